"""10,000 saves in memory, or in storage too: the launchers and the ranks hold after them what they held after 20.

The bytes of memory are compared from 1,000 on: in the first saves allocators grow, and modules are imported.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from flk_runtime.contract import pod_env, user_env
from tests.support.held import count_in, of_launcher, of_process
from tests.support.pods import Pods
from tests.support.processes import until

SAVES = (20, 1_000, 10_000)
LEFT = (SAVES[2] - SAVES[1]) // 10  # objects or entries: less than a tenth of one for each save
MEMORY = 2 << 20  # bytes: less than 250 for each save; an allocator keeps some that are free
MEMORY_GOES_BACK = 8 << 20  # bytes: less than 10 kB each time that the script goes back, which reads files

TRAIN = """
    import os, pathlib, sys, time, torch, flk_runtime as flk
    from flk_runtime.distributed import process_group
    from sitecustomize import held

    stops = [int(text) for text in sys.argv[1:]]
    with flk.init(device="cpu", save_every=1, log_every=0, seed=1) as run:
        model = torch.nn.Linear(16, 16)
        model, optimizer = run.parallelize(model, torch.optim.AdamW(model.parameters()))
        pathlib.Path(f"pid.0.{run.rank}").write_text(str(os.getpid()))
        while run.steps < stops[-1]:
            model(torch.ones(1, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step()
            if run.steps in stops:
                text = repr(held() | {"keys": process_group.store().num_keys()})
                pathlib.Path(f"new.{run.rank}").write_text(text)
                pathlib.Path(f"new.{run.rank}").rename(f"rank.{run.rank}.{run.steps}")
                while not pathlib.Path(f"goes-on.{run.steps}").exists():
                    time.sleep(0.05)
"""

# It goes back to its latest checkpoint in every tenth step.
GOES_BACK = """
    import os, pathlib, sys, threading, time, torch, torch.distributed as dist, flk_runtime as flk
    from flk_runtime.distributed import process_group
    from sitecustomize import held

    stops, step = [int(text) for text in sys.argv[1:]], 0
    dist.init_process_group("gloo")
    rank, place = dist.get_rank(), os.path.abspath("checkpoints")
    model = torch.nn.Linear(16, 16)
    torch.nn.init.ones_(model.weight)
    pathlib.Path(f"pid.0.{rank}").write_text(str(os.getpid()))
    while step < stops[-1]:
        step += 1
        flk.save(step, place, wait=step in stops, model=model)
        if step % 10 == 5:
            assert flk.restore(place, model=model) == step
        if step in stops:
            while any(thread.name == "flk-checkpoint-watch" for thread in threading.enumerate()):
                time.sleep(0.05)  # of the time before it went back
            dist.barrier()  # rank 0 has deleted the keys
            text = repr(held() | {"keys": process_group.store().num_keys()})
            pathlib.Path(f"new.{rank}").write_text(text)
            pathlib.Path(f"new.{rank}").rename(f"rank.{rank}.{step}")
            while not pathlib.Path(f"goes-on.{step}").exists():
                time.sleep(0.05)
"""


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("script", "memory"), [(TRAIN, MEMORY), (GOES_BACK, MEMORY_GOES_BACK)], ids=["memory", "storage and going back"]
)
def test_what_is_held_after_10_000_saves_is_what_was_held_after_20(
    pods: Callable[..., Pods], root: Path, script: str, memory: int
) -> None:
    job = pods(2, 1, script=script, **{pod_env.MEMORY_ROOT: str(root), user_env.MEMORY_LIMIT: str(64 << 20)})
    count_in(job)
    job.start("train.py", *map(str, SAVES))
    found: dict[str, list[dict[str, int]]] = {}
    for saves in SAVES:
        for rank in range(2):
            path = job.folder / f"rank.{rank}.{saves}"
            until(path.exists, f"rank {rank} saves {saves} times", seconds=3000, context=job.logs_of_all)
            counts = ast.literal_eval(path.read_text()) | of_process(job.pid(0, rank))
            found.setdefault(f"rank {rank}", []).append(counts)
            found.setdefault(f"launcher {rank}", []).append(of_launcher(job, rank, root))
        (job.folder / f"goes-on.{saves}").touch()
    assert [job.running[pod].wait(120) for pod in range(2)] == [0, 0], job.logs_of_all()
    for who, counts_of in found.items():
        print(who, *counts_of)
    for who, (first, before, after) in found.items():
        assert after["entries"] - first["entries"] < LEFT, who
        assert all(after[name] == first[name] for name in ("keys", "shards", "bytes of shards") if name in first), who
        assert after.pop("memory") - before.pop("memory") < memory, who
        assert all(after.pop(name) - before.pop(name) < LEFT for name in ("objects", "entries")), who
        assert after == before, who
