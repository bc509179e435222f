"""Pods of strategy diloco know where the workers meet, and how the hub and they know each other."""

from __future__ import annotations

from typing import Any

from flk.manifest.environment import outer_rendezvous_variables
from flk.spec.job import Job, validated
from flk.targets import DEFAULT
from flk_runtime.contract import pod_env, pod_layout


def job(strategy: str = "diloco", **diloco: str) -> Job:
    return validated({"command": "a.py", "name": "gpt", "strategy": strategy, "diloco": diloco})


def values(of: Job) -> dict[str, Any]:
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in outer_rendezvous_variables(of, DEFAULT)}


def test_pod_0_serves_the_hub_unless_the_workers_meet_elsewhere() -> None:
    host = DEFAULT.pod_host("gpt", 0)
    address = f"{host}:{pod_layout.SERVICE_PORT}"
    assert values(job()) == {pod_env.SERVICE_ADDRESS: address, pod_env.SERVICE: "flk_diloco"}
    assert values(job(hub="hub:29401", secret="shared:key")) == {
        pod_env.SERVICE_ADDRESS: "hub:29401",
        pod_env.SERVICE_SECRET: {"secretKeyRef": {"name": "shared", "key": "key"}},
    }


def test_other_strategies_have_none() -> None:
    assert outer_rendezvous_variables(validated({"command": "a.py", "name": "gpt"}), DEFAULT) == []
