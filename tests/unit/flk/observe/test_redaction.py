"""No secret of a job is in what flk keeps and shows of it."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from flk.observe.redaction import kept_diff, kept_job, secrets_of

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
        "command": ["python", "train.py", f"--hf-token={CANARY}", "--password", CANARY, f"DB_PASSWORD={CANARY}"],
        "args": ["--api-key", CANARY, "--lr=0.1", f"--cache=redis://:{CANARY}@cache.example"],
    }
    whole = job()
    whole["metadata"]["annotations"] = {"flk.dev/spec": CANARY, "flk.dev/owner": "ada"}
    whole["metadata"]["managedFields"] = [CANARY]
    template = {"spec": {"containers": [container], "initContainers": [container]}}
    whole["spec"]["pytorchReplicaSpecs"]["Worker"]["template"] = template
    kept = json.dumps(kept_job(whole))
    assert CANARY not in kept
    assert "--lr=0.1" in kept
    assert '"0.1"' in kept
    assert "https://me:***@mlflow.example" in kept
    assert "ada" in kept
    assert CANARY in json.dumps(whole)  # the object itself stays as it is


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
    assert kept.count("HF_TOKEN=*** ./get.sh --lr 0.1") == 2
    assert kept.count("git+https://***@host/x") == 2
    assert "timm" in kept


DIFF = f"""diff --git a/train.py b/train.py
-lr = 0.1
+lr = 0.2
+    os.environ["HF_TOKEN"] = "{CANARY}"
+login(user="ada", token="{CANARY}")
+  api_key: {CANARY}
+"password": "{CANARY}",
+data = "https://me:{CANARY}@data.example"
+if token == end:
+print("another-canary")
+print("canary-of-a-command")
diff --git a/conf/.env b/conf/.env
+X={CANARY}
diff --git a/model.py b/model.py
+tokens = 3
"""


def test_no_secret_of_a_diff_is_kept() -> None:
    variables = {"WANDB_API_KEY": "another-canary", "EMPTY_TOKEN": "", "LR": "0.1"}
    env = [{"name": name, "value": value} for name, value in variables.items()]
    kept = kept_diff(DIFF, secrets_of({"env": env, "command": ["train.py", "--api-token", "canary-of-a-command"]}))
    assert CANARY not in kept
    assert kept.count('+print("***")\n') == 2
    for line in (
        "-lr = 0.1",
        '+    os.environ["HF_TOKEN"] = ***',
        '+data = "https://me:***@data.example"',
        "+tokens = 3",
    ):
        assert line in kept.splitlines()
    assert "+if token == end:" in kept
    assert "diff --git a/conf/.env b/conf/.env\n(not shown, since its name says that it is secret)\ndiff" in kept


@pytest.mark.parametrize("word", ["a", "a.", "token ", '"', "-", "="])
def test_a_long_line_of_a_diff_takes_linear_time(word: str) -> None:
    """64 kB took minutes: each character began another search to the end of the line."""
    signal.alarm(60)
    kept_diff("+" + word * (400_000 // len(word)), [])
    signal.alarm(0)


@pytest.mark.parametrize(
    "spec", ["[" * 100_000, "[1]", '{"env": [5], "command": 5}', '{"env": 5, "setup": 5}', "x", "1e999"]
)
def test_any_text_may_stand_where_the_options_are(spec: str) -> None:
    item = job()
    item["metadata"]["annotations"] = {"flk.dev/spec": spec}
    assert kept_job(item)["metadata"]["name"] == "gpt"
    assert secrets_of(item) == []
