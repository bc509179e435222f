"""Sinks: where the metrics of a job go besides its log, as ``--metrics`` and FLK_METRICS name them.

Standard library only: the client checks the text, and the ranks read it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

TENSORBOARD: Final = "tensorboard"
MLFLOW: Final = "mlflow"
WANDB: Final = "wandb"
NO_SINK: Final = "none"
IMPLIED: Final = {"MLFLOW_TRACKING_URI": MLFLOW, "WANDB_PROJECT": WANDB}
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
    return tuple(SinkName(kind) for name, kind in IMPLIED.items() if variables.get(name))
