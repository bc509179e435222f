"""The run of this process: `init` begins one at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flk_runtime.checkpoint import CheckpointManager
    from flk_runtime.run.run import Run

run: Run | None = None
"""The latest run, which may be closed."""


def checkpoints() -> CheckpointManager | None:
    """The checkpoint manager of the run; None if there is no run."""
    return run._saves.manager if run else None
