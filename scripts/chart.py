"""Put the archive of the runtime, which the chart ships with each job, into the chart of this checkout.

It is not under version control, since it changes with every module. `make chart` runs this before
Helm reads `charts/flk`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from flk.manifest import runtime_archive

CHART: Final = Path(__file__).parents[1] / "charts" / "flk"
# flk bench makes jobs of its own, and workers of strategy diloco need a secret that flk submit makes.
OPTIONAL: Final = frozenset({"plan"})


def prepare() -> Path:
    """Write the archive, if it has changed, and return the folder of the chart. May run in several processes."""
    path = CHART / "files" / "flk_runtime.zip"
    archive = runtime_archive(OPTIONAL)
    if not path.exists() or path.read_bytes() != archive:
        new = path.with_suffix(f".{os.getpid()}.swp")
        new.write_bytes(archive)
        new.replace(path)
    return CHART


if __name__ == "__main__":
    prepare()
