"""A release: package, chart, images and documentation have one version, and nothing is published unchecked."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from flk_runtime.contract import VERSION

ROOT = Path(__file__).parents[2]
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")}

# Where a version stands, with a pattern whose group is the version.
VERSIONS = {
    "pyproject.toml": r'(?m)^version = "(.+)"$',
    "charts/flk/Chart.yaml": r"(?m)^(?:v|appV)ersion: (.+)$",
    "docker/Dockerfile": r'image\.version="(.+?)"',
    "docker/build": r"(?m)^version=(.+)$",
    "docker/release": r"flktrain/flk:([0-9][^-\s\"$]*)",
    "docker/check": r"flktrain/flk:([0-9][^-\s\"$]*)",
}


@pytest.mark.promise("Pages: Package, chart, images and pages have one version")
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


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_pins_its_actions_and_gives_no_job_more_than_it_needs(name: str) -> None:
    workflow = WORKFLOWS[name]
    assert workflow["permissions"] == {}
    for job in workflow["jobs"].values():
        assert "permissions" in job
        for step in job.get("steps", ()):
            if "uses" in step:
                assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"]), step["uses"]
            if "actions/checkout@" in step.get("uses", ""):
                assert step["with"]["persist-credentials"] is False


@pytest.fixture
def docker(tmp_path: Path) -> dict[str, str]:
    """The environment for a docker that writes down its calls, and whose images have the identity in `identity`."""
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(
        """#!/bin/bash
echo "$@" >>"$HERE/calls"
case "$*" in
build*) echo "$BUILDX_NO_DEFAULT_ATTESTATIONS" >"$HERE/attestations" ;;
*RepoDigests*) echo "library@$(cat "$HERE/digest")" ;;
"image inspect"*) cat "$HERE/identity" ;;
esac
"""
    )
    program.chmod(0o755)
    (tmp_path / "identity").write_text("sha256:one\n")
    (tmp_path / "digest").write_text("sha256:00\n")
    return os.environ | {"PATH": f"{program.parent}:{os.environ['PATH']}", "HERE": str(tmp_path)}


def test_the_images_that_were_saved_are_pushed_under_their_names(docker: dict[str, str], tmp_path: Path) -> None:
    program = [ROOT / "docker" / "release"]
    subprocess.run([*program, "save", "images"], cwd=tmp_path, env=docker, check=True)
    subprocess.run([*program, "push", "images"], cwd=tmp_path, env=docker, check=True, capture_output=True)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call for call in calls if call.startswith("push")] == [
        f"push --quiet flktrain/flk:{VERSION}-{kind}" for kind in ("cpu", "cuda")
    ]
    (tmp_path / "calls").unlink()
    (tmp_path / "identity").write_text("sha256:another\n")
    done = subprocess.run([*program, "push", "images"], cwd=tmp_path, env=docker, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.endswith("is another image than the one that was saved\n")
    assert "push" not in (tmp_path / "calls").read_text()
