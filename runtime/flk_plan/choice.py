"""Choice: the strategy that `auto` stands for, by the predicted times of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from flk_plan.capture import CapturedModel
from flk_plan.communication import Cluster
from flk_plan.hardware import GPUS
from flk_plan.plan import predictions, unmodelled
from flk_plan.predict import Prediction
from flk_runtime.contract.quantities import size_text
from flk_runtime.errors import SetupError

# A strategy that communicates less is chosen if it takes at most this factor longer.
_AS_FAST: Final = 1.01


def choose(captured: CapturedModel, cluster: Cluster) -> dict[str, str]:
    """The strategy that auto stands for, and the reason in words.

    Raises SetupError if the GPU has no figures, or the predictions leave something out.
    """
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
    return _answer(fits, tight)


def _answer(seconds: Mapping[str, float], tight: Sequence[Prediction]) -> dict[str, str]:
    """The fastest strategy. Of several that are as fast, the first, which communicates least."""
    fastest = min(seconds.values())
    strategy = next(name for name, value in seconds.items() if value <= fastest * _AS_FAST)
    others = [f"{name} {_time(value)}" for name, value in seconds.items() if name != strategy]
    others += [f"{row.strategy} does not fit ({size_text(row.total)})" for row in tight]
    reason = f"{_time(seconds[strategy])} for a step (predicted)"
    return {"strategy": strategy, "reason": f"{reason}, {', '.join(others)}" if others else reason}


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
