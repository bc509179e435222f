"""chosen_sinks(): the sinks of a run, which must be installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Final

from flk_runtime.contract import user_env
from flk_runtime.contract.options import MLFLOW, NO_SINK, TENSORBOARD, WANDB, SinkName, implied_sinks, parse_sinks
from flk_runtime.errors import SetupError

_PACKAGES: Final = {TENSORBOARD: "tensorboard", MLFLOW: "mlflow", WANDB: "wandb"}


def chosen_sinks(text: str | None, variables: Mapping[str, str]) -> tuple[SinkName, ...]:
    """The sinks of an argument, else of FLK_METRICS, else those that other variables imply and that are installed.

    Raises SetupError for a wrong text, and for a sink that is named and cannot work here.
    """
    name = "metrics" if text is not None else user_env.METRICS
    given = user_env.METRICS.read(variables) if text is None else text or NO_SINK
    if not given:
        return tuple(each for each in implied_sinks(variables) if _is_installed(_PACKAGES[each.kind]))
    try:
        named = parse_sinks(given)
    except ValueError as error:
        raise SetupError(f"{name}={given}: {error}") from None
    for each in named:
        package = _PACKAGES[each.kind]
        if not _is_installed(package):
            raise SetupError(
                f"{name}: {each.kind} needs the package {package}, which this image lacks: add --pip {package}, or "
                "install it in the image"
            )
        if each.kind == MLFLOW and not variables.get("MLFLOW_TRACKING_URI"):
            raise SetupError(f"{name}: mlflow needs the address of its server in MLFLOW_TRACKING_URI")
    return named


def _is_installed(package: str) -> bool:
    """Whether a package can be imported. A folder of its name, as W&B makes one for its files, is none."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
