"""Choice: the strategy that `auto` stands for, by measured times of a step where there are any, else by predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from flk_plan.capture import CapturedModel
from flk_plan.communication import Cluster
from flk_plan.hardware import GPUS
from flk_plan.plan import identity, predictions, strategies_of, unmodelled
from flk_plan.predict import Prediction
from flk_runtime.contract.quantities import size_text
from flk_runtime.errors import SetupError

# A strategy that communicates less is chosen if it takes at most this factor longer.
_AS_FAST: Final = 1.01
_MEASURED_AS_FAST: Final = 1.05  # two measurements of one strategy differ, too


def choose(captured: CapturedModel, cluster: Cluster, measured: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The strategy that auto stands for, and the reason in words.

    ``measured`` are results of `flk bench`. Results of the same model and hardware win over predictions. Raises
    SetupError if there are none and the GPU has no figures, or the predictions leave something out.
    """
    steps = _matching(measured, identity(captured, cluster))
    seconds = {name: steps[name] for name in strategies_of(captured, cluster) if name in steps}
    if len(seconds) > 1:
        return _answer(seconds, "measured by flk bench", [], _MEASURED_AS_FAST)
    if not cluster.gpu.is_known:
        raise SetupError(
            f"there are no figures for a {cluster.gpu.name}, only for {', '.join(GPUS)}: `flk bench` can measure it"
        )
    if reason := next(unmodelled(captured), ""):
        raise SetupError(f"{reason}; `flk bench` can measure it")
    rows = {row.strategy: row for row in predictions(captured, cluster)}
    fits = {name: row.step_seconds for name, row in rows.items() if row.fits}
    tight = [row for row in rows.values() if not row.fits]
    if not fits:
        least = min(tight, key=lambda row: row.total)
        return {
            "strategy": least.strategy,
            "reason": f"it needs least memory, {size_text(least.total)} of {size_text(cluster.gpu.memory)}, "
            "and none fits",
        }
    return _answer(fits, "predicted", tight)


def _matching(measured: Sequence[Mapping[str, Any]], of: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of a step by strategy, of the newest result of this model and hardware."""
    for result in reversed(measured):
        if result.items() >= of.items():
            return {name: float(value) for name, value in result["seconds"].items() if value}
    return {}


def _answer(
    seconds: Mapping[str, float], how: str, tight: Sequence[Prediction], as_fast: float = _AS_FAST
) -> dict[str, str]:
    """The fastest strategy. Of several that are as fast, the first, which communicates least."""
    fastest = min(seconds.values())
    strategy = next(name for name, value in seconds.items() if value <= fastest * as_fast)
    others = [f"{name} {_time(value)}" for name, value in seconds.items() if name != strategy]
    others += [f"{row.strategy} does not fit ({size_text(row.total)})" for row in tight]
    reason = f"{_time(seconds[strategy])} for a step ({how})"
    return {"strategy": strategy, "reason": f"{reason}, {', '.join(others)}" if others else reason}


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
