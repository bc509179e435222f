"""Steps: counts optimizer steps; after a step it may print metrics, write a checkpoint, or stop early.

A step with a batch of a loader ends where its loop draws the next batch, or at the end of the loop or the run: what the
script does after `Run.step`, such as a scheduler's step or the end of an epoch, belongs to it. Others end at once. If
the loop is over, and the script begins another, the step ends with the first one of that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, SupportsFloat

import torch

from flk_runtime.checkpoint.manager import is_passed, next_multiple
from flk_runtime.contract import ExitCode
from flk_runtime.errors import SetupError
from flk_runtime.training.context import RunContext
from flk_runtime.training.extensions import OuterLoop
from flk_runtime.training.lines import Metrics
from flk_runtime.training.process import current
from flk_runtime.training.saves import Saves


class Steps:
    """The steps of a run, including those before a resume."""

    def __init__(self, context: RunContext, saves: Saves, metrics: Metrics) -> None:
        self._context, self._saves, self._metrics = context, saves, metrics
        self.done = saves.manager.steps
        self.began = False
        """Whether a step has been done since the start or the resume."""
        self.is_open = False
        """Whether the latest step has not ended: it is counted, and what it makes due is not done."""
        self._before = 0  # the steps when it began
        self._log_every, self._next_line = context.options.log_every, 0
        self._total = 0  # steps of the whole job, as told
        self.outer: OuterLoop | None = None
        if context.options.begin_recording:
            context.options.begin_recording(context, saves.manager)

    def begin_rounds(self, outer: OuterLoop) -> None:
        """Make these steps the steps of one of several workers. Collective."""
        self.outer = outer
        self.done = outer.begin(self.done)

    def tell_total(self, total: int) -> None:
        """Print how many steps the whole job has, if lines of metrics follow: readers see what is left from it."""
        if self._log_every and total > max(self._total, self.done + self._log_every):
            self._total = total
            self._context.lines.tell({"step": self.done, "total": total})

    def record(
        self,
        loss: torch.Tensor | float | None,
        values: dict[str, Any],
        *,
        samples: int,
        epoch: Callable[[], int | None],
        draws: bool = False,
        tokens: int = 0,
        report: bool = False,
    ) -> None:
        """Count a step, with the samples and tokens of all ranks together, and do all that is due. Collective.

        It runs in each step, when the training has emptied the caches of the processor. Calls take most of its time, so
        it makes few, and none for what is not due.
        ``draws``: a loader has given its batch, so the step ends where the next one is drawn, with those before that
        have not ended. ``report``: print a line of metrics in any case.
        """
        first = not self.began
        if first:
            if not isinstance(loss, SupportsFloat | None):
                raise SetupError(f"run.step takes the loss, a number, and not {type(loss).__name__}: run.step(loss)")
            self._saves.manager.begin_rank_rng()  # no pass of a model has
            self._saves.manager.finish_restoring()
            self.began = True
            page = self._context.page
            if page.counts_optimizers:  # the first step of this one is counted: run.step counts it again
                page.counts_optimizers, page.step_time, page.step_seconds = False, 0.0, 0.0
        before, metrics = self.done, self._metrics
        done = self.done = before + 1
        if self.outer:
            done = self.done = self.outer.step(done)
        page = self._context.page
        page.record_step(done)
        metrics.samples += samples
        metrics.tokens += tokens
        metrics.utilisation.steps += 1
        if first:
            metrics.utilisation.begin()
        if report or done >= self._next_line:
            self._next_line = next_multiple(self._log_every, done)
            if report or is_passed(self._log_every, before, done):
                self._print_line(loss, values, epoch())
        if not self.is_open:
            self.is_open, self._before = True, before
        if not draws:
            self.end_step()
        if current.tick:
            current.tick()

    def end_step(self) -> None:
        """End the latest step, if it has not ended: save if that is due, and stop if a pod has to go. Collective."""
        if not self.is_open:
            return
        self.is_open = False
        done, page = self.done, self._context.page
        can_save = self._saves.manager.can_save
        if can_save and done >= self._saves.due:
            can_save = self._saves.save_after_step(self._before, done)
        if page.must_stop(done) if can_save else not page.script_stops and page.must_end_unsaved(done):
            self._stop()

    def finish(self) -> None:
        """Save progress since the latest save, if there is any, and wait until it is saved. Collective."""
        self.end_step()
        self._saves.save_progress(self.done)
        self._saves.manager.wait()

    def close(self) -> None:
        """Take leave of the other workers too. Collective."""
        self.finish()
        if self.outer:
            self.outer.close(self.done)

    def _print_line(self, loss: torch.Tensor | float | None, values: dict[str, Any], epoch: int | None) -> None:
        number = None if loss is None else float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        line: dict[str, Any] = {"step": self.done}
        if epoch is not None:
            line["epoch"] = epoch
        if number is not None:
            line["loss"] = number
        line |= self._metrics.read()
        if self.outer:
            line |= self.outer.metrics
        self._context.lines.add(line | values, number)

    def _stop(self) -> NoReturn:
        """Save if there is a place, and end this rank, because a pod of the job received SIGTERM. Collective."""
        self.finish()
        saved = "which is saved" if self._saves.manager.can_save else "which is not saved: no place has room for it"
        self._context.say(f"stopped after step {self.done}, {saved}")
        raise SystemExit(int(ExitCode.PREEMPTED))
