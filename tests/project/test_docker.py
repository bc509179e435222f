"""The Dockerfile: both images of flk get the same files of flk in the same way, and every package is pinned."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

DOCKER = Path(__file__).parents[2] / "docker"
DOCKERFILE = DOCKER / "Dockerfile"
LOCKS = sorted((DOCKER / "requirements").glob("*.txt"))


def stages() -> dict[str, list[str]]:
    """The instructions of each stage, in order, with continued lines joined."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    name = ""
    for line in (" ".join(line.split()) for line in text.splitlines() if line.strip()):
        if match := re.fullmatch(r"FROM (\S+) AS ([\w-]+)", line):
            name = match[2]
            found[name] = []
        elif name:
            found[name].append(line)
    return found


def pins(lock: Path) -> dict[str, tuple[str, list[str]]]:
    """The version and the hashes of each package in a file of docker/requirements."""
    text = re.sub(r"^ *#.*\n", "", lock.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found = {}
    for line in filter(None, text.splitlines()):
        name, version = line.split()[0].split("==")
        found[name] = (version, re.findall(r"--hash=sha256:([0-9a-f]{64})(?:\s|$)", line))
    return found


def test_every_stage_is_named() -> None:
    environments = {"environment_cpu", "environment_cuda", "sbom_cpu", "sbom_cuda"}
    images = {"torch", "cpu", "cuda", "cpu-compiler", "cuda-compiler"}
    assert stages().keys() == {"client", "source", "sbom", "fabric", *images, *environments}
    assert len(re.findall("^FROM ", DOCKERFILE.read_text(), re.MULTILINE)) == len(stages())


def test_the_cuda_image_gets_what_the_cpu_image_gets() -> None:
    def of_flk(stage: str) -> list[str]:
        lines = [line.replace(stage, "TARGET") for line in stages()[stage]]
        return [line for line in lines if line.startswith(("RUN", "COPY")) and "/opt/flk" in line]

    assert of_flk("cuda") == of_flk("cpu")
    assert len(of_flk("cpu")) == 4
    for stage in ("cpu", "cuda"):
        assert stages()[stage][-2] == "COPY --from=source /opt/flk /opt/flk"
        assert stages()[stage][-1].startswith("LABEL org.opencontainers.image.title=")
        assert any(line.startswith("ENV") and "USER=flk" in line for line in stages()[stage])
    # The user of the CPU image is that of the stage `torch`.
    for stage in ("torch", "cuda"):
        assert [line for line in stages()[stage] if line.startswith("USER")] == ["USER 10001:10001"]


@pytest.mark.parametrize("image", ["cpu", "cuda"])
def test_the_images_with_a_compiler_have_it_and_the_headers_of_torch_and_no_rights(image: str) -> None:
    lines = stages()[f"{image}-compiler"]
    assert 'RUN ["/bin/sh", "/tmp/install-compiler"]' in lines
    assert lines[-1] == "USER 10001:10001"
    headers = "COPY --from=environment_cpu /opt/torch-include /opt/venv/lib/python3.11/site-packages/torch/include"
    assert (headers in lines) == (image == "cpu")  # the CUDA image has them


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_every_package_has_a_version_and_hashes(lock: Path) -> None:
    assert pins(lock)
    for name, (version, hashes) in pins(lock).items():
        assert version, name
        assert hashes, name


def test_the_images_contain_what_the_client_depends_on() -> None:
    client = pins(DOCKER / "requirements" / "client.txt")
    project = (DOCKER.parent / "pyproject.toml").read_text()
    listed = re.findall(r'^  "(.+?)"', project.partition("\ndependencies = [")[2].partition("\n]")[0], re.MULTILINE)
    assert len(listed) >= 5
    for text in listed:
        wanted = Requirement(text)
        assert wanted.specifier.contains(client[wanted.name][0]), f"{text}: docker/lock pins it anew"


def test_a_package_index_and_a_list_of_wheels_are_two_variables() -> None:
    def readers(variable: str, *files: Path) -> set[str]:
        return {path.name for path in files if path.is_file() and re.search(rf"\b{variable}\b", path.read_text())}

    root = DOCKER.parent
    indexes = (root / "Makefile", root / "tests" / "project" / "test_torch_versions.py")
    assert readers("TORCH_INDEX", *indexes) == {path.name for path in indexes}
    assert readers("TORCH_WHEELS", *indexes) == set()
    assert readers("TORCH_WHEELS", *DOCKER.iterdir()) == {"Dockerfile", "build", "install-torch", "lock"}
    assert readers("TORCH_INDEX", *DOCKER.iterdir()) == set()


def test_both_images_have_the_client_of_s3() -> None:
    assert all("obstore" in pins(DOCKER / "requirements" / f"torch-{name}.txt") for name in ("cpu", "cuda"))


def test_packages_that_share_a_process_have_one_version() -> None:
    client, cpu, cuda = (
        pins(DOCKER / "requirements" / f"{name}.txt") for name in ("client", "torch-cpu", "torch-cuda")
    )
    for name in client.keys() & (cpu | cuda).keys():
        assert client[name] == cpu[name] == cuda[name], name
    assert cpu["torch"][0] == f"{cuda['torch'][0]}+cpu"
