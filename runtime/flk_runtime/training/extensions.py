"""What a run takes from extensions: packages beside this one, which it finds by name.

The core imports none of them by itself. A row of the tables names the module that is imported when a script or a
variable asks for it, and the protocols say what the core calls.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Final, Protocol, TypeAlias, cast

import torch

from flk_runtime.checkpoint import CheckpointManager
from flk_runtime.contract import user_env
from flk_runtime.contract.options import AUTO, DILOCO
from flk_runtime.discovery import RankInfo
from flk_runtime.errors import setting
from flk_runtime.parallel import ParallelModel
from flk_runtime.system import trial
from flk_runtime.training.process import current

_CHOOSER: Final = "flk_plan.automatic"
_OUTER: Final = "flk_diloco.strategy"
_RECORDERS: Final = "flk_sinks.curves"
_VERIFIER: Final = "flk_verify.start"


class OuterLoop(Protocol):
    """The rounds of a model that several workers train. It is saved with the model; its methods are collective."""

    def begin(self, steps: int) -> int:
        """Meet the other workers after so many steps. Returns the steps that are done then."""

    def step(self, steps: int) -> int:
        """Do what is due after so many steps. Returns the steps that are done then."""

    def restart(self) -> None:
        """Take the model's parameters as those that all workers begin with."""

    def close(self, steps: int) -> None:
        """Take leave of the other workers after so many steps."""

    @property
    def metrics(self) -> dict[str, Any]:
        """Values for a line of metrics; on rank 0."""

    def state_dict(self) -> dict[str, Any]:
        """What the workers have agreed on, for a checkpoint."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a result of `state_dict`."""


class Outer(Protocol):
    """A strategy over several workers, each a process group that trains with a strategy of its own, ``inner``.

    ``str()`` of it names the strategy with its options, which have to be the same on all ranks.
    """

    name: str
    """Under which its loop is saved."""
    inner: str
    worker: int
    """The number of this process's worker."""
    workers: int

    def loop(self, parallel: ParallelModel, steps: int) -> OuterLoop:
        """The loop of a model whose ``steps`` were made before. Collective."""


BeginRecording: TypeAlias = Callable[[Any, CheckpointManager], None]
"""Gives the lines of metrics of a run, by its `RunContext`, to what records them. Collective."""


def choose(strategy: str, rank_info: RankInfo, device: torch.device, timeout: float) -> str:
    """The strategy that auto stands for, chosen by an extension; any other ``strategy`` is itself. Collective.

    The process group is open, and its collectives may take ``timeout`` seconds.
    """
    if strategy != AUTO:
        return strategy
    return cast("str", import_module(_CHOOSER).choose(rank_info, device, timeout))


def verify(strategy: str, rank_info: RankInfo, timeout: float) -> None:
    """Compare the first steps with those of the whole model in one process, if $FLK_VERIFY asks for it. Collective.

    They are those of the process's first training. Raises VerificationError on all ranks where they differ, and
    SetupError where they cannot be compared.
    """
    if setting(user_env.VERIFY) and not trial.is_trial() and current.training is None:
        import_module(_VERIFIER).verify(strategy, rank_info, timeout)


def outer(strategy: str, options: Any) -> Outer | None:
    """The strategy of several workers that is named ``strategy``, with ``options`` or the environment's.

    None if it is not a strategy of several workers. Raises SetupError.
    """
    if strategy != DILOCO:
        return None
    return cast("Outer", import_module(_OUTER).outer(options))


def recording(text: str | None) -> BeginRecording | None:
    """The function that begins to record metrics outside of the log, as ``text`` or the environment says; None: nobody.

    Raises SetupError for sinks that cannot work here.
    """
    return cast("BeginRecording | None", import_module(_RECORDERS).recording(text))
