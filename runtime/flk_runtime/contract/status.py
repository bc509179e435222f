"""RankStatus: all that is known of one rank at one moment, with its `Phase`. It is made once and read by all.

The launcher of the rank makes it of the rank's progress page (`flk_runtime.launcher.hangs.watch`). It travels with the
heartbeat; the leader keeps the latest one of each rank. From it hangs and slow ranks are found, and from it `flk top`,
the metrics page and the record say how far the job is. Phases are also written in records, so their
values stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from flk_runtime.contract.values import StrEnum, dataclass


class Phase(StrEnum):
    """The phase of a rank, as far as flk's library knows. A script without it stays in STARTING until it trains."""

    STARTING = "start"  # the script has not called `flk_runtime.init`, and perhaps never does
    RENDEZVOUS = "rendezvous"  # the ranks meet, compare their settings and open the process group
    FIRST_STEP = "first-step"  # torch compiles, kernels are tuned, datasets are opened
    TRAINING = "step"
    EVALUATING = "evaluation"  # a loop over the loader of `Run.evaluation`, or inside `Loop.evaluating`
    SAVING = "save"  # a checkpoint
    RESTORING = "restore"  # a checkpoint
    MEETING = "round"  # with the other workers of strategy diloco


NEVER: Final = 1e9  # seconds since something that has not happened
NO_STEP: Final = -1


@dataclass(frozen=True)
class RankStatus:
    """The state of one rank. Times are in seconds, shares from 0 to 1; None: the script does not tell."""

    rank: int
    pod: int
    step: int = NO_STEP  # optimizer steps done
    phase: Phase = Phase.STARTING
    step_seconds: float | None = None  # mean of the latest steps
    work: float | None = None  # share of the time in which no collective of it was pending; the leader adds it
    slow: float | None = None  # how many times as long as the median it works; None: the others do not wait for it
    memory: int | None = None  # resident bytes of its process
    data_wait: float | None = None  # share of the time in which it waited for batches
    saved: int = NO_STEP  # step of the latest checkpoint that it took part in
    stored: int = NO_STEP  # step of the latest one of them in storage
    restored: int = NO_STEP  # the step after which this attempt began
    # Signs of progress.
    idle: float = 0.0  # since the last step, heartbeat, line, or begin or end of a collective; at most the rank's age
    beat: float = NEVER  # since the last step or heartbeat
    cpu_idle: float = 0.0  # since the rank and the processes that it started last used CPU time
    waits: float = 0.0  # how long the rank has been in the same collective; 0: it is in none
    samples: int = 0  # how often its observer has looked whether a collective is pending, since the rank started
    pending: int = 0  # how often one was


SIGNS: Final = ("idle", "beat", "cpu_idle", "waits", "samples", "pending")  # which say nothing once the job has ended
Ranks = dict[int, list[RankStatus]]
"""The latest status of each rank of the job, by pod. Pods whose ranks have ended are in it, with none."""


def of_all(ranks: Mapping[int, list[RankStatus]]) -> Iterator[RankStatus]:
    """The status of each rank. Another thread may put those of a pod meanwhile."""
    return (status for of_pod in list(ranks.values()) for status in of_pod)
