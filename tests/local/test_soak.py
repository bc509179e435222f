"""A soak of all kinds of faults at once: the final state is the right one to the bit, and only faults end attempts.

Each gradient is a small whole number that depends on the step alone, and so is the state of SGD with momentum 1. So all
sums are exact, whatever the number of ranks, and the state after any step can be computed without training.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flk_runtime.contract import log_format, pod_env, user_env
from flk_runtime.contract.failure import Kind
from flk_runtime.contract.record import JobRecord
from flk_runtime.system.host import descendants
from tests.support.hosts import Hosts
from tests.support.network import network
from tests.support.pods import Pods
from tests.support.ports import held_ports
from tests.support.processes import alive
from tests.support.s3 import FaultyProxy, S3Server

FAULTS = int(os.environ.get("FLK_SOAK_FAULTS", "500"))
SEED = int(os.environ.get("FLK_SOAK_SEED", "7"))
STOPPED = 25.0  # seconds
PATIENCE = 400.0  # seconds for the next attempt, on a machine that does other things too
PODS = 3
MEMORY = 12  # MiB of each pod for checkpoints
OF_PROCESSES = ("rank", "launcher", "stop", "full memory")
AT_RESTORE = " at a restore"  # a fault of storage while two pods are lost, so that only storage has the whole state
# What a fault may look like to the launchers. Anything else is a defect: an exception, a hang, a state that differs.
OF_PODS = (Kind.LOST, Kind.CONTAINER_KILLED, Kind.CONNECTION, Kind.TIMEOUT, Kind.PREEMPTED)
OF_STORAGE = (Kind.IO, Kind.STORAGE)
TRIES = 3  # attempts that may begin while storage is out of order, which lasts ten seconds at most
WIDTH = 997
# In all processes, so in the launchers too, whose checks of the folder fail as those of the ranks do.
CUSTOMIZE = """
    import errno, os, pathlib

    def fsync(file, plain=os.fsync, stale=pathlib.Path({stale!r})):
        if stale.exists() and "checkpoint" in os.readlink(f"/proc/self/fd/{{file}}"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return plain(file)

    os.fsync = fsync
"""
TRAIN = f"""
    import builtins, errno, os, pathlib, sys, time
    import torch, torch.distributed as dist, flk_runtime as flk

    stale, stop = pathlib.Path("stale"), pathlib.Path("stop")

    def failing(do):
        def call(*arguments, **options):
            if stale.exists() and "checkpoint" in str(arguments[0]):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(arguments[0]))
            return do(*arguments, **options)
        return call

    builtins.open, os.replace = failing(open), failing(os.replace)

    class Sum(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros({WIDTH}))
        def forward(self, x):
            return (self.weight * x).sum()

    run = flk.init(device="cpu", log_every=0, strategy=sys.argv[1])
    model = Sum()
    model, optimizer = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=1.0))
    attempt, begun = os.environ["FLK_ATTEMPT"], run.steps
    while True:
        seed = torch.Generator().manual_seed(run.steps + 1)
        optimizer.zero_grad()
        model(torch.randint(-2, 3, ({WIDTH},), generator=seed).float()).backward()
        optimizer.step()
        run.step()
        pathlib.Path(f"step.{{attempt}}.{{run.rank}}").write_text(f"{{os.getpid()}} {{run.steps - begun}}")
        ends = torch.tensor(float(stop.exists()))
        dist.all_reduce(ends)
        if ends:
            break
        time.sleep(0.03)
    (weight,) = model.parameters()
    momentum = optimizer.state[weight]["momentum_buffer"]
    values = [getattr(each, "full_tensor", lambda: each)().detach() for each in (weight, momentum)]
    if run.rank == 0:
        torch.save((run.steps, *values), "result.pt")
"""


class Soak:
    """A job that faults hit."""

    def __init__(self, job: Pods, arguments: tuple[str, ...], memory: dict[int, Path], draw: random.Random) -> None:
        self.job, self.arguments, self.memory, self.draw = job, arguments, memory, draw
        self.since = 0  # the first attempt that counts as running
        self.proxy: FaultyProxy | None = None

    def cause(self, kind: str) -> None:
        """Cause a fault, wait until it is over, and end it."""
        pod = self.draw.randrange(PODS)
        launcher = self.job.running[pod]
        for_a_while = self.draw.uniform(0.2, 6.0)
        if kind.endswith(AT_RESTORE):
            for lost in (pod, (pod + 1) % PODS):
                self.job.running[lost].kill()
                self.job.running[lost].wait()
                for path in self.memory[lost].iterdir():
                    shutil.rmtree(path, ignore_errors=True)
            self.restart_pods()
            kind = kind.removesuffix(AT_RESTORE)
            for_a_while = self.draw.uniform(4.0, 10.0)
        if kind == "rank":
            pid, _ = self.newest(pod)
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        elif kind == "launcher":
            if launcher.poll() is None:
                launcher.send_signal(signal.SIGKILL)
        elif kind == "stop":
            pids = [launcher.pid, *descendants(launcher.pid)] if launcher.poll() is None else []
            signal_all(pids, signal.SIGSTOP)
            time.sleep(STOPPED)
            signal_all(pids, signal.SIGCONT)
        elif kind == "full memory":
            filler = self.memory[pod] / "filler"
            with contextlib.suppress(OSError), filler.open("wb") as file:
                for _ in range(MEMORY):
                    file.write(bytes(1 << 20))
            time.sleep(for_a_while)
            filler.unlink(missing_ok=True)
        elif kind == "cut":
            assert isinstance(self.job, Hosts)
            host = self.job.net.hosts[pod]
            host.cut()
            time.sleep(for_a_while)
            host.heal()
        elif kind == "stale":
            (self.job.folder / "stale").touch()
            time.sleep(for_a_while)
            (self.job.folder / "stale").unlink()
        elif kind == "503" and self.proxy:
            self.proxy.mode.write_text("unavailable")
            time.sleep(for_a_while)
            self.proxy.mode.write_text("")

    def newest(self, rank: int) -> tuple[int, int]:
        """Process id of a rank in its latest attempt, and how many steps it has made there; zeros before its first.

        Where pod 0 is lost with another pod, the others of an elastic job may count their attempts anew.
        """
        paths = sorted(self.job.folder.glob(f"step.*.{rank}"), key=lambda path: path.stat().st_mtime_ns)
        words = paths[-1].read_text().split() if paths else []
        return (int(words[0]), int(words[1])) if len(words) == 2 else (0, 0)

    def wait_for_progress(self) -> None:
        """Wait until an attempt with all ranks makes steps, and checkpoints among them."""
        before = {rank: self.newest(rank) for rank in range(PODS)}
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            self.restart_pods()
            now = {rank: self.newest(rank) for rank in range(PODS)}
            # An elastic job may go on with fewer ranks for a while; then the pod that was lost comes back.
            if all(now[rank] != before[rank] and now[rank][1] >= 7 and alive(now[rank][0]) for rank in range(PODS)):
                return
            time.sleep(0.1)
        self.fail(f"no rank makes progress: {before}")

    def restart_pods(self) -> bool:
        """Restart the pods that ended with a code of 128 or more, or by a signal, as the operator does."""
        for pod, process in list(self.job.running.items()):
            code = process.poll()
            if code is not None and (code < 0 or code >= 128):
                self.job.start(*self.arguments, only=pod)
            elif code:
                self.fail(f"pod {pod} ended with {code}")
        return all(process.poll() == 0 for process in self.job.running.values())

    def fail(self, what: str) -> None:
        pytest.fail(f"{what}\n{self.job.logs_of_all()[-20000:]}", pytrace=False)


def signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@contextlib.contextmanager
def memories(folder: Path) -> Iterator[dict[int, Path]]:
    """A small file system in memory for each pod."""
    found = {pod: folder / f"memory.{pod}" for pod in range(PODS)}
    try:
        for path in found.values():
            path.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={MEMORY}m", "tmpfs", path], check=True)
        yield found
    finally:
        for path in found.values():
            subprocess.run(["umount", "--lazy", path], check=False, stderr=subprocess.DEVNULL)


def variables(memory: Path) -> dict[str, str]:
    return {pod_env.MEMORY_ROOT: str(memory), user_env.MEMORY_LIMIT: f"{MEMORY - 2}Mi"}


@pytest.fixture
def soak(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Soak]]:
    """Makes the job: ``soak(strategy, storage, elastic=…)``; storage is ``folder``, on three hosts, or ``s3``."""
    with contextlib.ExitStack() as stack:

        def make(strategy: str, storage: str, *, elastic: bool) -> Soak:
            settings = {
                user_env.LEASE: "3",
                pod_env.RESTARTS: "100000",
                pod_env.DISRUPTIONS: "100000",
                user_env.BACKOFF: "2",
                user_env.RETRY_SAME_FAILURE: "1",
                user_env.SAVE_EVERY: "3",
                user_env.STORE_EVERY: "15",
                user_env.NODE_MEMORY: "0",
                pod_env.GRACE: "5",
                **({pod_env.MIN_PODS: "2"} if elastic else {}),
            }
            memory = stack.enter_context(memories(tmp_path))
            draw = random.Random(f"{SEED} {strategy} {storage}")
            if storage == "folder":
                job: Pods = Hosts(tmp_path, stack.enter_context(network(PODS)), **settings)
                job.variables |= {user_env.START: "fork", user_env.CHECKPOINT: str(tmp_path / "checkpoint")}
                proxy = None
            else:
                free_port = stack.enter_context(held_ports())
                server = S3Server(tmp_path / "server", free_port())
                stack.callback(server.stop)
                proxy = FaultyProxy(server, tmp_path / "mode")
                stack.callback(proxy.stop)
                job = Pods(tmp_path, free_port(), PODS, 1, **settings, **proxy.variables)
                job.variables[user_env.CHECKPOINT] = "s3://bucket/soak"
            for pod, path in memory.items():
                job.variables_of.setdefault(pod, {}).update(variables(path))
            stack.callback(job.kill)
            customize = tmp_path / "customize" / "sitecustomize.py"
            customize.parent.mkdir()
            customize.write_text(textwrap.dedent(CUSTOMIZE).format(stale=str(job.folder / "stale")))
            job.variables["PYTHONPATH"] = str(customize.parent)
            job.write(TRAIN)
            made = Soak(job, ("train.py", strategy), memory, draw)
            made.proxy = proxy
            return made

        yield make


@pytest.mark.promise("Recovery: Faults of all kinds, mixed, leave the state that training has without them")
@pytest.mark.soak
@pytest.mark.timeout(FAULTS * 90 + 900)
@pytest.mark.parametrize(
    ("strategy", "storage", "elastic"),
    [("full_shard", "folder", False), ("ddp", "folder", True), ("ddp", "s3", False), ("full_shard", "s3", True)],
)
def test_faults_of_all_kinds_leave_the_state_that_training_has_without_them(
    soak: Callable[..., Soak], strategy: str, storage: str, elastic: bool
) -> None:
    run = soak(strategy, storage, elastic=elastic)
    of_storage = "stale" if storage == "folder" else "503"
    kinds = [*OF_PROCESSES, of_storage, of_storage + AT_RESTORE, *(["cut"] if storage == "folder" else [])]
    run.job.start(*run.arguments)
    run.wait_for_progress()
    count = max(1, FAULTS // 4)
    counts = dict.fromkeys(kinds, 0)
    for kind in [kind for _ in range(count) for kind in run.draw.sample(kinds, len(kinds))][:count]:
        if run.draw.random() < 0.7:  # else the fault hits an attempt that is starting or restoring
            run.wait_for_progress()
        run.restart_pods()
        counts[kind] += 1
        run.cause(kind)
    run.wait_for_progress()
    (run.job.folder / "stop").touch()
    run.job.until(run.restart_pods, "the job ends")
    failures = causes(run.job)
    steps = check_result(run.job.folder / "result.pt")
    kinds_seen = {str(kind): failures.count(kind) for kind in dict.fromkeys(failures)}
    print(f"{strategy} {storage}: {count} faults {counts}: {len(failures) + 1} attempts {kinds_seen}, {steps} steps")
    for causes_of, most in bounds(counts, elastic=elastic).items():
        ended = [failures.pop(failures.index(kind)) for kind in [*failures] if kind in causes_of]
        assert len(ended) <= most, f"{len(ended)} attempts ended by {causes_of}, and the faults can end {most}"
    assert not failures, run.job.log(0)[-20000:]


def bounds(counts: dict[str, int], *, elastic: bool) -> dict[tuple[Kind, ...], int]:
    """How many attempts so many faults of each kind can end at most, by the kinds of the attempts' failures."""
    at_restore = sum(count for kind, count in counts.items() if kind.endswith(AT_RESTORE))
    pods = counts["launcher"] + counts["stop"] + counts.get("cut", 0) + 2 * at_restore
    storage = at_restore + counts.get("stale", 0) + counts.get("503", 0)
    return {
        (Kind.KILLED,): counts["rank"],
        OF_PODS: pods,
        OF_STORAGE: TRIES * storage,
        (Kind.UNHEALTHY,): pods + storage,  # a pod that stood still, or one that saw alone that the folder was stale
        (Kind.RESIZED,): pods if elastic else 0,  # each pod comes back
    }


def causes(job: Pods) -> list[Kind]:
    """The kind of the failure of each attempt, as the records in the logs say at last."""
    found: dict[int, Kind] = {}
    for line in job.logs_of_all().splitlines():
        match = re.search(re.escape(log_format.RECORD_MARKER) + r"(.*)", line)
        record = JobRecord.from_json(match[1]) if match else None
        for attempt in record.attempts if record else []:
            if attempt.failure:
                found[attempt.number] = attempt.failure.kind
    return list(found.values())


def check_result(path: Path) -> int:
    """Check the state at the end of the job against the one that is computed. Returns the number of its steps."""
    import torch

    steps, weight, momentum = torch.load(path)
    expected, speed = torch.zeros(WIDTH), torch.zeros(WIDTH)
    for step in range(1, steps + 1):
        speed += torch.randint(-2, 3, (WIDTH,), generator=torch.Generator().manual_seed(step)).float()
        expected -= speed
    assert torch.equal(momentum, speed)
    assert torch.equal(weight, expected)
    return int(steps)
