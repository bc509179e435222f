"""The text of `flk profile`: what the steps of a rank took, and the operators that took most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from flk.cli.output import table
from flk.cli.screen import cut
from flk.terminal import printable_lines
from flk_runtime.contract.quantities import plural

if TYPE_CHECKING:
    from flk.jobs.profiling import Operator, TraceSummary

_OPERATORS: Final = 10  # of the CPU, and of the GPU, that are shown
_NAME: Final = 60  # characters of an operator's name


def profile_text(rank: int, pod: str, answer: Mapping[str, Any], summary: TraceSummary) -> str:
    """Return the summary of one rank. ``answer`` comes from `flk_runtime.profiling.rank`."""
    mean = summary.seconds / summary.steps
    last = answer["first_step"] + summary.steps - 1
    lines = [
        f"rank {rank} in {pod}: {plural(summary.steps, 'step')} ({answer['first_step']} to {last}), "
        f"{_time(mean)} a step, the longest {_time(summary.longest)}",
        "  " + ", ".join(_shares(summary)),
        f"  {_overhead(answer, mean)}",
    ]
    for what, operators in (("CPU", summary.cpu), ("GPU", summary.gpu)):
        if operators:
            lines += ["", *_operators(what, operators, summary.steps)]
    return printable_lines(lines)


def _shares(summary: TraceSummary) -> list[str]:
    parts = [
        f"{summary.communication:.0%} communication",
        f"{summary.data_wait:.0%} waiting for data",
        f"{summary.outside:.0%} outside of operators",
    ]
    return [*parts, f"GPU {summary.gpu_busy:.0%} busy"] if summary.gpu_busy is not None else parts


def _overhead(answer: Mapping[str, Any], mean: float) -> str:
    """Return what the profiler cost: longer steps, and the time in which it held up the training."""
    before = answer["step_seconds_before"]
    share = mean / before - 1 if before else 0.0
    step = f"{share:+.0%} a step against" if share > 0 else "steps are no longer than the"
    longer = f"{step} {_time(before)} before, " if before else ""
    return f"overhead of the profiler: {longer}{_time(answer['pause_seconds'])} to begin and end"


def _operators(what: str, operators: Sequence[Operator], steps: int) -> list[str]:
    rows = [
        [cut(each.name, _NAME), f"{each.calls / steps:.4g}", _time(each.seconds / steps), f"{each.share:.1%}"]
        for each in operators[:_OPERATORS]
    ]
    found = table([f"{what} OPERATOR", "CALLS/STEP", "SELF TIME/STEP", "SHARE"], rows)
    left = len(operators) - _OPERATORS
    return [*found, f"and {left} more"] if left > 0 else found


def _time(seconds: float) -> str:
    """Return a time with three digits: 12.3 ms."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
