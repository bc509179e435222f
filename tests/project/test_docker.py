"""The Dockerfile: both images of flk get the same files of flk in the same way, and every package is pinned."""

from __future__ import annotations

import re
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

DOCKER = Path(__file__).parents[2] / "docker"
LOCKS = sorted((DOCKER / "requirements").glob("*.txt"))


def pins(lock: Path) -> dict[str, tuple[str, list[str]]]:
    """The version and the hashes of each package in a file of docker/requirements."""
    text = re.sub(r"^ *#.*\n", "", lock.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found = {}
    for line in filter(None, text.splitlines()):
        name, version = line.split()[0].split("==")
        found[name] = (version, re.findall(r"--hash=sha256:([0-9a-f]{64})(?:\s|$)", line))
    return found


@pytest.mark.promise("Pages: Package, chart, images and pages have one version")
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


def test_the_images_contain_nothing_else_for_the_client() -> None:
    needed, names = set[str](), ["flk"]
    while names:
        name = names.pop().lower()
        needed.add(name)
        parsed = [Requirement(text) for text in requires(name) or ()]
        used = [each.name for each in parsed if each.marker is None or each.marker.evaluate({"extra": ""})]
        names += [other for other in used if other.lower() not in needed]
    assert pins(DOCKER / "requirements" / "client.txt").keys() <= needed, "docker/lock leaves out what nothing needs"


def test_packages_that_share_a_process_have_one_version() -> None:
    client, cpu, cuda = (
        pins(DOCKER / "requirements" / f"{name}.txt") for name in ("client", "torch-cpu", "torch-cuda")
    )
    for name in client.keys() & (cpu | cuda).keys():
        assert client[name] == cpu[name] == cuda[name], name
    assert cpu["torch"][0] == f"{cuda['torch'][0]}+cpu"
