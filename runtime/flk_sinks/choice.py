"""chosen_sinks(): the sinks of a run, which must be installed."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from typing import Final

from flk_runtime.contract import user_env
from flk_runtime.contract.options import MLFLOW, NO_SINK, TENSORBOARD, WANDB, SinkName, implied_sinks, parse_sinks
from flk_runtime.errors import SetupError

_PACKAGES: Final = {TENSORBOARD: "tensorboard", MLFLOW: "mlflow", WANDB: "wandb"}
# Variables and files that may give W&B a key, or tell it to need none.
_LOGINS: Final = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_ANONYMOUS", "WANDB_CONFIG_DIR", "NETRC")
_LOGIN_FILES: Final = ("~/.netrc", "~/_netrc", "~/.config/wandb/settings", "wandb/settings")


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
        if each.kind == WANDB and not _may_log_in(variables):
            raise SetupError(
                f"{name}: wandb needs a key in WANDB_API_KEY, or WANDB_MODE=offline for files that `wandb sync` sends"
            )
    return named


def _may_log_in(variables: Mapping[str, str]) -> bool:
    """Whether W&B may find a key, or needs none. Without one, no line of metrics would ever be written."""
    # Rank 0 writes, and its script may have logged in by itself.
    if variables.get("RANK", "0") != "0" or "wandb" in sys.modules:
        return True
    if variables.get("WANDB_MODE", "online") != "online" or any(variables.get(each) for each in _LOGINS):
        return True
    return any(os.path.exists(os.path.expanduser(each)) for each in _LOGIN_FILES)


def _is_installed(package: str) -> bool:
    """Whether a package can be imported. A folder of its name, as W&B makes one for its files, is none."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
