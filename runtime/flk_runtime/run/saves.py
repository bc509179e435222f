"""Saves: when a run writes a checkpoint."""

from __future__ import annotations

import os
import platform
import time

import torch

from flk_runtime.checkpoint import CheckpointManager, CheckpointOptions
from flk_runtime.checkpoint.interval import COMPUTED, AutoInterval
from flk_runtime.contract import VERSION, user_env
from flk_runtime.contract.record import SOURCES
from flk_runtime.distributed import process_group
from flk_runtime.errors import MismatchError
from flk_runtime.preflight import report
from flk_runtime.run.context import RunContext
from flk_runtime.shared.progress import Phase
from flk_runtime.system import rng


class Saves:
    """Writes the checkpoints of a run: every ``save_every`` steps, at its end, and when the script asks for one."""

    def __init__(self, context: RunContext, *, needs_model: bool = True) -> None:
        """Resume from the newest checkpoint, if there is one. ``needs_model``: nothing is saved without. Collective."""
        options, worker = context.options, context.member.worker
        self._context = context
        self.timeouts = process_group.Timeouts(options.timeout, options.step_timeout)
        self.manager = CheckpointManager(
            CheckpointOptions(
                place=options.checkpoint,
                seed=rng.derive_seed("worker", options.seed, worker, 0) if worker else options.seed,
                metadata=_metadata(options.strategy),
                timeout=options.timeout,
                keep=options.keep,
                keep_every=options.keep_every,
                needs_model=needs_model,
            ),
            context.print,
            self._note_saved,
        )
        self._auto: AutoInterval | None = None
        if options.save_every == COMPUTED:
            nodes = max(1, context.world_size // context.rank_info.local_world_size)
            self._auto = AutoInterval(self.manager.steps, nodes, context.rank_info.attempt)
        context.page.restored_from = SOURCES.index(self.manager.source)
        context.page.restored = self.manager.steps

    def save(self, steps: int, *, wait: bool = False) -> None:
        """Save the state after ``steps`` steps, if there is a place and a model. Collective."""
        if self.manager.can_save:
            self._context.page.phase = Phase.SAVING
            with self.timeouts.long():  # a rank may wait for its last write for longer than a step
                self.manager.save(steps)
                if wait:
                    self.manager.wait()
            self._context.page.phase = Phase.TRAINING

    def save_after_step(self, steps: int) -> None:
        """Save if a save is due after the step. Collective where it saves."""
        every = self._context.options.save_every
        if self._auto:
            self._save_when_due(self._auto, steps)
        elif every and steps % every == 0:
            self.save(steps)
        else:
            self.manager.poll()

    def save_progress(self, steps: int) -> None:
        """Save progress since the latest save, if there is any. Collective."""
        if self.manager.has_progress_since_save(steps):
            self.save(steps)

    def complete(self) -> None:
        """Wait until the latest checkpoint is complete."""
        self._context.page.phase = Phase.SAVING
        self.manager.wait()
        self._context.page.phase = Phase.TRAINING

    def export(self, steps: int, file: str | os.PathLike[str]) -> None:
        """Save, and write the model in that checkpoint to a safetensors file. Collective."""
        from flk_runtime.checkpoint.files import export_weights

        place = self.manager.place
        if not (self.manager.can_save and place):
            raise MismatchError("export needs checkpoints and a parallelized model: pass checkpoint= to init")
        self.save_progress(steps)
        self.complete()
        process_group.on_main(lambda: export_weights(place, file))

    def _save_when_due(self, auto: AutoInterval, steps: int) -> None:
        """Save if the computed interval is over; rank 0 then computes the next one."""
        if steps < auto.next or not self.manager.can_save:
            return
        begin = time.monotonic()
        auto.begin(steps)
        self.save(steps)
        auto.copied(time.monotonic() - begin)
        interval, line = process_group.on_main(lambda: auto.choose(steps, self._context.page.step_seconds))
        auto.next = steps + interval
        if line:
            self._context.print(line)

    def _note_saved(self, step: int) -> None:
        self._context.page.saved = step
        if self._auto:
            self._auto.completed(step)


def _metadata(strategy: str) -> dict[str, str]:
    """The writer of this run's checkpoints: job, code, versions and strategy."""
    return {
        "job": os.environ.get(user_env.JOB, ""),
        "code": report.code_version(),
        "flk": VERSION,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "strategy": strategy,
    }
