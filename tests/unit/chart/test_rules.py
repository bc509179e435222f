"""What flk refuses the chart refuses too, in the same words."""

from __future__ import annotations

from typing import Any

import pytest

from flk.errors import UsageError
from flk.spec.job import validated
from flk.spec.packages import refuse_mixed_hashes
from tests.support.chart import template

HASHED = "einops==0.8.0 --hash=sha256:abc\n"
# Jobs that are wrong because of several fields together; wrong values of one field are refused by the schema.
REFUSED: dict[str, dict[str, Any]] = {
    "limit of processors": {"resources": {"cpu": 2, "cpu_limit": "1500m"}},
    "limit of memory": {"resources": {"memory": "4Gi", "memory_limit": "4G"}},
    "limit with an exponent": {"resources": {"memory": "1e9", "memory_limit": "999999999"}},
    "type of GPUs without a number": {"resources": {"gpu_type": "H100"}},
    "secret that is a variable": {"env": {"TOKEN": "x"}, "secrets": {"TOKEN": "wandb:token"}},
    "two volumes at one path": {"volumes": ["a:/data", "nfs://server/b:/data/"]},
    "volume where the checkpoints are": {"volumes": ["a:/ckpt"], "checkpoint": "b:/ckpt"},
    "checkpoint in two places": {"checkpoint": {"address": "s3://bucket/a", "volume": "b", "path": "/ckpt"}},
    "toleration of nothing": {"nodes": {"tolerations": [{"operator": "Equal", "value": "a"}]}},
    "toleration of any value": {"nodes": {"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]}},
    "toleration for a time": {"nodes": {"tolerations": [{"key": "a", "tolerationSeconds": 3}]}},
    "patch of the job": {"patch": {"kind": "Pod"}},
    "priority without a queue": {"queue_priority": "high"},
    "spares of an elastic job": {"elastic": "2:4", "spares": 1},
    "pods of an elastic job": {"elastic": "2:4", "replicas": 5},
    "torchrun": {"command": ["/usr/bin/torchrun", "train.py"]},
    "python": {"command": ["python3", "train.py"]},
    "no module": {"command": ["-m"]},
    "option": {"command": ["-c", "print()"]},
}
ACCEPTED: dict[str, Any] = {
    "resources": {"cpu": "1500m", "cpu_limit": 2, "memory": "4G", "memory_limit": "4Gi"},
    "volumes": ["a:/data", "b:/data/more"],
    "checkpoint": "c:/ckpt",
    "nodes": {"tolerations": ["a", "b=c:NoSchedule", {"key": "d", "effect": "NoExecute", "tolerationSeconds": 3}]},
}


@pytest.mark.parametrize("fields", REFUSED.values(), ids=REFUSED)
def test_the_chart_refuses_what_flk_refuses_in_its_words(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as refused:
        validated({"command": ["/app/train.py"], "name": "gpt", **fields})
    sentence = str(refused.value).partition(": ")[2]
    chart = template({"job": {"enabled": True, "command": ["/app/train.py"], **fields}})
    assert chart.code != 0
    assert sentence in chart.stderr.replace('\\"', "'").replace('"', "'")


def test_the_chart_accepts_what_is_close_to_wrong() -> None:
    validated({"command": ["/app/train.py"], "name": "gpt", **ACCEPTED})
    assert template({"job": {"enabled": True, "command": ["/app/train.py"], **ACCEPTED}}).kinds()


def test_the_chart_refuses_packages_without_hashes_beside_some_with() -> None:
    job = {"enabled": True, "script": "print()", "files": {"pins.txt": HASHED}, "requirements": "./pins.txt"}
    with pytest.raises(UsageError) as refused:
        refuse_mixed_hashes(["einops"], ["pins.txt"], lambda path: HASHED)
    assert str(refused.value) in template({"job": {**job, "pip": ["einops"]}}).stderr
    assert template({"job": job}).kinds()
    assert "job.requirements: there is no file" in template({"job": {**job, "requirements": "other.txt"}}).stderr
