"""The fork server: a process that has imported torch once and forks the ranks of every attempt.

An import of torch takes a second of CPU time for each rank and attempt; a fork takes a few milliseconds. The server is
not the launcher itself, because it must have neither threads nor open stores: ranks inherit only the imported modules.
What it imports is decided once, before it starts (`preload`), because a process that serves cannot try an import: it
cannot undo one that has started a thread. The server never uses CUDA, because CUDA cannot be used after a fork.

With FLK_START=spawn, on macOS, or if the imported modules make a fork unsafe, the server is a new Python interpreter
and starts another new one for each rank.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import selectors
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NoReturn

from flk_runtime.contract import pod_layout
from flk_runtime.contract.failure import Kind, signal_name
from flk_runtime.contract.quantities import plural
from flk_runtime.errors import RuntimeFailure
from flk_runtime.launcher.control import STOP_SIGNALS
from flk_runtime.launcher.processes import preload, rank_process
from flk_runtime.system import host

# jemalloc's own thread, which pyarrow starts when it is imported: jemalloc prepares it for forks (pthread_atfork).
_SAFE_THREAD = "jemalloc_bg_thd"


@dataclass(frozen=True)
class Exited:
    """A rank's process has ended."""

    pid: int
    status: int  # for os.waitstatus_to_exitcode


class ServerDiedError(RuntimeFailure):
    """The fork server has ended, and its ranks with it."""

    kind = Kind.LOST


class ForkServer:
    """The launcher's client of the fork server. ``connection`` becomes readable when a rank has ended."""

    def __init__(self, connection: Connection, pid: int) -> None:
        """``pid`` is the process id of the server at the other end of ``connection``; see `start`."""
        self.connection = connection
        self.pid = pid
        self._exited: list[Exited] = []  # received while `launch` waited for its answer

    @classmethod
    def start(cls, *, fork: bool, inherited: Sequence[socket.socket] = ()) -> ForkServer:
        """Start the server. Ranks are forks of this process or, if ``fork`` is false, new Python interpreters.

        ``inherited`` are sockets of this process, which ranks must not have. To fork, this process must not have opened
        stores, and `why_unsafe` must return None.
        """
        ours, theirs = Pipe()
        parent = os.getpid()
        if fork:
            # A garbage collection in a rank would write to all imported objects, so that their pages are copied.
            gc.freeze()
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                try:
                    ours.close()
                    for end in inherited:
                        end.close()
                    host.die_with_parent(parent)
                    _Server(theirs, fork=True).run()
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(1)  # an exception would unwind into the launcher's frames, which write its record
        else:
            # posix_spawn and not fork: this process may have threads that hold locks.
            os.set_inheritable(theirs.fileno(), True)
            python = [
                sys.executable,
                "-m",
                "flk_runtime.launcher.processes.forkserver",
                str(theirs.fileno()),
                str(parent),
            ]
            pid = os.posix_spawn(sys.executable, python, os.environ, setsigmask=STOP_SIGNALS)
        theirs.close()
        return cls(ours, pid)

    def launch(
        self, command: Sequence[str], environment: Mapping[str, str], folder: str, stdout: int, stderr: int, report: int
    ) -> int:
        """Start one rank in a process group of its own, and return its process id.

        ``stdout``, ``stderr`` and ``report`` are descriptors to write to; the rank gets copies of them. Raises
        ServerDiedError, and OSError if they cannot be sent or no process can be made.
        """
        request = {"command": list(command), "environment": dict(environment), "folder": folder}
        with contextlib.suppress(BrokenPipeError):  # the server has died: `_receive` raises ServerDiedError
            with _socket_of(self.connection) as end:  # first: no request waits for descriptors that cannot be sent
                socket.send_fds(end, [b"\0"], [stdout, stderr, report])
            self.connection.send(request)
        while True:
            answer = self._receive()
            if "started" in answer:
                return int(answer["started"])
            if code := answer.get("refused"):
                limit = ", as at a limit of processes (pids.max of the pod, ulimit -u)" if code == errno.EAGAIN else ""
                raise OSError(code, f"no process can be made: {os.strerror(code)}{limit}")
            self._exited.append(Exited(**answer))  # another rank ended first

    def ended(self) -> Exited:
        """The next rank that has ended. Waits for one unless ``pending`` is true."""
        return self._exited.pop(0) if self._exited else Exited(**self._receive())

    @property
    def pending(self) -> bool:
        """Whether ``ended`` returns at once."""
        return bool(self._exited) or self.connection.poll()

    def _receive(self) -> dict[str, int]:
        try:
            answer: dict[str, int] = self.connection.recv()
        except (EOFError, ConnectionResetError):
            raise ServerDiedError(_why_ended(self.pid)) from None
        return answer


class _Server:
    """The server's own process."""

    def __init__(self, connection: Connection, *, fork: bool) -> None:
        self._connection = connection
        self._fork = fork
        self._pid = os.getpid()  # which forks know before they end with this process
        self._opened = contextlib.ExitStack()  # the files that a rank closes
        self._opened.enter_context(connection)
        self._selector = self._opened.enter_context(selectors.DefaultSelector())

    def run(self) -> NoReturn:
        """Serve until the launcher closes its end of the socket."""
        for number in STOP_SIGNALS:
            # Ctrl-C reaches all processes of a terminal. The server must outlive it: its ranks save on it, and end with
            # the server. A stop signal ends the launcher in the end, which closes the socket.
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # blocked while a new interpreter started
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
                else:
                    self._serve()

    def _serve(self) -> None:
        """Start the rank that is asked for."""
        try:
            with _socket_of(self._connection) as end:
                fds = socket.recv_fds(end, 1, 3)[1]
            request = self._connection.recv()
        except (EOFError, ConnectionResetError):
            os._exit(0)
        try:
            if len(fds) < 3:
                raise OSError(errno.EMFILE, "the server can open no more files")
            pid = os.fork()
        except OSError as error:
            answer = {"refused": error.errno or errno.EAGAIN}
        else:
            if pid == 0:
                self._become_rank(request, fds)
            # Both sides do it, as shells do: whichever runs first, the group exists before the launcher signals it.
            with contextlib.suppress(PermissionError, ProcessLookupError):  # it has executed a program, or has ended
                os.setpgid(pid, pid)
            answer = {"started": pid}
        for fd in fds:
            os.close(fd)
        self._connection.send(answer)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._connection.send({"pid": pid, "status": status})

    def _become_rank(self, request: dict[str, Any], fds: list[int]) -> NoReturn:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (*STOP_SIGNALS, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.setpgid(0, 0)
            if self._fork or pod_layout.LINUX:  # else the new interpreter does it
                host.die_with_parent(self._pid)
            self._opened.close()
            stdin = os.open(os.devnull, os.O_RDONLY)
            for target, source in enumerate((stdin, *fds[:2])):
                os.dup2(source, target)
            for fd in (stdin, *fds[:2]):
                os.close(fd)
            os.set_inheritable(fds[2], True)
            os.environ.update(request["environment"], FLK_REPORT_FD=f"{fds[2]}:{os.fstat(fds[2]).st_ino}")
            os.chdir(request["folder"])
            if not self._fork:
                # The new interpreter finds the pipe of its report by its number, so it must survive the exec.
                python = [
                    sys.executable,
                    "-u",
                    "-m",
                    "flk_runtime.launcher.processes.rank_process",
                    *request["command"],
                ]
                os.execv(sys.executable, python)
            os.set_inheritable(fds[2], False)
            code = _run_forked(request["command"])
        except BaseException:
            traceback.print_exc()
        finally:
            # sys.exit would unwind into the server's own frames, whose `finally` blocks are not this rank's.
            os._exit(code)


def _why_ended(server: int) -> str:
    """How the fork server has ended, whose end of the socket is closed."""
    code = os.waitstatus_to_exitcode(os.waitpid(server, 0)[1])
    if code < 0:
        return f"the fork server was killed by {signal_name(-code)}"
    return "the fork server has ended with an exception, which is a bug in flk: it is in the log of this pod"


@contextlib.contextmanager
def _socket_of(connection: Connection) -> Iterator[socket.socket]:
    """The socket of a connection, for what only sockets can: send and receive descriptors."""
    end = socket.socket(fileno=connection.fileno())
    try:
        yield end
    finally:
        end.detach()


def _run_forked(command: Sequence[str]) -> int:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    preload.become_own()
    return rank_process.run_exit_handlers(rank_process.run(command))


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


if __name__ == "__main__":
    sys.path.pop(0)  # -m puts the working folder there
    if pod_layout.LINUX:  # elsewhere it ends when the launcher's end of the socket is closed
        host.die_with_parent(int(sys.argv[2]))
    _Server(Connection(int(sys.argv[1])), fork=False).run()
