"""Fabric presets: their values are those that the vendors publish."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from flk.errors import UsageError
from flk.spec.hardware import FABRICS
from flk.spec.job import validated

PUBLISHED: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("published_fabrics.yaml").read_text())


def test_every_preset_is_in_the_table() -> None:
    assert FABRICS.keys() == PUBLISHED.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_values_are_the_published_ones(name: str) -> None:
    preset, published = FABRICS[name], PUBLISHED[name]
    assert preset.env == published["env"]
    assert preset.pod_limits(gpus=8) == published["limits"]


def test_a_pod_requests_its_share_of_the_adapters_of_a_node() -> None:
    efa = FABRICS["efa"]
    assert efa.pod_limits(gpus=1) == {"vpc.amazonaws.com/efa": "4", "hugepages-2Mi": "640Mi"}
    assert efa.pod_limits(gpus=0) == {}


def test_huge_pages_need_memory_or_cpu() -> None:
    fields = {"command": "a.py", "fabric": "efa"}
    with pytest.raises(UsageError) as caught:
        validated(fields | {"resources": {"gpu": 8}})
    assert str(caught.value) == (
        "resources.memory: is missing: fabric efa requests hugepages-2Mi, "
        "which Kubernetes accepts only with memory or cpu"
    )
    for resources in ({"gpu": 8, "memory": "1Gi"}, {"gpu": 8, "cpu": 1}, {}):
        assert validated(fields | {"resources": resources}).fabric == "efa"
