"""verify(): before a training begins, make its first steps twice in processes of their own, and compare them.

Each rank starts the script anew for a few steps under the strategy. Rank 0 starts it once more, in a world of one rank
and without a strategy, where loaders give it the batches of all ranks. The training itself is not touched: it begins
after them, with the seeds and weights that it has without them.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from flk_runtime.contract import user_env
from flk_runtime.discovery import RankInfo
from flk_runtime.distributed import process_group
from flk_runtime.errors import SetupError, VerificationError, setting
from flk_runtime.shared.progress import heartbeat
from flk_runtime.system import trial
from flk_runtime.system.text import last_line

_POLL: Final = 0.1  # seconds
_GRACE: Final = 10.0  # seconds in which processes end by themselves after another one has failed
_LAUNCHERS: Final = ("flk", "torchrun", "env", "alone")  # their variables are those of torchrun
_LINES: Final = 12  # of a failed process's output that are shown
_FAILED: Final = "flk-verify-failed"  # in the store, when a process has failed on any rank
_CURE: Final = "leave --verify out, or see what it needs in docs/concepts/sharding.md"


def verify(strategy: str, rank_info: RankInfo, limit: float) -> None:
    """Compare the first steps under ``strategy`` with those of the whole model in one process. Collective.

    ``strategy`` is empty where the script has its own. The number of steps is $FLK_VERIFY. The process group is open.
    ``limit``: seconds that all of it may take. Raises VerificationError on all ranks if a step differs, and SetupError
    if the two cannot be compared.
    """
    if rank_info.attempt:  # the first attempt has verified it, or has ended with what it found
        return
    if rank_info.launcher not in _LAUNCHERS:
        raise SetupError(f"--verify works under flk and torchrun, and not under {rank_info.launcher}: {_CURE}")
    if setting(user_env.WORKERS) > 1:
        raise SetupError(f"--verify compares the ranks of one group, and strategy diloco has several: {_CURE}")
    variables = {user_env.VERIFY: "", "MASTER_PORT": str(process_group.on_main(_free_port))}
    if strategy:
        variables[user_env.STRATEGY] = strategy
    is_main = rank_info.rank == 0
    with tempfile.TemporaryDirectory(prefix="flk-") as folder, contextlib.ExitStack() as stack:
        request = {"steps": setting(user_env.VERIFY), "strategy": strategy or "the script's strategy", "folder": folder}
        processes = [stack.enter_context(_started(request | {"role": "rank"}, variables))]
        if is_main:
            variables |= _alone(rank_info.world_size)
            processes.append(stack.enter_context(_started(request | {"role": "whole"}, variables)))
        error = _wait(processes, folder, time.monotonic() + limit)
        result = Path(folder, "result.json")
        found: dict[str, str] = json.loads(result.read_text()) if is_main and result.exists() else {}
    errors = process_group.all_gather(error)
    _tell(process_group.on_main(lambda: found), next(filter(None, errors), ""), is_main=is_main)


def _tell(found: dict[str, str], error: str, *, is_main: bool) -> None:
    """Raise what was found, or say on rank 0 that the steps agree."""
    if "difference" in found:
        raise VerificationError(found["difference"])
    if "line" not in found or error:
        reasons = "; ".join(filter(None, (found.get("refused"), error))) or "there is no result"
        raise SetupError(f"--verify: the first steps could not be compared: {reasons}: {_CURE}")
    if is_main:
        print(f"flk: {found['line']}", flush=True)


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


def _wait(processes: list[subprocess.Popen[bytes]], folder: str, deadline: float) -> str:
    """Wait until this rank's process has ended, the first one, or one on any rank has failed. Returns what failed."""
    store, look_at = process_group.store(), 0.0
    while processes[0].poll() is None:  # the other one, with the whole model, may wait for an answer then
        now = time.monotonic()
        if now > deadline:
            store.set(_FAILED, "")
            break
        if now >= look_at:
            look_at = now + 1.0
            heartbeat()  # this rank makes no step meanwhile
            if any(each.poll() for each in processes):
                store.set(_FAILED, "")
            if store.check([_FAILED]):
                deadline = min(deadline, now + _GRACE)
        time.sleep(_POLL)
    if not any(each.poll() for each in processes):
        return "" if processes[0].poll() == 0 else "the processes waited for each other, or took too long"
    role = "whole" if processes[-1].poll() and len(processes) > 1 else "rank"
    lines = Path(folder, role).read_text(errors="replace").splitlines()
    name = {"whole": "the whole model in one process", "rank": "a rank"}[role]
    sys.stderr.write("\n".join([f"flk: --verify: {name} wrote:", *lines[-_LINES:], ""]))
    return f"{name} failed: {last_line(lines)[:300]}"


def _alone(world_size: int) -> dict[str, str]:
    """The variables of the one process that stands for all ranks."""
    ranks = dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"), "0")
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"), "1")
    port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    return ranks | sizes | port | {user_env.FULL_WORLD_SIZE: "", user_env.STANDS_FOR: str(world_size)}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])
