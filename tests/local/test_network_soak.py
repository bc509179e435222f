"""Network faults and deaths of processes, mixed: the job ends with the same result to the bit, and nothing hangs."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.support.hosts import Hosts
from tests.support.network import network
from tests.support.processes import alive

FAULTS = int(os.environ.get("FLK_SOAK_FAULTS", "200"))
SOAK_LEASE = 3.0  # seconds
PATIENCE = 300.0  # seconds for the next attempt, on a machine that does other things too
KINDS = ("short cut", "cut", "one way", "leader cut", "loss", "rank", "launcher")

# Each step adds a sum over all ranks to the state. Rank 0 saves every ten steps, and all ranks begin with what it has
# saved. The job ends after the step in which rank 0 finds the file `stop`, or after the step in the file `last`.
TRAIN = """
    import os, pathlib, time
    import torch, torch.distributed as dist

    saved, last = pathlib.Path("state.pt"), pathlib.Path("last")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    content = [saved.read_bytes() if saved.exists() else b""] if rank == 0 else [None]
    dist.broadcast_object_list(content)
    if content[0]:
        pathlib.Path(f"read.{rank}").write_bytes(content[0])
        step, state = torch.load(f"read.{rank}")
    else:
        step, state = 0, torch.zeros(64)
    pathlib.Path(f"pid.{os.environ['FLK_ATTEMPT']}.{rank}").write_text(str(os.getpid()))
    end = int(last.read_text()) if last.exists() else None
    while True:
        step += 1
        share = torch.randn(65, generator=torch.Generator().manual_seed(step * world + rank))
        share[64] = rank == 0 and (step == end if end else pathlib.Path("stop").exists())
        dist.all_reduce(share)
        state = state * 0.999 + share[:64]
        if rank == 0 and (step % 10 == 0 or share[64]):
            torch.save((step, state), "state.new")
            os.replace("state.new", saved)
        if share[64]:
            break
        if end is None:
            time.sleep(0.02)
    dist.barrier()
"""


@pytest.mark.soak
@pytest.mark.root("makes network namespaces")
@pytest.mark.timeout(FAULTS * 60 + 600)
def test_network_faults_and_deaths_do_not_change_the_result(tmp_path: Path) -> None:
    draw = random.Random(7)
    with network(3) as net:
        job = Hosts(
            new_folder(tmp_path, "disturbed"),
            net,
            FLK_LEASE=str(SOAK_LEASE),
            FLK_START="fork",
            FLK_RESTARTS="100000",
            FLK_DISRUPTIONS="100000",
            FLK_BACKOFF="0",
            FLK_RETRY_SAME_FAILURE="1",
            FLK_HANG_TIMEOUT="0",
        )
        job.write(TRAIN)
        counts = dict.fromkeys(KINDS, 0)
        try:
            job.start("train.py")
            kinds = [kind for _ in range(FAULTS) for kind in draw.sample(KINDS, len(KINDS))]  # all equally often
            for kind in kinds[:FAULTS]:
                if draw.random() < 0.8:  # else the fault hits an attempt that is starting
                    running_attempt(job)
                counts[kind] += 1
                cause(kind, job, draw)
                restart_pods(job)
            running_attempt(job)
            (job.folder / "stop").touch()
            job.until(lambda: restart_pods(job) and all(p.poll() == 0 for p in job.running.values()), "the job ends")
        finally:
            job.kill()
        attempts = job.record().attempts[-1].number + 1
        disturbed = (job.folder / "state.pt").read_bytes()
        step = last_step(job.folder)
        assert step > FAULTS  # the job has trained between the faults
        print(f"{FAULTS} faults {counts}: {attempts} attempts, {step} steps")

        calm = Hosts(new_folder(tmp_path, "calm"), net, FLK_START="fork", FLK_HANG_TIMEOUT="0")
        calm.write(TRAIN)
        (calm.folder / "last").write_text(str(step))
        try:
            calm.start("train.py")
            calm.until(lambda: all(p.poll() is not None for p in calm.running.values()), "the calm job ends")
            assert calm.wait() == [0, 0, 0], calm.logs_of_all()
        finally:
            calm.kill()
        assert (calm.folder / "state.pt").read_bytes() == disturbed


def cause(kind: str, job: Hosts, draw: random.Random) -> None:
    """Cause a fault, wait until it is over, and end it."""
    pod = draw.randrange(3)
    host = job.net.hosts[0 if kind == "leader cut" else pod]
    if kind == "rank":
        pids = [int(path.read_text() or 0) for path in job.folder.glob(f"pid.*.{pod}")]
        for pid in pids:
            if pid and alive(pid):
                os.kill(pid, signal.SIGKILL)
    elif kind == "launcher":
        if job.running[pod].poll() is None:
            job.running[pod].send_signal(signal.SIGKILL)
    else:
        if kind == "loss":
            host.lose(0.3)
        else:
            ways = draw.choice([(True, False), (False, True)]) if kind == "one way" else (True, True)
            host.cut(receives=ways[0], sends=ways[1])
        time.sleep(draw.uniform(0.2, 1.0) * SOAK_LEASE * (0.6 if kind == "short cut" else 2.0))
        host.heal()


def running_attempt(job: Hosts) -> None:
    """Wait until an attempt runs that has saved a checkpoint."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        restart_pods(job)
        numbers = {int(path.name.split(".")[1]) for path in job.folder.glob("pid.*")}
        if numbers:
            paths = list(job.folder.glob(f"pid.{max(numbers)}.*"))
            pids = [path.read_text() for path in paths]
            saved = job.folder / "state.pt"
            has_saved = saved.exists() and saved.stat().st_mtime > max(path.stat().st_mtime for path in paths)
            if has_saved and len(pids) == 3 and all(pid and alive(int(pid)) for pid in pids):
                return
        time.sleep(0.05)
    pytest.fail(f"no attempt runs\n{job.logs_of_all()[-20000:]}", pytrace=False)


def restart_pods(job: Hosts) -> bool:
    """Restart the pods that ended with a code of 128 or more, or by a signal, as the operator does."""
    for pod, process in list(job.running.items()):
        code = process.poll()
        if code is not None and (code < 0 or code >= 128):
            job.start("train.py", only=pod)
        elif code:
            pytest.fail(f"pod {pod} ended with {code}\n{job.logs_of_all()[-20000:]}", pytrace=False)
    return True


def last_step(folder: Path) -> int:
    import torch

    step, _ = torch.load(folder / "state.pt")
    return int(step)


def new_folder(parent: Path, name: str) -> Path:
    (parent / name).mkdir()
    return parent / name
