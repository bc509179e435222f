"""A rank's own process, from its first line to the exception that it ends with."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import functools
import importlib.util
import os
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from typing import Any

from flk_runtime import contract
from flk_runtime.system import report


def run(command: Sequence[str]) -> int:
    """Run the user's script or module as ``__main__`` and return the exit code that this process ends with.

    An exception is reported to the launcher at once, before anything is closed: peers notice a broken connection only
    after that, so the report of the cause is always earlier than theirs.
    """
    try:
        _run(command)
    except SystemExit as exit_:
        return _exit_code(exit_)
    except BaseException as error:
        sys.last_value = error  # keeps what its frames hold until the process has ended, see _run
        report.send(report.describe(error))
        if isinstance(error, KeyboardInterrupt):
            return contract.ExitCode.INTERRUPTED
        # torch.distributed's own hook writes the rank before each line, which the launcher does already.
        hook = sys.__excepthook__ if sys.excepthook.__module__.startswith("torch") else sys.excepthook
        hook(type(error), error.with_traceback(report.own_frames(error.__traceback__)), error.__traceback__)
        return 1
    return 0


def keep_groups() -> None:
    """Let process groups that the script destroys live until this process ends, which it does by os._exit.

    Dropping the last reference to a gloo group (a DistributedDataParallel holds one, so that may be where a function of
    the script ends) waits, with Python's lock held, for a thread of the group's, which may wait for that lock: seen in
    torch 2.13, about once in a few hundred ends of a job.
    """
    from torch.distributed import distributed_c10d

    destroy = distributed_c10d.destroy_process_group
    kept: list[Any] = []

    @functools.wraps(destroy)
    def destroy_process_group(group: Any = None) -> None:
        kept.extend(distributed_c10d._world.pg_map)
        destroy(group)

    distributed_c10d.destroy_process_group = destroy_process_group
    sys.modules["torch.distributed"].destroy_process_group = destroy_process_group  # type: ignore[attr-defined]


def finish(code: int) -> int:
    """What the interpreter does when a script ends, up to the flush: wait for its threads, run its exit functions.

    The caller then ends with os._exit: what else the interpreter does at its end, tearing down torch's C++ objects
    while gloo's threads still run, now and then aborts a process that has done its work.
    """
    with contextlib.suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    return code


def _run(command: Sequence[str]) -> None:
    """Execute the script or module in a new ``__main__``, which stays in sys.modules for the rest of the process.

    runpy would drop the script's variables at its end, a DistributedDataParallel among them, and with it the last
    reference to a gloo group: its destructor waits, with Python's lock held, for a thread that waits for that lock.
    """
    main = types.ModuleType("__main__")
    if command[0] == "-m":
        sys.path.insert(0, os.getcwd())
        code, spec = _find(command[1])
        main.__spec__, main.__loader__, main.__package__ = spec, spec.loader, spec.parent
        path, arguments = str(spec.origin), list(command[2:])
        sys.argv[:] = [path, *arguments]
    else:
        path = command[0]
        sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec")
        sys.argv[:] = list(command)
    main.__file__ = path
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    exec(code, main.__dict__)  # noqa: S102 - what this process is for


def _find(name: str) -> tuple[types.CodeType, ModuleSpec]:
    """The code of a module, or of the __main__ of a package, as `python -m` would find it."""
    spec = importlib.util.find_spec(name)
    if spec and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    # Not isinstance(…, InspectLoader): the loader of archives, in which this package may have come, is not registered.
    get_code: Callable[[str], types.CodeType | None] | None = getattr(spec.loader, "get_code", None) if spec else None
    code = get_code(spec.name) if spec and get_code else None
    if spec is None or code is None:
        raise ModuleNotFoundError(f"no module named {name} that can be started", name=name)
    return code, spec


def _exit_code(exit_: SystemExit) -> int:
    if exit_.code is None or isinstance(exit_.code, int):
        return (exit_.code or 0) & 0xFF
    print(exit_.code, file=sys.stderr)
    report.send(
        {"kind": "exit", "type": "SystemExit", "message": str(exit_.code), "traceback": "", "time": time.time()}
    )
    return 1


if __name__ == "__main__":
    # The way a rank starts where the fork server is switched off: python -m flk_runtime.launcher.worker script.py args
    sys.path.pop(0)  # -m puts the working folder there; _run puts what the script expects
    os._exit(finish(run(sys.argv[1:])))
