"""Strategy auto: the ranks choose their strategy at the start, by the plan of the script.

Rank 0 runs ``python -m flk_plan`` in a process of its own, which runs the script up to its first step on
tensors without data. The other ranks wait and get the result.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

from flk_runtime.contract import pod_env, user_env
from flk_runtime.discovery import RankInfo
from flk_runtime.distributed import process_group
from flk_runtime.errors import RuntimeFailure, SetupError
from flk_runtime.system import host, trial
from flk_runtime.system.text import last_line

TIMEOUT: Final = 300.0  # seconds that the plan may take
_ALONE: Final = "ddp"  # of one rank, and of trials
_UNPLANNED: Final = "full_shard"  # it needs least memory


@dataclass(frozen=True)
class Choice:
    """A strategy and the reason for it, for a number of ranks."""

    strategy: str
    reason: str
    world_size: int
    local_world_size: int


def choose(rank_info: RankInfo, device: torch.device, timeout: float) -> str:
    """The strategy that auto stands for in this run. The process group is open; its collectives may take ``timeout``
    seconds. Collective.

    Rank 0 prints it with the reason. If the script cannot be planned, it is full_shard. In a trial it is ddp.
    """
    if trial.is_trial():
        return _ALONE
    choice = process_group.on_main(lambda: _kept(rank_info) or _chosen(rank_info, device, min(TIMEOUT, timeout / 2)))
    if process_group.rank() == 0:
        print(f"flk: strategy {choice.strategy}, chosen by auto: {choice.reason}", file=sys.stderr, flush=True)
    return choice.strategy


def _kept(rank_info: RankInfo) -> Choice | None:
    """The choice of an earlier attempt in this pod, if that had as many ranks."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        choice = Choice(**json.loads(Path(os.environ.get(pod_env.CHOICE, "")).read_text()))
        if (choice.world_size, choice.local_world_size) == (rank_info.world_size, rank_info.local_world_size):
            return choice
    return None


def _chosen(rank_info: RankInfo, device: torch.device, limit: float) -> Choice:
    if rank_info.world_size == 1:
        strategy, reason = _ALONE, "there is one rank"
    else:
        try:
            found = run_plan(rank_info, device, trial.script_command(), limit)
            strategy, reason = found["strategy"], found["reason"]
        except RuntimeFailure as error:
            reason = f"it needs least memory, and there is no plan, because {error}; set another with --strategy"
            strategy = _UNPLANNED
    choice = Choice(strategy, reason, rank_info.world_size, rank_info.local_world_size)
    path = os.environ.get(pod_env.CHOICE)
    if path:
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps(asdict(choice)))
    return choice


def run_plan(rank_info: RankInfo, device: torch.device, command: list[str], limit: float = TIMEOUT) -> dict[str, Any]:
    """Choose the strategy of ``command`` for the ranks and the devices of this run, as `flk_plan.choice` does.

    ``limit`` is the time in seconds that this may take. Raises SetupError if the script cannot be planned.
    """
    with tempfile.TemporaryDirectory(prefix="flk-") as folder:
        result, output = Path(folder, "plan.json"), Path(folder, "output")
        request = {
            "choose": True,
            "nodes": -(-rank_info.world_size // rank_info.local_world_size),
            "ranks": rank_info.local_world_size,
            **_device(device, rank_info.local_world_size),
            "fabric": user_env.FABRIC.read(os.environ),
            "output": str(result),
        }
        environment = trial.trial_environment()
        environment.pop(pod_env.GPUS, None)
        with output.open("wb") as sink:
            try:
                process = subprocess.run(
                    [sys.executable, "-m", "flk_plan", json.dumps(request), *command],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    timeout=limit,
                )
            except subprocess.TimeoutExpired:
                raise SetupError(
                    f"the script did not reach its first step within {limit:g} s: leave out what takes long before it, "
                    f"or waits for values of the model, such as generate(), where ${user_env.TRIAL} is set"
                ) from None
        if not result.exists():
            last = last_line(output.read_text(errors="replace").split("\n"))
            raise SetupError(f"the script failed while it was planned (exit code {process.returncode}): {last[:200]}")
        data: dict[str, Any] = json.loads(result.read_text())
    if "error" in data:
        raise SetupError(data["error"])
    return data


def _device(device: torch.device, local_world_size: int) -> dict[str, Any]:
    """Name and memory (bytes) of this rank's device; of a CPU, its share of the container's memory."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {"device": properties.name, "memory": properties.total_memory}
    return {"device": "cpu", "memory": host.memory_limit() // local_world_size}
