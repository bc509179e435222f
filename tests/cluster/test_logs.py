"""Logs of jobs in a real cluster: of both attempts, of the rank that failed first, and when pods and job are gone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

FAILS = """
import os, time
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
dist.barrier()
if rank == 1:
    raise ValueError("sample 371 has no label")
dist.barrier()
"""
FOREIGN = """
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {{name: foreign}}
spec:
  pytorchReplicaSpecs:
    Worker:
      replicas: 2
      restartPolicy: Never
      template:
        spec:
          securityContext: {{runAsNonRoot: true, runAsUser: 1000, seccompProfile: {{type: RuntimeDefault}}}}
          containers:
          - name: pytorch
            image: {image}
            command: [python3, -c, "print('same line'); print('no prefix')"]
            securityContext: {{allowPrivilegeEscalation: false, capabilities: {{drop: [ALL]}}}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "fails.py").write_text(FAILS)
    return tmp_path


def test_logs_of_a_job_that_fails_and_then_is_gone(flk: Any, kubectl: Any, image: str, folder: Path) -> None:
    args = ["--replicas", "2", "--cpu", "50m", "--restarts", "1", "--image", image, "--env", "FLK_RETRY_SAME_FAILURE=1"]
    made = flk("submit", "fails.py", "--name", "fails", *args, cwd=folder)
    assert made.code == 0, made.stderr
    followed = flk("logs", "fails", "-o", "jsonl")
    assert followed.code == 100, followed.stderr
    assert "rank 1 in fails-worker-1 raised ValueError: sample 371 has no label" in followed.stderr
    lines = [json.loads(line) for line in followed.stdout.splitlines()]
    begun = {
        (line["rank"], line["attempt"], line["message"]) for line in lines if line["message"].startswith("attempt ")
    }
    assert {(rank, n + 1, f"attempt {n}") for rank in (0, 1) for n in (0, 1)} <= begun
    assert all(line["time"] and line["pod"].startswith("fails-worker-") for line in lines)

    first = flk("logs", "fails", "--first-error")
    assert first.code == 0, first.stderr
    assert first.stdout.splitlines()[-1] == "[rank 1] ValueError: sample 371 has no label"
    assert "[rank 0]" not in first.stdout

    chosen = flk("logs", "fails", "--no-follow", "--grep", "^attempt", "--rank", "1", "--timestamps")
    marks = [line.partition(" ")[2] for line in chosen.stdout.splitlines()]
    assert marks == ["[rank 1] attempt 0", "[pod 1] attempt 2", "[rank 1] attempt 1"]

    kubectl("delete", "pod", "fails-worker-1", "--wait=true")
    kept = flk("logs", "fails", "--no-follow", "--rank", "1")
    assert kept.code == 0
    assert "fails-worker-1 is gone; these are its last lines, as of " in kept.stderr
    assert "[rank 1] ValueError: sample 371 has no label" in kept.stdout.splitlines()

    assert flk("delete", "--finished").stdout == "fails\n"
    gone = flk("logs", "fails")
    assert gone.code == 100  # that of the job, which had ended
    assert "[rank 1] ValueError: sample 371 has no label" in gone.stdout.splitlines()
    assert "job fails is gone" in gone.stderr


def test_logs_of_a_job_that_flk_did_not_make(flk: Any, kubectl: Any, image: str) -> None:
    kubectl("create", "-f", "-", stdin=FOREIGN.format(image=image))
    followed = flk("logs", "foreign")
    assert followed.code == 0, followed.stderr
    assert {"[pod 0] same line", "[pod 1] no prefix"} <= set(followed.stdout.splitlines())
    folded = flk("logs", "foreign", "--no-follow", "--fold").stdout
    assert folded == "[pods 0-1] same line\n[pods 0-1] no prefix\n"
    saved = flk("logs", "foreign", "--no-follow", "--output-folder", "saved")
    assert saved.code == 0, saved.stderr
    assert "wrote 2 files to saved" in saved.stderr
    assert flk("wait", "foreign", "--for", "condition=Succeeded").code == 0
    assert flk("delete", "-l", "app=none").stdout == ""
    assert flk("delete", "--all", "--older-than", "1h").stdout == ""
    assert flk("delete", "--all").stdout == ""
    assert flk("delete", "--all", "--include-others").stdout == "foreign\n"
    assert flk("wait", "foreign", "--for", "delete").code == 0
