"""How a rank failed, from its report, or from its exit code and its last lines on stderr."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flk_runtime.contract import foreign
from flk_runtime.contract.failure import Failure, Kind, kind_of_end, kind_of_text, with_advice
from flk_runtime.contract.foreign import Time
from flk_runtime.contract.secrets import hidden
from flk_runtime.system.text import last_exception

_STDERR_LINES = 20  # that are kept
# In what faulthandler writes: frames that started the script, and a list of all extension modules; torch's C++ frames.
_NOISE = re.compile(
    r"\s*$|Extension modules: |frame #\d+: "
    r'|  File ".*flk_runtime/(launcher/[\w/]+|__main__)\.py"|  File "<frozen runpy>"'
)
# Lines on stderr of a process that a signal has ended, from the most to the least telling: a line of std::terminate,
# a line of Python or the C library before they abort (not faulthandler's name of the signal), the innermost frame.
_LAST_WORDS = (
    re.compile(r"\s*what\(\): "),
    re.compile(r"Fatal Python error: (?!Aborted|Segmentation fault|Bus error|Floating point|Illegal instruction)"),
    re.compile(r".*: Assertion .* failed\.|\*\*\* .+ \*\*\*: terminated"),
    re.compile(r"(double free or corruption|corrupted |(free|malloc|realloc|munmap_chunk|malloc_consolidate)\(\): )"),
    re.compile(r'  File ".+", line \d+ in '),
)
_TERMINATED = "terminate called "
_CRASH = re.compile(r"^(terminate called |Fatal Python error: )", re.MULTILINE)  # a process that aborts writes this
_THROWN = re.compile(r"^terminate called after throwing an instance of '(?:\w+::)*(\w+)'", re.MULTILINE)
_TRAILING_LINES = 2  # that may follow the traceback which ended a process


@dataclass(frozen=True)
class _Report:
    """What a rank reports; its fields but ``output`` are those of a failure. None: it does not say."""

    kind: Kind
    type: str | None = None
    message: str | None = None
    traceback: str | None = None
    time: Time | None = None
    exit_code: int | None = None
    output: str = ""


def is_crash(stderr: str) -> bool:
    """Return whether a process has written to stderr that it aborts. It may take seconds to end after that."""
    return _CRASH.search(stderr) is not None


def from_report(failure: Failure, report: bytes, secrets: Sequence[str] = ()) -> tuple[Failure, str] | None:
    """``failure`` with the fields of a rank's report (`flk_runtime.shared.failure_report`); None if it is no report.

    With it comes the text about the exception that the rank leaves to the launcher to print; it may be empty. The
    failure is without ``secrets``.
    """
    try:
        found = foreign.load(_Report, report)
    except foreign.ForeignError:
        return None
    fields = {name: value for name, value in vars(found).items() if name != "output" and value is not None}
    fields |= {name: hidden(fields[name], secrets) for name in ("message", "traceback") if name in fields}
    return replace(failure, **fields), found.output


def from_exit_code(failure: Failure, code: int, stderr: str, *, oom: bool) -> Failure:
    """``failure`` with the exit code of the rank's process, negative for a signal, and its last 20 lines on stderr.

    ``oom`` says whether the kernel has killed a process of this pod at its memory limit. NCCL's watchdog aborts the
    process with SIGABRT where the connection to a peer broke, which is secondary, and where the GPU is lost.
    """
    lines = [line for line in stderr.splitlines() if not _NOISE.match(line)][-_STDERR_LINES:]
    failure = replace(failure, stderr="\n".join(lines))
    if code >= 0:
        ended = last_exception("\n".join(lines)) if code else ""
        message = ended if ended in lines[-1 - _TRAILING_LINES :] else ""
        return replace(failure, kind=kind_of_end(code, None), exit_code=code, message=message)
    kind = kind_of_end(None, -code)
    if oom and code == -signal.SIGKILL:
        kind = Kind.OOM
    elif code == -signal.SIGABRT:
        ended = stderr[max(0, stderr.rfind(_TERMINATED)) :]  # earlier lines are of what the rank has survived
        thrown, told = _THROWN.search(ended), kind_of_text("", ended)
        if told.meaning.secondary or (thrown and told is Kind.GPU):
            kind = told
        if thrown and told is Kind.GPU:
            failure = replace(failure, type=thrown[1])
    words = [
        line.strip().removeprefix("what():").strip() for words in _LAST_WORDS for line in lines if words.match(line)
    ]
    return replace(failure, kind=kind, signal=-code, message=with_advice(words[0]) if words else "")
