"""A process that has imported torch once and forks the ranks of every attempt from it.

Importing torch takes a second of a core for each rank and each attempt; a fork takes a few milliseconds. The server is
a process of its own, and not the launcher, because it has to be free of threads and open stores: a rank inherits
nothing but the imported modules. It never touches CUDA, so that each rank can.

Where forking is switched off (FLK_START=spawn), or what was imported has made it unsafe, the server is a fresh
interpreter itself and starts each rank as another.
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from flk_runtime.launcher import worker as rank
from flk_runtime.system import host

PRELOAD = ("torch", "torch.distributed", "torch.nn.parallel", "torch.utils.data", "numpy")
# What every optimizer of torch imports when it is made: a second for each rank and each attempt, if not done before.
PRELOAD_FOR_OPTIMIZERS = ("torch._dynamo",)
# What the sharding strategies import: half a second.
PRELOAD_FOR_SHARDING = ("torch.distributed.fsdp", "torch.distributed.tensor")
_MESSAGE = 1 << 20
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Exited:
    """A rank's process has ended with this wait status (see os.waitstatus_to_exitcode)."""

    pid: int
    status: int


class ServerDiedError(ConnectionError):
    """The fork server was killed, and its ranks with it."""


class ForkServer:
    """The launcher's end of the server. ``socket`` becomes readable when a rank has ended."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.socket = connection
        self._early: list[Exited] = []  # ended while `launch` waited for its answer

    @classmethod
    def start(cls, *, fork: bool) -> ForkServer:
        """Start the server, whose ranks are forks of this process or (not ``fork``) fresh interpreters.

        To be forked, this process must not have opened stores yet, and `unsafe` must find nothing.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE)
        parent = os.getpid()
        if fork:
            # What has been imported is not garbage. Looked at, its pages would be copied in every rank, one by one.
            gc.freeze()
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                ours.close()
                host.die_with_parent(parent)
                _Server(theirs, fork=True).run()
        else:
            # Not a fork that goes on: this process may have threads, and locks that they hold.
            theirs.set_inheritable(True)
            python = [sys.executable, "-m", "flk_runtime.launcher.forkserver", str(theirs.fileno()), str(parent)]
            pid = os.posix_spawn(sys.executable, python, os.environ, setsigmask=_STOP_SIGNALS)
        theirs.close()
        return cls(pid, ours)

    def launch(
        self, command: Sequence[str], environment: Mapping[str, str], folder: str, stdout: int, stderr: int, report: int
    ) -> int:
        """Start one rank in a process group of its own, and return its process id. The three descriptors are copied."""
        request = {"command": list(command), "environment": dict(environment), "folder": folder}
        fds = array.array("i", [stdout, stderr, report])
        with contextlib.suppress(BrokenPipeError):  # `_receive` says so
            self.socket.sendmsg([json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        while True:
            answer = self._receive()
            if "started" in answer:
                return int(answer["started"])
            self._early.append(Exited(int(answer["exited"]), int(answer["status"])))

    def ended(self) -> Exited:
        """The next rank that has ended. Call when ``socket`` is readable or ``pending`` is true."""
        if self._early:
            return self._early.pop(0)
        answer = self._receive()
        return Exited(int(answer["exited"]), int(answer["status"]))

    @property
    def pending(self) -> bool:
        """Whether ``ended`` has something that ``socket`` no longer shows."""
        return bool(self._early)

    def _receive(self) -> dict[str, Any]:
        try:
            data = self.socket.recv(_MESSAGE)
        except ConnectionResetError:
            data = b""
        if not data:
            raise ServerDiedError("the fork server was killed")
        answer: dict[str, Any] = json.loads(data)
        return answer


class _Server:
    def __init__(self, connection: socket.socket, *, fork: bool) -> None:
        self._connection = connection
        self._fork = fork

    def run(self) -> NoReturn:
        """Serve until the launcher goes away."""
        for number in _STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # the launcher decides; it ends the server by closing the socket
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)  # blocked while a fresh interpreter came up
        wakeup, alarm = socket.socketpair()
        for end in (wakeup, alarm):
            end.setblocking(False)
        signal.set_wakeup_fd(alarm.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, selectors.EVENT_READ)
            selector.register(wakeup, selectors.EVENT_READ)
            while True:
                ready = selector.select()
                for key, _ in ready:
                    if key.fileobj is wakeup:
                        with contextlib.suppress(BlockingIOError):
                            wakeup.recv(4096)
                        self._reap()
                    else:
                        self._serve()

    def _serve(self) -> None:
        data, ancillary, _, _ = self._connection.recvmsg(_MESSAGE, socket.CMSG_SPACE(3 * 4))
        if not data:
            os._exit(0)
        fds = array.array("i")
        for _, _, content in ancillary:
            fds.frombytes(content)
        pid = os.fork()
        if pid == 0:
            self._become_rank(json.loads(data), list(fds))
        for fd in fds:
            os.close(fd)
        self._connection.send(json.dumps({"started": pid}).encode())

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._connection.send(json.dumps({"exited": pid, "status": status}).encode())

    def _become_rank(self, request: dict[str, Any], fds: list[int]) -> NoReturn:
        code = 1
        try:
            server = os.getppid()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.setpgid(0, 0)
            host.die_with_parent(server)
            self._connection.close()
            stdin = os.open(os.devnull, os.O_RDONLY)
            for target, source in enumerate((stdin, *fds[:2])):
                os.dup2(source, target)
            for fd in (stdin, *fds[:2]):
                os.close(fd)
            os.set_inheritable(fds[2], True)
            os.environ.update(request["environment"], FLK_REPORT_FD=str(fds[2]))
            os.chdir(request["folder"])
            if not self._fork:
                python = [sys.executable, "-u", "-m", "flk_runtime.launcher.worker", *request["command"]]
                os.execv(sys.executable, python)
            os.set_inheritable(fds[2], False)
            code = _run_forked(request["command"])
        finally:
            # As the interpreter does at its end; `exit` alone would unwind into the server's own frames.
            os._exit(code)


def _run_forked(command: Sequence[str]) -> int:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if "numpy.random" in sys.modules:
        # Its generator was seeded before the fork; without this all ranks would draw the same numbers.
        sys.modules["numpy.random"].seed()
    rank.keep_groups()
    return rank.finish(rank.run(command))


def unsafe(process: Path = Path("/proc/self")) -> str | None:
    """Why this process must not be forked to become a rank, as words after "because"; None where it may be."""
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_initialized():
        return "CUDA is in use already"
    for number in os.listdir(process / "fd"):
        with contextlib.suppress(OSError):
            if os.readlink(process / "fd" / number).startswith("/dev/nvidia-uvm"):  # opened by cuInit, not by NVML
                return "CUDA is in use already"
    if _threads(process) == 1:
        return None
    # OpenBLAS (NumPy's) starts threads when it is imported and ends them before a fork, so what counts is what one
    # leaves over.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python >= 3.12: of threads, which is what is asked here
        pid = os.fork()
        if pid == 0:
            os._exit(0)
    os.waitpid(pid, 0)
    more = _threads(process) - 1
    return f"{more} {'thread runs' if more == 1 else 'threads run'} already" if more > 0 else None


def _threads(process: Path) -> int:
    return len(os.listdir(process / "task"))


def preload(script: Path | None, strategy: str = "") -> None:
    """Import what the ranks will need; a module that is not there is theirs to miss, except torch itself.

    ``script`` is looked at for the words ``optim`` and ``shard``, where there is one: a job that has no optimizer
    should not wait for what only optimizers need. ``strategy`` is what the job asks for.
    """
    text = script.read_bytes() if script else b"optim"
    shards = b"shard" in text or ("shard" in strategy and strategy != "no_shard")
    names = PRELOAD + PRELOAD_FOR_OPTIMIZERS * (b"optim" in text) + PRELOAD_FOR_SHARDING * shards
    # What an import makes stays. Looking for garbage in it takes a tenth of torch's time, and a quarter of Dynamo's.
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
    host.die_with_parent(int(sys.argv[2]))
    _Server(socket.socket(fileno=int(sys.argv[1])), fork=False).run()
