"""60 attempts of one job, each ended by a killed rank: in the last its processes hold what they held in the tenth."""

from __future__ import annotations

import ast
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from flk_runtime.contract import pod_env, user_env
from tests.support.held import count_in, of_launcher, of_process
from tests.support.pods import Pods
from tests.support.processes import until

ATTEMPTS = (10, 60)
STEPS = 4  # of each attempt until a rank is killed
PER_ATTEMPT = 20  # objects, and entries of tables, that the record of an attempt takes
MEMORY = 50 << 10  # bytes for each attempt: the record of it, and pages that an allocator keeps

TRAIN = f"""
    import os, pathlib, time, torch, flk_runtime as flk
    from flk_runtime.distributed import process_group
    from sitecustomize import held

    with flk.init(device="cpu", save_every=1, store_every=2, log_every=0, seed=1) as run:
        model = torch.nn.Linear(16, 16)
        model, optimizer = run.parallelize(model, torch.optim.AdamW(model.parameters()))
        attempt, begun = os.environ["FLK_ATTEMPT"], run.steps
        while True:
            model(torch.ones(1, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step()
            if run.steps - begun == {STEPS}:
                run.save(wait=True)
                found = held() | {{"keys": process_group.store().num_keys(), "pid": os.getpid(), "begun": begun}}
                new = pathlib.Path(f"new.{{run.rank}}")
                new.write_text(repr(found))
                new.rename(f"rank.{{attempt}}.{{run.rank}}")
                time.sleep(600)
"""


def descendants(pid: int) -> list[int]:
    """The processes below a process."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            found += [child, *descendants(child)]
    return found


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_what_is_held_in_attempt_60_is_what_was_held_in_attempt_10(
    pods: Callable[..., Pods], root: Path, tmp_path: Path
) -> None:
    settings = {
        pod_env.MEMORY_ROOT: str(root),
        user_env.MEMORY_LIMIT: str(64 << 20),
        user_env.CHECKPOINT: str(tmp_path / "checkpoint"),
        pod_env.RESTARTS: "1000",
        user_env.BACKOFF: "0",
        user_env.RETRY_SAME_FAILURE: "1",
        user_env.NODE_MEMORY: "0",
    }
    job = pods(2, 1, script=TRAIN, **settings)
    (temporary := tmp_path / "tmp").mkdir()
    job.variables["TMPDIR"] = str(temporary)
    count_in(job)
    job.start("train.py")
    found: dict[str, list[dict[str, int]]] = {}
    begun = []
    for attempt in range(1, ATTEMPTS[-1] + 1):
        counts = {}
        for rank in range(2):
            path = job.folder / f"rank.{attempt - 1}.{rank}"
            until(path.exists, f"rank {rank} trains in attempt {attempt}", context=job.logs_of_all)
            counts[rank] = ast.literal_eval(path.read_text())
        begun.append(counts[0].pop("begun"))
        assert begun[-1] == counts[1].pop("begun")
        pids = {rank: each.pop("pid") for rank, each in counts.items()}
        if attempt in ATTEMPTS:
            for pod, pid in pids.items():
                launcher = job.running[pod].pid
                below = descendants(launcher)
                servers = [each for each in below if each != pid]
                found.setdefault(f"rank {pod}", []).append(counts[pod] | of_process(pid))
                for number, server in enumerate(servers):
                    found.setdefault(f"server {pod}.{number}", []).append(of_process(server))
                others = {"children": len(below), "temporary": len(list(temporary.rglob("*")))}
                found.setdefault(f"launcher {pod}", []).append(of_launcher(job, pod, root) | others)
        if attempt == ATTEMPTS[-1]:
            break
        os.kill(pids[attempt % 2], signal.SIGKILL)
    assert begun == [STEPS * each for each in range(len(begun))], "each attempt goes on where the last one was"
    for who, counts_of in found.items():
        print(who, *counts_of)
    attempts = ATTEMPTS[1] - ATTEMPTS[0]
    for who, (before, after) in found.items():
        assert after.pop("memory") - before.pop("memory") < MEMORY * attempts, who
        for name in ("objects", "entries"):
            assert after.pop(name, 0) - before.pop(name, 0) < PER_ATTEMPT * attempts, who
        # A connection may just be served, and a third file of a shard is made when storage is slow for the first time.
        for name in ("files", "threads", "shards"):
            assert after.pop(name, 0) - before.pop(name, 0) < attempts // 10, who
        assert after.pop("bytes of shards", 0) < 2 * before.pop("bytes of shards", 1), who
        assert after == before, who
