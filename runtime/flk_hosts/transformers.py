"""adopt(): let flk keep the state of a Transformers Trainer.

The Trainer resumes as from a checkpoint of its own, and restores its counters. The weights, the optimizer, the
scheduler, the random states and the place in the data come from flk instead of files.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from transformers import TrainerCallback
from transformers import trainer as trainers
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint

from flk_hosts.accelerate import PreparedLoader, is_placeable
from flk_runtime.checkpoint.stateful import per_rank
from flk_runtime.distributed import parameters_in
from flk_runtime.errors import SetupError
from flk_runtime.shared.progress import Phase, own_page
from flk_runtime.training.elastic import refuse_elastic
from flk_runtime.training.entry.adopt import adopt_training
from flk_runtime.training.loop import RESERVED_METRICS, Loop

_STATE_FILE = "trainer_state.json"  # transformers.trainer.TRAINER_STATE_NAME
# What a Trainer adds up between two lines of its log, in attributes of its own.
_SUMS = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "current_flos")
# The methods of a trainer in whose place methods of the host come.
_REPLACED: Final = (
    "train",
    "get_batch_samples",
    "_init_training_state",
    "_finalize_training",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_rng_state",
)


def adopt(trainer: Any, **options: Any) -> None:
    """Let flk keep the state of ``trainer``, a transformers.Trainer. Call it once, before ``trainer.train()``.

    The model, optimizer, scheduler, counters, random states and the position in the data are saved after every
    ``save_every`` steps, and at the end. ``trainer.train()`` then resumes from flk's checkpoint, or from the one that
    is passed to it if flk has none. When a pod of the job must go, all ranks save after the same step and
    end with code 143. ``options`` are options of `flk_runtime.adopt`, such as ``save_every``.

    Raises SetupError if the trainer uses DeepSpeed or auto_find_batch_size, and in an elastic job.
    """
    if getattr(trainer, "is_deepspeed_enabled", False):
        raise SetupError("adopt: flk cannot keep the state of a Trainer with DeepSpeed: let DeepSpeed save it")
    if trainer.args.auto_find_batch_size:
        raise SetupError("adopt: auto_find_batch_size begins the training anew: set per_device_train_batch_size")
    if missing := [name for name in _REPLACED if not hasattr(trainer, name)]:
        raise SetupError(
            f"adopt: flk needs {missing[0]} of Trainer, which this release of Transformers lacks: update it"
        )
    refuse_elastic("adopt", "the steps of a Trainer would have fewer samples with fewer ranks")
    host = _Host(trainer, options)
    for name in _REPLACED:
        setattr(trainer, name, getattr(host, name.strip("_"))(getattr(trainer, name)))


class _Host:
    """One training of a Trainer. The methods that are given a method of the trainer return what takes its place."""

    def __init__(self, trainer: Any, options: dict[str, Any]) -> None:
        self._trainer, self._options = trainer, options
        self._counters = _Counters(trainer, self)
        self._folder = ""  # of the checkpoint that the trainer believes it resumes from
        self._loop: Loop | None = None
        self._tokens = 0
        self._epoch, self._between_epochs = -1, True
        self._before_epoch = self._skipped = 0  # steps before this epoch, and steps of it before a resume
        self._steps_per_epoch = 0
        self._finds_place = False  # the loader leaves out the batches that were used, and not the trainer
        self._loader_knows = True  # where it is in this epoch
        self.is_over = False
        """Whether the trainer has made its last step."""
        self.is_done = False
        """Whether a step is done and not counted: it is when its evaluation is over, which a resume then leaves out."""
        self.logs: dict[str, Any] = {}
        """What the trainer has logged since the latest step was counted."""

    @property
    def loop(self) -> Loop:
        if self._loop is None:
            raise SetupError("adopt: the training was not begun by trainer.train()")
        return self._loop

    @property
    def place(self) -> tuple[int, int]:
        """The epoch of the next step, and the number of its steps before that one."""
        steps = self._trainer.state.global_step - self._before_epoch
        is_over = self._between_epochs or steps >= self._steps_per_epoch
        return (self._epoch + 1, 0) if is_over else (self._epoch, steps)

    def train(self, train: Callable[..., Any]) -> Callable[..., Any]:
        def run(resume_from_checkpoint: Any = None, trial: Any = None, **more: Any) -> Any:
            if trial is not None or self._loop:
                raise SetupError(
                    "adopt: flk keeps the state of one training: call trainer.train() once, and not in a search for "
                    "hyperparameters"
                )
            self._trainer.add_callback(_Callback(self))  # after all others, which may make copies at the beginning
            self._loop = loop = adopt_training(**{"log_every": 0, **self._options}, trainer=self._counters)
            if not loop.steps:
                return train(resume_from_checkpoint=resume_from_checkpoint, **more)
            theirs = resume_from_checkpoint
            if theirs is True and os.path.isdir(self._trainer.args.output_dir):
                theirs = get_last_checkpoint(self._trainer.args.output_dir)
            if theirs:
                loop.print(f"flk: resume from {theirs} is ignored: flk has a checkpoint, of step {loop.steps}")
            with tempfile.TemporaryDirectory(prefix="flk-") as self._folder:
                with open(os.path.join(self._folder, _STATE_FILE), "w") as file:
                    file.write(self._counters.saved["state"])
                return train(resume_from_checkpoint=self._folder, **more)

        return run

    def init_training_state(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        """The trainer computes the epoch and its batches that are used from the number of steps; flk has saved them."""

        def run(max_steps: int, steps_per_epoch: int, epochs: int, folder: Any, trial: Any) -> tuple[int, int]:
            epoch, batches = begin(max_steps, steps_per_epoch, epochs, folder, trial)
            pieces, saved = self._trainer.args.gradient_accumulation_steps, self._counters.saved
            if self._is_ours(folder) and saved["over_after"] == max_steps:
                epoch, batches = epochs, 0
            elif self._is_ours(folder) and not self._trainer.args.ignore_data_skip:
                epoch, batches = saved["epoch"], saved["steps_of_epoch"] * pieces
            self._epoch, self._skipped, self._steps_per_epoch = epoch - 1, batches // pieces, steps_per_epoch
            return epoch, batches

        return run

    def load_from_checkpoint(self, load: Callable[..., Any]) -> Callable[..., Any]:
        return lambda folder, *more: None if self._is_ours(folder) else load(folder, *more)

    load_optimizer_and_scheduler = load_from_checkpoint

    def load_rng_state(self, load: Callable[..., Any]) -> Callable[..., Any]:
        def run(folder: Any) -> None:
            if not self._is_ours(folder):
                load(folder)
            elif not self._finds_place:  # else the loader has set it, and may have drawn from it since
                self.loop.restore_random_state()

        return run

    def get_batch_samples(self, read: Callable[..., Any]) -> Callable[..., Any]:
        """A step is counted before the batches of the next one are read, which are then read after a resume."""

        def run(*arguments: Any, **named: Any) -> Any:
            self.count()
            return read(*arguments, **named)

        return run

    def finalize_training(self, finish: Callable[..., Any]) -> Callable[..., Any]:
        """Save the rest: the last step is done, and the trainer has not loaded its best model yet."""

        def run(*arguments: Any, **named: Any) -> Any:
            self.is_over = True
            self.count()
            self.loop.close()
            return finish(*arguments, **named)

        return run

    def _is_ours(self, folder: Any) -> bool:
        return bool(self._folder) and folder == self._folder

    def begin(self) -> None:
        """Register and restore what the trainer has made: it is about to train."""
        trainer, loop = self._trainer, self.loop
        batch, saved = trainer.get_total_train_batch_size(trainer.args), self._counters.saved
        if not loop.steps and trainer.state.global_step:  # it has restored a checkpoint of its own
            loop.begin_at(trainer.state.global_step)
        if loop.steps and saved and saved["batch"] != batch:
            raise SetupError(
                f"adopt: the checkpoint is of steps of {saved['batch']} samples, and now a step has {batch}: the "
                "trainer would not find its place in the data; resume with the same number of ranks, "
                "per_device_train_batch_size and gradient_accumulation_steps"
            )
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        objects = {"model": trainer.model_wrapped, "optimizer": optimizer, "scheduler": trainer.lr_scheduler}
        if beside := _trained_beside(trainer, optimizer):  # no gradients of theirs are averaged, so the ranks differ
            objects |= {"optimizer": per_rank(optimizer), **{name: per_rank(each) for name, each in beside.items()}}
        if scaler := getattr(trainer.accelerator, "scaler", None):
            objects["scaler"] = scaler
        loop.register(**objects)
        loop.register_states(loss=per_rank(_Sums(trainer)), **self._data(loop))
        self._finds_place = _finds_place(trainer.callback_handler.train_dataloader)
        self._tokens = trainer.state.num_input_tokens_seen
        self.note_what_follows(evaluates=trainer.args.eval_on_start)

    def _data(self, loop: Loop) -> dict[str, Any]:
        """The loader, whose place in the data is kept; nothing if the trainer skips what was used."""
        loader = self._trainer.callback_handler.train_dataloader
        if self._trainer.args.ignore_data_skip or not is_placeable(loader):
            return {}
        placed = PreparedLoader(loader, is_over=lambda: not (self.place[1] and self._loader_knows))
        placed.loop = loop
        return {"loader": per_rank(placed)}

    def begin_epoch(self) -> None:
        """Count the last step of the epoch before."""
        self._between_epochs = True
        self.count()
        self._between_epochs = False
        self._epoch += 1
        self._loader_knows = self._finds_place or not self._skipped
        self._before_epoch, self._skipped = self._trainer.state.global_step - self._skipped, 0

    def note_what_follows(self, *, evaluates: bool = False, saves: bool = False) -> None:
        """Tell the launcher that the trainer evaluates or saves, which may take long."""
        if evaluates or saves:
            own_page().phase = Phase.EVALUATING if evaluates else Phase.SAVING

    def count(self) -> None:
        """Count the step that was done, with all that is due after it."""
        own_page().phase = Phase.TRAINING
        if not self.is_done:
            return
        self.is_done = False
        trainer, logs = self._trainer, self.logs
        self.logs, report = {}, bool(logs)
        logs["total_steps"] = trainer.state.max_steps
        seen, before = trainer.state.num_input_tokens_seen, self._tokens
        self._tokens = seen
        samples = trainer.get_total_train_batch_size(trainer.args)
        try:
            self.loop.step(logs.pop("loss", None), samples=samples, tokens=seen - before, report=report, **logs)
        except SystemExit:
            if not self.loop.has_storage and trainer.args.save_strategy != "no":
                trainer._save_checkpoint(trainer.model_wrapped, trial=None)
            raise


class _Callback(TrainerCallback):  # type: ignore[misc]
    """Tells the host what the trainer does."""

    def __init__(self, host: _Host) -> None:
        self._host = host

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._host.begin()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._host.begin_epoch()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._host.is_done = True
        self._host.note_what_follows(evaluates=control.should_evaluate, saves=control.should_save)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._host.note_what_follows(evaluates=control.should_evaluate, saves=control.should_save)

    on_evaluate = on_epoch_end  # the evaluation is over, and control says so

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        numbers = {name: value for name, value in logs.items() if isinstance(value, (int, float))}
        self._host.logs |= {
            name: value for name, value in numbers.items() if name == "loss" or name not in RESERVED_METRICS
        }


class _Counters:
    """The state of a trainer, as its own checkpoints have it, and its place in the data."""

    def __init__(self, trainer: Any, host: _Host) -> None:
        self._trainer, self._host = trainer, host
        self.saved: dict[str, Any] = {}
        """What the checkpoint has."""

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        epoch, steps = self._host.place
        callbacks: dict[str, list[Any]] = {}
        for each in [*trainer.callback_handler.callbacks, trainer.control]:
            if isinstance(each, ExportableState):
                callbacks.setdefault(type(each).__name__, []).append(each.state())
        own = {name: states if len(states) > 1 else states[0] for name, states in callbacks.items()}
        # Not asdict, which copies: a script may have logged tensors, and those with gradients cannot be copied.
        state = {each.name: getattr(trainer.state, each.name) for each in dataclasses.fields(trainer.state)}
        return {
            "state": json.dumps(
                {**state, "stateful_callbacks": own},
                default=lambda value: value.tolist() if hasattr(value, "tolist") else str(value),
            ),
            "batch": trainer.get_total_train_batch_size(trainer.args),
            "epoch": epoch,
            "steps_of_epoch": steps,
            "over_after": trainer.state.max_steps if self._host.is_over else 0,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.saved = state


class _Sums:
    """The sums of losses of a rank that a trainer has not logged yet."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        values = {name: getattr(self._trainer, name) for name in _SUMS if hasattr(self._trainer, name)}
        return {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in values.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            now = getattr(self._trainer, name, None)
            setattr(self._trainer, name, torch.full_like(now, value) if isinstance(now, torch.Tensor) else value)


def _trained_beside(trainer: Any, optimizer: Any) -> dict[str, nn.Module]:
    """The modules of a trainer that its optimizer trains beside the model, as losses of sentence-transformers."""
    rest = set(map(id, parameters_in(optimizer))) - set(map(id, trainer.model.parameters()))
    modules = {name: each for name, each in vars(trainer).items() if isinstance(each, nn.Module)}
    return {
        f"trainer.{name}": each for name, each in modules.items() if not rest.isdisjoint(map(id, each.parameters()))
    }


def _finds_place(loader: Any) -> bool:
    """Whether the next epoch of a loader begins where the checkpoint was saved."""
    position = getattr(loader, "flk_position", None)
    return position is not None and position["began"] is not None


_skip: Any = trainers.skip_first_batches


def _skip_first_batches(loader: Any, count: int = 0) -> Any:
    """Skip nothing of a loader that goes on at its place in the data."""
    return loader if _finds_place(loader) else _skip(loader, count)


trainers.skip_first_batches = _skip_first_batches
