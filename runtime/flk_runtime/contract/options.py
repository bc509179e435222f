"""Values of options, as users write them: strategies, intervals between checkpoints, hang timeouts, checks, sinks.

Standard library only: the client checks the values, and the ranks read them. Sinks are where the metrics of a job go
besides its log.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from flk_runtime.contract.variable import is_count

AUTO: Final = "auto"  # in place of a value that flk chooses: of a strategy, a target, a gang
DILOCO: Final = "diloco"
# Strategies of ranks that train one model. Those from no_shard on are named as in torch's FSDP ShardingStrategy;
# no_shard is the same as ddp.
INNER_STRATEGIES: Final = ("ddp", "no_shard", "shard_grad_op", "full_shard", "hybrid_shard", "hybrid_shard_zero2")
# Values of --strategy. auto has the ranks choose one of the values before it at their start. diloco trains several
# workers, each with an inner strategy.
STRATEGIES: Final = ("none", *INNER_STRATEGIES, AUTO, DILOCO)
OUTER_DTYPES: Final = ("fp32", "fp16", "int8", "int4")  # of what workers of strategy diloco send to each other


def parse_strategy(text: str) -> str:
    """Return the strategy that ``text`` names, as written in STRATEGIES or in torch (FULL_SHARD, _HYBRID_SHARD_ZERO2).

    Raises ValueError, with the list of names, if there is no such strategy.
    """
    name = text.lower().replace("-", "_").lstrip("_")
    if name not in STRATEGIES:
        raise ValueError(f"unknown strategy {text!r}: expected one of {', '.join(STRATEGIES)}")
    return name


MOST_STEPS: Final = 2**31 - 1


def check_interval(value: object, least: int = 0) -> int:
    """Return ``value`` if it is so many steps, at least ``least``. Raises ValueError with what was expected."""
    if is_count(value, least) and value <= MOST_STEPS:
        return value
    raise ValueError(f"expected a number of steps from {least} to {MOST_STEPS}")


def parse_interval(text: str) -> int:
    """Return the number of steps that ``text`` is. Raises ValueError with what was expected."""
    return check_interval(int(text) if text.isdecimal() else text)


TENSORBOARD: Final = "tensorboard"
MLFLOW: Final = "mlflow"
WANDB: Final = "wandb"
NO_SINK: Final = "none"
IMPLIED_SINKS: Final = {"MLFLOW_TRACKING_URI": MLFLOW, "WANDB_PROJECT": WANDB}
"""Variables of other tools, with the sinks that they choose where nobody names any."""
_FORMS: Final = f"{TENSORBOARD}:/PATH, {MLFLOW} and {WANDB}, separated by commas, or {NO_SINK}"
_PLACE: Final = r"(/|[a-z][a-z0-9]*://)[^,\s]*"
_SINK: Final = rf"{TENSORBOARD}:{_PLACE}|{MLFLOW}|{WANDB}"
SINKS: Final = rf"{NO_SINK}|({_SINK})(,({_SINK}))*"


class SinkName(NamedTuple):
    """A sink of a job: its kind, and the folder of TensorBoard's files."""

    kind: str
    place: str = ""


def parse_sinks(text: str) -> tuple[SinkName, ...]:
    """Read the sinks of a job. Raises ValueError for other texts and for a sink that is named twice."""
    if not re.fullmatch(SINKS, text):
        raise ValueError(f"expected {_FORMS}")
    if text == NO_SINK:
        return ()
    sinks = [SinkName(*sink.split(":", 1)) for sink in text.split(",")]
    kinds = [sink.kind for sink in sinks]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise ValueError(f"names {kind} twice")
    return tuple(sinks)


def implied_sinks(variables: Mapping[str, object]) -> tuple[SinkName, ...]:
    """Return the sinks that variables of other tools choose."""
    return tuple(SinkName(kind) for name, kind in IMPLIED_SINKS.items() if variables.get(name))
