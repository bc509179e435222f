"""The Dockerfile: both images of flk get the same files of flk in the same way."""

from __future__ import annotations

import re
from pathlib import Path

DOCKERFILE = Path(__file__).parents[2] / "docker" / "Dockerfile"


def stages() -> dict[str, list[str]]:
    """The instructions of each stage, in order, with continued lines joined."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    name = ""
    for line in (" ".join(line.split()) for line in text.splitlines() if line.strip()):
        if match := re.fullmatch(r"FROM (\S+) AS (\w+)", line):
            name = match[2]
            found[name] = []
        elif name:
            found[name].append(line)
    return found


def test_every_stage_is_named() -> None:
    assert stages().keys() == {"environment", "torch", "source", "cpu", "cuda"}
    assert len(re.findall("^FROM ", DOCKERFILE.read_text(), re.MULTILINE)) == len(stages())


def test_the_cuda_image_gets_what_the_cpu_image_gets() -> None:
    def of_flk(stage: str) -> list[str]:
        return [line for line in stages()[stage] if line.startswith(("RUN", "COPY", "USER"))]

    assert of_flk("cuda") == of_flk("cpu")
    assert of_flk("cpu")[-1] == "COPY --from=source /opt/flk /opt/flk"
    for stage in ("cpu", "cuda"):
        users = [line for line in of_flk(stage) if line.startswith("USER")]
        assert users[-1] == "USER 10001:10001"
        assert any(line.startswith("ENV") and "USER=flk" in line for line in stages()[stage])
