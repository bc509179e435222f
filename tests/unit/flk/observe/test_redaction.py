"""No secret of a job is in what flk keeps and shows of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flk.observe.redaction import kept_job, secrets_of

CANARY = "hunter2-canary"


def job() -> dict[str, Any]:
    spec: dict[str, Any] = {"pytorchReplicaSpecs": {"Worker": {"replicas": 1}}}
    return {"metadata": {"name": "gpt", "uid": "uid-1"}, "spec": spec}


def test_no_secret_is_kept() -> None:
    container = {
        "name": "pytorch",
        "env": [
            {"name": "WANDB_API_KEY", "value": CANARY},
            {"name": "LR", "value": "0.1"},
            {"name": "MLFLOW_TRACKING_URI", "value": f"https://me:{CANARY}@mlflow.example"},
        ],
        "command": ["python", "train.py", f"--hf-token={CANARY}", "--password", CANARY, f"DB_PASSWORD={CANARY}-2"],
        "args": ["--api-key", CANARY, "--lr=0.1", f"--cache=redis://:{CANARY}@cache.example"],
        "lifecycle": {"postStart": {"exec": {"command": ["sh", "-c", f"cd /x && A_TOKEN={CANARY} ./get.sh"]}}},
        "livenessProbe": {"httpGet": {"httpHeaders": [{"name": "Authorization", "value": CANARY}]}},
    }
    whole = job()
    whole["metadata"]["annotations"] = {
        "flk.dev/spec": CANARY,
        "kubectl.kubernetes.io/last-applied-configuration": CANARY,
        "flk.dev/owner": "ada",
    }
    whole["metadata"]["managedFields"] = [CANARY]
    template = {"spec": {"containers": [container], "initContainers": [container]}}
    whole["spec"]["pytorchReplicaSpecs"]["Worker"]["template"] = template
    kept = json.dumps(kept_job(whole))
    assert CANARY not in kept
    assert "--lr=0.1" in kept
    assert '"0.1"' in kept
    assert "https://me:***@mlflow.example" in kept
    assert "ada" in kept
    assert secrets_of(whole) == [f"{CANARY}-2", CANARY]  # the object itself stays as it is


def test_no_secret_of_the_options_is_kept() -> None:
    spec: dict[str, Any] = {
        "pip": [f"git+https://{CANARY}@host/x", "timm"],
        "setup": f"HF_TOKEN={CANARY} ./get.sh --lr 0.1",
        "on_restart": f"--api-token='{CANARY}'",
        "mounts": [{"address": f"https://me:{CANARY}@host/x"}],
    }
    env = [{"name": "FLK_SETUP", "value": spec["setup"]}, {"name": "FLK_ON_RESTART", "value": spec["on_restart"]}]
    env.append({"name": "FLK_PIP", "value": spec["pip"][0]})
    whole = job()
    whole["metadata"]["annotations"] = {"flk.dev/spec": json.dumps(spec)}
    template = {"spec": {"containers": [{"name": "pytorch", "env": env}]}}
    whole["spec"]["pytorchReplicaSpecs"]["Worker"]["template"] = template
    kept = json.dumps(kept_job(whole))
    assert CANARY not in kept
    assert "get.sh" not in kept
    assert kept.count("git+https://***@host/x") == 2
    assert "timm" in kept


@pytest.mark.parametrize(
    "spec", ["[" * 100_000, "[1]", '{"env": [5], "command": 5}', '{"env": 5, "setup": 5}', "x", "1e999"]
)
def test_any_text_may_stand_where_the_options_are(spec: str) -> None:
    item = job()
    item["metadata"]["annotations"] = {"flk.dev/spec": spec}
    assert kept_job(item)["metadata"]["name"] == "gpt"
    assert secrets_of(item) == []
