"""A release: package, chart, images and documentation have one version, and nothing is published unchecked."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from flk_runtime.contract import VERSION

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"

# Where a version stands, with a pattern whose group is the version.
VERSIONS = {
    "pyproject.toml": r'(?m)^version = "(.+)"$',
    "charts/flk/Chart.yaml": r"(?m)^(?:v|appV)ersion: (.+)$",
    "docker/Dockerfile": r'image\.version="(.+?)"',
    "docker/build": r"(?m)^version=(.+)$",
    "docker/check": r"flktrain/flk:([0-9][^-\s\"$]*)",
}


@pytest.mark.parametrize(("path", "pattern"), VERSIONS.items(), ids=VERSIONS.keys())
def test_versions_agree(path: str, pattern: str) -> None:
    found = re.findall(pattern, (ROOT / path).read_text())
    assert found
    assert set(found) == {VERSION}


def test_every_image_of_flk_that_the_repository_names_has_this_version() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.is_file() and path.suffix in {".md", ".py", ".yaml", ".yml", ".json", ".ambr"}:
            for version in re.findall(r"flktrain/flk:([0-9]+\.[0-9]+\.[0-9]+)", path.read_text()):
                assert version == VERSION, name


def test_the_workflow_checks_before_it_publishes_and_gives_no_job_more_than_it_needs() -> None:
    workflow = yaml.safe_load(WORKFLOW.read_text())
    assert workflow["permissions"] == {}
    jobs = workflow["jobs"]
    assert jobs["check"]["permissions"] == {"contents": "read"}
    assert any("make release-check" in step.get("run", "") for step in jobs["check"]["steps"])
    for name in jobs.keys() - {"check"}:
        assert jobs[name]["needs"] == "check"
        assert "environment" in jobs[name]
    for job in jobs.values():
        for step in job["steps"]:
            if "uses" in step:
                assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"]), step["uses"]
            if "actions/checkout@" in step.get("uses", ""):
                assert step["with"]["persist-credentials"] is False


def test_release_check_does_all_but_publishing() -> None:
    done = subprocess.run(["make", "-n", "release-check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    steps = [
        "ruff check",
        "helm lint --strict",
        "pytest",
        "uv build",
        "helm package",
        "mkdocs build",
        "docker/build cpu",
    ]
    for step in [*steps, "docker/build cuda", "docker/check cpu", "docker/check cuda"]:
        assert step in done.stdout, step
    for word in ("push", "publish", "upload", "login"):
        assert word not in done.stdout, word
