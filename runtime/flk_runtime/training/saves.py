"""Saves: when a run writes a checkpoint."""

from __future__ import annotations

import os
import platform

import torch

from flk_runtime.checkpoint import CheckpointOptions, open_checkpoints
from flk_runtime.checkpoint.manager import is_passed, next_multiple
from flk_runtime.contract import VERSION, pod_env, user_env
from flk_runtime.errors import SetupError
from flk_runtime.preflight import report
from flk_runtime.system import rng
from flk_runtime.training.context import RunContext
from flk_runtime.training.process import current


class Saves:
    """Writes the checkpoints of a run: every ``save_every`` steps, at its end, and when the script asks for one.

    With ``store_every`` the memory of the pods keeps those, and storage every ``store_every`` steps one of its own.
    """

    def __init__(self, context: RunContext, *, needs_model: bool = True) -> None:
        """Resume from the newest checkpoint, if there is one. ``needs_model``: nothing is saved without. Collective."""
        options, worker = context.options, context.worker
        self._context = context
        given = current.place(options.checkpoint)
        self._place, in_memory = current.next_place(options.checkpoint)
        name = self._place.name
        if self._place.saved_by == "script":
            raise SetupError(
                f"this process has saved another training in {name} with flk.save, and this one would resume from it: "
                "pass checkpoint= to one of both"
            )
        if given.trainings and name:
            context.say(f"training {given.trainings + 1} of this process: its checkpoints are in {name}")
        if not in_memory and pod_env.MEMORY in os.environ:
            context.say(
                "the memory of the pods keeps only the first training of a process: this one is saved in storage, if "
                "there is any"
            )
        self.manager = open_checkpoints(
            CheckpointOptions(
                place=name,
                seed=rng.derive_seed("worker", options.seed, worker, 0) if worker else options.seed,
                metadata={
                    "job": os.environ.get(user_env.JOB, ""),
                    "code": report.code_version(),
                    "flk": VERSION,
                    "torch": torch.__version__,
                    "python": platform.python_version(),
                    "strategy": options.strategy,
                },
                timeout=options.timeout,
                keep=options.keep,
                store_every=options.store_every,
                needs_model=needs_model,
                in_memory=in_memory,
            ),
            context.print,
            lambda step: setattr(context.page, "saved", step),
            lambda step: setattr(context.page, "stored", step),
        )
        self.manager.restored_by_script = self._place.restored
        given.trainings += 1
        self.due = 0
        """The number of steps from which on `save_after_step` has something to do."""
        self._keep = options.save_every
        self._store = options.store_every if self.manager.has_storage else None
        context.page.begin_at(self.manager.steps, self.manager.source)

    def begin_at(self, steps: int) -> None:
        """Leave the checkpoint alone, because the script has restored another one, of so many steps."""
        self.manager.ignore_checkpoint(steps)
        self._context.page.begin_at(steps, self.manager.source)
        self._context.say(f"training goes on after step {steps}, from a checkpoint of the script's own")

    def save(self, steps: int, *, wait: bool = False) -> None:
        """Save the state after ``steps`` steps, if there is a place and a model. Collective."""
        if self.manager.can_save:
            self.manager.save(steps)
            self._place.saved_by = "training"
            self.due = 0
        if wait:
            self.manager.wait(together=True)  # raises too if there is a place, and it takes nothing

    def save_after_step(self, before: int, steps: int) -> bool:
        """Save if a save is due after ``steps`` steps; ``before``: those at the last call. Collective where it saves.

        Returns whether later steps can save.
        """
        can_save, store = self.manager.can_save, self._store or 0
        # The memory keeps it, or storage if that has no interval of its own.
        kept = is_passed(self._keep, before, steps) and (self._store is None or self.manager.keeps_in_memory)
        if can_save and (kept or is_passed(store, before, steps)):
            self.save(steps)
            return self.manager.can_save
        # The latest checkpoint may become complete in memory.
        self.due = 0 if self.manager.poll() else min(next_multiple(every, steps) for every in (self._keep, store))
        return can_save

    def save_progress(self, steps: int) -> None:
        """Save progress since the latest save, if there is any. Collective."""
        if self.manager.has_progress_since_save(steps):
            self.save(steps)
