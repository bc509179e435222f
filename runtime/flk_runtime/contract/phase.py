"""Phase: what a rank is doing. Its progress page, heartbeats, limits of hangs, goodput and `flk top` have this one set.

It is written in hang timeouts of users (``step=5m``) and in records, so the values stay as they are.
"""

from __future__ import annotations

import enum


class Phase(str, enum.Enum):
    """The phase of a rank, as far as flk's library knows. A script without it stays in STARTING until it trains."""

    STARTING = "start"  # the script has not called `flk_runtime.init`, and perhaps never does
    RENDEZVOUS = "rendezvous"  # the ranks meet, compare their settings and open the process group
    FIRST_STEP = "first-step"  # torch compiles, kernels are tuned, datasets are opened
    TRAINING = "step"
    EVALUATING = "evaluation"  # a loop over the loader of `Run.evaluation`, or inside `Loop.evaluating`
    SAVING = "save"  # a checkpoint
    RESTORING = "restore"  # a checkpoint
    MEETING = "round"  # with the other workers of strategy diloco

    def __str__(self) -> str:
        return str(self.value)
