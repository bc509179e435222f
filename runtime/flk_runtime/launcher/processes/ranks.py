"""The ranks of this pod: starts them, passes on their output, ends them, and says how each of them ended."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import selectors
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

from flk_runtime.contract import foreign, log_format, pod_env, user_env
from flk_runtime.contract.failure import Failure, Kind, kind_of_end, kind_of_text, with_advice
from flk_runtime.contract.foreign import Time
from flk_runtime.contract.secrets import hidden
from flk_runtime.launcher.processes.forkserver import ForkServer
from flk_runtime.launcher.processes.output import Output, Prefixer, RankPipes
from flk_runtime.launcher.settings import Settings
from flk_runtime.launcher.transport.messages import AttemptStarted
from flk_runtime.shared.progress import ProgressPage
from flk_runtime.system import host
from flk_runtime.system.text import last_exception

if TYPE_CHECKING:
    from flk_runtime.launcher.processes.service import Service

_STDERR_LINES = 20  # that are kept
# In what faulthandler writes: frames that started the script, and a list of all extension modules; torch's C++ frames.
_NOISE = re.compile(
    r"\s*$|Extension modules: |frame #\d+: "
    r'|  File ".*flk_runtime/(launcher/[\w/]+|__main__)\.py"|  File "<frozen runpy>"'
)
# Lines on stderr of a process that a signal has ended, from the most to the least telling: a line of std::terminate,
# a line of Python or the C library before they abort (not faulthandler's name of the signal), the innermost frame.
_LAST_WORDS = (
    re.compile(r"\s*what\(\): "),
    re.compile(r"Fatal Python error: (?!Aborted|Segmentation fault|Bus error|Floating point|Illegal instruction)"),
    re.compile(r".*: Assertion .* failed\.|\*\*\* .+ \*\*\*: terminated"),
    re.compile(r"(double free or corruption|corrupted |(free|malloc|realloc|munmap_chunk|malloc_consolidate)\(\): )"),
    re.compile(r'  File ".+", line \d+ in '),
)
_TERMINATED = "terminate called "
_CRASH = re.compile(r"^(terminate called |Fatal Python error: )", re.MULTILINE)  # a process that aborts writes this
_THROWN = re.compile(r"^terminate called after throwing an instance of '(?:\w+::)*(\w+)'", re.MULTILINE)
_TRAILING_LINES = 2  # that may follow the traceback which ended a process


@dataclass(frozen=True)
class _Report:
    """What a rank reports; its fields but ``output`` are those of a failure. None: it does not say."""

    kind: Kind
    type: str | None = None
    message: str | None = None
    traceback: str | None = None
    time: Time | None = None
    exit_code: int | None = None
    output: str = ""


def from_report(failure: Failure, report: bytes, secrets: Sequence[str] = ()) -> tuple[Failure, str] | None:
    """``failure`` with the fields of a rank's report (`flk_runtime.shared.failure_report`); None if it is no report.

    With it comes the text about the exception that the rank leaves to the launcher to print; it may be empty. The
    failure is without ``secrets``.
    """
    try:
        found = foreign.load(_Report, report)
    except foreign.ForeignError:
        return None
    fields = {name: value for name, value in vars(found).items() if name != "output" and value is not None}
    fields |= {name: hidden(fields[name], secrets) for name in ("message", "traceback") if name in fields}
    return replace(failure, **fields), found.output


def from_exit_code(failure: Failure, code: int, stderr: str, *, oom: bool) -> Failure:
    """``failure`` with the exit code of the rank's process, negative for a signal, and its last 20 lines on stderr.

    ``oom`` says whether the kernel has killed a process of this pod at its memory limit. NCCL's watchdog aborts the
    process with SIGABRT where the connection to a peer broke, which is secondary, and where the GPU is lost.
    """
    lines = [line for line in stderr.splitlines() if not _NOISE.match(line)][-_STDERR_LINES:]
    failure = replace(failure, stderr="\n".join(lines))
    if code >= 0:
        ended = last_exception("\n".join(lines)) if code else ""
        message = ended if ended in lines[-1 - _TRAILING_LINES :] else ""
        return replace(failure, kind=kind_of_end(code, None), exit_code=code, message=message)
    kind = kind_of_end(None, -code)
    if oom and code == -signal.SIGKILL:
        kind = Kind.OOM
    elif code == -signal.SIGABRT:
        ended = stderr[max(0, stderr.rfind(_TERMINATED)) :]  # earlier lines are of what the rank has survived
        thrown, told = _THROWN.search(ended), kind_of_text("", ended)
        if told.meaning.secondary or (thrown and told is Kind.GPU):
            kind = told
        if thrown and told is Kind.GPU:
            failure = replace(failure, type=thrown[1])
    words = [
        line.strip().removeprefix("what():").strip() for words in _LAST_WORDS for line in lines if words.match(line)
    ]
    return replace(failure, kind=kind, signal=-code, message=with_advice(words[0]) if words else "")


ATTEMPT_FOLDER: Final = "attempt_{number}"  # of the files of an attempt's ranks


def rank_environment(settings: Settings, attempt: AttemptStarted, local_rank: int, error_folder: str) -> dict[str, str]:
    """The variables of one rank: torchrun's variables, so that its scripts run unchanged, and flk's own.

    For names and meaning see torch/distributed/elastic/agent/server/local_elastic_agent.py. The folder of the rank's
    error file and progress page is made in ``error_folder``.
    """
    rank = str(attempt.ranks(settings.pod, settings.processes)[local_rank])
    world_size = str(len(attempt.pods) * settings.processes)
    folder = Path(error_folder, ATTEMPT_FOLDER.format(number=attempt.number), str(local_rank))
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(settings.processes),
        "GROUP_RANK": str(attempt.pods.index(settings.pod)),
        "GROUP_WORLD_SIZE": str(len(attempt.pods)),
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": attempt.master_address,
        "MASTER_PORT": str(attempt.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(attempt.number),
        "TORCHELASTIC_MAX_RESTARTS": str(settings.limits.restarts),
        "TORCHELASTIC_RUN_ID": settings.job,
        "TORCHELASTIC_ERROR_FILE": str(folder / "error.json"),
        # The leader serves the store at MASTER_ADDR:MASTER_PORT, so rank 0 must not open one there.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        pod_env.PROGRESS: str(folder / "progress"),
        pod_env.OBSERVER: str(folder / "observer"),
        pod_env.CHOICE: str(Path(error_folder, "strategy")),
        user_env.HEARTBEAT: str(folder / "heartbeat"),
        user_env.ATTEMPT: str(attempt.number),
        user_env.FULL_WORLD_SIZE: str(settings.world_size),
        **({user_env.WORKER: str(settings.worker)} if settings.workers > 1 else {}),
        **settings.service_key_variable,
    }


def prepare_environment(settings: Settings, environ: MutableMapping[str, str]) -> None:
    """Set the launcher's variables that torch reads when it is imported. Values that the user has set are kept."""
    defaults = {
        # Without it torch starts one thread for each processor of the node, in every rank.
        "OMP_NUM_THREADS": str(max(1, (settings.cpus or host.cpu_count()) // settings.processes)),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if _records_nothing():
        defaults["TORCH_NCCL_TRACE_BUFFER_SIZE"] = "2000"  # collectives, as in newer torch
    interface = host.interface_with_address(settings.pod_ip) if settings.pod_ip else ""
    if interface:
        # Without them gloo takes the interface of the host name's address, and NCCL the first one it finds.
        defaults["GLOO_SOCKET_IFNAME"] = interface
        defaults["NCCL_SOCKET_IFNAME"] = "=" + interface
    try:
        tempfile.gettempdir()
    except FileNotFoundError:  # the file system of the image is read-only
        defaults["TMPDIR"] = tempfile.tempdir = settings.work
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:  # getpass.getuser() and what asks it, such as torch.compile of older torch, would fail
        defaults |= dict.fromkeys(("USER", "LOGNAME"), environ.get("USER") or environ.get("LOGNAME") or "flk")
    for name, value in defaults.items():
        environ.setdefault(name, value)


def resolve_python_path(work: str, environ: MutableMapping[str, str]) -> None:
    """Let the relative entries of PYTHONPATH be folders below ``work``, where the ranks start, for them and for others.

    Python has taken them for folders of the launcher's own working folder, which in a pod is the image's.
    """
    entries = environ.get("PYTHONPATH", "").split(os.pathsep)
    meant = {os.path.abspath(entry).lstrip("/"): os.path.join(work, entry) for entry in entries if entry}
    sys.path[:] = [meant.get(os.path.abspath(path).lstrip("/"), path) if path else path for path in sys.path]
    if any(entries):
        environ["PYTHONPATH"] = os.pathsep.join(os.path.join(work, entry) for entry in entries if entry)


def _records_nothing() -> bool:
    """Whether torch's flight recorder, in which flk finds the collectives that ranks wait in, is off by default.

    It is on from torch 2.11, which warns of this name of the variable: the only one that all older ones know.
    """
    try:
        version = re.match(r"(\d+)\.(\d+)", metadata.version("torch"))
    except metadata.PackageNotFoundError:  # a build that was not installed is likely to be new
        return False
    return version is not None and (int(version[1]), int(version[2])) < (2, 11)


_TRACKERS_TIMEOUT = 2.0  # seconds for Python's resource trackers to end after what they track; it takes milliseconds
_ORPHANS_TIMEOUT, _ORPHANS_POLL = 5.0, 0.005  # seconds for processes that ranks have left to end after SIGKILL


@dataclass
class RankProcess:
    """A running rank."""

    rank: int
    pid: int
    pipes: RankPipes
    progress: ProgressPage
    environment: Mapping[str, str]  # variables that the launcher has set for it
    output_time: float = 0.0  # of its latest output, by time.monotonic; 0: none yet
    failure: Failure | None = None
    kill_at: float | None = None  # time of SIGKILL, by time.monotonic
    killed_at: float | None = None  # when it was sent
    terminated: bool = False  # the launcher has told it to end

    @property
    def crashing(self) -> bool:
        """Whether the rank has written to stderr that it aborts. It may take seconds to end after that.

        A signal that ends it sooner is not the cause of its failure.
        """
        return _CRASH.search(self.pipes.stderr_tail) is not None

    def end(self, timeout: float, number: int = 0) -> None:
        """Send SIGKILL to the rank and to processes that it started in ``timeout`` seconds, unless they get it earlier.

        A signal ``number`` that is not 0 is sent now, to the rank only: it may need the workers of its DataLoader while
        it saves.
        """
        at = time.monotonic() + timeout
        self.kill_at = at if self.kill_at is None else min(at, self.kill_at)
        if number:
            self.terminated = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL to the rank and to the processes that it has started, unless all have ended."""
        self.killed_at = self.killed_at or time.monotonic()
        host.kill_group(self.pid)

    def ended_by_launcher(self, failure: Failure) -> bool:
        """Return whether ``failure`` of this rank is the launcher's own SIGTERM or SIGKILL."""
        by_signal = failure.signal in (signal.SIGTERM, signal.SIGKILL) and failure.kind is not Kind.OOM
        return self.terminated and (by_signal or failure.exit_code == 128 + signal.SIGTERM)


class Ranks:
    """The running ranks of this pod."""

    def __init__(
        self,
        settings: Settings,
        server: ForkServer,
        selector: selectors.BaseSelector,
        output: Output,
        error_folder: str,
        count_lines: Callable[[int], None],
        service: Service | None = None,
        on_line: Callable[[bytes], None] | None = None,
    ) -> None:
        """``selector`` watches the ranks' pipes, and ``output`` passes on their content. ``server`` starts the ranks.

        ``error_folder`` is for files of the ranks; ``count_lines`` is called with the number of lines written, and
        ``on_line`` with lines of rank 0 that may be metrics.
        """
        self._on_line = on_line
        self._settings = settings
        self.server = server
        self._kept = host.children()  # children that predate the ranks (setup command, image entrypoint): never killed
        self._service = service
        self.selector = selector
        self._output = output
        self._paused = False  # the ranks' output is not read, because the launcher's own output is full
        self._error_folder = error_folder
        self._count_lines = count_lines
        self._by_pid: dict[int, RankProcess] = {}
        self._attempt = 0  # number of the last one
        self._oom_kills = 0  # of processes of this container that were killed before this attempt, or are reported
        self._orphans_since: float | None = None  # by time.monotonic; None: no orphans are known
        self._orphans_at: float | None = None  # when to look at them again

    def __iter__(self) -> Iterator[RankProcess]:
        return iter(self._by_pid.values())

    def __len__(self) -> int:
        return len(self._by_pid)

    def start(self, attempt: AttemptStarted, variables: Mapping[str, str]) -> None:
        """Start all ranks of this pod, with these variables beside their own. Raises ServerDiedError and OSError."""
        self._attempt = attempt.number
        self._oom_kills = host.oom_kills()
        self._orphans_since = self._orphans_at = None
        for left in Path(self._error_folder).glob(ATTEMPT_FOLDER.format(number="*")):
            shutil.rmtree(left, ignore_errors=True)  # else a job of many attempts fills the disk
        for local_rank in range(self._settings.processes):
            self._start_one(attempt, local_rank, variables)

    def _start_one(self, attempt: AttemptStarted, local_rank: int, variables: Mapping[str, str]) -> None:
        settings = self._settings
        rank = attempt.ranks(settings.pod, settings.processes)[local_rank]
        prefix = log_format.RANK_PREFIX.format(rank=settings.first_pod * settings.processes + rank)
        environment = {**rank_environment(settings, attempt, local_rank, self._error_folder), **variables}
        page = ProgressPage.create(Path(environment[pod_env.PROGRESS]))
        pipes = RankPipes(
            Prefixer(
                prefix,
                self._output.write_stdout,
                self._count_lines,
                self._on_line if rank == 0 else None,
                settings.secrets,
            ),
            Prefixer(prefix, self._output.write_stderr, self._count_lines, secrets=settings.secrets),
        )
        for fd in pipes.read_ends:
            if not (self._paused and fd in pipes.output_ends):
                self.selector.register(fd, selectors.EVENT_READ)
        command = settings.command + (settings.on_restart if attempt.again else ())
        try:
            pid = self.server.launch(command, environment, settings.work, *pipes.write_ends)
        except OSError:
            for fd in pipes.read_ends:
                self._stop_watching(fd)
                pipes.close(fd)
            raise
        finally:
            pipes.close_write_ends()
        self._by_pid[pid] = RankProcess(rank, pid, pipes, page, environment)

    def read(self, fd: int) -> RankProcess | None:
        """Pass on output that a rank has written to the pipe ``fd``. Returns the rank, or None if it has ended."""
        rank = next((rank for rank in self if fd in rank.pipes.read_ends), None)
        if rank:
            rank.output_time = time.monotonic()
        if rank and not rank.pipes.read(fd):
            self._stop_watching(fd)
            rank.pipes.close(fd)
        self.pause_or_resume()
        return rank

    def pause_or_resume(self) -> None:
        """Read the ranks' output only while it can be passed on. Only a rank that writes more waits then.

        Call when the launcher's output has room again.
        """
        if self._paused == self._output.is_full:
            return
        self._paused = not self._paused
        for rank in self:
            for fd in rank.pipes.output_ends:
                if self._paused:
                    self._stop_watching(fd)
                else:
                    self.selector.register(fd, selectors.EVENT_READ)

    def _stop_watching(self, fd: int) -> None:
        with contextlib.suppress(KeyError):  # it is paused
            self.selector.unregister(fd)

    def report_of(self, rank: RankProcess) -> tuple[Failure, str] | None:
        """The exception that the rank has reported, if there is a new one, and what the rank has not printed of it."""
        report = rank.pipes.take_report()
        if report is None:
            return None
        return from_report(self.new_failure(Kind.EXCEPTION, rank), report, self._settings.secrets)

    def remove(self, pid: int) -> RankProcess | None:
        """Remove a rank whose process has ended: kill processes that it left, and pass on the rest of its output."""
        rank = self._by_pid.pop(pid, None)
        if rank:
            rank.kill()  # first, because a process that writes without end may hold the pipes
            for fd in rank.pipes.read_ends:
                self._stop_watching(fd)
                rank.pipes.read_rest_and_close(fd)
        return rank

    def orphans_have_ended(self) -> bool:
        """Kill the processes that ranks have left, also in sessions of their own. Returns whether all are gone.

        Call it when no rank runs. Such a process may hold a GPU or a port that the next attempt needs. If SIGKILL does
        not end it, it is given up after 5 s and counts as gone. Python's resource trackers have time to end themselves,
        so that the shared memory of killed ranks does not stay.
        """
        now = time.monotonic()
        since = self._orphans_since or now

        def keep() -> list[int]:
            return [self.server.pid, *self._kept, *(self._service.pids() if self._service else ())]

        found = host.kill_adopted(keep, spare_trackers=now < since + _TRACKERS_TIMEOUT)
        self._orphans_since = since if found else None
        waits = found and now < since + _ORPHANS_TIMEOUT
        self._orphans_at = now + _ORPHANS_POLL if waits else None
        return not waits

    def failure_of_exit(self, rank: RankProcess, code: int) -> Failure:
        """The failure of a removed rank that has reported none: ``code`` is its exit code, negative for a signal."""
        if rank.terminated and rank.crashing and code in (-signal.SIGTERM, -signal.SIGKILL):
            code = -signal.SIGABRT  # the launcher has cut the crash short
        oom = host.oom_kills() > self._oom_kills
        if oom and code == -signal.SIGKILL:
            self._oom_kills += 1
        return from_exit_code(self.new_failure(Kind.EXIT, rank), code, rank.pipes.stderr_tail, oom=oom)

    def failure_of_server(self, message: str) -> Failure:
        """The failure of this pod when the fork server has died, and the ranks with it."""
        oom = host.oom_kills() > self._oom_kills
        return replace(
            self.new_failure(Kind.OOM if oom else Kind.LOST), message=message if oom else f"lost its ranks: {message}"
        )

    def new_failure(self, kind: Kind, rank: RankProcess | None = None) -> Failure:
        """A failure of a rank, or of this pod, in the current attempt at this time."""
        settings = self._settings
        failure = Failure(kind, settings.pod, None, settings.pod_name, settings.node, self._attempt, time.time())
        if rank is None:
            return failure
        step = rank.progress.step
        return replace(failure, rank=rank.rank, step=step if step >= 0 else None)

    def end(self, timeout: float, number: int = 0) -> None:
        """Send SIGKILL to all ranks in ``timeout`` seconds, and a signal now (see RankProcess.end)."""
        for rank in self:
            rank.end(timeout, number)

    def kill_overdue(self) -> None:
        """Send SIGKILL to the ranks whose time to end has passed."""
        now = time.monotonic()
        for rank in self:
            if rank.kill_at is not None and now >= rank.kill_at:
                rank.kill()
                rank.terminated, rank.kill_at = True, None

    def abandon_unkillable(self) -> list[Failure]:
        """Give up the ranks that have survived SIGKILL for the kill timeout, and return their failures.

        Such a process waits in the kernel, for a file server or a driver, and can keep its GPU as long.
        """
        limit = time.monotonic() - self._settings.kill_timeout
        survivors = [rank for rank in self if rank.killed_at is not None and rank.killed_at <= limit]
        for rank in survivors:
            self.remove(rank.pid)
        return [
            replace(self.new_failure(Kind.UNKILLABLE, rank), rank=None, message=f"rank {rank.rank}, process {rank.pid}")
            for rank in survivors
        ]

    @property
    def next_kill(self) -> float | None:
        """Time at which a method that kills or gives up processes has something to do; None if nothing is planned."""
        times = [self._orphans_at, *(rank.kill_at for rank in self)]
        times += [rank.killed_at + self._settings.kill_timeout for rank in self if rank.killed_at is not None]
        return min((due for due in times if due is not None), default=None)
