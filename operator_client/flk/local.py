"""Run a job on this machine: one launcher for each replica, with the environment variables of its pod.

`LocalRun` also restarts a launcher that was killed, as the training operator recreates a pod.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import math
import os
import random
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import IO

from flk import local_gpus, units
from flk.errors import FlkError, UsageError
from flk.manifest.environment import environment
from flk.shipped import module_path
from flk.spec.job import Job
from flk.spec.packages import requirement_files
from flk.user_files import cache_folder
from flk_runtime import contract
from flk_runtime.contract import platform, pod_env, pod_layout, user_env
from flk_runtime.contract.exit_codes import ExitCode
from flk_runtime.contract.log_format import is_record, parse_record
from flk_runtime.contract.record import JobRecord
from flk_runtime.contract.strategies import DILOCO

KILL_AFTER = 3.0  # seconds after the ranks' grace period after which all processes are killed
STATE_FOLDER = Path(".flk")  # has the folders that stand for volumes: .flk/volumes/<PersistentVolumeClaim>
_SHM = Path("/dev/shm")  # noqa: S108 - memory, not a temporary file
_MEMORY_PREFIX = "flk-run-"
_INSTALL = (
    "activate the environment that has torch, or install torch beside flk: "
    f"{sys.executable} -m pip install torch, or pipx inject flk torch"
)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass
class _Pod:
    """The launcher of one replica, and the incomplete last line of each of its outputs."""

    index: int
    process: subprocess.Popen[bytes]
    rest: dict[int, bytes] = field(default_factory=dict)  # by file descriptor


class LocalRun:
    """A job on this machine. ``run`` returns the exit code of the job's pods."""

    def __init__(self, job: Job, folder: Path, code: bytes | None = None) -> None:
        """``job`` has a name; its ranks start in ``folder``.

        With ``code``, an archive of the files that would travel, each pod has a folder of its own with these files
        instead, as in a cluster: see `pods_folder`. It begins anew with a pod that takes the place of a killed one.
        """
        self._job = job
        self._folder = folder
        self._code = code
        if sys.platform not in ("linux", "darwin"):
            raise UsageError(
                f"`flk run` needs Linux or macOS, because its launchers do (this is {sys.platform})",
                hint="use flk submit, or run flk in a Linux container",
            )
        gpus = local_gpus.count_gpus()
        self._gpus = local_gpus.shares(job, gpus)
        self._known_gpus = job.resources.gpu if gpus and self._gpus else 0
        self._python, self._path = interpreter()
        self._pods: dict[int, _Pod] = {}
        self._selector = selectors.DefaultSelector()
        self._signals: list[int] = []
        self._killed = 0  # launchers that were killed
        self._stopped_by: int | None = None
        self._kill_at: float | None = None
        self._unwritten: FlkError | None = None  # why the output could not be written
        self.record: JobRecord | None = None
        """The last record of the launcher of pod 0."""

    def run(self) -> int:
        """Start all launchers and wait until they have ended.

        SIGTERM lets the ranks save, as in a pod, within the job's grace period. Ctrl-C gives them 5 seconds to end.
        Raises FlkError, after the ranks could save, if their output cannot be written.
        """
        with (
            tempfile.TemporaryDirectory(prefix="flk-") as scratch,
            _memory(self._job) as memory,
            self._handled_signals(),
        ):
            self._base = self._environment(Path(scratch)) | memory
            self._ports = [free_port() for _ in range(self._job.workers)]
            if self._gpus is not None and not any(self._gpus):
                self._say(
                    "the pods of the job have more ranks than this machine has GPUs, so they train on the CPU: "
                    "use fewer --replicas, --processes or --spares"
                )
            try:
                for index in range(self._job.created_pods):
                    self._start(index)
                return self._follow()
            finally:
                self._kill()

    def _environment(self, scratch: Path) -> dict[str, str]:
        """Return the variables that all launchers share: the shell's, except those that another launcher has set."""
        job = self._job
        values = {k: v for k, v in os.environ.items() if not user_env.is_reserved(k) or k == "PYTHONUNBUFFERED"}
        missing = [name for name in job.secrets if name not in values]
        if missing:
            raise UsageError(
                f"the secret variable {missing[0]} is not set in this environment, and `flk run` reads no Secrets",
                hint=f"export {missing[0]}=… before `flk run`",
            )
        values.update(environment(job))
        asked = (
            units.parse_quantity(job.resources.cpu)
            if job.resources.cpu
            else Decimal(os.cpu_count() or 1) / job.created_pods
        )
        values |= {
            **self._outer_rendezvous(),
            pod_env.POD_IP: "127.0.0.1",
            pod_env.JOB_UID: secrets.token_hex(16),
            pod_env.RDZV_SECRET: secrets.token_hex(16),
            pod_env.CPUS: str(math.ceil(asked)),
            user_env.NODE_NAME: socket.gethostname(),
            user_env.CHECKPOINT: str(checkpoint_place(job, self._folder) or scratch / "checkpoint"),
            pod_env.PARENT: str(os.getpid()),
            pod_env.SETUP_DONE: str(scratch / "setup" / "done"),
        }
        if self._code is not None:
            values[pod_env.CODE] = str(scratch / "code")
            (scratch / "code").mkdir()
            (scratch / "code" / f"{pod_layout.CODE_ARCHIVE}.000").write_bytes(self._code)
        if job.pip or job.requirements:
            packages = packages_folder(job, self._folder, self._python, values)
            _made(packages.parent, "set XDG_CACHE_HOME to a folder that you can write")
            values[pod_env.PACKAGES] = str(packages)
        path = module_path([self._path], values)
        values.pop("PYTHONPATH", None)
        return values | path

    def _outer_rendezvous(self) -> dict[str, str]:
        """Return the variables that say where DiLoCo's workers meet: at this job's hub or at another job's."""
        if self._job.strategy != DILOCO:
            return {}
        diloco = self._job.diloco
        secret = os.environ.get(pod_env.MEET_SECRET, "")
        if diloco and diloco.secret and not secret:
            raise UsageError(
                f"diloco.secret: `flk run` reads no Secrets, and {pod_env.MEET_SECRET} is not set in this environment",
                hint=f"export {pod_env.MEET_SECRET}=… before `flk run`",
            )
        given: dict[str, str] = {pod_env.MEET_SECRET: secret} if secret else {}
        if diloco and diloco.meet:
            return {pod_env.MEET: diloco.meet, **given}
        port = str(pod_layout.MEET_PORT if secret else free_port())
        return {pod_env.MEET: f"127.0.0.1:{port}", pod_env.HUB_PORT: port, **given}

    def _folder_of(self, index: int) -> Path:
        """The folder in which the ranks of a pod start."""
        if self._code is None:
            return self._folder
        folder = pods_folder(self._job, self._folder) / str(index)
        shutil.rmtree(folder, ignore_errors=True)
        # A rank of the killed launcher may still have written.
        return _made(folder, "--pod-folders needs a folder that you can write")

    def _start(self, index: int) -> None:
        folder = self._folder_of(index)
        values = self._base | {
            pod_env.WORK: str(folder),
            pod_env.RDZV_ENDPOINT: f"127.0.0.1:{self._ports[index * self._job.workers // self._job.replicas]}",
            pod_env.POD_INDEX: str(index),
            user_env.POD_NAME: f"{self._job.name}-worker-{index}",
        }
        if self._known_gpus:
            values[pod_env.GPUS] = str(self._known_gpus)
        if self._gpus:
            values[platform.VISIBLE_GPUS] = self._gpus[index]
        # In a session of its own, so that the terminal's Ctrl-C reaches only flk, which forwards it once.
        process = subprocess.Popen(
            [self._python, "-u", "-m", "flk_runtime", "--", *self._job.command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=values,
            start_new_session=True,
        )
        pod = _Pod(index, process)
        self._pods[index] = pod
        for source, sink in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if source:
                os.set_blocking(source.fileno(), False)
                pod.rest[source.fileno()] = b""
                self._selector.register(source, selectors.EVENT_READ, (source, pod, sink))

    def _follow(self) -> int:
        codes: dict[int, int] = {}
        while self._pods:
            timeout = 0.5 if self._kill_at is None else max(0.0, min(0.5, self._kill_at - time.monotonic()))
            for key, _ in self._selector.select(timeout):
                if key.data:
                    self._forward(*key.data)
                else:
                    with contextlib.suppress(BlockingIOError):
                        os.read(key.fd, 4096)
            while self._signals:
                self._handle_signal(self._signals.pop(0))
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._kill()
            for pod in [pod for pod in self._pods.values() if not pod.rest and pod.process.poll() is not None]:
                code = pod.process.returncode
                del self._pods[pod.index]
                if (code < 0 or code >= 128) and self._kill_at is None:
                    self._killed += 1
                    if self._killed > self._job.disruptions:
                        self._say(f"the launcher of pod {pod.index} was killed, and no disruptions are left")
                        self._kill()
                        return int(ExitCode.INFRASTRUCTURE)
                    self._say(f"the launcher of pod {pod.index} was killed; restarting it, as the operator would")
                    self._start(pod.index)
                else:
                    codes[pod.index] = code if code >= 0 else 128 - code
        if self._unwritten is not None:
            raise self._unwritten
        if self._stopped_by is not None:
            return int(ExitCode.INTERRUPTED if self._stopped_by == signal.SIGINT else ExitCode.PREEMPTED)
        if self.record and self.record.outcome != "running":
            return self.record.code
        return max(codes.values(), default=0)

    def _forward(self, source: IO[bytes], pod: _Pod, sink: IO[str]) -> None:
        """Write complete lines to ``sink``, and keep records, which are not for people."""
        fd = source.fileno()
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return
        head, newline, tail = (pod.rest[fd] + data).rpartition(b"\n")
        if not data:
            head, newline, tail = pod.rest[fd], b"", b""
        kept = []
        for line in head.split(b"\n") if head or newline else []:
            text = line.decode(errors="replace")
            if not is_record(text):
                kept.append(text + "\n")
            elif (record := parse_record(text)) and not (self.record and self.record.outcome == "failed"):
                self.record = record
        if kept:
            try:
                sink.write("".join(kept))
                sink.flush()
            except BrokenPipeError:
                pass
            except FlkError as error:  # the disk is full: the ranks save, and the run ends with the error
                self._unwritten = error
                self._signals.append(signal.SIGTERM)
        pod.rest[fd] = tail
        if not data:
            self._selector.unregister(source)
            source.close()
            del pod.rest[fd]

    def _handle_signal(self, number: int) -> None:
        if number == signal.SIGQUIT:  # its launcher prints the stacks of all ranks
            if 0 in self._pods:
                self._pods[0].process.send_signal(number)
            return
        if self._stopped_by is not None:
            if number == signal.SIGINT:  # Ctrl-C again kills at once
                self._kill()
            return
        self._stopped_by = number
        grace = pod_layout.INTERRUPT_GRACE if number == signal.SIGINT else self._job.grace
        self._kill_at = time.monotonic() + grace + KILL_AFTER
        self._say(f"{signal.Signals(number).name}: ending {len(self._pods)} pods")
        for pod in self._pods.values():
            with contextlib.suppress(ProcessLookupError):
                pod.process.send_signal(number)

    def _kill(self) -> None:
        """Kill all launchers, whose ranks then end: by the kernel, and on macOS by themselves within a second."""
        for pod in self._pods.values():
            with contextlib.suppress(ProcessLookupError):
                pod.process.kill()
        for pod in self._pods.values():
            pod.process.wait()

    def _say(self, text: str) -> None:
        print(f"flk: {text}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def _handled_signals(self) -> Iterator[None]:
        wakeup, alarm = socket.socketpair()
        wakeup.setblocking(False)
        alarm.setblocking(False)
        self._selector.register(wakeup, selectors.EVENT_READ, None)
        before = {number: signal.signal(number, lambda n, _: self._signals.append(n)) for number in _SIGNALS}
        fd = signal.set_wakeup_fd(alarm.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(fd)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._selector.close()
            wakeup.close()
            alarm.close()


@contextlib.contextmanager
def _memory(job: Job) -> Iterator[dict[str, str]]:
    """A folder in memory for the checkpoints of one run, as a variable for the launchers, where there is such a place.

    It is on the disk that the job names, if it names one, which may raise UsageError. It is locked while the run lasts.
    Folders of runs that were killed are removed.
    """
    root, variable = _SHM, pod_env.MEMORY_ROOT
    if job.memory_path:
        root, variable = Path(job.memory_path), pod_env.MEMORY_PATH
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"memory_path: cannot make {root}: {error.strerror}") from error
    if not os.access(root, os.W_OK):
        if job.memory_path:
            raise UsageError(f"memory_path: {root} cannot be written to by this user")
        yield {}
        return
    for left in root.glob(f"{_MEMORY_PREFIX}*"):
        with contextlib.suppress(OSError), _locked(left):
            shutil.rmtree(left, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(prefix=_MEMORY_PREFIX, dir=root, ignore_cleanup_errors=True) as folder,
        _locked(Path(folder)),
    ):
        yield {variable: folder}


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder. Raises OSError if another process holds it, or the folder is somebody else's."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def as_check(job: Job) -> Job:
    """Return a job that only checks whether this one can start: its ranks run flk_runtime/check.py."""
    return job.changed(command=["-m", "flk_runtime.check"], restarts=0, disruptions=0, checkpoint=None)


def checkpoint_place(job: Job, folder: Path) -> Path | str | None:
    """Return the folder that stands for the volume of the checkpoints, or their address in S3.

    A second run resumes from it.
    """
    if job.checkpoint is None:
        return None
    if job.checkpoint.address:
        return environment(job)[user_env.CHECKPOINT]
    return folder / STATE_FOLDER / "volumes" / str(job.checkpoint.volume) / str(job.name)


def pods_folder(job: Job, folder: Path) -> Path:
    """Return the folder with the folder of each pod, by its index, of a job whose pods have folders of their own."""
    return folder / STATE_FOLDER / "pods" / str(job.name)


def packages_folder(job: Job, folder: Path, python: str, environ: Mapping[str, str]) -> Path:
    """Return the folder in which the packages of a job are installed, in the user's cache.

    It is another one for each Python, each change of the requirements or of what they name here, and each setting of
    pip. Raises UsageError for a file that cannot be read.
    """
    files = requirement_files(job.requirements, folder) if job.requirements else []
    texts = [(folder / file).read_text("utf-8") for file in files]
    named = [
        folder / word for word in (*(job.pip or []), *" ".join(texts).split()) if word.endswith((".whl", ".gz", ".zip"))
    ]
    contents = [hashlib.sha256(path.read_bytes()).hexdigest() for path in named if path.is_file()]
    sources = [path for path in job.pip or [] if (folder / path).is_dir()]  # what is in them may change with each run
    pip = sorted((name, value) for name, value in environ.items() if name.startswith("PIP_"))
    state = os.stat(python)
    made_from = [python, state.st_mtime_ns, str(folder), job.pip, texts, contents, sources and time.time(), pip]
    name = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:16]
    return cache_folder() / "packages" / name / "venv"


def _made(folder: Path, hint: str) -> Path:
    """Return a folder that exists from now on. Raises UsageError with ``hint`` if it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder} cannot be made ({error.strerror})", hint=hint) from None
    return folder


def free_port() -> int:
    """Return a free port for the launcher of pod 0.

    It is below net.ipv4.ip_local_port_range, so that no connection takes it before the launcher listens or restarts.
    """
    while True:
        port = random.randrange(20_000, 32_768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def interpreter() -> tuple[str, str]:
    """Return the Python that runs the launchers, and what to add to its module path so that it finds flk_runtime.

    It is flk's own Python if that has torch, otherwise (flk installed by pipx, for instance) the one on PATH. Raises
    UsageError if neither has it.
    """
    if importlib.util.find_spec("torch"):
        return sys.executable, ""
    python = shutil.which("python3") or shutil.which("python")
    if not python:
        raise UsageError("no Python with torch: flk's own has none, and there is no python3 on PATH", hint=_INSTALL)
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    if subprocess.run([python, "-c", look], capture_output=True).returncode:
        raise UsageError(f"no Python with torch: neither flk's own nor {python} has it", hint=_INSTALL)
    return python, str(Path(contract.__file__).parents[2])
