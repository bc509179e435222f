"""Entry point of the launcher: it reads the settings, unpacks the code, imports torch, builds and runs the agent."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import io
import os
import selectors
import signal
import sys
import tarfile
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from flk_runtime.contract import ExitCode, log_format, pod_env, pod_layout, user_env
from flk_runtime.contract.failure import Failure
from flk_runtime.contract.quantities import plural
from flk_runtime.contract.secrets import hidden, secrets_in
from flk_runtime.errors import SetupError
from flk_runtime.launcher.agent import Agent
from flk_runtime.launcher.control import FOLDER_PREFIX, Control, Wakeup
from flk_runtime.launcher.coordinator.leader import Leader
from flk_runtime.launcher.coordinator.policy import final_reason
from flk_runtime.launcher.hangs.watch import Watch
from flk_runtime.launcher.processes import forkserver
from flk_runtime.launcher.processes.forkserver import ForkServer, ServerDiedError
from flk_runtime.launcher.processes.output import Output, redirected_stderr
from flk_runtime.launcher.processes.preload import module_file, preload
from flk_runtime.launcher.processes.ranks import Ranks, prepare_environment, resolve_python_path
from flk_runtime.launcher.records.history import new_record
from flk_runtime.launcher.records.writer import RecordWriter, write_termination_message
from flk_runtime.launcher.settings import Settings
from flk_runtime.launcher.telemetry import health
from flk_runtime.launcher.transport import Member, Server, messages
from flk_runtime.shared import failure_report
from flk_runtime.system import host

_FLUSH_TIMEOUT = 5.0  # seconds in which the reader of the output may take the last lines


def main(arguments: Sequence[str]) -> NoReturn:
    """Run the launcher with these command line arguments, and end the process with an `ExitCode`."""
    wakeup = Wakeup()
    wakeup.install()
    settings: Settings | None = None
    try:
        settings = Settings.from_environment(arguments, os.environ)
        os.environ.pop(pod_env.RDZV_SECRET, None)  # the ranks must not inherit it
        host.raise_open_files_limit()
        if settings.parent:
            host.die_with_parent(settings.parent, signal.SIGTERM)
        code = _run(settings, wakeup)
    except SetupError as error:
        code = _refuse(settings, arguments, error)
    except BaseException as error:
        code = ExitCode.ERROR
        settings = settings or _unread_settings(arguments)
        print(hidden(traceback.format_exc(), settings.secrets), end="", file=sys.stderr)
        found = failure_report.describe(error)
        failure = Failure(found.pop("kind"), settings.pod, None, settings.pod_name, settings.node, **found)
        _record(settings, failure, code)
    host.exit_at_once(code)  # not sys.exit: the threads of the rendezvous still run


def _run(settings: Settings, wakeup: Wakeup) -> int:
    if settings.code:
        unpack(Path(settings.code), Path(settings.work), settings.code_hash)
    resolve_python_path(settings.work, os.environ)
    if not os.environ.get(pod_env.SETUP):  # which may fetch the script
        _script_of(settings)  # a wrong name is told before packages are installed
    if any(os.environ.get(name) for name in pod_env.PREPARATION):
        from flk_runtime.launcher.processes.preparation import Preparation  # not every job needs it

        Preparation(settings, wakeup).run()
    script = _script_of(settings)
    importlib.invalidate_caches()  # folders of the path that were not there before have modules now
    prepare_environment(settings, os.environ)
    if sys.path and sys.path[0] == os.getcwd():
        sys.path.pop(0)  # `python -m flk_runtime` put it there; Python does not put it there for a script
    host.adopt_orphans()
    _import_torch(settings, script)
    _check_build_of_torch(settings)
    unsafe = forkserver.why_unsafe() if settings.fork else None
    server = ForkServer.start(fork=settings.fork and not unsafe, inherited=wakeup.ends)
    with (
        tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, ignore_cleanup_errors=True) as folder,
        redirected_stderr(Path(folder, "launcher.log")) as stderr,
    ):
        output = Output(1, stderr, wakeup.wake)
        agent = build_agent(settings, wakeup, server, output, folder)
        _tell_of_threads(agent.records.log, settings.secrets)
        if unsafe:
            agent.records.log(f"falling back to {user_env.START}=spawn: {unsafe}")
        wakeup.starting = False
        try:
            return agent.run()
        except ServerDiedError as error:
            return agent.fail_without_server(error)
        finally:
            output.flush(_FLUSH_TIMEOUT)


def _script_of(settings: Settings) -> Path | None:
    """The file of the script; None for a module. Raises SetupError if it is not there."""
    if settings.command[0] == "-m":
        return None
    script = Path(settings.work, settings.command[0])
    if not script.is_file():
        raise SetupError(f"no such script: {settings.command[0]} in {settings.work}")
    return script


def build_agent(settings: Settings, wakeup: Wakeup, server: ForkServer, output: Output, error_folder: str) -> Agent:
    """The launcher of a pod: its parts, and how they reach each other. Those that it does not need are not made.

    What listens has its port when this returns. Nothing else is started but the service of an extension, that of
    checkpoints in memory, and the reading of usage. ``error_folder`` is for files of the ranks.
    """
    records = RecordWriter(settings, output.write_stderr, output.last_lines)
    telemetry, log = records.telemetry, records.log
    service = None
    if settings.service:
        from flk_runtime.launcher.processes.service import Service  # not every job needs it

        service = Service(settings, os.environ, log)
        service.start()
    ranks = Ranks(
        settings,
        server,
        selectors.DefaultSelector(),
        output,
        error_folder=error_folder,
        count_lines=records.count_lines,
        service=service,
        on_line=telemetry.add_line if telemetry else None,
    )
    rendezvous = None
    if settings.pod == 0:
        rendezvous = Server(
            settings,
            lambda send, serve_store: Leader(settings, send, serve_store, log, time.monotonic(), telemetry),
            wakeup.post,
            log,
        )
    memory = None
    if settings.trains:
        from flk_runtime.launcher.replication.service import MemoryService

        memory = MemoryService.open(
            settings,
            wake=wakeup.wake,
            post=wakeup.post,
            # An attempt runs, so member is there.
            unreadable=lambda attempt, checkpoint: member.send(messages.Unreadable(attempt, checkpoint)),
            log=log,
        )
    port = rendezvous.port if rendezvous else settings.rendezvous_port
    inventory = memory.inventory if memory else lambda: None
    member = Member(settings, port, wakeup.post, log, inventory, lambda: (*records.former(), health.check(settings)))
    questions = {
        topic.value: lambda asker, topic=topic: member.send(messages.Question(topic, asker)) for topic in messages.Topic
    }
    meter = None
    if settings.telemetry:
        from flk_runtime.launcher.telemetry.usage import Meter

        meter = Meter(settings)
        meter.start()
    watch = Watch(
        settings,
        member.post_status,
        lambda number, snapshots: member.send(messages.StacksReport(number, snapshots)),
        lambda: memory.received_at if memory else 0.0,
        meter,
    )
    control = Control(error_folder, questions)
    return Agent(
        settings, wakeup, records, ranks, member, watch, control, rendezvous=rendezvous, memory=memory, service=service
    )


def _tell_of_threads(log: Callable[[str], None], secrets: Sequence[str]) -> None:
    """Have each thread that ends with an exception leave lines in the pod's log: its stderr goes to a file."""

    def tell(ended: threading.ExceptHookArgs) -> None:
        log(f"the thread {ended.thread and ended.thread.name} has ended with an exception, which is a bug in flk:")
        lines = traceback.format_exception(ended.exc_type, ended.exc_value, ended.exc_traceback)
        for line in hidden("".join(lines), secrets).splitlines():
            log(line)

    threading.excepthook = tell


def _import_torch(settings: Settings, script: Path | None) -> None:
    """Import what forked ranks need. Where each rank imports torch itself, look whether it is there.

    Raises SetupError if torch is missing.
    """
    try:
        if settings.fork:
            preload(
                script,
                Path(settings.work),
                settings.preload,
                user_env.STRATEGY.read(os.environ),
                makes_steps=settings.makes_steps,
                module=None if script else module_file(settings.command[1], Path(settings.work)),
            )
        elif settings.pod == 0 or not importlib.util.find_spec("torch"):
            import torch  # noqa: F401 - pod 0 serves the ranks' store, or the exception says that it is not there
    except ImportError as error:
        raise SetupError(f"{sys.executable} cannot import torch: {error}") from error


def _check_build_of_torch(settings: Settings) -> None:
    """Raise SetupError if the pod has GPUs and the imported torch, if any, is built for the CPU."""
    torch = sys.modules.get("torch")
    if settings.health and settings.gpus and torch and torch.version.cuda is None and torch.version.hip is None:
        raise SetupError(
            f"this pod has requested {plural(settings.gpus, 'GPU')} ({pod_env.GPUS}), but torch {torch.__version__} "
            f"is built for the CPU: use an image with a build for its GPUs, or set {user_env.PREFLIGHT}=off"
        )


def _refuse(settings: Settings | None, arguments: Sequence[str], error: SetupError) -> int:
    """Report settings, code or packages that cannot be used, on stderr and in the termination message."""
    settings = settings or _unread_settings(arguments)
    prefix = log_format.LAUNCHER_PREFIX.format(index=settings.pod_in_job)
    message = hidden(str(error), settings.secrets)
    host.write_all(2, f"{prefix}error: {message}\n".encode(errors="replace"))
    failure = Failure(error.kind, settings.pod, None, settings.pod_name, settings.node, 0, time.time(), "", message)
    failure = replace(failure, stderr=error.output)
    _record(settings, failure, failure.code)
    return failure.code


def _unread_settings(arguments: Sequence[str]) -> Settings:
    """The settings of a launcher whose environment cannot be read."""
    end, index = (os.environ.get(name, "") for name in (pod_env.TERMINATION_LOG, pod_env.POD_INDEX))
    return Settings(
        tuple(arguments),
        pod=int(index) if index.isdecimal() else 0,
        pod_name=os.environ.get(user_env.POD_NAME, ""),
        node=os.environ.get(user_env.NODE_NAME, ""),
        termination_log=end,
        secrets=tuple(secrets_in(os.environ, arguments)),
    )


def _record(settings: Settings, failure: Failure, code: int) -> None:
    """Write the termination message of a launcher that this failure ends with ``code``."""
    texts = {name: hidden(getattr(failure, name), settings.secrets) for name in ("message", "traceback", "stderr")}
    failure = replace(failure, **texts)
    record = new_record("failed", code, failure, [], settings.limits, final_reason(failure))
    write_termination_message(settings.termination_log, record)


def unpack(source: Path, target: Path, expected: str) -> int:
    """Put the code in ``source`` into ``target`` and return the number of files. Raises SetupError.

    ``source`` contains a split archive, code.tar.gz.000, code.tar.gz.001, …. ``expected`` is its SHA-256 in hex. A
    container that was restarted may call it again with the same target.
    """
    pieces = sorted(source.glob(pod_layout.CODE_ARCHIVE + ".*"))
    if not pieces:
        raise SetupError(f"no {pod_layout.CODE_ARCHIVE}.* in {source}")
    archive = b"".join(piece.read_bytes() for piece in pieces)
    found = hashlib.sha256(archive).hexdigest()
    if expected and found != expected:
        raise SetupError(f"the code in {source} has the hash {found[:12]}, but {expected[:12]} was submitted")
    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        members = tar.getmembers()
        files = {member.name for member in members if member.isfile()}
        for member in members:
            linked = member.linkname and os.path.normpath(os.path.join(os.path.dirname(member.name), member.linkname))
            path = target / member.name
            outside = not path.resolve().is_relative_to(target.resolve())
            if member.islnk() or (linked and linked not in files) or outside:
                raise SetupError(f"the archive of the code has a link or a path outside its folder: {member.name}")
        if hasattr(tarfile, "data_filter"):
            tar.extractall(target, members, filter="data")
        else:  # Python before 3.10.12 and 3.11.4
            tar.extractall(target, members)  # noqa: S202 - checked above
    return len(members)
