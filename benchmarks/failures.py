"""Measure a training in which ranks and launchers are killed: its time over the time without failures.

    python benchmarks/failures.py [--rounds 10] [--steps 300] [--ranks 8] [--milliseconds 100] [--only flk]

Two launchers with half of the ranks each make short steps, and so do their peers: torchrun with a checkpoint of torch's
DCP in memory every 10 steps, ft_launcher of nvidia-resiliency-ext 0.4.1 and 0.7.0 with the same, and torchft 0.2.0,
where each rank is a replica by itself; these are installed into the user's cache folder if that is possible. flk saves
in the memory of the launchers in every step. Ten rounds of 300 steps are 3,000 steps of each case. Once nothing fails.
Once a rank is killed in every 100 steps. Once also a launcher is killed in every 300 steps, with all its ranks and what
its memory holds; each of them may be it, the leader too. It starts again at once, and so does a launcher that ends
because of it, as an operator would do it. The moment of each kill is uniform over its 100 or 300 steps, so that it has
no place in the peers' interval between two checkpoints.
Goals: at most 1.02 times the time without failures with killed ranks, at most 1.05 times with both, no training that
does not come to its end, and the same loss in each step, to the bit. torchft trains with fewer replicas after a loss,
so that its losses are not compared.
Left out: nodes and networks that fail, kills while the ranks start or restart from another one, both launchers at once,
the time in which an operator makes another pod, and models whose state takes long to save or to load.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import launch
import measure
from flk_runtime.contract import pod_env
from flk_runtime.system import host
from slow_link import TORCHFT, TORCHFT_NEEDS

RANK_EVERY, LAUNCHER_EVERY = 100, 300  # steps
GOALS = {"killed ranks": measure.at_most(1.02), "killed ranks and launchers": measure.at_most(1.05)}
NONE = "no failures"
LAUNCHERS = 2
RESTARTS = 100_000
LOOP = str(Path(__file__).with_name("failing_loop.py"))
STEP_LIMIT, FAULT_LIMIT = 1.0, 60.0  # seconds that a step and a fault may take at most, on a machine that is busy
# The peers, and a function whose result is true if this machine has them, or can get them.
PEERS: Final[dict[str, Callable[[], object]]] = {
    "torchrun": lambda: True,
    **{name: launcher.folder for name, launcher in launch.FT_LAUNCHERS.items()},
    "torchft": lambda: launch.packages_folder(TORCHFT, TORCHFT_NEEDS),
}
LIGHTHOUSE = (
    "import sys, time; from torchft.coordination import LighthouseServer; "
    "server = LighthouseServer(bind=sys.argv[1], min_replicas=1, join_timeout_ms=100); time.sleep(1e6)"
)


@dataclass(frozen=True)
class Sizes:
    """What is trained, and how long."""

    steps: int
    ranks: int
    milliseconds: float  # of a step


@dataclass(frozen=True, order=True)
class Kill:
    """A rank or a launcher that is killed."""

    moment: float  # in steps since the start of the training
    of_launcher: bool
    victim: int  # the rank, or the index of the launcher


@dataclass
class Training:
    """What a run has shown: its seconds from the first step to the last one, and its losses by step."""

    seconds: float
    losses: dict[int, set[str]] = field(default_factory=dict)  # several where a step that was made again differs


class NoRecoveryError(Exception):
    """The training has not come to its end in time."""


class Job:
    """The launchers of one run in a folder, whose ranks and launchers can be killed."""

    def __init__(self, name: str, sizes: Sizes, folder: Path) -> None:
        self.folder, self.sizes = folder, sizes
        self._memory = [folder / f"memory.{index}" for index in range(LAUNCHERS)]
        keeper = "flk" if name == "flk" else "dcp"
        script = [LOOP, str(sizes.steps), str(sizes.milliseconds), keeper]
        launchers: dict[str, launch.Launcher] = {"flk": launch.flk, "torchrun": launch.torchrun, **launch.FT_LAUNCHERS}
        self._processes = launchers[name](script, sizes.ranks, LAUNCHERS, RESTARTS)
        if name == "flk":
            self._processes = [
                launch.Process(each.command, {**each.variables, pod_env.MEMORY_ROOT: str(memory)})
                for each, memory in zip(self._processes, self._memory, strict=True)
            ]
        self.running = [self._start(index) for index in range(LAUNCHERS)]

    def _start(self, index: int) -> subprocess.Popen[Any]:
        self._memory[index].mkdir(exist_ok=True)
        with (self.folder / f"log.{index}").open("ab") as log:
            return self._processes[index].start(self.folder, stdout=log, stderr=log)

    def pid(self, rank: int) -> int:
        """Process id of the latest process of a rank."""
        return int((self.folder / f"pid.{rank}").read_text() or 0)

    def kill_rank(self, rank: int) -> None:
        """Kill a rank."""
        kill(self.pid(rank))

    def kill_launcher(self, index: int) -> None:
        """Kill a launcher with all its ranks, forget what its memory holds, and start it again."""
        below = host.descendants(self.running[index].pid)
        self.running[index].kill()
        for pid in below:
            kill(pid)
        self.running[index].wait()
        shutil.rmtree(self._memory[index])
        self.running[index] = self._start(index)

    def restart(self) -> None:
        """Start launchers again that have ended with a failure, as an operator does it."""
        for index, process in enumerate(self.running):
            if process.poll():
                self.running[index] = self._start(index)

    def end(self) -> None:
        """End all that still runs."""
        for process in self.running:
            process.terminate()
        for process in self.running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
        for file in self.folder.glob("pid.*"):
            kill(int(file.read_text() or 0))


class TorchftJob(Job):
    """Replicas of one rank each, and the lighthouse by which they find each other. Nothing else starts them again."""

    def __init__(self, sizes: Sizes, folder: Path) -> None:
        self.folder, self.sizes = folder, sizes
        packages = launch.packages_folder(TORCHFT, TORCHFT_NEEDS)
        assert packages is not None, "check packages_folder() before"
        variables = {"PYTHONPATH": launch.with_packages(packages)}
        port = launch.free_port()
        script = [sys.executable, LOOP, str(sizes.steps), str(sizes.milliseconds), "torchft"]
        self._processes = [
            launch.Process([*script, str(rank), f"http://127.0.0.1:{port}"], variables) for rank in range(sizes.ranks)
        ]
        self._memory = [folder / f"memory.{rank}" for rank in range(sizes.ranks)]
        lighthouse = launch.Process([sys.executable, "-c", LIGHTHOUSE, f"0.0.0.0:{port}"], variables)
        self._lighthouse = lighthouse.start(folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.running = [self._start(rank) for rank in range(sizes.ranks)]

    def kill_rank(self, rank: int) -> None:
        """Kill a replica, and start it again."""
        self.running[rank].kill()
        self.running[rank].wait()
        self.running[rank] = self._start(rank)

    def kill_launcher(self, index: int) -> None:
        """Kill as many replicas as a launcher has ranks, and start them again."""
        each = self.sizes.ranks // LAUNCHERS
        lost = range(index * each, (index + 1) * each)
        for rank in lost:
            self.running[rank].kill()
        for rank in lost:
            self.kill_rank(rank)

    def end(self) -> None:
        """End the replicas and the lighthouse."""
        super().end()
        self._lighthouse.kill()
        self._lighthouse.wait()


def kill(pid: int) -> None:
    """SIGKILL a process, if it still runs."""
    with contextlib.suppress(ProcessLookupError):
        if pid:
            os.kill(pid, signal.SIGKILL)


def kills(faults: str, steps: int, ranks: int, seed: int) -> list[Kill]:
    """What is killed in a training, in the order of its moments: one rank or launcher in each of its periods.

    The moment is uniform over the whole period, but for the first step, before which nothing is measured. A period that
    the training ends before has its kill only if the moment is in the training; the first one is never longer than it.
    """
    draw = random.Random(f"{seed} {faults}")
    periods = {NONE: (), "killed ranks": ((RANK_EVERY, False),)}
    found = []
    for longest, of_launcher in periods.get(faults, ((RANK_EVERY, False), (LAUNCHER_EVERY, True))):
        every = min(longest, steps)
        for begin in range(0, steps, every):
            moment = draw.uniform(max(1, begin), begin + every)
            victim = draw.randrange(LAUNCHERS if of_launcher else ranks)
            found += [Kill(moment, of_launcher, victim)] if moment < steps else []
    return sorted(found)


def train(name: str, faults: str, sizes: Sizes, seed: int) -> Training | None:
    """Run a training once with these faults. None if it did not come to its end."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # the peers' checkpoints are in memory, too
        job = TorchftJob(sizes, Path(folder)) if name == "torchft" else Job(name, sizes, Path(folder))
        try:
            return follow(job, kills(faults, sizes.steps, sizes.ranks, seed))
        except NoRecoveryError as error:
            measure.progress(f"{name}, {faults}: {error}")
            for log in sorted(Path(folder).glob("log.*"))[:2]:
                measure.progress(log.read_text(errors="replace")[-2000:])
            return None
        finally:
            job.end()


def follow(job: Job, due: Sequence[Kill]) -> Training:
    """Kill each victim at its moment, and wait for the last step. Raises NoRecoveryError after a generous time."""
    sizes, left = job.sizes, list(due)
    deadline = time.monotonic() + FAULT_LIMIT * (1 + len(due)) + sizes.steps * (STEP_LIMIT + sizes.milliseconds / 1000)
    while True:
        lines = read(job.folder)
        reached = int(lines[-1][0]) if lines else 0
        if reached >= sizes.steps:
            break
        if left and reached >= left[0].moment // 1:
            now = left.pop(0)
            time.sleep(now.moment % 1 * sizes.milliseconds / 1000)  # anywhere in the step
            job.kill_launcher(now.victim) if now.of_launcher else job.kill_rank(now.victim)
        if time.monotonic() > deadline:
            raise NoRecoveryError(f"step {reached} of {sizes.steps} after all that time")
        if all(process.poll() is not None for process in job.running):
            raise NoRecoveryError(f"ended with {[process.poll() for process in job.running]} after step {reached}")
        if len(left) < len(due):
            job.restart()
        time.sleep(0.01)
    training = Training(float(lines[-1][1]) - float(lines[0][1]))
    for step, _, loss in lines:
        training.losses.setdefault(int(step), set()).add(loss)
    return training


def read(folder: Path) -> list[list[str]]:
    """The fields of the lines of steps so far."""
    with contextlib.suppress(FileNotFoundError):
        return [line.split() for line in (folder / "losses").read_text().split("\n")[:-1]]
    return []


def other_losses(undisturbed: Training, disturbed: Training) -> list[int]:
    """The steps that have another loss than without failures, or several."""
    return [step for step, losses in sorted(undisturbed.losses.items()) if losses != disturbed.losses.get(step)]


def main() -> int:
    parser = measure.parser(__doc__, rounds=10)
    parser.add_argument("--steps", type=measure.positive, default=300, help="of each run (default 300)")
    parser.add_argument("--ranks", type=measure.positive, default=8, help="of both launchers together (default 8)")
    parser.add_argument("--milliseconds", type=float, default=100, help="that a step takes at least (default 100)")
    parser.add_argument("--only", nargs="+", choices=("flk", *PEERS), help="sides to measure beside flk (default: all)")
    arguments = parser.parse_args()
    if arguments.ranks % LAUNCHERS:
        parser.error(f"--ranks must be a multiple of {LAUNCHERS}, the number of launchers (is {arguments.ranks})")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and leave nothing behind
    report = measure.Report("failures", arguments)
    sizes = Sizes(arguments.steps, arguments.ranks, arguments.milliseconds)
    peers = [name for name, is_there in PEERS.items() if name in (arguments.only or PEERS) and is_there()]
    runs: dict[tuple[str, str], list[Training | None]] = {}
    for number in range(arguments.rounds):
        cases = {
            f"{name}, {faults}": partial(train, name, faults, sizes, number)
            for name in ("flk", *peers)
            for faults in (NONE, *GOALS)
        }
        order = dict(cases if number % 2 == 0 else reversed(cases.items()))
        shown = measure.alternate(order, 1, show=lambda run: f"{run.seconds:.1f} s" if run else "-")
        for case, values in shown.items():
            name, _, faults = case.partition(", ")
            runs.setdefault((name, faults), []).append(values[0])
        for (name, faults), trainings in runs.items():
            calm, disturbed = runs[name, NONE][-1], trainings[-1]
            if name != "torchft" and calm and disturbed and (differ := other_losses(calm, disturbed)):
                text = f"{len(differ)} steps have other losses than without failures, from {differ[0]} on"
                measure.progress(f"{name}, {faults}: {text}")
    for faults, goal in GOALS.items():
        report_of(report, runs, peers, faults, goal, sizes)
    return report.finish()


def report_of(
    report: measure.Report,
    runs: dict[tuple[str, str], list[Training | None]],
    peers: Sequence[str],
    faults: str,
    goal: measure.Goal,
    sizes: Sizes,
) -> None:
    """Compare the runs with these faults to those without, and flk's part to that of its peers."""
    pairs = {name: list(zip(runs[name, faults], runs[name, NONE], strict=True)) for name in ("flk", *peers)}
    of_steps = f"{sizes.ranks} ranks, steps of {sizes.milliseconds:g} ms"
    ended = [(disturbed, calm) for disturbed, calm in pairs["flk"] if disturbed and calm]
    lost = len(pairs["flk"]) - len(ended)
    report.compute(
        f"trainings with {faults} that did not come to their end, {of_steps}, flk",
        lost,
        len(pairs["flk"]),
        measure.at_most(0),
        "trainings",
    )
    if not ended:
        return
    differ = sum(len(other_losses(calm, disturbed)) for disturbed, calm in ended)
    what = f"steps with {faults} that have another loss than without, {of_steps}, flk"
    report.compute(what, differ, sizes.steps * len(ended), measure.at_most(0), "steps")
    what = f"time with {faults} / without, {of_steps}, flk"
    report.compare(what, [with_them.seconds for with_them, _ in ended], [calm.seconds for _, calm in ended], goal, "s")
    for peer in peers:
        both = [
            ((ours.seconds, calm.seconds), (theirs.seconds, their_calm.seconds))
            for (ours, calm), (theirs, their_calm) in zip(pairs["flk"], pairs[peer], strict=True)
            if ours and calm and theirs and their_calm
        ]
        if len(both) < len(ended):
            print(f"{peer}, {faults}: {len(ended) - len(both)} of {len(ended)} trainings did not come to their end")
        if not both:
            continue
        report.compare(
            f"time with {faults} over the time without, {of_steps}, flk / {peer}",
            [ours / calm for (ours, calm), _ in both],
            [theirs / calm for _, (theirs, calm) in both],
            measure.at_most(1),
            "times",
        )
        report.compare(
            f"time with {faults}, {of_steps}, flk / {peer}",
            [ours for (ours, _), _ in both],
            [theirs for _, (theirs, _) in both],
            measure.at_most(1),
            "s",
        )


if __name__ == "__main__":
    sys.exit(main())
