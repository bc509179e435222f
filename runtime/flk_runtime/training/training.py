"""Training: what a run and a loop of the script's own have in common: ranks, metrics, and their end."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from flk_runtime.checkpoint import CheckpointManager
from flk_runtime.distributed import process_group
from flk_runtime.distributed.process_group import Numbers
from flk_runtime.errors import SetupError
from flk_runtime.system import rng
from flk_runtime.training.context import RunContext
from flk_runtime.training.ending import complete_at_the_end, end_write, ends_without_failure, forget
from flk_runtime.training.lines import Metrics
from flk_runtime.training.saves import Saves
from flk_runtime.training.step.batches import Batches
from flk_runtime.training.step.steps import Steps

if TYPE_CHECKING:
    from typing_extensions import Self


class Training:
    """This rank's side of a training, of which `Run` and `Loop` are the two kinds."""

    def __init__(self, context: RunContext, *, owns_group: bool, needs_model: bool = True) -> None:
        """The process group is open; `close` destroys it if ``owns_group``. ``needs_model``: of `Saves`. Collective."""
        info, options = context.rank_info, context.options
        self.rank_info, self.attempt = info, info.attempt
        self.rank, self.world_size, self.full_world_size = context.rank, context.world_size, context.full_world_size
        self.local_rank, self.local_world_size = info.local_rank, info.local_world_size
        self.worker, self.workers = context.worker, context.workers
        self.device, self.seed, self.strategy = options.device, options.seed, options.strategy
        self.is_main, self.closed = self.rank == 0, False
        self._context, self._owns_group = context, owns_group
        # What follows draws alike in each attempt, and on all ranks, however far this training has drawn.
        context.closing.append(lambda: rng.seed_all(rng.seed_of_next(options.seed)))
        self._metrics = Metrics(options.device, context.world_size, context.page, context.say)
        self._saves = Saves(context, needs_model=needs_model)
        self._steps = Steps(context, self._saves, self._metrics)
        self._batches = Batches(context, self._steps, self._saves, self._metrics)
        # The end of the process waits for writes, and leaves, if nothing closes this training before.
        complete_at_the_end(self._saves.manager, self)
        context.closing.append(lambda: forget(self._saves.manager))

    @property
    def steps(self) -> int:
        """Optimizer steps so far, including those before a resume."""
        return self._steps.done

    @property
    def manager(self) -> CheckpointManager:
        """The manager of the checkpoints, which saves and restores the state."""
        return self._saves.manager

    def print(self, *values: object) -> None:
        """Print a line on rank 0."""
        self._context.print(*values)

    def log_hyperparameters(self, **values: Any) -> None:
        """Give the sinks of the run what describes it, such as ``lr=3e-4``: numbers, texts, and mappings of them.

        A sink shows it beside the curves. Later calls add to it. Without sinks, and on ranks other than 0, it does
        nothing. flk itself adds job, namespace, code, image, strategy, world size and restarts.
        """
        for recorder in self._context.lines.recorders:
            recorder.describe(values)

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""
        dist.barrier()

    def mean(self, value: Numbers, weight: Numbers = 1.0) -> float:
        """The mean of all ranks' ``value``, weighted by ``weight``, such as a number of samples. Collective.

        A rank gives one value, or several as a sequence or a tensor, also none; and one weight for all of them or as
        many weights. What has the weight 0 does not count, and may be NaN. The result is the same on all ranks, and NaN
        if all weights are 0.
        """
        return process_group.mean(value, weight)

    def log(self, **values: Any) -> None:
        """Print a line of JSON on rank 0, with the number of steps; its numbers go to the sinks of the run too."""
        self._context.lines.log({"step": self._steps.done, **values})

    def save(self, *, wait: bool = False) -> None:
        """Write a checkpoint now, if there is a place for it and, in a run, a parallelized model. Collective.

        Training stops until the state is copied to memory; a thread writes it. With ``wait``, training stops until the
        checkpoint is complete; a training that ends with `abandon` needs it. A checkpoint that is still being written
        is awaited first. Raises CheckpointError on all ranks if one of them could not be written or a state cannot be
        saved, and SetupError after `close`. With ``wait``, they are raised too where a place takes nothing.
        """
        self._check_open("save")
        self._saves.save(self._steps.done, wait=wait)

    def close(self) -> None:
        """Save what is not saved yet, and destroy the process group if flk has opened it. A second call does nothing.

        Collective.
        """
        if not self.closed:
            self._steps.close()
            if self._owns_group:
                self.barrier()  # no rank leaves while another still communicates
            self._leave(at_once=False)

    def abandon(self) -> None:
        """Leave without saving and without waiting for other ranks, which may have died."""
        if not self.closed:
            self._leave(at_once=True)

    def end_step(self) -> None:
        """Save what the latest step has made due, at the end of the process: no batch is drawn any more. Collective."""
        if dist.is_initialized():
            with contextlib.suppress(SystemExit):  # the process ends anyway
                self._steps.end_step()

    def say_unsaved(self) -> None:
        """Say on rank 0 what storage will lack, because nothing has closed this training."""
        manager, steps, name = self._saves.manager, self._steps.done, type(self).__name__.lower()
        if self._steps.began and manager.has_storage and manager.can_save and manager.has_progress_since_save(steps):
            self._context.say(
                f"the state after step {steps} is not saved, since the script ends without {name}.close(), which the "
                f"end of `with … as {name}:` calls too, but sys.exit inside does not"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is None:
            self.close()
            return
        try:
            if isinstance(error, SystemExit) and not self.closed:
                end_write(self._saves.manager, self, failed=not ends_without_failure(error))
        finally:
            self.abandon()

    def _check_open(self, method: str) -> None:
        if self.closed:
            raise SetupError(f"this run is closed: call {method}() before close(), or begin another run with init()")

    def _leave(self, *, at_once: bool) -> None:
        self.closed = True
        page = self._context.page
        if page.target < 0:  # else the launcher looks whether this rank has reached it
            page.boundary = -1  # no step follows: SIGTERM is for the script's own handler again
        for function in self._context.closing:
            function()
        if self._owns_group:
            process_group.leave(at_once=at_once)
