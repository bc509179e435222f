"""The files in k8s: example manifests are what `flk render` gives today, and the installer calls kubectl as it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

K8S = Path(__file__).parents[2] / "k8s"
EXAMPLES = K8S / "examples"


@pytest.mark.parametrize("job", sorted(EXAMPLES.glob("*.flk.yaml")), ids=lambda path: path.name)
def test_example_manifest_is_up_to_date(job: Path) -> None:
    # `make examples` renews them.
    command = [sys.executable, "-m", "flk", "render", "--file", str(job)]
    rendered = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert job.with_name(job.name.replace(".flk.yaml", ".yaml")).read_text() == rendered


def test_every_example_has_a_job_file() -> None:
    names = {path.name.split(".")[0] for path in EXAMPLES.glob("*.flk.yaml")}
    assert {path.stem for path in EXAMPLES.glob("*.yaml") if not path.name.endswith(".flk.yaml")} == names
