"""Snapshot: the activity of a rank at one moment, as data that launchers send to each other, and how it is taken.

The stacks of this pod's ranks come by a signal, their collectives by a socket. Nothing here
waits long for a rank that does not answer: snapshots have to show ranks that are stopped, or that hold Python's lock in
native code.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from flk_runtime.launcher.settings import Settings
from flk_runtime.shared import observer
from flk_runtime.shared.observer import Pending
from flk_runtime.system import host

FRAMES: Final = 40  # of one thread that are kept, from the innermost one
OTHER_THREADS: Final = 2  # beside the main thread
_STACKS_TIMEOUT: Final = 2.0  # seconds in which a process writes its stacks
_SETTLED: Final = 0.2  # seconds without a change after which they are complete,
_LAST_FRAME: Final = " in <module>\n"  # unless the process wants to run, and this is not what they end with
_ANSWER_TIMEOUT: Final = 2.0  # seconds in which a rank tells its collectives
_WORKERS: Final = 8  # processes of a rank whose stacks are read
_WORKERS_TIMEOUT: Final = 3.0  # seconds for all of them
_OTHER_FRAMES: Final = 12  # of other threads and of processes
_TEXT_LIMIT: Final = 120  # characters of a line of source
_THREADS: Final = 16  # ranks that are looked at at the same time
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
_LAUNCHER = re.compile(r"(^|/)flk_runtime/launcher/processes/(rank_process|forkserver)\.py$")
_LIBRARY_FOLDER = re.compile(r"^.*/(site-packages|dist-packages|lib(?=/python3\.\d+/))/")
_OBSERVER = re.compile(r"(^|/)flk_runtime/shared/observer\.py$")


class Frame(NamedTuple):
    """One call on a Python stack."""

    file: str
    line: int
    function: str
    text: str = ""  # the line of source

    @property
    def place(self) -> str:
        """File, line and function."""
        return f"{self.file}:{self.line}" + (f" in {self.function}" if self.function != "<module>" else "")

    def __str__(self) -> str:
        return f"{self.place}: {self.text}" if self.text else self.place


@dataclass(frozen=True)
class Snapshot:
    """The state of one rank, its stacks and its collectives."""

    rank: int
    pod: int
    pod_name: str = ""
    node: str = ""
    state: str = ""  # of the process, as in /proc: R runs, S sleeps, D waits for a device, T is stopped
    main: tuple[Frame, ...] = ()  # stack of the main thread, innermost call first; empty if it could not be read
    threads: tuple[tuple[Frame, ...], ...] = ()  # stacks of other threads
    workers: tuple[tuple[Frame, ...], ...] = ()  # main threads of processes that the rank has started
    answers: bool = True  # the rank's observer answered: no native code holds Python's lock (GIL)
    groups: Mapping[str, int] = field(default_factory=dict)  # number of the latest collective of each group
    pending: tuple[Pending, ...] = ()

    @property
    def key(self) -> str:
        """Equal for ranks which do the same at the same place."""
        return repr([self.state == "T", [frame[:3] for frame in self.main], [str(each) for each in self.pending[:1]]])


def take(paths: Mapping[int, tuple[int, str]], settings: Settings) -> list[Snapshot]:
    """Snapshots of ranks of this pod, within 15 seconds. ``paths`` has the process and its FLK_OBSERVER, by rank."""

    def one(rank: int) -> Snapshot:
        pid, path = paths[rank]
        threads = parse_stacks(_ask_for_stacks(pid, path), settings.work)
        answer = _ask_for_collectives(path)
        workers = []
        deadline = time.monotonic() + _WORKERS_TIMEOUT
        for worker in host.descendants(pid)[:_WORKERS]:
            if time.monotonic() < deadline:
                workers += parse_stacks(_ask_for_stacks(worker, path), settings.work)[-1:]
        return Snapshot(
            rank,
            settings.pod,
            settings.pod_name,
            settings.node,
            state=_state(pid),
            main=threads[-1] if threads else (),  # faulthandler writes the main thread last
            threads=tuple(stack[:_OTHER_FRAMES] for stack in threads[:-1][:OTHER_THREADS]),
            workers=tuple(stack[:_OTHER_FRAMES] for stack in workers),
            answers=answer is not None,
            groups=answer.groups if answer else {},
            pending=answer.pending if answer else (),
        )

    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(one, paths))


def parse_stacks(text: str, folder: str = "") -> list[tuple[Frame, ...]]:
    """The stacks of all threads in the text of faulthandler, without the stack of the observer's own thread."""
    stacks: list[list[Frame]] = []
    in_launcher = False  # the frames that started the script, and all frames outside of them
    for line in text.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            stacks.append([])
            in_launcher = False
        elif stacks and (match := _FRAME.match(line)):
            in_launcher = in_launcher or bool(_LAUNCHER.search(match[1]))
            if not in_launcher and len(stacks[-1]) < FRAMES:
                stacks[-1].append(_frame(*match.groups(), folder=folder))
    return [tuple(stack) for stack in stacks if not any(_OBSERVER.search(frame.file) for frame in stack)]


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and all its descendants so far, in seconds."""
    # utime, stime, and both for ended children
    ticks = sum(int(value) for each in (pid, *host.descendants(pid)) for value in _stat(each)[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def _state(pid: int) -> str:
    """The state of a process as in /proc (R, S, D, T, Z); empty if it has ended."""
    return "".join(_stat(pid)[:1]).upper()


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name; none if the process has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return []


def _ask_for_stacks(pid: int, path: str) -> str:
    """The text that a process writes after the signal; empty if it is stopped or has no handler.

    ``path`` is FLK_OBSERVER of the rank, also for processes that the rank has started.
    """
    if not _handles_signal(pid) or _state(pid) == "T":
        return ""
    with contextlib.suppress(OSError), open(path + observer.STACKS, errors="replace") as stacks:
        stacks.seek(0, os.SEEK_END)
        os.kill(pid, observer.stack_signal())
        deadline = time.monotonic() + _STACKS_TIMEOUT
        text, changed = "", time.monotonic()
        while time.monotonic() < deadline:
            time.sleep(0.01)
            more = stacks.read()
            if more:
                text, changed = text + more, time.monotonic()
            elif text and time.monotonic() - changed > _SETTLED and (_state(pid) != "R" or text.endswith(_LAST_FRAME)):
                break
        return text
    return ""


def _handles_signal(pid: int) -> bool:
    """Return whether the process has a handler for the signal; without one the signal would end it."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name == "SigCgt":
                return bool(int(value, 16) >> (observer.stack_signal() - 1) & 1)
    return False


def _ask_for_collectives(path: str) -> observer.Collectives | None:
    """The answer of the observer of the rank with this FLK_OBSERVER; None if there is none in time."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ANSWER_TIMEOUT)
        with observer.short_path(path + observer.SOCKET) as short:
            connection.connect(short)
        connection.sendall(b"\n")
        with connection.makefile("rb") as file:
            return observer.ANSWERS.decode(file.read())
    return None


def _frame(file: str, line: str, function: str, *, folder: str) -> Frame:
    number = int(line) if line.isdigit() else 0
    text = "" if file.startswith("<") else linecache.getline(os.path.join(folder, file), number).strip()[:_TEXT_LIMIT]
    prefix = folder.rstrip("/") + "/"
    return Frame(_LIBRARY_FOLDER.sub("", file.removeprefix(prefix) if folder else file), number, function, text)
