"""A release: package, chart, images and documentation have one version, and nothing is published unchecked."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from flk.spec.job import DEFAULT_IMAGE
from flk_runtime.contract import VERSION
from tests.conftest import pytest_runtest_setup
from tests.project import test_python_versions, test_torch_versions

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


def commands(workflow: str) -> str:
    """What the jobs of a workflow run, as one text."""
    return "\n".join(
        step.get("run", "") for job in WORKFLOWS[workflow]["jobs"].values() for step in job.get("steps", ())
    )


def made(line: str) -> set[str]:
    """The targets of make that a line of a step names."""
    return (
        {word for word in shlex.split(line)[1:] if re.fullmatch("[a-z-]+", word)} if line.startswith("make ") else set()
    )


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


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_command_that_fails_before_a_pipe_fails_its_step(name: str) -> None:
    # A shell that is named is started with pipefail, and the default one without.
    assert WORKFLOWS[name]["defaults"] == {"run": {"shell": "bash"}}
    for job in WORKFLOWS[name]["jobs"].values():
        assert "defaults" not in job
        assert all("shell" not in step for step in job.get("steps", ()))


def test_a_pull_request_sees_no_secret_and_may_write_nothing() -> None:
    text = (ROOT / ".github" / "workflows" / "check.yml").read_text()
    assert "${{ secrets" not in text
    assert "${{ vars" not in text
    assert "pull_request_target" not in text
    assert all(job["permissions"] == {"contents": "read"} for job in WORKFLOWS["check"]["jobs"].values())


def test_kind_kubectl_and_helm_are_those_of_one_script_in_every_job_that_makes_something() -> None:
    for workflow in WORKFLOWS.values():
        for name, job in workflow["jobs"].items():
            steps = [step.get("run", "") for step in job.get("steps", ())]
            makes = [number for number, step in enumerate(steps) if re.search(r"\bmake\b|k8s/test-cluster", step)]
            if makes:
                assert "k8s/install-tools" in "".join(steps[: makes[0]]), name
    version = re.search(r"release/(v[0-9.]+)/bin/linux/amd64/kubectl", (ROOT / "k8s" / "install-tools").read_text())
    assert version
    image = WORKFLOWS["check"]["jobs"]["cluster"]["env"]["KIND_IMAGE"]
    assert re.fullmatch(rf"kindest/node:{re.escape(version[1])}@sha256:[0-9a-f]{{64}}", image)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_job_with_images_makes_room_for_them_first(name: str) -> None:
    for job in WORKFLOWS[name]["jobs"].values():
        steps = [step.get("run", "") for step in job.get("steps", ())]
        large = [
            number for number, step in enumerate(steps) if re.search(r"make .*\bimages|cluster$|docker/release", step)
        ]
        if large:
            assert ".github/free-disk" in steps[: large[0]]
        for step in steps:
            if "docker/release save" in step:
                assert step.index("docker builder prune --all --force\n") < step.index("docker/release save")


def test_nothing_is_published_before_all_is_checked_and_built() -> None:
    jobs = WORKFLOWS["release"]["jobs"]
    assert jobs["check"]["uses"] == "./.github/workflows/check.yml"

    def needed(name: str) -> set[str]:
        direct = jobs[name].get("needs", [])
        return {*direct, *(each for other in direct for each in needed(other))}

    assert {"images", "chart"} <= needed("package")  # PyPI takes nothing back, and the package names an image
    for name in jobs.keys() - {"check", "build"}:
        assert {"build", "check"} <= needed(name)
        assert "environment" in jobs[name]
        assert not re.search(r"\bmake\b|docker/build", str(jobs[name]["steps"])), f"{name} builds"


def test_the_workflows_call_what_make_and_the_scripts_offer() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for workflow in WORKFLOWS:
        for line in commands(workflow).splitlines():
            assert made(line) <= targets, line
            for script in re.findall(r"(?:\b(?:docker|k8s)|\.github)/[\w-]+(?= |$)", line):
                assert os.access(ROOT / script, os.X_OK), line


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_job_fails_where_what_its_tests_need_is_missing(name: str) -> None:
    for job in WORKFLOWS[name]["jobs"].values():
        if any(re.search(r"\bmake test\b|pytest", step.get("run", "")) for step in job.get("steps", ())):
            assert job["env"]["FLK_TEST_CLUSTER"] == "required"


def test_the_workflows_test_every_release_of_python_and_torch_that_the_package_names() -> None:
    jobs = {name: workflow["jobs"] for name, workflow in WORKFLOWS.items()}
    pythons = jobs["check"]["pythons"]["strategy"]["matrix"]["python"]
    assert pythons == test_python_versions.VERSIONS
    for job in (jobs["check"]["pythons"], jobs["soak"]["pythons"]):
        (setup,) = (step for step in job["steps"] if "setup-python" in step.get("uses", ""))
        *others, default = setup["with"]["python-version"].split("\n")
        assert others in (pythons, ["${{ matrix.python }}"])
        assert default == "3.11"
    named = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert sorted(named) == sorted([*pythons, default])
    assert jobs["soak"]["torch"]["strategy"]["matrix"]["torch"] == test_torch_versions.VERSIONS
    for name, files in {"check": {"python"}, "soak": {"python", "torch"}}.items():
        assert set(re.findall(r"test_(\w+)_versions\.py", commands(name))) == files
    for workflow in ("check", "soak"):
        for file, test in re.findall(r"(tests/\S+\.py)::(\w+)\[", commands(workflow)):
            assert f"def {test}(" in (ROOT / file).read_text()


def test_mpich_is_not_that_of_the_machine_which_starts_each_rank_alone() -> None:
    job = WORKFLOWS["check"]["jobs"]["local"]
    assert job["runs-on"] == "ubuntu-24.04"
    steps = [step.get("run", "") for step in job["steps"]]
    assert not any(re.search(r"apt-get install.*\bmpich\b", step) for step in steps)
    assert any(re.search(r"pip\" install --quiet mpich==[0-9.]+$", step, re.MULTILINE) for step in steps)


def test_what_only_root_may_do_is_tested_as_root() -> None:
    assert "sudo -E .venv/bin/pytest -rs -m 'root and not soak'" in commands("check")
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.root(" in path.read_text()]
    assert len(marked) >= 5
    for path in (ROOT / "tests").rglob("test_*.py"):
        assert not re.search(r"skipif\(os\.geteuid\(\) != 0", path.read_text()), f"{path} has no mark"


def test_what_only_root_may_do_is_skipped_for_others(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    request.node.add_marker(pytest.mark.root("mounts a file system"))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(pytest.skip.Exception, match="mounts a file system, which needs root"):
        pytest_runtest_setup(request.node)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    pytest_runtest_setup(request.node)


def test_the_tests_of_a_pull_request_are_all_tests_each_once() -> None:
    folders = re.findall(r"\btests/(\w+)(?![\w/])", commands("check"))
    assert sorted(folders) == sorted(path.name for path in (ROOT / "tests").iterdir() if list(path.rglob("test_*.py")))


def test_local_tests_find_an_s3_server_that_was_checked() -> None:
    (steps,) = (job["steps"] for job in WORKFLOWS["check"]["jobs"].values() if "tests/local" in str(job["steps"]))
    (server,) = (number for number, step in enumerate(steps) if "versitygw" in str(step))
    (tests,) = (number for number, step in enumerate(steps) if "tests/local" in step.get("run", ""))
    assert server < tests
    assert re.fullmatch("[0-9a-f]{64}", steps[server]["env"]["SHA256"])
    assert 'echo "$SHA256  $ARCHIVE" | sha256sum --check\n' in steps[server]["run"]


def test_release_check_makes_what_the_workflows_make_except_publishing() -> None:
    recipe = (ROOT / "Makefile").read_text().partition("\nrelease-check:")[2].partition("\n\n")[0]
    called = [word for words in re.findall(r"\$\(MAKE\) (.*)", recipe) for word in words.split()]
    in_workflows = {
        word for name in ("check", "release") for line in commands(name).splitlines() for word in made(line)
    }
    assert len(called) == len(set(called)), "something is done twice"
    assert set(called) == in_workflows - {"venv"}


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


def test_the_images_that_were_saved_are_pushed_under_the_names_that_the_client_uses(
    docker: dict[str, str], tmp_path: Path
) -> None:
    program = [ROOT / "docker" / "release"]
    subprocess.run([*program, "save", "images"], cwd=tmp_path, env=docker, check=True)
    subprocess.run([*program, "push", "images"], cwd=tmp_path, env=docker, check=True, capture_output=True)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call for call in calls if call.startswith("push")] == [
        f"push --quiet {image}" for image in DEFAULT_IMAGE.values()
    ]
    (tmp_path / "calls").unlink()
    (tmp_path / "identity").write_text("sha256:another\n")
    done = subprocess.run([*program, "push", "images"], cwd=tmp_path, env=docker, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.endswith("is another image than the one that was saved\n")
    assert "push" not in (tmp_path / "calls").read_text()


def test_the_documentation_says_of_every_image_whether_a_release_publishes_it() -> None:
    (published,) = re.findall(r"(?m)^for target in (.+); do$", (ROOT / "docker" / "release").read_text())
    (built,) = re.findall(r"(?m)^# build (\S+) \.\.\.", (ROOT / "docker" / "build").read_text())
    page = " ".join((ROOT / "docs" / "guides" / "install.md").read_text().split())
    listed = [page[: page.index(f"{verb} these two")] for verb in ("A release publishes", "No release publishes")]
    named = [re.findall(r"`docker/build ([\w-]+)`", text)[-2:] for text in listed]
    assert named[0] == published.split()
    assert sorted(named[1]) == sorted(set(built.split("|")) - set(published.split()) - {"torch"})  # of tests only


def base(docker: dict[str, str], image: str) -> subprocess.CompletedProcess[str]:
    environment = docker | {"PYTHON_IMAGE": image}
    return subprocess.run([ROOT / "docker" / "base"], env=environment, capture_output=True, text=True)


def test_the_base_of_the_images_is_named_by_the_digest_of_what_was_pulled(
    docker: dict[str, str], tmp_path: Path
) -> None:
    assert base(docker, "").stdout == "python:3.11-slim-bookworm@sha256:00\n"
    assert (tmp_path / "calls").read_text().startswith("pull --quiet python:3.11-slim-bookworm\n")
    (tmp_path / "calls").unlink()
    assert base(docker, "host:5000/python:3@sha256:11").stdout == "host:5000/python:3@sha256:11\n"
    assert not (tmp_path / "calls").exists()
    (tmp_path / "digest").write_text("\n")
    done = base(docker, "mine:1")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "docker/base: mine:1 has no digest of a registry\n")


@pytest.mark.parametrize("digest", ["", "@sha256:00"])
def test_an_image_says_what_it_was_built_on(docker: dict[str, str], tmp_path: Path, digest: str) -> None:
    environment = docker | {"PYTHON_IMAGE": f"host:5000/python:3{digest}"}
    subprocess.run([ROOT / "docker" / "build", "cpu"], env=environment, check=True, capture_output=True)
    (call,) = (line for line in (tmp_path / "calls").read_text().splitlines() if line.startswith("build "))
    assert f"--build-arg PYTHON_IMAGE=host:5000/python:3{digest} " in call
    assert "--label org.opencontainers.image.base.name=host:5000/python:3 " in call
    assert ("--label org.opencontainers.image.base.digest=sha256:00 " in call) == bool(digest)


def test_the_index_of_make_is_not_the_list_of_wheels_of_an_image(docker: dict[str, str], tmp_path: Path) -> None:
    environment = docker | {"TORCH_INDEX": "https://index.example", "TORCH_WHEELS": "https://wheels.example/torch/"}
    subprocess.run([ROOT / "docker" / "build", "cpu"], env=environment, check=True, capture_output=True)
    (call,) = (line for line in (tmp_path / "calls").read_text().splitlines() if line.startswith("build "))
    assert "--build-arg TORCH_WHEELS=https://wheels.example/torch/ " in call
    assert "index.example" not in call


def test_an_image_has_no_attestations_with_which_kind_does_not_load_it(docker: dict[str, str], tmp_path: Path) -> None:
    environment = {name: value for name, value in docker.items() if name != "BUILDX_NO_DEFAULT_ATTESTATIONS"}
    subprocess.run([ROOT / "docker" / "build", "cpu"], env=environment, check=True, capture_output=True)
    assert (tmp_path / "attestations").read_text() == "1\n"


@pytest.mark.parametrize(("workflow", "job"), [("release", "build"), ("check", "cluster")])
def test_images_are_built_on_a_base_by_its_digest(workflow: str, job: str) -> None:
    steps = [step.get("run", "") for step in WORKFLOWS[workflow]["jobs"][job]["steps"]]
    (resolved,) = (number for number, step in enumerate(steps) if "docker/base" in step)
    (built,) = (number for number, step in enumerate(steps) if re.search(r"^make .*\b(?:images|tests/cluster)$", step))
    assert resolved < built
    assert steps[resolved] == 'base=$(docker/base)\necho "PYTHON_IMAGE=$base" >>"$GITHUB_ENV"\n'


def test_the_page_for_contributors_has_every_setting_that_a_release_needs() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    names = re.findall(r"\b(?:secrets|vars)\.(\w+)", text)
    assert len(set(names)) == 5
    environments = re.findall(r"environment: (?:{name: )?([\w-]+)", text)
    for name in {*names, *environments, "release.yml", "v*"}:
        assert f"`{name}`" in page, name
    assert 'source is "GitHub Actions"' in page
