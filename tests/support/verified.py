"""``python -m tests.support.verified NAME…``: what `flk run --verify` says of the scripts of `verify_cases`, as JSON.

Each process of a script is a fork of this one, which has imported torch. Without names, all scripts are run.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import TextIO

import torch

import flk_runtime.parallel.ddp
import flk_runtime.parallel.fsdp2  # once, and not in each fork  # noqa: F401
from flk_verify.__main__ import follow
from tests.support.ports import held_ports
from tests.support.verify_cases import RIGHT, WRONG, Case

_LIMIT = 120.0  # seconds
_RANKS = {"ddp": 2, "none": 2, "full_shard": 3, "shard_grad_op": 3, "hybrid_shard": 4, "hybrid_shard_zero2": 4}


def verified(script: str, strategy: str, ranks: int, *, steps: int = 3, nodes: int = 1) -> dict[str, str]:
    """What `flk_verify` finds: line, difference or refused; ``failed`` with the output where a process fails."""
    with tempfile.TemporaryDirectory() as folder, held_ports() as free_port:
        file = Path(folder, "script.py")
        file.write_text(dedent(script))
        request = {"steps": steps, "strategy": strategy, "folder": folder}
        environment = {"FLK_TRIAL": "1", "FLK_STRATEGY": strategy, "MASTER_ADDR": "127.0.0.1"}
        environment |= {"MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        processes = [
            _start(file, request | {"role": "rank"}, environment | _variables(rank, ranks, nodes))
            for rank in range(ranks)
        ]
        alone = _variables(0, 1, 1) | {
            "FLK_STANDS_FOR": str(ranks),
            "WORLD_SIZE": "1",
            "MASTER_PORT": str(free_port()),
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


def is_named(case: Case, found: dict[str, str]) -> bool:
    """Whether a script that trains otherwise is named, with one of the causes that fit."""
    text = " ".join(found.values())
    return "line" not in found and any(f"Cause: {cause}" in text or cause == "refused: " for cause in case.causes)


def main(names: list[str], output: TextIO = sys.stdout) -> None:
    """Write a line for each script and strategy: name, strategy, whether it is as it should be, and what was found."""
    for name, case in (RIGHT | WRONG).items():
        for strategy in case.strategies if not names or name in names else ():
            nodes = 2 if strategy.startswith("hybrid") else 1
            found = verified(case.script, strategy, _RANKS[strategy], nodes=nodes)
            right = is_named(case, found) if case.causes else "line" in found
            print(json.dumps([name, strategy, right, found]), file=output, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
