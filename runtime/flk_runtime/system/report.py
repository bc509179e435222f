"""The report that a rank sends to its launcher when it ends with an exception.

The launcher reads it from a pipe, and torchrun's tools from the file that TORCHELASTIC_ERROR_FILE names.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
import types
from typing import Any

from flk_runtime import contract

_LAUNCHER = os.path.join(os.path.dirname(os.path.dirname(__file__)), "launcher", "")
_TRACEBACK_LIMIT = 6000  # characters of a traceback that go into the report

# What a rank raises when a peer has gone away: gloo, NCCL and the store name themselves in the message.
_SECONDARY_TYPES = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError", "ConnectionResetError"})
_SECONDARY_WORDS = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "NCCL",
    "Watchdog caught collective",
    "recvValue failed",
    "sendBytes failed",
)


def is_secondary(type_name: str, message: str) -> bool:
    """Whether an exception looks like a peer's end seen from here, rather than like a cause."""
    return type_name in _SECONDARY_TYPES or any(word in message for word in _SECONDARY_WORDS)


def describe(error: BaseException) -> dict[str, Any]:
    """The exception as the fields of a contract.Failure."""
    name = type(error).__name__
    message = str(error)
    lines = traceback.format_exception(type(error), error, own_frames(error.__traceback__))
    refused = getattr(error, "code", None) is contract.ExitCode.USAGE  # flk_runtime's own: it would be so again
    return {
        "kind": "usage" if refused else "exception",
        "type": name,
        "message": message,
        "traceback": "".join(lines)[-_TRACEBACK_LIMIT:],
        "time": time.time(),
        "secondary": not refused and is_secondary(name, message),  # a sentence of ours may speak of NCCL
    }


def send(report: dict[str, Any]) -> None:
    """Hand a report to the launcher, and to the file where torchrun's ranks leave theirs."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        pipe = int(os.environ[contract.REPORT_FD])
        write_all(pipe, json.dumps(report).encode() + b"\n")
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": report["traceback"], "timestamp": str(int(report["time"]))}
        content = {"message": {"message": f"{report['type']}: {report['message']}", "extraInfo": extra}}
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump(content, file)


def write_all(fd: int, data: bytes) -> None:
    """Write the whole of ``data``; where the reader has gone away the rest is dropped."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except InterruptedError:
            continue
        except OSError:
            return


def own_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback without the leading frames of the launcher and of importlib: it begins in the user's code."""
    begin = trace
    while begin is not None:
        name = begin.tb_frame.f_code.co_filename
        if not name.startswith((_LAUNCHER, "<frozen importlib")):
            return begin
        begin = begin.tb_next
    return trace
