"""complete_at_the_end(): the end of a process waits for the checkpoints that it writes, and leaves open trainings."""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import sys
from multiprocessing.util import Finalize
from typing import Final

from flk_runtime.checkpoint.manager import CheckpointManager
from flk_runtime.contract import ExitCode
from flk_runtime.shared import failure_report
from flk_runtime.training.process import Training, current

_NO_FAILURE: Final = (None, 0, ExitCode.PREEMPTED)  # codes of SystemExit; with the last one other ranks end too


def complete_at_the_end(manager: CheckpointManager, training: Training | None = None) -> None:
    """Have the end of this process wait for the writes of ``manager``, and leave its ``training``."""
    if current.id != os.getpid():
        current.id = os.getpid()
        current.writers.clear()  # they are of the process that this one was forked from
        if multiprocessing.parent_process() is not None:  # such a process does not use atexit
            Finalize(None, _end, exitpriority=0)
    current.writers.setdefault(manager, training)


def forget(manager: CheckpointManager) -> None:
    """Neither wait for ``manager`` any more nor leave its training: it is closed, or another one is in its place."""
    current.writers.pop(manager, None)


def has_failed() -> bool:
    """Whether the script has failed, at the end of this process or in the handling of its exception."""
    error = sys.exc_info()[1]  # that ends a process of multiprocessing
    raised = hasattr(sys, "last_type") or hasattr(sys, "last_value")  # by Python, or by flk's launcher
    return raised or failure_report.exits_with_failure or (error is not None and not ends_without_failure(error))


def ends_without_failure(error: BaseException | None) -> bool:
    """Whether an exception ends the process as one that has done its work, or has stopped with the other ranks."""
    return isinstance(error, SystemExit) and error.code in _NO_FAILURE


@atexit.register
def _end() -> None:
    """Wait for writes, and leave trainings that nothing has closed. Leaving does not wait: other ranks may be gone."""
    if current.id != os.getpid():
        return
    _complete()  # before trainings are left: a write may need the process group
    for training in filter(None, [*current.writers.values()]):
        training.abandon()
    current.writers.clear()  # a spawned process comes here twice, and forgets in between that it has failed


def end_write(manager: CheckpointManager, training: Training | None, *, failed: bool) -> None:
    """Wait for what ``manager`` writes, and say what an open ``training`` has not saved. Raises CheckpointError.

    If this rank has ``failed``, other ranks may go on: nothing new is written, which would need them, and an error is
    printed only.
    """
    if not failed:
        if training is not None:
            training.end_step()
        manager.wait(at_end=True)
        if training is not None:
            training.say_unsaved()
        return
    try:
        manager.finish_write()
    except Exception as error:
        print(f"flk: {error}", file=sys.stderr, flush=True)


def _complete() -> None:
    """Wait for writes, unless the script has raised an exception: other ranks may be gone then.

    A line says what an open run or loop has not saved, which only all ranks together could save.

    If one fails, this process reports it and ends with code 1, which an exception does not achieve here. Functions that
    were registered with atexit before this module was imported are not called then, but for the end of logging.
    """
    failed = failure_report.exits_with_failure
    if has_failed() and not failed:
        return
    errors = []
    for manager, training in current.writers.items():
        try:
            end_write(manager, training, failed=failed)
        except Exception as error:
            errors.append(error)
    if errors:
        failure_report.send(failure_report.describe(errors[0]))
        for stream, text in ((sys.stdout, ""), (sys.stderr, "".join(map(failure_report.format_error, errors)))):
            with contextlib.suppress(OSError, ValueError):
                stream.write(text)
                stream.flush()
        logging.shutdown()
        os._exit(1)
