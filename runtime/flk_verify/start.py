"""verify(): before a training begins, make its first steps twice in processes of their own, and compare them.

Each rank starts the script anew for a few steps under the strategy. Rank 0 starts it once more, in a world of one rank
and without a strategy, where loaders give it the batches of all ranks. The training itself is not touched: it begins
after them, with the seeds and weights that it has without them.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flk_runtime.contract import user_env
from flk_runtime.discovery import RankInfo
from flk_runtime.distributed import process_group
from flk_runtime.errors import SetupError, VerificationError, setting
from flk_runtime.shared.progress import heartbeat
from flk_runtime.system import trial
from flk_runtime.system.text import last_line
from flk_verify.channel import KEY

_POLL: Final = 0.1  # seconds
_GRACE: Final = 10.0  # seconds in which processes end by themselves after another one has failed
_LAUNCHERS: Final = ("flk", "torchrun", "env", "alone")  # their variables are those of torchrun
_LINES: Final = 12  # of a failed process's output that are shown
_NOT: Final = "leave --verify out, or see what it needs in docs/concepts/sharding.md"


def verify(strategy: str, rank_info: RankInfo, limit: float) -> None:
    """Compare the first steps under ``strategy`` with those of the whole model in one process. Collective.

    ``strategy`` is empty where the script has its own. The number of steps is $FLK_VERIFY. The process group is open.
    ``limit``: seconds that all of it may take. Raises VerificationError on all ranks if a step differs, and SetupError
    if the two cannot be compared.
    """
    steps = setting(user_env.VERIFY)
    if rank_info.attempt:  # the first attempt has verified it, or has ended with what it found
        return
    if rank_info.launcher not in _LAUNCHERS:
        raise SetupError(f"--verify works under flk and torchrun, and not under {rank_info.launcher}: {_NOT}")
    port = process_group.on_main(_free_port)
    request: dict[str, Any] = {"steps": steps, "strategy": strategy or "the script's own strategy"}
    environment = {user_env.VERIFY: "", "MASTER_PORT": str(port)} | ({user_env.STRATEGY: strategy} if strategy else {})
    is_main = process_group.rank() == 0
    with tempfile.TemporaryDirectory(prefix="flk-") as folder, contextlib.ExitStack() as stack:
        request |= {"folder": folder}
        environment |= {KEY: secrets.token_hex(16)}
        begin = [_Process("this rank", request | {"role": "rank"}, environment)]
        if is_main:
            alone = request | {"role": "whole"}
            begin.append(_Process("the whole model in one process", alone, environment | _alone(rank_info.world_size)))
        processes = [stack.enter_context(each.started(folder)) for each in begin]
        error = _wait(processes, time.monotonic() + limit)
        result = Path(folder, "result.json")
        found: dict[str, Any] = json.loads(result.read_text()) if is_main and result.exists() else {}
    _tell(process_group.all_gather(error), process_group.on_main(lambda: found))


def _tell(errors: list[str], found: dict[str, Any]) -> None:
    """Raise what was found, or say on rank 0 that the steps agree."""
    if "difference" in found:
        raise VerificationError(found["difference"])
    if "refused" in found:
        raise SetupError(f"--verify: {found['refused']}{f' ({errors[0]})' if errors[0] else ''}: {_NOT}")
    if any(errors) or not found:
        # Of rank 0 first: it knows the process without ranks, whose end breaks the connections of the others.
        first = next((f"rank {rank}: {error}" for rank, error in enumerate(errors) if error), "there is no result")
        raise SetupError(f"--verify: the first steps could not be compared: {first}: {_NOT}")
    if process_group.rank() == 0:
        print(f"flk: {found['line']}", flush=True)


@dataclass(frozen=True)
class _Process:
    """A process that runs the script for some steps."""

    name: str
    request: dict[str, Any]
    environment: dict[str, str]

    @contextlib.contextmanager
    def started(self, folder: str) -> Iterator[_Running]:
        output = Path(folder, self.request["role"])
        with output.open("wb") as sink:
            process = subprocess.Popen(
                [sys.executable, "-m", "flk_verify", json.dumps(self.request), *trial.script_command()],
                env=trial.trial_environment() | self.environment,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
            )
        try:
            yield _Running(self.name, process, output)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


@dataclass(frozen=True)
class _Running:
    name: str
    process: subprocess.Popen[bytes]
    output: Path

    @property
    def error(self) -> str:
        """Why it has failed; empty if it has not."""
        if not (code := self.process.poll()):
            return ""
        lines = self.output.read_text(errors="replace").splitlines()
        sys.stderr.write("\n".join([f"flk: --verify: {self.name} wrote:", *lines[-_LINES:], ""]))
        return f"{self.name} failed (exit code {code}): {last_line(lines)[:300]}"


def _wait(processes: list[_Running], deadline: float) -> str:
    """Wait until all ``processes`` have ended, or one on any rank has failed. Returns what failed here."""
    store = process_group.store()
    failed, look_at = "flk-verify-failed", 0.0
    while processes[0].process.poll() is None:  # the whole model has its answers from rank 0, and is ended then
        now = time.monotonic()
        if now > deadline:
            store.set(failed, "")
            return "they took too long, or wait for each other"
        if now >= look_at:
            look_at = now + 1.0
            heartbeat()  # this rank makes no step meanwhile
            if any(each.process.poll() for each in processes):
                store.set(failed, "")
            if store.check([failed]):
                deadline = min(deadline, now + _GRACE)
        time.sleep(_POLL)
    return next(filter(None, (each.error for each in reversed(processes))), "")


def _alone(world_size: int) -> dict[str, str]:
    """The variables of the one process that stands for all ranks."""
    ranks = dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"), "0")
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"), "1")
    port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    return ranks | sizes | port | {user_env.FULL_WORLD_SIZE: "", user_env.STANDS_FOR: str(world_size)}


def _free_port() -> int:
    with socket.socket() as each:
        each.bind(("", 0))
        return int(each.getsockname()[1])
