"""What manifests look like: whole files for a table of jobs, so that every change of them is seen and meant.

FLK_UPDATE_GOLDEN=1 writes them anew.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from flk.manifest import Bundle
from flk.manifest.render import render, to_yaml
from flk.spec import file as jobfile
from flk.spec.hardware import FABRICS
from flk.spec.job import Job, validated

GOLDEN = Path(__file__).parent / "golden"
JOBS = sorted(GOLDEN.glob("*.job.yaml"))


def rendered(path: Path) -> tuple[Job, str]:
    job = validated(jobfile.read(str(path)))
    # In place of archives, which differ with the version of zlib.
    bundle = Bundle() if job.ship is False else Bundle(runtime=b"runtime", code=b"code", script="train.py")
    if job.command[0] == "-m":
        bundle = Bundle(runtime=b"runtime", code=b"code")
    return job, to_yaml(render(job, bundle), job)


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name.removesuffix(".job.yaml"))
def test_manifest_is_as_in_its_golden_file(path: Path) -> None:
    golden = path.with_name(path.name.replace(".job.yaml", ".yaml"))
    _, text = rendered(path)
    if os.environ.get("FLK_UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


def test_every_fabric_has_a_golden_file() -> None:
    assert {path.name.removesuffix(".job.yaml") for path in JOBS} >= {f"fabric-{name}" for name in FABRICS}


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name.removesuffix(".job.yaml"))
def test_the_recorded_job_is_the_job(path: Path) -> None:
    job, text = rendered(path)
    record = next(iter(yaml.safe_load_all(text)))["metadata"]["annotations"]["flk.dev/spec"]
    assert Job.model_validate_json(record) == job
