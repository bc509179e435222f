"""The launchers of a job in a cluster recognise each other, and nobody else takes part."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.support.commands import WITHOUT_TORCH

SMALL = ["--cpu", "100m", *WITHOUT_TORCH]
SCRIPT = """
import os, time
print("attempt", os.environ["FLK_ATTEMPT"], "RDZV_SECRET" in str(os.environ), flush=True)
time.sleep(600)
"""


def patch_of(folder: Path, **variables: str) -> Path:
    """A patch that gives the container of a job these variables."""
    env = [{"name": name, "value": value, "valueFrom": None} for name, value in variables.items()]
    path = folder / "patch.yaml"
    path.write_text(yaml.safe_dump({"spec": {"containers": [{"name": "pytorch", "env": env}]}}))
    return path


def secrets(kubectl: Any) -> list[dict[str, Any]]:
    """The Secrets of the jobs of the name gpt."""
    found: list[dict[str, Any]] = kubectl.json("get", "secrets", "-l", "flk.dev/job=gpt")["items"]
    return found


def test_a_job_with_the_address_of_another_cannot_join_it(
    flk: Any, kubectl: Any, image: str, eventually: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    submit = ["submit", "train.py", "--replicas", "2", "--image", image, *SMALL]
    assert flk(*submit, "--name", "gpt", cwd=tmp_path).code == 0
    job = kubectl.json("get", "pytorchjob", "gpt")
    (secret,) = secrets(kubectl)
    assert [owner["uid"] for owner in secret["metadata"]["ownerReferences"]] == [job["metadata"]["uid"]]

    def lines_of_rank(rank: int) -> list[str]:
        lines = flk("logs", "gpt", "--no-follow", "--rank", str(rank)).stdout.splitlines()
        return [line for line in lines if f"[rank {rank}] " in line]

    eventually("both ranks run", lambda: lines_of_rank(0) and lines_of_rank(1))
    assert "False" in lines_of_rank(1)[0], "the ranks see the secret"

    address = {"FLK_RDZV_ENDPOINT": "gpt-worker-0:29400"}
    stolen = {"FLK_JOB": "gpt", "FLK_JOB_UID": job["metadata"]["uid"], "FLK_RDZV_SECRET": "guessed"}
    options = ["--env", "FLK_JOIN_TIMEOUT=5", "--restarts", "0"]
    for name, variables in {"other": address, "thief": address | stolen}.items():
        patch = patch_of(tmp_path, **variables)
        assert flk(*submit, "--name", name, "--patch", str(patch), *options, cwd=tmp_path).code == 0
    for name, reason in {
        "other": "the leader at this address belongs to another job",
        "thief": "the leader at this address does not know the secret of this job",
    }.items():
        eventually(f"pod 1 of {name} is refused", lambda n=name, r=reason: r in flk("logs", n, "--no-follow").stdout)
    state = json.loads(flk("status", "gpt", "-o", "json").stdout)
    assert state["phase"] == "Running"
    assert len(state["attempts"]) == 1
    assert len(lines_of_rank(0)) == len(lines_of_rank(1)) == 1
    assert "refused a connection from" in flk("logs", "gpt", "--no-follow").stdout

    assert flk("delete", "gpt").code == 0
    assert flk(*submit, "--name", "gpt", cwd=tmp_path).code == 0
    eventually("both ranks run", lambda: lines_of_rank(0) and lines_of_rank(1))
    eventually("the secret goes with the job", lambda: len(secrets(kubectl)) == 1)
    assert secrets(kubectl)[0]["metadata"]["name"] != secret["metadata"]["name"]
