"""Measure what flk says of faults that are injected into a training: which rank, why, and how soon.

    python benchmarks/diagnosis.py [--rounds 14] [--faults 15] [--processes 2] [--only KIND …]

Three launchers with two ranks each, on hosts that are network namespaces of this machine, train a small model without
end. Each round injects so many faults, one after the other, at a random rank, half of them in the first second after
the job trains and half of them in 20 s. The groups of `fault_kinds` have fixed parts of the faults (`PARTS`), in a
random order, and the kinds of a group come in turn. 14 rounds are 210 faults. It needs root, ip, iptables and tc.
Time and verdict are of one statement: that of the record when it first has a failure for the attempt. A job that does
not train again after a fault counts as wrong, and so does a fault that ends another thing than it should. Of slow ranks
no cause is judged, since the record says no other one than their data. `fault_kinds` says which kinds are missing.
Goals: the right rank (or pod) in 0.98 and the right cause in 0.95 of all faults, 0.95 of them named within 15 s of the
limit that the job's settings have for the kind (0 for a rank that ends), each in all and in each group, and no alarm
before a fault. `false_alarms` trains the same job for two hours without a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import measure

sys.path.insert(0, str(Path(__file__).parents[1]))

from fault_kinds import FAULTS, GROUPS, HANG_LIMIT, LEASE, SLOW_WINDOW, Act, Fault, Who
from flk_runtime.contract import log_format, pod_env, user_env
from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.contract.record import JobRecord, SlowRank
from flk_runtime.system import host
from tests.support.network import LEADER_NAME, TOOLS, Network, network

PODS = 3  # with two, nobody could say which of them a cut isolates
SOON = 15.0  # seconds after the limit
STEPS_BEFORE = 5  # steps of all ranks before the next fault
CUT, STOPPED = 8.0, 10.0  # seconds that a cut and a pod that stands still last
PATIENCE = 60.0  # seconds after which a fault counts as never named, beyond its limit and SOON
MOMENTS = (1.0, 20.0)  # seconds after the job trains within which a fault comes
STARTING = 10.0  # seconds of a start, about
START_LIMIT = 180.0  # seconds until all ranks make steps, on a machine that is busy
# How many of 15 faults are of each group.
PARTS = {"ranks that end": 6, "hangs": 4, "pods and network": 3, "slow ranks": 2}
_ENDED = re.compile(r"^\[pod \d+\] attempt (\d+) ended: (.*)")
_STACK = re.compile(r"^\[pod \d+\] (?:rank (\d+) in |(  ))?")


@dataclass(frozen=True)
class Outcome:
    """What was said of a fault."""

    fault: Fault
    rank: int
    seconds: float | None  # beyond the limit; None: it was never named
    rank_is_right: bool = False
    cause_is_right: bool = False
    said: str = ""

    @property
    def verdicts(self) -> dict[str, bool]:
        """What is right, of what is judged: no rank of a fault between ranks, and no cause of a slow rank."""
        judged = {"rank": self.fault.who is not Who.ANY, "cause": not self.fault.slow}
        right = {"rank": self.rank_is_right, "cause": self.cause_is_right}
        return {what: right[what] for what in right if judged[what]}


@dataclass
class Said:
    """What the launchers have said so far, as it came."""

    records: list[JobRecord] = field(default_factory=list)
    statements: list[tuple[float, int, str]] = field(default_factory=list)
    """When it was said why an attempt has ended, the number of the attempt, and the cause in one line."""
    lines: list[str] = field(default_factory=list)

    def follow(self, launcher: subprocess.Popen[str]) -> None:
        """Note the lines of a launcher until it ends."""
        for line in launcher.stdout or ():
            self.note(line, time.time())

    def note(self, line: str, now: float) -> None:
        """Note a line of a launcher."""
        self.lines.append(line)
        if match := _ENDED.match(line):
            self.statements.append((now, int(match[1]) - 1, match[2]))
        record = log_format.parse_record(line)
        if record:
            self.statements += [(now, each.number, each.failure.summary) for each in record.attempts if each.failure]
            self.records.append(record)

    def first_said(self, attempt: int, failure: Failure) -> float:
        """When it was first said that this failure has ended an attempt, and no other one."""
        return min(
            when for when, number, text in self.statements if number == attempt and same_line(text, failure.summary)
        )

    def failure(self, attempt: int) -> Failure | None:
        """Why an attempt has ended, as the latest record says it."""
        known = [each for record in self.records[-1:] for each in record.attempts if each.number == attempt]
        return known[0].failure if known else None

    @property
    def attempt(self) -> int:
        """The number of the latest attempt; -1: none is known."""
        return max((each.number for record in self.records[-1:] for each in record.attempts), default=-1)

    @property
    def slow(self) -> list[SlowRank]:
        """The ranks that are slow now."""
        return self.records[-1].slow if self.records else []


class Job:
    """The launchers of one job, which start again as an operator would start them."""

    def __init__(self, net: Network, folder: Path, processes: int) -> None:
        self.net, self.folder, self.processes = net, folder, processes
        self.said = Said()
        self.running: dict[int, subprocess.Popen[str]] = {}
        self._secret = f"{random.random()}"
        for path in [*folder.glob("progress.*"), *folder.glob("memory.*/*")]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        net.name_leader(net.hosts[0].address)
        for pod in range(PODS):
            self.start(pod)

    def start(self, pod: int) -> None:
        """Start a launcher."""
        memory = self.folder / f"memory.{pod}"
        memory.mkdir(exist_ok=True)
        own: dict[Any, object] = {
            user_env.JOB: "diagnosis",
            pod_env.PODS: PODS,
            pod_env.PROCESSES: self.processes,
            pod_env.POD_INDEX: pod,
            user_env.POD_NAME: f"pod-{pod}",
            pod_env.POD_IP: self.net.hosts[pod].address,
            pod_env.RDZV_ENDPOINT: f"{LEADER_NAME}:29400",
            pod_env.JOB_UID: self._secret,
            pod_env.RDZV_SECRET: self._secret,
            pod_env.MEMORY_ROOT: memory,
            pod_env.RESTARTS: 100_000,
            pod_env.DISRUPTIONS: 100_000,
            pod_env.GRACE: 5,
            pod_env.PARENT: os.getpid(),
            user_env.RETRY_SAME_FAILURE: 1,
            user_env.BACKOFF: 0,
            user_env.NODE_MEMORY: 0,
            user_env.HANG_TIMEOUT: f"{HANG_LIMIT:g}s",
            user_env.LEASE: LEASE,
            user_env.SLOW_WINDOW: SLOW_WINDOW,
            "OMP_NUM_THREADS": 1,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        }
        environment = os.environ | {
            name if isinstance(name, str) else name.name: str(value) for name, value in own.items()
        }
        self.running[pod] = launcher = subprocess.Popen(
            [*self.net.hosts[pod].prefix, sys.executable, "-m", "flk_runtime", "--", "train.py"],
            cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, text=True, errors="replace",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        threading.Thread(target=self.said.follow, args=(launcher,), daemon=True).start()

    def restart_pods(self) -> bool:
        """Start launchers again that have ended with 128 or more. Returns whether the job goes on."""
        for pod, launcher in self.running.items():
            code = launcher.poll()
            if code is not None and 0 <= code < 128:
                return False
            if code is not None:
                self.start(pod)
        return True

    def progress(self, rank: int) -> tuple[int, int, int]:
        """Attempt, steps and process id of a rank; zeros before its first step."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            attempt, steps, pid = (self.folder / f"progress.{rank}").read_text().split()
            return int(attempt), int(steps), int(pid)
        return -1, 0, 0

    def trains(self) -> bool:
        """Whether all ranks make steps in the latest attempt."""
        found = [self.progress(rank) for rank in range(PODS * self.processes)]
        return all(attempt == self.said.attempt and steps >= STEPS_BEFORE for attempt, steps, _ in found)

    def end(self) -> None:
        """End the launchers, and their ranks with them."""
        for launcher in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                signal_all(launcher.pid, signal.SIGCONT)
            launcher.kill()
            launcher.wait()
        time.sleep(0.5)  # the ranks end with their launcher


class Injection:
    """One fault at one rank, and how it ends."""

    def __init__(self, job: Job, fault: Fault, rank: int, number: int) -> None:
        self.job, self.fault, self.rank, self.pod = job, fault, rank, rank // job.processes
        self.number = number  # of the injection, for the name of its module
        self._since = len(job.said.lines)
        self.over: Callable[[], None] = lambda: None  # ends the fault

    def begin(self) -> float:
        """Make the fault. Returns the time."""
        folder, pod = self.job.folder, self.job.net.hosts[self.pod]
        launcher, act = self.job.running[self.pod], self.fault.act
        pid = self.job.progress(self.rank)[2]
        if act is Act.NONE:
            return self._have_the_rank_run_it(folder)
        now = time.time()
        if act in (Act.KILL_RANK, Act.END_RANK, Act.STOP_RANK):
            numbers = {Act.KILL_RANK: signal.SIGKILL, Act.END_RANK: signal.SIGTERM, Act.STOP_RANK: signal.SIGSTOP}
            os.kill(pid, numbers[act])
        elif act is Act.KILL_WORKER:
            os.kill(min(host.children(pid)), signal.SIGKILL)
        elif act in (Act.KILL_LAUNCHER, Act.END_LAUNCHER):
            launcher.send_signal(signal.SIGKILL if act is Act.KILL_LAUNCHER else signal.SIGTERM)
        elif act is Act.STOP_POD:
            signal_all(launcher.pid, signal.SIGSTOP)
            self._ends_after(STOPPED, lambda: signal_all(launcher.pid, signal.SIGCONT))
        else:
            pod.cut(receives=act is not Act.CUT_SENDS, sends=act is not Act.CUT_RECEIVES)
            self._ends_after(CUT, pod.heal)
        return now

    def _ends_after(self, seconds: float, end: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, end)
        timer.start()

        def over() -> None:
            timer.join()

        self.over = over

    def _have_the_rank_run_it(self, folder: Path) -> float:
        module = f"fault_{self.number}_train"
        (folder / f"{module}.py").write_text(self.fault.module)
        (folder / "happened").unlink(missing_ok=True)
        for left in (folder / "small").iterdir():
            left.unlink()
        new = folder / "fault.new"
        new.write_text(json.dumps({"rank": self.rank, "place": self.fault.place, "module": module}))
        new.rename(folder / "fault")
        deadline = time.monotonic() + START_LIMIT
        while time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError, ValueError):
                return float((folder / "happened").read_text())
            time.sleep(0.01)
        raise NeverHappenedError(f"rank {self.rank} has not come to it")

    def wait(self, attempt: int, began: float) -> Outcome:
        """Wait until the fault is named."""
        fault, said = self.fault, self.job.said
        deadline = time.monotonic() + fault.limit + SOON + PATIENCE
        goes_on = True
        while time.monotonic() < deadline:
            goes_on = goes_on and self.job.restart_pods()
            if fault.slow and said.slow:
                ranks = [each.rank for each in said.slow]
                late = time.time() - began - fault.limit
                return Outcome(fault, self.rank, late, ranks == [self.rank], said=said.slow[0].summary)
            failure = said.failure(attempt)
            if failure:
                late = said.first_said(attempt, failure) - began - fault.limit
                rank_is_right, cause_is_right = self.judge(failure, said.lines[self._since :])
                text = f"{failure.kind}: {failure.summary}"
                return Outcome(fault, self.rank, late, rank_is_right, cause_is_right, text)
            time.sleep(0.02)
        return Outcome(fault, self.rank, None, said="".join(said.lines[-20:]))

    def judge(self, failure: Failure, lines: Sequence[str]) -> tuple[bool, bool]:
        """Whether a failure names the right rank or pod, and the right cause."""
        if self.fault.slow:
            return False, False  # nothing should have ended
        right = failure.pod == self.pod if self.fault.who is Who.POD else failure.rank == self.rank
        return right, matches(self.fault, failure, self.rank, lines)


def matches(fault: Fault, failure: Failure, rank: int, lines: Sequence[str]) -> bool:
    """Whether a failure has the cause that a fault at a rank is.

    Of what the failure shows beside flk's own summary, the details and the stack of this rank count only: the fault's
    code is on some stack whatever flk makes of it. The stacks of a hang are in the launchers' ``lines`` only.
    """
    shown = [failure.summary, f"{failure.type}: {failure.message}"]
    if fault.who is not Who.RANK or failure.rank == rank:
        shown.append(failure.details)
        shown += stack_of(rank, lines) if failure.kind is Kind.HANG else []
    return (
        failure.kind in fault.kinds
        and fault.type in ("", failure.type)
        and fault.signal in (None, failure.signal)
        and fault.exit_code in (None, failure.exit_code)
        and fault.words in "\n".join(shown)
        and (not fault.own_words or any(words in failure.summary for words in fault.own_words))
    )


def stack_of(rank: int, lines: Sequence[str]) -> list[str]:
    """The lines of launchers with the stack of a rank alone, and what flk says above it."""
    found, inside = [], False
    for line in lines:
        match = _STACK.match(line)
        if match and not match[2]:
            inside = match[1] == str(rank)
        if match and inside:
            found.append(line)
    return found


def same_line(one: str, other: str) -> bool:
    """Whether two lines are the same, as far as neither of them is cut."""
    one, other = one.strip().rstrip("…"), other.strip().rstrip("…")
    return one.startswith(other) or other.startswith(one)


class NotTrainingError(Exception):
    """The job does not train, or not again."""


class NeverHappenedError(Exception):
    """A rank has not run into its fault."""


def signal_all(pid: int, number: int) -> None:
    """Send a signal to a process and all below it."""
    for each in (pid, *host.descendants(pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, number)


class Diagnosis:
    """All injections, one after the other, and the alarms that no fault explains."""

    def __init__(self, net: Network, folder: Path, processes: int) -> None:
        self._net, self._folder, self._processes = net, folder, processes
        self._job: Job | None = None
        self._number = 0
        self._judged = 0  # attempts before this one are known to have ended by a fault, or are false alarms
        self.outcomes: list[Outcome] = []
        self.false_alarms: list[str] = []
        self.calm_seconds = 0.0  # in which the job was really watched under load

    def inject(self, fault: Fault, draw: random.Random) -> None:
        """Inject a fault into a job that trains, and note what is said of it, and whether the job goes on."""
        job = self._training_job()
        while not self._watch(job, draw.uniform(0, draw.choice(MOMENTS))):
            job = self._training_job()
        attempt = job.said.attempt
        self._number += 1
        injection = Injection(job, fault, draw.randrange(PODS * self._processes), self._number)
        try:
            outcome = injection.wait(attempt, injection.begin())
        except NeverHappenedError as error:
            outcome = Outcome(fault, injection.rank, None, said=str(error))
        injection.over()
        self._judged = max(attempt + 1, job.said.attempt)
        if fault.slow or outcome.seconds is None or not job.restart_pods():
            self.end()
        else:
            outcome = self._after_recovery(outcome)
        self.outcomes.append(outcome)
        late = "never" if outcome.seconds is None else f"{outcome.seconds:+.1f} s"
        wrong = [what.upper() for what, right in outcome.verdicts.items() if not right]
        verdict = f"WRONG {' AND '.join(wrong)}" if wrong else "right"
        measure.progress(f"{verdict}, {late}: {fault.name}, rank {outcome.rank}: {outcome.said}")

    def _after_recovery(self, outcome: Outcome) -> Outcome:
        """The outcome if the job trains again or flk has ended it; a wrong one if it does neither."""
        try:
            self._training_job()
        except NotTrainingError as error:
            job, self._job = self._job, None
            assert job, "the job that does not train"
            goes_on = job.restart_pods()
            job.end()
            if goes_on:
                return replace(outcome, rank_is_right=False, cause_is_right=False, said=f"{outcome.said}; {error}")
        return outcome

    def stay_calm(self, seconds: float) -> None:
        """Let the job run under load; each alarm is a false one."""
        left = seconds
        while left > 0:
            job = self._training_job()
            burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
            began = time.monotonic()
            try:
                goes_on = self._watch(job, left)
            finally:
                watched = time.monotonic() - began
                self.calm_seconds += watched
                left -= watched
                for burner in burners:
                    burner.kill()
                    burner.wait()
            if not goes_on:
                left -= STARTING  # so that a job that ends again and again comes to an end here, too

    def _training_job(self) -> Job:
        """The job once all its ranks train. Raises NotTrainingError."""
        deadline = time.monotonic() + START_LIMIT
        if not self._job:
            self._job, self._judged = Job(self._net, self._folder, self._processes), 0
        job = self._job
        while not job.trains():
            if not job.restart_pods() or time.monotonic() > deadline:
                raise NotTrainingError("the job does not train:\n" + "".join(job.said.lines[-80:]))
            time.sleep(0.05)
        self._note_attempts(job)
        return job

    def _watch(self, job: Job, seconds: float) -> bool:
        """Watch a job without a fault. Returns whether its attempt goes on; if not, there is an alarm."""
        attempt, end, slow = job.said.attempt, time.monotonic() + seconds, set[int]()
        while time.monotonic() < end:
            new = {each.rank: each.summary for each in job.said.slow if each.rank not in slow}
            slow |= new.keys()
            self._alarm(*new.values())
            if not job.restart_pods():
                self._alarm("the job has ended")
                self.end()
                return False
            if self._note_attempts(job) or job.said.attempt != attempt:
                return False
            time.sleep(min(0.1, max(0.0, end - time.monotonic())))
        return True

    def _note_attempts(self, job: Job) -> bool:
        """Sound an alarm for each attempt that no fault has ended, also the latest. Returns whether there is one."""
        ended = [
            number
            for number in range(self._judged, job.said.attempt + 1)
            if number < job.said.attempt or job.said.failure(number)
        ]
        for number in ended:
            failure = job.said.failure(number)
            self._alarm(failure.summary if failure else f"attempt {number + 1} ended")
            self._judged = number + 1
        return bool(ended)

    def _alarm(self, *texts: str) -> None:
        for text in texts:
            self.false_alarms.append(text)
            measure.progress(f"FALSE ALARM: {text}")

    def end(self) -> None:
        """End the job; the next fault gets a new one."""
        if self._job:
            self._job.end()
        self._job = None


@contextlib.contextmanager
def small_file_systems(folder: Path) -> Iterator[None]:
    """A file system of 1 MiB and one that is read-only, in a folder."""
    mounts = {"small": "size=1m", "read-only": "ro"}
    for name, options in mounts.items():
        (folder / name).mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder / name)], check=True)
    try:
        yield
    finally:
        for name in mounts:
            subprocess.run(["umount", "--lazy", str(folder / name)], check=False)


def report_of(report: measure.Report, outcomes: Sequence[Outcome]) -> None:
    """Print the times, and add the shares of faults that were named right and soon."""
    times = sorted(outcome.seconds for outcome in outcomes if outcome.seconds is not None)
    if times:
        most = times[max(0, -(-95 * len(times) // 100) - 1)]
        print(f"named after the limit: median {statistics.median(times):.1f} s, 95 % within {most:.1f} s")
    for group, faults in {"all": FAULTS, **GROUPS}.items():
        of_group = [outcome for outcome in outcomes if outcome.fault in faults]
        kinds = len({outcome.fault.name for outcome in of_group})
        of = f"{kinds} kinds" if group == "all" else f"{group}, {kinds} kinds"
        soon = [each.seconds is not None and each.seconds <= SOON for each in of_group]
        shares: Mapping[str, tuple[list[bool], float]] = {
            "faults whose rank or pod is right": (right_ones(of_group, "rank"), 0.98),
            "faults whose cause is right": (right_ones(of_group, "cause"), 0.95),
            f"faults named within {SOON:g} s of the limit": (soon, 0.95),
        }
        for what, (right, goal) in shares.items():
            if right:
                report.share(f"{what}, {of}", sum(right), len(right), measure.at_least(goal))


def right_ones(outcomes: Sequence[Outcome], what: str) -> list[bool]:
    """Whether the rank or the cause is right, of the outcomes in which it is judged."""
    return [outcome.verdicts[what] for outcome in outcomes if what in outcome.verdicts]


def in_turn(names: Sequence[str], draw: random.Random) -> Iterator[Fault]:
    """Faults without end: of the groups by their parts, and the kinds of a group in turn, both in a random order.

    ``names`` are the kinds to take; none: all.
    """
    chosen = {group: [each for each in faults if not names or each.name in names] for group, faults in GROUPS.items()}
    places = [group for group, part in PARTS.items() for _ in range(part) if chosen[group]]
    left: dict[str, list[Fault]] = {group: [] for group in chosen}
    while True:
        for group in draw.sample(places, len(places)):
            left[group] = left[group] or draw.sample(chosen[group], len(chosen[group]))
            yield left[group].pop()


def options_of(parser: argparse.ArgumentParser) -> Any:
    """The options of a benchmark that trains the job on hosts of its own, which it must be able to make."""
    parser.add_argument("--processes", type=measure.positive, default=2, help="ranks of each launcher (default 2)")
    options = parser.parse_args()
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        measure.skip(f"{missing[0]} is not installed")
    if os.geteuid() != 0:
        measure.skip("network namespaces need root")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and leave nothing behind
    return options


@contextlib.contextmanager
def diagnosed(processes: int) -> Iterator[Diagnosis]:
    """A job without faults so far, which ends with the context."""
    with network(PODS) as net, tempfile.TemporaryDirectory() as name, small_file_systems(Path(name)):
        Path(name, "train.py").write_text("import faulty\n\nfaulty.main()\n")
        diagnosis = Diagnosis(net, Path(name), processes)
        try:
            yield diagnosis
        except NotTrainingError as error:
            raise SystemExit(str(error)) from None
        finally:
            diagnosis.end()


def main() -> int:
    parser = measure.parser(__doc__, rounds=14)
    parser.add_argument("--faults", type=measure.positive, default=15, help="in a round (default 15)")
    parser.add_argument("--only", nargs="+", metavar="KIND", default=[], help="kinds to inject (default: all)")
    parser.add_argument("--seed", type=int, default=1)
    options = options_of(parser)
    if unknown := set(options.only) - {fault.name for fault in FAULTS}:
        parser.error(f"--only: benchmarks/fault_kinds.py has no kind {min(unknown)!r}")
    report = measure.Report("diagnosis", options)
    draw = random.Random(options.seed)
    faults = in_turn(options.only, draw)
    with diagnosed(options.processes) as diagnosis:
        try:
            for _ in range(options.rounds * options.faults):
                diagnosis.inject(next(faults), draw)
        finally:
            report_of(report, diagnosis.outcomes)
            if diagnosis.outcomes:
                alarms = len(diagnosis.false_alarms)
                report.compute("alarms before a fault", alarms, len(diagnosis.outcomes), measure.at_most(0), "faults")
            code = report.finish()
    return code


if __name__ == "__main__":
    sys.exit(main())
