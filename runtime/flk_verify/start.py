"""verify(): before a training begins, make its first steps twice in processes of their own, and compare them.

Each rank starts the script anew for a few steps under the strategy. Rank 0 starts it once more, in a world of one rank
and without a strategy, where loaders give it the batches of all ranks. The training itself is not touched: it begins
after them, with the seeds and weights that it has without them.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from flk_runtime.contract import pod_layout, user_env
from flk_runtime.discovery import RankInfo
from flk_runtime.distributed import process_group
from flk_runtime.errors import SetupError, VerificationError, setting
from flk_runtime.shared.progress import heartbeat
from flk_runtime.system import trial
from flk_runtime.system.text import last_line
from flk_runtime.training.options import TIMEOUT

_POLL: Final = 0.1  # seconds
_GRACE: Final = 10.0  # seconds in which processes end by themselves after another one has failed
_LAUNCHERS: Final = ("flk", "torchrun", "env", "alone")  # their variables are those of torchrun
_LINES: Final = 12  # of a failed process's output that are shown
_FAILED: Final = "flk-verify-failed"  # in the store: the first failure of a process on any rank
_CURE: Final = "leave --verify out, or see what it needs in docs/concepts/sharding.md"


def verify(strategy: str, rank_info: RankInfo, limit: float) -> None:
    """Compare the first steps under ``strategy`` with those of the whole model in one process. Collective.

    ``strategy`` is empty where the script has its own. The number of steps is $FLK_VERIFY. The process group is open.
    ``limit``: seconds that it may take, at least `TIMEOUT`. Raises VerificationError on all ranks if a step differs,
    and SetupError where the two cannot be compared. If a process fails, a line says that nothing is verified.
    """
    if rank_info.launcher not in _LAUNCHERS:
        raise SetupError(f"--verify works under flk and torchrun, and not under {rank_info.launcher}: {_CURE}")
    if setting(user_env.WORKERS) > 1:
        raise SetupError(f"--verify compares the ranks of one group, and strategy diloco has several: {_CURE}")
    is_main = rank_info.rank == 0
    port, port_alone = process_group.on_main(lambda: [str(port) for port in pod_layout.free_ports(2)])
    variables = {
        user_env.VERIFY: "",
        user_env.FULL_WORLD_SIZE: "",  # the samples of a step are those of the ranks that are there
        "MASTER_PORT": port,
        "NVIDIA_TF32_OVERRIDE": "0",  # cuBLAS and cuDNN: what is float32 has the digits of float32
    }
    if strategy:
        variables[user_env.STRATEGY] = strategy
    with tempfile.TemporaryDirectory(prefix="flk-") as folder, contextlib.ExitStack() as stack:
        request = {"steps": setting(user_env.VERIFY), "strategy": strategy or "the script's strategy", "folder": folder}
        request["parent"] = os.getpid()
        processes = [stack.enter_context(_started(request | {"role": "rank"}, variables))]
        if is_main:
            variables |= _alone(rank_info.world_size, port_alone)
            processes.append(stack.enter_context(_started(request | {"role": "whole"}, variables)))
        has_failed = _wait(processes, request, time.monotonic() + max(limit, TIMEOUT))
        result = Path(folder, "result.json")
        found: dict[str, str] = json.loads(result.read_text()) if is_main and result.exists() else {}
    failures = process_group.all_gather(has_failed)
    error = process_group.store().get(_FAILED).decode() if any(failures) else ""
    line = _line(process_group.on_main(lambda: found), error)
    if is_main:
        print(f"flk: {line}", flush=True)


def _line(found: dict[str, str], error: str) -> str:
    """The line that says what was verified, or why nothing was. Raises what was found."""
    if "difference" in found:
        raise VerificationError(found["difference"])
    if "refused" in found:
        raise SetupError(f"--verify: the first steps could not be compared: {found['refused']}: {_CURE}")
    if error or "line" not in found:
        return f"not verified: {error or found.get('failed', 'there is no result')}; the training begins without it"
    return found["line"]


@contextlib.contextmanager
def _started(request: dict[str, Any], variables: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs the script for some steps, and writes its output to a file with the name of its role."""
    with Path(request["folder"], request["role"]).open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "flk_verify", json.dumps(request), *trial.script_command()],
            env=trial.trial_environment() | variables,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _wait(processes: list[subprocess.Popen[bytes]], request: dict[str, Any], deadline: float) -> bool:
    """Wait until this rank's process, the first one, has ended. Returns whether a process of this rank has failed.

    The first failure on any rank ends the wait of all, and is in the store under _FAILED.
    """
    store, look_at = process_group.store(), 0.0
    while processes[0].poll() is None:  # the other one, with the whole model, may wait for an answer then
        now = time.monotonic()
        if now > deadline:
            break
        if now >= look_at:
            look_at = now + 1.0
            heartbeat()  # this rank makes no step meanwhile
            _report(processes, request)
            if store.check([_FAILED]):
                deadline = min(deadline, now + _GRACE)
        time.sleep(_POLL)
    if processes[0].poll() is None:
        store.compare_set(_FAILED, "", "the processes waited for each other, or took too long")
        return True
    return _report(processes, request)


def _report(processes: list[subprocess.Popen[bytes]], request: dict[str, Any]) -> bool:
    """Whether a process of this rank has failed. The first failure of all ranks goes into the store, with its text."""
    names = (f"rank {process_group.rank()}", "the whole model in one process")
    for process, role, name in zip(processes, ("rank", "whole"), names, strict=False):
        if process.poll():
            if not process_group.store().check([_FAILED]):
                lines = Path(request["folder"], role).read_text(errors="replace").splitlines()
                process_group.store().compare_set(_FAILED, "", f"{name} failed: {last_line(lines)[:300]}")
                sys.stderr.write("\n".join([f"flk: --verify: {name} wrote:", *lines[-_LINES:], ""]))
            return True
    return False


def _alone(world_size: int, port: str) -> dict[str, str]:
    """The variables of the one process that stands for all ranks."""
    ranks = dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"), "0")
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"), "1")
    return ranks | sizes | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, user_env.STANDS_FOR: str(world_size)}
