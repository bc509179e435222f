"""The process of a rank: it runs the user's script or module as ``__main__`` and reports its exception."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import faulthandler
import gc
import importlib.util
import inspect
import io
import os
import runpy
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import Any

from flk_runtime.contract import ExitCode, pod_layout
from flk_runtime.contract.failure import Kind
from flk_runtime.shared import failure_report, observer, optimizer_steps, progress
from flk_runtime.system import host
from flk_runtime.system.text import text_of

_C10D = "torch.distributed.distributed_c10d"
_FLUSH_SECONDS = 5.0  # that the files of a rank may take to be written at its end
_reports: list[dict[str, Any]] = []  # of a failure, to send when this rank's exit handlers have run
_FILES = frozenset({io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom})
# What Python imports before the folder of a script is on its path.
_BEFORE_PATH = frozenset(
    {"_collections_abc", "_sitebuiltins", "abc", "codecs", "encodings", "genericpath", "io", "os", "posixpath"}
    | {"site", "stat"}
)


def run(command: Sequence[str]) -> int:
    """Run the user's script or module (``-m``, name) with its arguments, and return the exit code of this process.

    An exception is reported to the launcher at once, while all connections are open. The peers notice a broken
    connection later, so their reports come after the report of the root cause. The launcher prints the traceback of a
    secondary exception, if it is not the consequence of a known cause. An exception in a process that the script has
    forked is not reported: the rank itself goes on.
    """
    rank = os.getpid()
    host.name_process(f"rank {os.environ.get('RANK', '')}")  # the ranks of a pod have one command line
    faulthandler.enable(all_threads=False)  # a fatal signal leaves the Python stack on stderr
    observer.start()
    try:
        if module := sys.modules.get(optimizer_steps.MODULE):
            optimizer_steps.count(module)
        else:  # from the script's import of torch on
            sys.meta_path.insert(0, _AfterImport(optimizer_steps.MODULE, optimizer_steps.count))
        _run(command)
    except SystemExit as exit_:
        return _exit_code(exit_, reports=os.getpid() == rank)
    except BaseException as error:
        return _fail(error, reports=os.getpid() == rank)
    finally:
        if os.getpid() == rank:
            _tell_of_groups()
    return 0


def _tell_of_groups() -> None:
    """Tell the launcher whether this rank, which ends, has ever been in a group with the others."""
    page, c10d = progress.own_page(), sys.modules.get(_C10D)
    if not page.grouped:
        # torch's hook for exceptions stays when the script has destroyed its group.
        joined = "horovod" in sys.modules or (c10d is not None and (c10d.is_initialized() or sys.excepthook != _hook()))
        page.grouped = 1 if joined else -1


def _fail(error: BaseException, *, reports: bool) -> int:
    """Report the exception that ends this process, print it, and return the exit code."""
    # A handler of torch's DataLoader raises RuntimeError when a worker has died, wherever the rank is then.
    for _ in range(2):
        with contextlib.suppress(Exception):  # what the handler raises for a signal that has come already
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sys.last_value = error  # keeps the frames and their objects until the process ends, see _run
    hook = _hook()
    if reports:
        report = failure_report.describe(error)
        left_to_launcher = Kind(report["kind"]).meaning.secondary and hook is sys.__excepthook__
        failure_report.send(report | {"output": failure_report.format_error(error)} if left_to_launcher else report)
        said_elsewhere = getattr(error, "everywhere", False) and os.environ.get("LOCAL_RANK") != "0"
        if left_to_launcher or said_elsewhere:
            return 1
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    try:
        with contextlib.suppress(SystemExit):  # of a hook that ends the process
            hook(type(error), error.with_traceback(failure_report.user_frames(error)), error.__traceback__)
    except Exception:
        sys.__excepthook__(type(error), error, error.__traceback__)
    return 1


def _hook() -> Any:
    """The hook for exceptions that the script has set, or Python's.

    torch.distributed sets one around it, which prefixes each line with the rank, as the launcher does already.
    """
    hook = sys.excepthook
    while inspect.isfunction(hook) and str(hook.__module__).partition(".")[0] == "torch":
        hook = inspect.getclosurevars(hook).nonlocals.get("old_hook", sys.__excepthook__)
    return hook


class _AfterImport:
    """A finder (sys.meta_path) that calls a function with one module when the script has imported it."""

    def __init__(self, name: str, function: Callable[[types.ModuleType], None]) -> None:
        self._name = name
        self._function = function

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The spec that the other finders have for the module; None for every other module."""
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec and spec.loader:
            execute = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                self._function(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def run_exit_handlers(code: int) -> int:
    """Wait for the script's threads, run its exit handlers, end its objects and flush its output; return ``code``.

    As under Python, the destructors of the script's variables are called, unless something else holds them.
    The caller then ends with os._exit. The rest of Python's shutdown destroys torch's C++ objects while gloo's threads
    still run, which sometimes aborts a process that has succeeded.
    """
    with contextlib.suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    for report in _reports:
        failure_report.send(report)
    threading.excepthook = lambda _: None  # of threads that still run, and no longer find the script's variables
    flushed = _flush()  # before files end together with what they write to, in any order
    sys.modules.pop("__main__", None)
    with contextlib.suppress(BaseException):
        gc.collect()
    if flushed:
        _flush()
    return code


def _flush() -> bool:
    """Write what open files have in their buffers, and return whether that has come to its end.

    A thread does, since another one may hold a file for ever, as while it writes to a full pipe.
    """
    thread = threading.Thread(target=_flush_files, daemon=True)
    with contextlib.suppress(BaseException):
        try:
            thread.start()
        except RuntimeError:  # at a limit of processes
            _flush_files()
        else:
            thread.join(_FLUSH_SECONDS)
    return not thread.is_alive()


def _flush_files() -> None:
    """Write what Python's own files that are still open have in their buffers, and what C's standard output has."""
    files: list[Any] = [each for each in gc.get_objects() if type(each) in _FILES]
    files.sort(key=lambda file: not isinstance(file, io.TextIOWrapper))  # which write to the others
    for file in (sys.stdout, sys.stderr, *files):
        with contextlib.suppress(Exception):
            file.flush()
    libc = ctypes.CDLL(None)
    with contextlib.suppress(Exception):
        libc.fflush(ctypes.c_void_p.in_dll(libc, "stdout"))


def _run(command: Sequence[str]) -> None:
    """Execute the script or module in a new ``__main__`` module, which stays until the rank ends.

    Its arguments, path and attributes are as under Python. runpy would delete the script's variables before its threads
    and exit handlers have ended, which use them.
    """
    main: Any = types.ModuleType("__main__")
    sys.orig_argv[:] = [sys.executable, "-u", *command]
    sys.argv[:] = list(command)
    path = os.path.abspath(command[0])  # as in Python >= 3.9; sys.argv keeps the path as it was given
    if command[0] == "-m":
        sys.path.insert(0, os.getcwd())
        _forget_shadowed(sys.path[0])
        del sys.argv[1]  # while the packages are imported
        # ModuleNotFoundError, which is not retried, in the place of runpy's own ImportError.
        _, spec, code = runpy._get_module_details(command[1], ModuleNotFoundError)  # type: ignore[attr-defined]
        sys.argv[0] = str(spec.origin)
        main.__spec__, main.__loader__, main.__package__ = spec, spec.loader, spec.parent
        main.__file__, main.__cached__ = str(spec.origin), spec.cached
    else:
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))  # a link's target has its modules beside it
        _forget_shadowed(sys.path[0], os.path.basename(path))
        main.__file__, main.__cached__ = path, None
        main.__loader__ = SourceFileLoader("__main__", path)
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)  # or its annotations would be texts, as here
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    exec(code, main.__dict__)  # noqa: S102 - it is the user's script


def _forget_shadowed(folder: str, script: str = "") -> None:
    """Forget the modules of Python's library that modules in ``folder`` shadow, so that imports find those of the user.

    They were imported before this folder was on the path. A script's own name shadows none: it is seldom meant.
    """
    roots = {name.partition(".")[0] for name in sys.modules}.intersection(sys.stdlib_module_names)
    for root in roots - _BEFORE_PATH - {script.removesuffix(".py")}:
        spec = getattr(sys.modules.get(root), "__spec__", None)
        beside = PathFinder.find_spec(root, [folder]) if spec and spec.has_location else None
        if beside and beside.origin:
            for name in [each for each in sys.modules if each.partition(".")[0] == root]:
                del sys.modules[name]


def _exit_code(exit_: SystemExit, *, reports: bool) -> int:
    if exit_.code is None or isinstance(exit_.code, int):
        code = (exit_.code or 0) & 0xFF
    else:
        code, text = 1, text_of(exit_.code)
        print(text, file=sys.stderr)
        if reports:
            # Sent by `run_exit_handlers`: when the launcher knows of it, it ends the ranks, which may be writing.
            report = {"kind": Kind.EXIT, "type": "SystemExit", "message": text, "traceback": "", "time": time.time()}
            _reports.append(report | {"exit_code": 1})
    failure_report.exits_with_failure = code not in (0, ExitCode.PREEMPTED)
    return code


if __name__ == "__main__":
    # Start of a rank without a fork: python -m flk_runtime.launcher.processes.rank_process script.py args
    sys.path.pop(0)  # the working folder, from -m; _run inserts the folder that the script expects
    if not pod_layout.LINUX:
        host.die_with_parent(os.getppid())
    os._exit(run_exit_handlers(run(sys.argv[1:])))
