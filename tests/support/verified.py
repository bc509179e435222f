"""Runs a script as `flk run --verify` does, in forks of this process, which has imported torch."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import torch

from flk_verify.__main__ import follow

_LIMIT = 120.0  # seconds


def verified(script: str, strategy: str, ranks: int, *, steps: int = 3, nodes: int = 1) -> dict[str, str]:
    """What `flk_verify` finds: line, difference or refused; ``failed`` with the output where a process fails."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "script.py")
        file.write_text(dedent(script))
        request = {"steps": steps, "strategy": strategy, "folder": folder}
        environment = {"FLK_TRIAL": "1", "FLK_STRATEGY": strategy, "MASTER_ADDR": "127.0.0.1"}
        environment |= {"MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(ranks)}
        processes = [
            _start(file, request | {"role": "rank"}, environment | _variables(rank, ranks, nodes))
            for rank in range(ranks)
        ]
        alone = _variables(0, 1, 1) | {
            "FLK_STANDS_FOR": str(ranks),
            "WORLD_SIZE": "1",
            "MASTER_PORT": str(_free_port()),
        }
        processes.append(_start(file, request | {"role": "whole"}, environment | alone))
        codes = dict(_ends(processes))
        result = Path(folder, "result.json")
        if result.exists():
            return dict(json.loads(result.read_text()))
        outputs = [path.read_text(errors="replace")[-3000:] for path in sorted(Path(folder).glob("output-*"))]
        return {"failed": "\n".join([str(codes), *outputs])}


def _variables(rank: int, ranks: int, nodes: int) -> dict[str, str]:
    local = ranks // nodes
    numbers = {"RANK": rank, "LOCAL_RANK": rank % local, "LOCAL_WORLD_SIZE": local}
    groups = {"GROUP_RANK": rank // local, "GROUP_WORLD_SIZE": nodes}
    return {name: str(value) for name, value in (numbers | groups).items()}


def _start(script: Path, request: dict[str, object], environment: dict[str, str]) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.setsid()
        os.environ.update(environment)
        output = os.open(
            script.parent / f"output-{request['role']}-{environment['RANK']}", os.O_WRONLY | os.O_CREAT, 0o600
        )
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        torch.set_num_threads(1)
        follow(request, [str(script)])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _ends(processes: list[int]) -> Iterator[tuple[int, int]]:
    """The exit codes of the ranks, at most some seconds after one has failed; the rest is killed."""
    deadline, left = time.monotonic() + _LIMIT, list(processes)
    while left and time.monotonic() < deadline:
        for pid in list(left):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                left.remove(pid)
                yield processes.index(pid), os.waitstatus_to_exitcode(status)
                if status:
                    deadline = min(deadline, time.monotonic() + 10)
        if left == processes[-1:]:  # the whole model, which waits for an answer
            break
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def _free_port() -> int:
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        return int(each.getsockname()[1])
