"""Strategy diloco as a run calls it: the options with this process's place among the workers."""

from __future__ import annotations

from typing import Any, Final

from flk_diloco.options import DiLoCo, Membership, environment_options
from flk_diloco.worker import OuterLoop
from flk_runtime.contract.options import DILOCO
from flk_runtime.errors import SetupError
from flk_runtime.parallel import ParallelModel


class DiLoCoStrategy:
    """A `flk_runtime.training.extensions.Outer`."""

    name: Final = DILOCO

    def __init__(self, options: DiLoCo) -> None:
        """Raises SetupError if the environment's workers contradict the options."""
        self._options = options
        self._membership = Membership.read(options)
        self.inner = options.inner
        self.worker, self.workers = self._membership.worker, self._membership.workers

    def __str__(self) -> str:
        return f"{self.name} ({self._options})"

    def loop(self, parallel: ParallelModel, steps: int) -> OuterLoop:
        """The rounds of this worker. Collective."""
        return OuterLoop(parallel, self._options, self._membership, steps)


def outer(options: Any) -> DiLoCoStrategy:
    """The strategy with a script's options, else with those of the environment. Raises SetupError."""
    if options is not None and not isinstance(options, DiLoCo):
        raise SetupError(f"strategy={options!r}: expected a flk_diloco.DiLoCo")
    return DiLoCoStrategy(options or environment_options())
