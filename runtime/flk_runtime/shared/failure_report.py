"""A rank's report of its exception, which the launcher reads from a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import traceback
import types
from typing import Any

from flk_runtime.contract import pod_env
from flk_runtime.contract.failure import Kind, kind_of_loss, kind_of_text, with_advice
from flk_runtime.contract.quantities import plural
from flk_runtime.errors import RuntimeFailure
from flk_runtime.system import faults, host
from flk_runtime.system.text import last_exception, text_of

_CORE = os.path.dirname(os.path.dirname(__file__))
_LAUNCHER = os.path.join(_CORE, "launcher", "")
_TRACEBACK_LIMIT = 6000  # characters of a traceback that go into the report
_MESSAGE_LIMIT = 4000  # characters of a message
_WRAPPED = re.compile(r"Caught \w+ (in .+)\.\nOriginal ")  # torch/_utils.py, ExceptionWrapper
# In messages of torch's DTensor: what to do.
_OF_SHARDS = {
    "mixed torch.Tensor and DTensor|sharded tensor:": (
        "use parameter.full_tensor() on all ranks, run.load_weights() for weights, "
        "or strategy ddp; and only a call of the model gathers them, as model(x), no method or part of it, unless "
        "torch.distributed.fsdp.register_fsdp_forward_method names the method"
    ),
    "does not have a sharding strategy registered": (
        "torch lacks this operation for them, so use another one, as parameter.copy_() in the place of "
        "torch._foreach_copy_, parameter.full_tensor() on all ranks, or strategy ddp"
    ),
    r"copy_\(\) on an invalid python storage": (
        "copy.deepcopy fails for one that has a gradient, so copy parameter.detach(), or use strategy ddp"
    ),
}

exits_with_failure = False
"""Whether this process ends because the script has called `sys.exit` with a code that says that it has failed."""


def describe(error: BaseException) -> dict[str, Any]:
    """The exception as fields of a Failure. Raises nothing, whatever methods the exception has.

    A group has the type and the message of the first exception in it that counts most.
    """
    kind = faults.kind_of(error)
    leaves = faults.leaves(error)
    first = min(leaves, key=lambda leaf: (faults.kind_of(leaf) != kind, _has_secondary_cause(leaf)))
    name = type(first).__name__
    message = with_advice(_of_worker(name, text_of(first))[:_MESSAGE_LIMIT])
    advice = next((advice for words, advice in _OF_SHARDS.items() if re.search(words, message)), "")
    if advice and not isinstance(first, RuntimeFailure):
        message = f"{message.splitlines()[-1].strip()} (parallelize has sharded the parameters: {advice})"
    others = f" (and {plural(len(leaves) - 1, 'other exception')})" if len(leaves) > 1 else ""
    return {
        "kind": kind_of_loss(message) if kind.meaning.may_follow_loss and _has_secondary_cause(error) else kind,
        "type": name,
        "message": message + others + (faults.full_file_system(error) if kind is Kind.DISK_FULL else ""),
        "traceback": format_error(error)[-_TRACEBACK_LIMIT:],
        "time": time.time(),
    }


def _of_worker(name: str, message: str) -> str:
    """The message of the original exception where torch has wrapped one of a DataLoader worker or of a replica."""
    match = _WRAPPED.match(message)
    original = last_exception(message) if match else ""
    return f"{original.removeprefix(f'{name}: ')} ({match[1]})" if match and original else message


def format_error(error: BaseException) -> str:
    """The traceback and the message, as Python prints them. Raises nothing."""
    try:
        lines = traceback.format_exception(type(error), error, user_frames(error))
    except Exception:  # a method of the exception, or of one in its chain, raises
        lines = traceback.format_tb(error.__traceback__)
    return "".join(lines)


def _has_secondary_cause(error: BaseException, seen: frozenset[int] = frozenset()) -> bool:
    """Return whether the exception, or one that it was raised from, is secondary. A group is if all in it are.

    ``seen`` has the ids of the exceptions that led here: one of a group may have been raised again, from its group.
    """
    for link in faults.causes(error):
        if id(link) in seen:
            return False
        seen |= {id(link)}
        if faults.members(link):
            # A group is often raised from one of its own exceptions, which does not decide for the others.
            return all(_has_secondary_cause(leaf, seen) for leaf in faults.leaves(link))
        if kind_of_text(type(link).__name__, text_of(link)).meaning.secondary:
            return True
    return False


def send(report: dict[str, Any]) -> None:
    """Send a report, as from `describe`, to flk's launcher, where it has started this rank.

    A script may have closed all descriptors. Then a file of its own may have the number.
    """
    with contextlib.suppress(OSError, ValueError, KeyError):
        pipe, inode = map(int, os.environ[pod_env.REPORT_FD].split(":"))
        if os.fstat(pipe).st_ino == inode:
            host.write_all(pipe, json.dumps(report).encode() + b"\n")


def user_frames(error: BaseException) -> types.TracebackType | None:
    """The exception's traceback without its leading frames in the launcher and in importlib.

    It starts in user code. Without any, as for a bug of flk, it is whole, but a SyntaxError says itself where it is.
    """
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename.startswith((_LAUNCHER, "<frozen importlib")):
        trace = trace.tb_next
    return trace if trace or isinstance(error, SyntaxError) else error.__traceback__
