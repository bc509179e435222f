"""Scripts that keep checkpoints in memory, and the deletion of the pods that hold them."""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path

from tests.support.pods import Pods

# Written directly against the launchers. Each rank's state says of which step and rank it is: a mixed state is seen.
TRAIN = """
    import itertools, os, pathlib, sys, time
    import torch, torch.distributed as dist
    from flk_runtime.checkpoint.memory import PodMemory, SaveKey
    from flk_runtime.shared.shard_file import DATA_BEGIN, Entry, ShardFile, read_header, verify
    from flk_runtime.shared.progress import own_page

    steps, save_every, pause, size = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    dist.init_process_group("gloo")
    rank, world_size, page = dist.get_rank(), dist.get_world_size(), own_page()
    attempt, numbers = int(os.environ["FLK_ATTEMPT"]), itertools.count(1)
    memory, files, step = PodMemory(os.environ["FLK_MEMORY"], attempt, rank), {}, 0

    def content(step, rank):
        return f"{step} {rank} ".encode().ljust(64, b".") * (size // 64)

    def restore():
        found = memory.restorable()
        if found is None:
            return 0
        for each in (each for each, reader in enumerate(found.readers) if reader == rank):
            shard = memory.open_shard(each).read_bytes()
            assert (verify(shard).step, verify(shard).rank) == (found.step, each)
            entry = read_header(shard).entries[0]
            data = shard[entry.begin : entry.begin + entry.length]
            assert data == content(found.step, each), (data[:64], found, each)
        return found.step

    def save(step):
        held = torch.tensor([int(memory.is_held(wait=True))])
        dist.all_reduce(held, dist.ReduceOp.MIN)
        memory.settle(whole=bool(held))
        path = memory.next_path()
        if path not in files:
            files[path] = ShardFile(path, [Entry("state", ("state",), DATA_BEGIN, size)], {})
        shard = files[path]
        shard.begin()
        shard.memory[DATA_BEGIN : DATA_BEGIN + size] = content(step, rank)
        number = next(numbers)
        shard.finish(step=step, number=number, world_size=world_size, rank=rank, values=b"")
        memory.finish(SaveKey(step, number), path)

    if memory:
        step = restore()
        memory.restored()
    page.restored, page.restored_from = step, 2 if step else 1
    print(f"begins at step {step}")
    begun = torch.tensor([step])
    dist.all_reduce(begun, dist.ReduceOp.MIN)
    assert begun.item() == step
    refusal = memory.reserve(dict.fromkeys(range(world_size), size + 4096)) if memory else ""
    if refusal:
        print(f"refused: {refusal}")
        memory = None
    while step < steps:
        dist.all_reduce(torch.ones(1))
        step += 1
        page.record_step(step)
        if memory and step % save_every == 0:
            save(step)
        pathlib.Path(f"pid.{attempt}.{rank}").write_text(str(os.getpid()))
        pathlib.Path(f"step.{rank}").write_text(str(step))
        time.sleep(pause)
        if memory and page.must_stop(step):
            save(step)
            assert memory.is_held(wait=True), memory.refusal
            page.saved = step
            sys.exit(143)
    print(f"rank {rank} done after step {step} in attempt {attempt}")
"""


GLOO = 'dist.init_process_group("gloo")'
_BEGIN = """
    import os, pathlib, time
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    import flk_runtime as flk
    from flk_runtime.shared.progress import own_page

    {init}
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    step = flk.restore(model=model, optimizer=optimizer)
    weight = model.module.weight
    assert len(optimizer.state) == (1 if step else 0)  # the bias never has a gradient
    print("begins at step", step, "with", float(weight.min()), float(weight.max()) if step else "nothing")

    def save(step, value, **options):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        with torch.no_grad():
            weight.fill_(value)
        flk.save(step, model=model, optimizer=optimizer, **options)

    if not step:
"""
_END = """
        dist.barrier()
        pathlib.Path(f"saved.{dist.get_rank()}").touch()
        print("all ranks have saved")
        time.sleep(600)
    dist.barrier()
"""
SAVES_TWICE = """
        for value in (1.0, 2.0, 3.0):
            save(1, value, wait=True)
"""


def own_loop(saves: str, init: str = GLOO) -> str:
    """A script with a loop of its own, which says what it restores. Without a checkpoint, it saves and waits."""
    return textwrap.dedent(_BEGIN.replace("{init}", init) + saves + _END)


def folder_of(root: Path, pod: int) -> Path:
    """The folder of a pod's launcher in ``root``, the memory of all of them."""
    (folder,) = root.glob(f"flk-*-{pod}")
    return folder


def delete_pods(job: Pods, root: Path, *pods: int) -> None:
    """Simulate the deletion of pods: the launcher ends at once, and its memory is gone."""
    for pod in pods:
        job.running[pod].kill()
    for pod in pods:
        job.running[pod].wait()
        for folder in root.glob(f"flk-*-{pod}"):  # none if it keeps no checkpoints
            shutil.rmtree(folder)
