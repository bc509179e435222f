"""Defaults of a namespace: a job's own values win over them."""

from __future__ import annotations

import pytest

from flk.errors import UsageError
from flk.spec.defaults import apply, parse
from flk.spec.job import validated

TEXT = "image: team/train:1\nfabric: efa\nqueue: team-a\ntolerations: [nvidia.com/gpu:NoSchedule]\n"


def test_a_job_that_says_nothing_takes_the_defaults() -> None:
    job = apply(validated({"command": "a.py"}), parse([("d", TEXT)]))
    assert (job.image, job.fabric, job.queue) == ("team/train:1", "efa", "team-a")
    assert [t.key for t in job.nodes.tolerations] == ["nvidia.com/gpu"]


def test_a_time_has_a_default_of_the_site() -> None:
    site = parse([("d", "stuck_after: 2h")])
    assert apply(validated({"command": "a.py"}), site).stuck_after == 7200
    assert apply(validated({"command": "a.py", "stuck_after": "30m"}), site).stuck_after == 1800


def test_a_job_wins_and_tolerations_add_up() -> None:
    said = {
        "image": "mine",
        "fabric": "auto",
        "queue": "q",
        "nodes": {"tolerations": ["a"], "avoid": ["node-a"]},
    }
    job = apply(validated({"command": "a.py"} | said), parse([("d", TEXT)]))
    assert job.nodes.avoid == ["node-a"]
    assert (job.image, job.fabric, job.queue) == ("mine", "auto", "q")
    assert [t.key for t in job.nodes.tolerations] == ["a", "nvidia.com/gpu"]


def test_of_two_the_later_by_name_wins_key_by_key() -> None:
    merged = parse([("b", "image: two"), ("a", "image: one\nqueue: q")])
    assert (merged.image, merged.queue) == ("two", "q")


def test_tolerations_of_two_add_up() -> None:
    merged = parse([("a", "tolerations: [gpu]"), ("b", "tolerations: [gpu, spot]")])
    assert [each.key for each in merged.tolerations] == ["gpu", "spot"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fabrik: efa", "ConfigMap d, defaults.yaml: fabrik: unknown key"),
        ("fabric: x", "ConfigMap d, defaults.yaml: fabric: must be one of"),
        ("tolerations: [1]", "ConfigMap d, defaults.yaml: tolerations[0]: must be a mapping"),
        ("- a", "ConfigMap d, defaults.yaml: must be a mapping"),
    ],
)
def test_a_mistake_names_the_config_map(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse([("d", text)])
    assert str(caught.value).startswith(message)
