"""RunOptions: the options of a run, made once from the arguments of `init` and the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch

from flk_runtime.contract import pod_env, user_env
from flk_runtime.contract.options import parse_strategy
from flk_runtime.contract.variable import Variable, integer
from flk_runtime.discovery import RankInfo
from flk_runtime.errors import SetupError, setting
from flk_runtime.system import device as devices
from flk_runtime.system import trial
from flk_runtime.system.torch_version import check_torch
from flk_runtime.training import extensions

T = TypeVar("T")
TIMEOUT: Final = 1800.0  # seconds that a collective may take
LOG_EVERY: Final = 10
_LINES: Final = Variable("log_every", "steps between two lines of metrics", LOG_EVERY, integer())
_CPU: Final = torch.device("cpu")


@dataclass(frozen=True)
class RunOptions:
    """The options of a run: the arguments of `init`, completed from the environment and checked."""

    strategy: str = "ddp"  # of the ranks of the process group
    outer: extensions.Outer | None = None  # they are one of several workers
    seed: int = user_env.SEED.default
    has_seed: bool = True  # it is given, and is not the script's own
    checkpoint: str | None = None  # the place of the checkpoints
    save_every: int = 0
    store_every: int | None = None  # None: every checkpoint is stored
    keep: int = user_env.KEEP.default
    log_every: int = LOG_EVERY
    begin_recording: extensions.BeginRecording | None = None  # of the lines of metrics, besides the log
    device: torch.device = _CPU
    backend: str = "gloo"
    timeout: float = TIMEOUT
    preflight: float = user_env.PREFLIGHT_TIMEOUT.default
    keep_batch: bool = True  # a step of an elastic job has as many samples with fewer ranks as with all

    @classmethod
    def read(cls, rank_info: RankInfo, given: dict[str, Any]) -> RunOptions:
        """Check the arguments ``given`` to `init` and complete them from the environment. Raises SetupError."""
        check_torch()
        device = devices.select(rank_info, given.get("device"))
        if device.type == "cuda":
            torch.cuda.set_device(device)
        strategy, outer = _strategy(given.get("strategy"))
        folder = place_of(given.get("checkpoint"))
        if trial.is_trial():
            folder = None
        if folder and outer and outer.workers > 1:  # they may share a volume
            folder = f"{folder}/worker-{outer.worker}"
        timeout = given.get("timeout", TIMEOUT)
        return cls(
            strategy=strategy,
            outer=outer,
            seed=count("seed", given.get("seed"), user_env.SEED),
            has_seed=given.get("seed") is not None or user_env.SEED in os.environ,
            checkpoint=folder,
            save_every=count("save_every", given.get("save_every"), user_env.SAVE_EVERY),
            store_every=count("store_every", given.get("store_every"), user_env.STORE_EVERY),
            keep=max(1, count("keep", given.get("keep"), user_env.KEEP)),
            log_every=count("log_every", given.get("log_every", LOG_EVERY), _LINES),
            begin_recording=None if trial.is_trial() else extensions.recording(given.get("metrics")),
            device=device,
            # gloo beside NCCL is for tensors on the CPU: states of random generators.
            backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            timeout=max(timeout, TIMEOUT) if trial.is_trial() else timeout,
            preflight=setting(user_env.PREFLIGHT_TIMEOUT) if setting(user_env.PREFLIGHT) == "on" else 0.0,
            keep_batch=pod_env.BATCH.read(os.environ) == "keep",
        )


def place_of(checkpoint: str | os.PathLike[str] | None) -> str | None:
    """The place of checkpoints of an argument, else of the environment; None if neither names one."""
    return os.fspath(checkpoint) if checkpoint else user_env.CHECKPOINT.read(os.environ) or None


def _strategy(given: Any) -> tuple[str, extensions.Outer | None]:
    """The strategy of the ranks of the process group, and the one over several groups, if there is one."""
    options = None if isinstance(given, str | None) else given
    name = given if isinstance(given, str | None) else getattr(given, "strategy", None)
    if options is not None and not isinstance(name, str):
        raise SetupError(f"strategy={given!r}: expected a name, or options such as flk_diloco.DiLoCo")
    try:
        strategy = parse_strategy(name or user_env.STRATEGY.read(os.environ))
    except ValueError as error:
        raise SetupError(str(error) if name else f"{error} (from {user_env.STRATEGY})") from None
    if setting(user_env.STANDS_FOR) > 1:
        return ("ddp" if strategy == "ddp" else "none"), None  # scripts may use the attributes of its wrapper
    outer = extensions.outer(strategy, options)
    return (outer.inner if outer else strategy), outer


def count(name: str, value: int | None, variable: Variable[T]) -> T:
    """The value of an argument, which is read as the text of its variable, else that of the variable.

    Raises SetupError.
    """
    if value is None:
        return setting(variable)
    return setting(Variable(name, variable.meaning, variable.default, variable.parse), {name: str(value)})
