"""The files of the chart that are generated, and k8s/rbac.yaml: `python -m scripts.chart` writes them.

All but the archive of the runtime are under version control, and a test compares them. The archive changes with every
module of the runtime: `make chart` makes it before Helm reads `charts/flk`. `make check` makes
only the archive, so that the test sees a stale file.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from flk.manifest import runtime_archive
from flk.targets import TARGETS
from scripts.chart import dashboard, manifests, rights, values

_ROOT: Final = Path(__file__).parents[2]
CHART: Final = _ROOT / "charts" / "flk"
FILES: Final[dict[Path, Callable[[], str]]] = {
    CHART / "values.yaml": values.values_text,
    CHART / "values.schema.json": values.schema_text,
    CHART / "files" / "dashboard.json": dashboard.dashboard,
    CHART / "files" / "rights.json": rights.rights,
    _ROOT / "k8s" / "rbac.yaml": rights.role,
    **{
        CHART / "files" / "manifests" / f"{name}.yaml": functools.partial(manifests.manifests, name) for name in TARGETS
    },
}


def prepare() -> Path:
    """Write the archive, if it has changed, and return the folder of the chart. May run in several processes."""
    _write(CHART / "files" / "flk_runtime.zip", runtime_archive())
    return CHART


def generate() -> None:
    """Write all files."""
    prepare()
    for path, text in FILES.items():
        _write(path, text().encode())


def _write(path: Path, content: bytes) -> None:
    if not path.exists() or path.read_bytes() != content:
        new = path.with_suffix(f".{os.getpid()}.swp")
        new.write_bytes(content)
        new.replace(path)
