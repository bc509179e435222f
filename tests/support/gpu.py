"""What scripts on a GPU have said, and the jobs whose rank is killed and restores."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flk_runtime.contract import pod_env, user_env
from flk_runtime.contract.record import JobRecord

Launch = Callable[..., subprocess.CompletedProcess[str]]

# The beginning of scripts that kill themselves in their first attempt. `note` keeps what an attempt has seen.
RESTARTED = """
    import ctypes, hashlib, pathlib, signal

    ATTEMPT = int(os.environ["FLK_ATTEMPT"])

    def note(key, value):
        with open(f"seen.{ATTEMPT}", "a") as file:
            file.write(json.dumps([key, value]) + "\\n")

    def kill():
        os.kill(os.getpid(), signal.SIGKILL)

    def digest(model, optimizer):
        # A hash of all bits of a model and its optimizer, with the devices of the optimizer's tensors.
        parameters = list(model.parameters())
        states = [(key, value) for each in parameters for key, value in sorted(optimizer.state[each].items())]
        content, places = hashlib.sha256(), set()
        for key, value in [("", each) for each in (*parameters, *model.buffers())] + states:
            local = (value.to_local() if hasattr(value, "to_local") else value).detach()
            if key:
                places.add(f"{key} {local.dtype} {local.device}")
            local = local.cpu().contiguous()
            content.update(ctypes.string_at(local.data_ptr(), local.nbytes))
        return [content.hexdigest(), sorted(places)]

    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.BatchNorm1d(256), nn.Linear(256, 1024), nn.Linear(1024, 256)

        def forward(self, x):
            return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.2, self.training)

    def noisy():
        torch.manual_seed(0)
        return nn.Sequential(*(Noisy() for _ in range(3)))

    def loss_of(model, x):
        return (model(x) - x.roll(1, 0)).square().mean()
"""
# cuBLAS computes the same bits again only if it may not choose its workspace.
SAME_BITS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def restarts(folder: Path, memory: Path | None = None, checkpoint: Path | None = None) -> dict[str, str]:
    """The variables of a job with one restart that keeps its checkpoints in memory, in storage or in both."""
    variables = {
        pod_env.RESTARTS: "1",
        user_env.BACKOFF: "0",
        pod_env.TERMINATION_LOG: str(folder / "termination"),
        **SAME_BITS,
    }
    if memory:
        variables[pod_env.MEMORY_ROOT] = str(memory)
    if checkpoint:
        variables[user_env.CHECKPOINT] = str(checkpoint)
    return variables


def record_in(folder: Path) -> JobRecord:
    """The record of the job that was started with `restarts`."""
    record = JobRecord.from_json((folder / "termination").read_text())
    assert record is not None
    return record


def seen(folder: Path, attempt: int) -> dict[str, Any]:
    """What an attempt has noted, by its keys."""
    return dict(json.loads(line) for line in (folder / f"seen.{attempt}").read_text().splitlines())


def said(ended: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The last object that rank 0 has printed."""
    lines = [line for line in ended.stdout.splitlines() if line.startswith("[rank 0] {")]
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("[rank 0] "))
    print(json.dumps(found))  # `make gpu` shows it
    return found
