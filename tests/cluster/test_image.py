"""flk's own images: they build, and do what they are for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import checked


@pytest.mark.promise("Pages: Package, chart, images and pages have one version")
@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_the_image_builds_and_does_what_it_is_for(target: str) -> None:
    """Without a cluster. The CUDA image has several gigabytes, and needs no GPU for this."""
    folder = Path(__file__).parents[2] / "docker"
    checked([str(folder / "build"), target], timeout=3000)
    assert "the example ends with held-out loss" in checked([str(folder / "check"), target], timeout=600)
