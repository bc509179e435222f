"""The fork server: a process that has imported torch once and forks the ranks of every attempt.

An import of torch takes a second of CPU time for each rank and attempt; a fork takes a few milliseconds. The server is
not the launcher itself, because it must have neither threads nor open stores: ranks inherit only the imported modules.
Modules draw random values when they are imported; each rank draws these values anew. The server never uses CUDA,
because CUDA cannot be used after a fork.

`ForkServer.prepare` has a fork of the server import what a script begins with, while the first attempt trains. If that
is safe, this fork starts the ranks from then on, and the server passes on requests and answers.

With FLK_START=spawn, on macOS, or if the imported modules make a fork unsafe, the server is a new Python interpreter
and starts another new one for each rank.
"""

from __future__ import annotations

import array
import contextlib
import errno
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from flk_runtime.contract import platform
from flk_runtime.contract.failure import Kind, signal_name
from flk_runtime.contract.ranges import plural
from flk_runtime.contract.strategies import AUTO
from flk_runtime.errors import RuntimeFailure
from flk_runtime.launcher import imports, rank_process
from flk_runtime.launcher.signals import HANDLED_SIGNALS
from flk_runtime.system import host

PRELOAD = ("torch", "torch.distributed", "torch.nn.parallel", "torch.utils.data", "numpy")
# The constructor of every torch optimizer imports this, which takes a second.
PRELOAD_FOR_OPTIMIZERS = ("torch._dynamo",)
# The sharding strategies import these, which takes half a second.
PRELOAD_FOR_SHARDING = ("torch.distributed.fsdp", "torch.distributed.tensor")
# The modules that a script with flk's library has imported by its first step: they take a fifth of a second.
PRELOAD_FOR_LIBRARY = (
    "flk_runtime.run.init",
    "flk_runtime.checkpoint.gather",
    "flk_runtime.checkpoint.load",
    "flk_runtime.checkpoint.save",
)
_CHUNK = 1 << 16  # bytes that are received at once
_ROOM = 1 << 30  # bytes of memory that must be free for what a script imports
# jemalloc's own thread, which pyarrow starts when it is imported: jemalloc prepares it for forks (pthread_atfork).
_SAFE_THREAD = "jemalloc_bg_thd"
_OOM_SCORE = Path("/proc/self/oom_score_adj")
T = TypeVar("T")


@dataclass(frozen=True)
class Exited:
    """A rank's process has ended."""

    pid: int
    status: int  # for os.waitstatus_to_exitcode


class ServerDiedError(RuntimeFailure):
    """The fork server has ended, and its ranks with it."""

    kind = Kind.LOST


class ForkServer:
    """The launcher's client of the fork server. ``socket`` becomes readable when a rank has ended."""

    def __init__(self, connection: socket.socket, pid: int, *, forks: bool) -> None:
        """``pid`` is the process id of the server at the other end of ``connection``; see `start`."""
        self.socket = connection
        self.pid = pid
        self._forks = forks
        self._exited: list[Exited] = []  # received while `launch` waited for its answer
        self._rest = b""  # received after the last message that was taken
        self.unprepared = ""
        """Why each rank imports again what `prepare` was asked to import; empty if it is not known, or they do not."""

    @classmethod
    def start(cls, *, fork: bool, inherited: Sequence[socket.socket] = ()) -> ForkServer:
        """Start the server. Ranks are forks of this process or, if ``fork`` is false, new Python interpreters.

        ``inherited`` are sockets of this process, which ranks must not have. To fork, this process must not have opened
        stores, and `why_unsafe` must return None.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX)  # of a message in each line
        parent = os.getpid()
        if fork:
            # A garbage collection in a rank would write to all imported objects, so that their pages are copied.
            gc.freeze()
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                try:
                    for each in (ours, *inherited):
                        each.close()
                    host.die_with_parent(parent)
                    _Server(theirs, fork=True).run()
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(1)  # an exception would unwind into the launcher's frames, which write its record
        else:
            # posix_spawn and not fork: this process may have threads that hold locks.
            theirs.set_inheritable(True)
            python = [sys.executable, "-m", "flk_runtime.launcher.forkserver", str(theirs.fileno()), str(parent)]
            pid = os.posix_spawn(sys.executable, python, os.environ, setsigmask=HANDLED_SIGNALS)
        theirs.close()
        return cls(ours, pid, forks=fork)

    def launch(
        self, command: Sequence[str], environment: Mapping[str, str], folder: str, stdout: int, stderr: int, report: int
    ) -> int:
        """Start one rank in a process group of its own, and return its process id.

        ``stdout``, ``stderr`` and ``report`` are descriptors to write to; the rank gets copies of them. Raises
        ServerDiedError, and OSError if they cannot be sent or no process can be made.
        """
        request = {"command": list(command), "environment": dict(environment), "folder": folder}
        self._ask(request, [stdout, stderr, report])
        while True:
            answer = self._receive()
            if "started" in answer:
                return int(answer["started"])
            if "refused" in answer:
                raise OSError(answer["refused"], _why_no_fork(answer["refused"]))
            if exited := self._exited_in(answer):
                self._exited.append(exited)

    def prepare(self, command: Sequence[str], environment: Mapping[str, str], folder: str) -> None:
        """Have the server import, beside the ranks, what they import first, so that later ranks need not.

        The arguments are a rank's, see `launch`. Nothing is done if the server has imported all of it.
        """
        statements: list[str] = []
        try:
            statements = imports.leading(command, Path(folder)) if self._forks else []
        except Exception as error:  # of a finder of modules, for instance: the training must not end for it
            self.unprepared = f"{type(error).__name__}: {error}"
        if not statements:
            return
        free = host.free_memory()
        if free < _ROOM:
            self.unprepared = f"{free >> 20} MiB of memory are free, and less than {_ROOM >> 20} are not enough"
            return
        request = {"command": list(command), "environment": dict(environment), "folder": folder}
        self._ask({**request, "statements": statements}, [])

    def ended(self) -> Exited | None:
        """The next rank that has ended; None if the server had something else to say.

        Waits for the server unless ``socket`` is readable or ``pending`` is true.
        """
        return self._exited.pop(0) if self._exited else self._exited_in(self._receive())

    @property
    def pending(self) -> bool:
        """Whether ``ended`` returns at once although ``socket`` may not be readable."""
        return bool(self._exited) or b"\n" in self._rest

    def _ask(self, request: Mapping[str, Any], fds: Sequence[int]) -> None:
        with contextlib.suppress(BrokenPipeError):  # `_receive` raises ServerDiedError
            _send(self.socket, json.dumps(request).encode() + b"\n", fds)

    def _exited_in(self, answer: Mapping[str, Any]) -> Exited | None:
        if "unprepared" in answer:
            self.unprepared = answer["unprepared"]
            return None
        return Exited(int(answer["exited"]), int(answer["status"]))

    def _receive(self) -> dict[str, Any]:
        while b"\n" not in self._rest:
            data = _received(self.socket)
            if not data:
                raise ServerDiedError(_why_ended(self.pid))
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _send(connection: socket.socket, line: bytes, fds: Sequence[int]) -> None:
    """Send a line, with descriptors that the other end gets copies of."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sent = connection.sendmsg([line], ancillary)
    connection.sendall(line[sent:])


def _received(connection: socket.socket) -> bytes:
    """What has arrived, or the next that arrives; nothing if the process at the other end has ended."""
    try:
        return connection.recv(_CHUNK)
    except ConnectionResetError:
        return b""


class _Server:
    """The server's own process."""

    def __init__(self, connection: socket.socket, *, fork: bool) -> None:
        self._connection = connection
        self._fork = fork
        self._pid = os.getpid()  # which forks know before they end with this process
        self._opened = contextlib.ExitStack()  # the files that a rank closes
        self._opened.enter_context(connection)
        self._selector = self._opened.enter_context(selectors.DefaultSelector())
        self._rest = b""  # received of a request whose end has not arrived
        self._fds = array.array("i")  # received for the next rank
        self._other: socket.socket | None = None  # to the server that imports what the script does
        self._other_pid = 0
        self._others: set[int] = set()  # process ids of all other servers that have not been found ended
        self._prepared = False  # the other server has imported it, and starts the ranks
        self._request: dict[str, Any] = {}  # what it imports
        self._unprepared = ""  # why it does not import all of it

    def run(self) -> NoReturn:
        """Serve until the launcher closes its end of the socket."""
        for number in HANDLED_SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # a stop signal ends the launcher, which closes the socket
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)  # blocked while a new interpreter started
        wakeup, write_end = socket.socketpair()
        for end in (wakeup, write_end):
            end.setblocking(False)
            self._opened.enter_context(end)
        signal.set_wakeup_fd(write_end.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self._selector.register(self._connection, selectors.EVENT_READ)
        self._selector.register(wakeup, selectors.EVENT_READ)
        while True:
            ready = self._selector.select()
            for key, _ in ready:
                if key.fileobj is wakeup:
                    with contextlib.suppress(BlockingIOError):
                        wakeup.recv(4096)
                    self._reap()
                elif key.fileobj is self._other:
                    self._pass_on(self._other)
                else:
                    self._serve()

    def _serve(self) -> None:
        """Do what the requests say whose ends have arrived: several, since `prepare` does not wait for an answer."""
        data, ancillary, _, _ = self._connection.recvmsg(_CHUNK, socket.CMSG_SPACE(3 * 4))
        if not data:
            os._exit(0)
        for _, _, content in ancillary:
            self._fds.frombytes(content)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if "statements" in request:
                self._request = request
                self._prepare()
            else:
                self._launch(request)

    def _launch(self, request: dict[str, Any]) -> None:
        fds, self._fds = self._fds, array.array("i")
        if self._other and self._prepared:
            with contextlib.suppress(BrokenPipeError):  # it was killed, which `_reap` finds
                _send(self._other, json.dumps(request).encode() + b"\n", fds)
            for fd in fds:
                os.close(fd)
            return
        try:
            pid = os.fork()
        except OSError as error:
            answer = {"refused": error.errno or errno.EAGAIN}
        else:
            if pid == 0:
                self._become_rank(request, list(fds))
            with contextlib.suppress(PermissionError, ProcessLookupError):  # it has executed a program, or has ended
                os.setpgid(pid, pid)  # as the rank itself does, so that the group exists when the launcher hears of it
            answer = {"started": pid}
        for fd in fds:
            os.close(fd)
        self._tell(**answer)

    def _prepare(self) -> None:
        """Fork a server that executes the statements of the request."""
        ours, theirs = socket.socketpair()
        try:
            pid = os.fork()
        except OSError as error:  # the ranks go on
            ours.close()
            theirs.close()
            self._unprepared = self._unprepared or _why_no_fork(error.errno or errno.EAGAIN)
            self._tell_unprepared()
            return
        if pid == 0:
            ours.close()
            self._become_prepared(theirs)
        theirs.close()
        self._other, self._other_pid = ours, pid
        self._others.add(pid)
        self._opened.enter_context(ours)
        self._selector.register(ours, selectors.EVENT_READ)

    def _become_prepared(self, connection: socket.socket) -> NoReturn:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            host.die_with_parent(self._pid)
            self._opened.close()
            for fd in self._fds:
                os.close(fd)
            count, why = _without_output(self._import)
            connection.sendall(json.dumps({"safe": count, "why": why}).encode() + b"\n")
            if not why:
                gc.freeze()
                _Server(connection, fork=True).run()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)

    def _import(self) -> tuple[int, str]:
        asked, score = self._request, _OOM_SCORE.read_text()
        _OOM_SCORE.write_text("1000")  # where memory is short, the kernel ends this process and no rank
        found = imports.execute(
            asked["statements"], asked["command"], asked["folder"], asked["environment"], why_unsafe
        )
        _OOM_SCORE.write_text(score)
        return found

    def _pass_on(self, other: socket.socket) -> None:
        """Pass on what the other server answers, or take what it has found: it serves, or another one is tried."""
        data = b""
        while not data.endswith(b"\n"):
            more = _received(other)
            if not more:
                break
            data += more
        if self._prepared:
            if not data:
                _end_as(os.waitpid(self._other_pid, 0)[1])
            self._connection.sendall(data)
            return
        statements = self._request["statements"]
        killed = {"safe": 0, "why": f"the process that tried `{statements[0]}` was killed"}
        found: dict[str, Any] = json.loads(data) if data else killed
        if not found["why"] and self._other_pid not in self._others:
            found = killed  # after its answer, and before it has started ranks
        self._unprepared = self._unprepared or found["why"]
        if not found["why"]:
            self._prepared = True
        else:
            self._selector.unregister(other)
            other.close()
            self._other = None
            self._request["statements"] = statements[: found["safe"]]
            if found["safe"]:
                self._prepare()
                return
        self._tell_unprepared()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._prepared and pid == self._other_pid:
                _end_as(status)
            if pid in self._others:
                self._others.remove(pid)  # a rank may get this number
            else:
                self._tell(exited=pid, status=status)

    def _tell_unprepared(self) -> None:
        self._tell(unprepared=self._unprepared)

    def _tell(self, **values: int | str) -> None:
        self._connection.sendall(json.dumps(values).encode() + b"\n")

    def _become_rank(self, request: dict[str, Any], fds: list[int]) -> NoReturn:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (*HANDLED_SIGNALS, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.setpgid(0, 0)
            if self._fork or platform.LINUX:  # else the new interpreter does it
                host.die_with_parent(self._pid)
            self._opened.close()
            stdin = os.open(os.devnull, os.O_RDONLY)
            for target, source in enumerate((stdin, *fds[:2])):
                os.dup2(source, target)
            for fd in (stdin, *fds[:2]):
                os.close(fd)
            os.set_inheritable(fds[2], True)
            os.environ.update(request["environment"], FLK_REPORT_FD=str(fds[2]))
            os.chdir(request["folder"])
            if not self._fork:
                python = [sys.executable, "-u", "-m", "flk_runtime.launcher.rank_process", *request["command"]]
                os.execv(sys.executable, python)
            os.set_inheritable(fds[2], False)
            code = _run_forked(request["command"])
        except BaseException:
            traceback.print_exc()
        finally:
            # sys.exit would unwind into the server's own frames.
            os._exit(code)


def _end_as(status: int) -> NoReturn:
    """End this process after the server that starts the ranks, and them with it, has ended with ``status``."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(1)


def _why_ended(server: int) -> str:
    """How the fork server has ended, whose end of the socket is closed."""
    code = os.waitstatus_to_exitcode(os.waitpid(server, 0)[1])
    if code < 0:
        return f"the fork server was killed by {signal_name(-code)}"
    return "the fork server has ended with an exception, which is a bug in flk: it is in the log of this pod"


def _why_no_fork(number: int) -> str:
    limit = ", as at a limit of processes (pids.max of the pod, ulimit -u)" if number == errno.EAGAIN else ""
    return f"no process can be made: {os.strerror(number)}{limit}"


def _without_output(function: Callable[[], T]) -> T:
    """Call a function while what this process prints goes nowhere."""
    kept = [os.dup(1), os.dup(2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for target in (1, 2):
            os.dup2(nowhere, target)
        return function()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for target, source in enumerate(kept, 1):
            os.dup2(source, target)
        for fd in (nowhere, *kept):
            os.close(fd)


def _run_forked(command: Sequence[str]) -> int:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    draw_anew()
    return rank_process.run_exit_handlers(rank_process.run(command))


def draw_anew() -> None:
    """Draw anew the random values that modules drew at their import, which all ranks and attempts share after the fork.

    Python draws anew after a fork for ``random``, and so do ``tempfile`` and ``uuid``; torch seeds the generators of
    GPUs when it first uses them. The seed of Python's hashes cannot be drawn again.
    """
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()
    if numpy := sys.modules.get("numpy.random"):
        numpy.seed()
    if sympy := sys.modules.get("sympy.core.random"):  # torch._dynamo imports it; it has two generators
        sympy.seed()
    if process := sys.modules.get("multiprocessing.process"):
        process.current_process().authkey = os.urandom(32)


def why_unsafe(process: Path = Path("/proc/self")) -> str | None:
    """The reason why a fork of this process must not become a rank; None if it may.

    ``process`` is the process's folder in /proc.
    """
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_initialized():
        return "CUDA is initialized already"
    for number in os.listdir(process / "fd"):
        with contextlib.suppress(OSError):
            if os.readlink(process / "fd" / number).startswith("/dev/nvidia-uvm"):  # opened by cuInit, not by NVML
                return "CUDA is initialized already"
    if _count_threads(process) == 1:
        return None
    # OpenBLAS (NumPy's) starts threads when it is imported and ends them before a fork. The threads that are left after
    # a fork count.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python >= 3.12 warns of threads
        pid = os.fork()
        if pid == 0:
            os._exit(0)
    os.waitpid(pid, 0)
    extra = _count_threads(process) - 1
    return f"{plural(extra, 'extra thread')} {'makes' if extra == 1 else 'make'} a fork unsafe" if extra > 0 else None


def _count_threads(process: Path) -> int:
    """The number of threads that a fork must not have: the main one counts, and those that are safe do not."""
    number = 0
    for task in (process / "task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            number += (task / "comm").read_text().strip() != _SAFE_THREAD
    return number


def preload(script: Path | None, strategy: str = "", *, makes_steps: bool = True) -> None:
    """Import the modules that the ranks will need. Modules that are not installed are skipped, except torch itself.

    The modules that optimizers need are imported if the text of ``script`` contains ``optim`` or there is no script.
    The modules for sharding are imported if the script contains ``shard`` or the job's ``strategy`` shards or may do
    so. The modules of flk's library are imported if the script contains ``flk_runtime``. Ranks that make no steps of
    training need torch alone.
    """
    text = script.read_bytes() if script else b"optim" * makes_steps
    may_shard = makes_steps and (strategy == AUTO or ("shard" in strategy and strategy != "no_shard"))
    shards = b"shard" in text or may_shard
    names = PRELOAD + PRELOAD_FOR_OPTIMIZERS * (b"optim" in text) + PRELOAD_FOR_SHARDING * shards
    names += PRELOAD_FOR_LIBRARY * (b"flk_runtime" in text)
    # Imports make hardly any garbage. Collecting it takes a tenth of the time of torch's import, a quarter of Dynamo's.
    gc.disable()
    try:
        for name in names:
            try:
                importlib.import_module(name)
            except ImportError:
                if name == "torch":
                    raise
    finally:
        gc.enable()


if __name__ == "__main__":
    sys.path.pop(0)  # -m puts the working folder there
    if platform.LINUX:  # elsewhere it ends when the launcher's end of the socket is closed
        host.die_with_parent(int(sys.argv[2]))
    _Server(socket.socket(fileno=int(sys.argv[1])), fork=False).run()
