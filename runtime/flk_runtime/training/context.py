"""RunContext: the options of a run and this rank's place in it, for all modules of the package."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist

from flk_runtime.discovery import RankInfo
from flk_runtime.shared import progress
from flk_runtime.shared.progress import Phase, ProgressPage
from flk_runtime.training.lines import Lines
from flk_runtime.training.options import RunOptions


@dataclass(frozen=True)
class RunContext:
    """The options of a run, and this rank's place in it. The process group is open."""

    options: RunOptions
    rank_info: RankInfo
    rank: int
    world_size: int
    full_world_size: int  # of an elastic job with all its pods
    worker: int  # the number of this rank's worker; 0 where there is one
    workers: int  # of them, each a process group; 1 but for a strategy over several
    page: ProgressPage
    lines: Lines
    closing: list[Callable[[], None]] = field(default_factory=list)
    """Called when the run is closed or abandoned."""

    @classmethod
    def begin(cls, rank_info: RankInfo, options: RunOptions) -> RunContext:
        """The context of a run that begins training in the process group."""
        page = progress.own_page()
        page.phase = Phase.TRAINING
        rank, world_size = dist.get_rank(), dist.get_world_size()
        return cls(
            options=options,
            rank_info=rank_info,
            rank=rank,
            world_size=world_size,
            full_world_size=max(rank_info.full_world_size, world_size),
            worker=options.outer.worker if options.outer else 0,
            workers=options.outer.workers if options.outer else 1,
            page=page,
            lines=Lines(rank, world_size),
        )

    def print(self, *values: object) -> None:
        """Print a line on rank 0."""
        if self.rank == 0:
            # One write: print() writes the newline separately, and another rank's line may come in between.
            sys.stdout.write(" ".join(map(str, values)) + "\n")
            sys.stdout.flush()

    def say(self, text: str) -> None:
        """Print a message of flk on rank 0."""
        self.print(f"flk: {text}")
