"""Flk: a callback that lets flk keep the state of a Lightning Trainer.

Lightning resumes its loops, callbacks and data module from what they save themselves. The weights, optimizers,
schedulers and random states come from flk, and a DataLoader continues after the batches that were given.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, __version__
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelPruning
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer import call
from torch.utils.data import DataLoader

from flk_hosts.loaders import make_resumable
from flk_runtime.checkpoint.stateful import per_rank, stateful_of
from flk_runtime.errors import SetupError
from flk_runtime.shared.progress import Phase, own_page
from flk_runtime.training.elastic import refuse_elastic
from flk_runtime.training.entry.adopt import adopt_training
from flk_runtime.training.loop import RESERVED_METRICS, Loop


class Flk(Callback):  # type: ignore[misc]
    """Lets flk keep the state of a Lightning Trainer: pass it in ``callbacks``.

    The model, optimizers, schedulers, loops, callbacks, random states and the position in the data are saved after
    every ``save_every`` steps, and at the end. ``trainer.fit`` then resumes from flk's checkpoint, or from its
    ``ckpt_path`` if flk has none. When a pod of the job must go, all ranks save after the same step and end
    with code 143. The arguments are those of `flk_runtime.adopt`, and ``log_every`` is ``log_every_n_steps`` by
    default.

    ``trainer.fit`` raises SetupError for DeepSpeed, for BatchSizeFinder, LearningRateFinder and ModelPruning, for a
    train loader that is no DataLoader and has no ``state_dict``, and in an elastic job, because flk would not find its
    place in the data.
    """

    def __init__(
        self,
        checkpoint: str | None = None,
        save_every: int | None = None,
        store_every: int | None = None,
        keep: int | None = None,
        log_every: int | None = None,
        metrics: str | None = None,
    ) -> None:
        self._options: dict[str, Any] = {
            "checkpoint": checkpoint,
            "save_every": save_every,
            "store_every": store_every,
            "keep": keep,
            "metrics": metrics,
        }
        self._log_every = log_every
        self._loop: Loop | None = None
        self._state = _State()
        self._ours = False  # the training resumes from flk's checkpoint
        self._resumes = False  # and has not made a step
        self._steps = 0  # trainer.global_step at the latest step that was noted
        self._loss: Any = None
        self._done = False  # a step, which is not counted yet
        self._total: dict[str, Any] = {}  # the number of steps of the training, if it is known

    @property
    def loop(self) -> Loop:
        """The loop that flk keeps. Raises SetupError before ``trainer.fit``."""
        if self._loop is None:
            raise SetupError("Flk: the training has not begun")
        return self._loop

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Open flk's checkpoint, and have the trainer restore from it where it restores from its own."""
        finders = [each for each in trainer.callbacks if isinstance(each, (BatchSizeFinder, LearningRateFinder))]
        if stage != "fit" or any(each._early_exit for each in finders):  # a Tuner only tries the training out
            return
        if finders:
            raise SetupError(
                f"Flk: {type(finders[0]).__name__} trains before the training, which flk cannot tell apart: use "
                "lightning.pytorch.tuner.Tuner before trainer.fit()"
            )
        if any(isinstance(each, ModelPruning) for each in trainer.callbacks):
            raise SetupError(
                "Flk: ModelPruning gives the weights other names as it prunes, under which a restart would not find "
                "them: prune after the training, with torch.nn.utils.prune"
            )
        if self._loop:
            raise SetupError("Flk: flk keeps the state of one training: call trainer.fit() once in a process")
        if "DeepSpeed" in type(trainer.strategy).__name__:
            raise SetupError("Flk: flk cannot keep the state of a Trainer with DeepSpeed: let DeepSpeed save it")
        refuse_elastic("Flk", "Lightning would not find its place in the data at another number of ranks")
        self._state.trainer = trainer
        log_every = trainer.log_every_n_steps if self._log_every is None else self._log_every
        self._loop = adopt_training(**self._options, log_every=log_every, lightning=per_rank(self._state))
        self._ours = self._resumes = self._loop.steps > 0
        connector, fit_loop = trainer._checkpoint_connector, trainer.fit_loop
        connector.resume_start = _in_turn(connector.resume_start, lambda *_, **__: self._choose(connector))
        connector.restore_training_state = _in_turn(
            connector.restore_training_state, lambda *_, **__: self._restore(trainer, connector)
        )
        # Before the hooks of the end, in which a callback may replace the weights by their averages.
        fit_loop.on_run_end = _in_turn(lambda: self._end(trainer), fit_loop.on_run_end)
        fit_loop._load_combined_loader_states = _in_turn(
            lambda: self._make_resumable(fit_loop), fit_loop._load_combined_loader_states
        )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._steps, total = trainer.global_step, trainer.estimated_stepping_batches
        self._total = {"total_steps": int(total)} if 0 < total < math.inf else {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._resumes:
            self._resumes = False
            trainer.fit_loop._restarting = False  # else Lightning leaves out ReduceLROnPlateau at the end of this epoch
            if trainer.current_epoch == self._state.saved["epoch"]:  # which a scheduler sets at its beginning
                trainer.accumulate_grad_batches = self._state.saved["accumulate_grad_batches"]
            self.loop.restore_random_state()
        self._count(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Note a step. It is counted when its validation is over, so that this is not made again after a resume."""
        if trainer.global_step != self._steps:
            self._steps, self._done = trainer.global_step, True
            self._loss = outputs.get("loss") if isinstance(outputs, dict) else outputs

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        own_page().phase = Phase.EVALUATING

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        own_page().phase = Phase.SAVING

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.loop.close()  # also if there was nothing to train

    def _end(self, trainer: Any) -> None:
        """Save the rest: the last step is done."""
        self._state.is_over = True
        self._count(trainer)
        self.loop.close()

    def _choose(self, connector: Any) -> None:
        """Take flk's checkpoint, else the trainer's own, which has been read if there is one."""
        step = int(connector._loaded_checkpoint.get("global_step", 0))
        if self._ours:
            connector._loaded_checkpoint = {}
            if step:
                self.loop.print(
                    f"flk: ckpt_path, of step {step}, is ignored: flk has a checkpoint, of step "
                    f"{self._state.saved['global_step']}"
                )
        elif step:
            self.loop.begin_at(step)

    def _restore(self, trainer: Any, connector: Any) -> None:
        """Register what the strategy has made, which restores it, and let Lightning restore the rest."""
        optimizers, schedulers = trainer.strategy.optimizers, trainer.strategy.lr_scheduler_configs
        objects = {"model": trainer.strategy.model}
        objects |= {f"optimizer-{number}": getattr(each, "optimizer", each) for number, each in enumerate(optimizers)}
        objects |= {f"scheduler-{number}": each.scheduler for number, each in enumerate(schedulers)}
        self.loop.register(**objects)
        if self._ours:
            connector._loaded_checkpoint = loaded = self._state.with_weights()
            call._call_lightning_module_hook(trainer, "on_load_checkpoint", loaded)
            connector.restore_datamodule()
            connector.restore_callbacks()
            connector.restore_precision_plugin_state()
            connector.restore_loops()
            trainer._logger_connector._callback_metrics.update(loaded["callback_metrics"])
            if trainer.fit_loop._data_fetcher is not None:  # an epoch has begun, as for estimated_stepping_batches
                trainer.fit_loop._load_combined_loader_states()
                iter(trainer.fit_loop._data_fetcher)
            if loaded["over_after"] == self._state.limits:
                trainer.fit_loop.run = lambda: self._run_ended(trainer.fit_loop)

    @staticmethod
    def _run_ended(fit_loop: Any) -> None:
        """Call the hooks of callbacks that Lightning leaves out after a training's end. Makes no step."""
        fit_loop.setup_data()
        fit_loop.reset()
        fit_loop.on_run_start()
        fit_loop.on_run_end()

    def _make_resumable(self, fit_loop: Any) -> None:
        for loader in fit_loop._combined_loader.flattened:
            if not isinstance(loader, DataLoader) and stateful_of(loader) is not loader:
                raise SetupError(
                    f"Flk: flk cannot find its place in a {type(loader).__name__}: use a DataLoader, or give it "
                    "state_dict and load_state_dict"
                )
            make_resumable(
                loader,
                read_ahead=lambda: _read_ahead(fit_loop),
                fetched=lambda: fit_loop._data_fetcher.fetched,
                resumed=lambda exhausted: self.loop.restore_random_state(),
            )

    def _count(self, trainer: Any) -> None:
        """Count the step that was done, with all that is due after it."""
        own_page().phase = Phase.TRAINING
        if self._done:
            self._done = False
            values = {name: value for name, value in trainer.logged_metrics.items() if name not in RESERVED_METRICS}
            self.loop.step(self._loss, samples=_samples(trainer), **(self._total | values))


def _in_turn(*functions: Callable[..., Any]) -> Callable[..., None]:
    """A function that calls these functions with its arguments, one after the other."""

    def run(*arguments: Any, **named: Any) -> None:
        for each in functions:
            each(*arguments, **named)

    return run


class _State:
    """What a Trainer's own checkpoint has besides the model, the optimizers and the schedulers.

    What callbacks keep in such a checkpoint is kept too. The state of the model is left out, unless one changes it.
    """

    def __init__(self) -> None:
        self.trainer: Any = None
        self.saved: dict[str, Any] = {}
        """What flk's checkpoint has."""
        self.is_over = False
        """Whether the trainer has made its last step."""

    @property
    def limits(self) -> list[int | None]:
        """After which epoch, and which step, the training ends."""
        return [self.trainer.max_epochs, self.trainer.max_steps]

    def state_dict(self) -> dict[str, Any]:
        trainer, precision = self.trainer, self.trainer.precision_plugin
        loops = trainer._checkpoint_connector._get_loops_state_dict()
        batches = loops["fit_loop"]["epoch_loop.batch_progress"]
        if batches["current"]["ready"] != batches["current"]["completed"]:  # the next one, which will be read again
            batches["is_last_batch"] = False
        for progress in (batches["total"], batches["current"]):
            progress["ready"] = progress["completed"]
        state = {
            "epoch": trainer.current_epoch,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": __version__,
            "state_dict": self._weights(),
            "loops": loops,
            "over_after": self.limits if self.is_over else None,
            "callbacks": call._call_callbacks_state_dict(trainer),
            "callback_metrics": dict(trainer.callback_metrics),
            type(precision).__qualname__: precision.state_dict(),
        }
        if trainer.datamodule is not None:
            state[type(trainer.datamodule).__qualname__] = trainer.datamodule.state_dict()
        weights = dict(state["state_dict"])
        call._call_callbacks_on_save_checkpoint(trainer, state)
        call._call_lightning_module_hook(trainer, "on_save_checkpoint", state)
        left = state.get("state_dict", {})
        if left.keys() == weights.keys() and all(left[name] is weights[name] for name in weights):
            state.pop("state_dict", None)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.saved = state

    def with_weights(self) -> dict[str, Any]:
        """The state in flk's checkpoint, with the state of the model, which has been restored."""
        return {"state_dict": self._weights(), **self.saved}

    def _weights(self) -> dict[str, Any]:
        """The state of the model; nothing where it is sharded, since collecting it takes long."""
        strategy = self.trainer.strategy
        is_sharded = isinstance(strategy, (FSDPStrategy, ModelParallelStrategy))
        return {} if is_sharded else strategy.lightning_module_state_dict()


def _read_ahead(fit_loop: Any) -> int:
    """The batches that Lightning has read and not trained on."""
    fetcher, progress = fit_loop._data_fetcher, fit_loop.epoch_loop.batch_progress.current
    is_drawn = not isinstance(fetcher, _DataLoaderIterDataFetcher)  # before the step, and not in it
    return len(getattr(fetcher, "batches", ())) + int(is_drawn and progress.ready - progress.completed)


def _samples(trainer: Any) -> int:
    """The samples of a step of all ranks together; 0 if the loader does not say."""
    size = getattr(trainer.train_dataloader, "batch_size", None)
    return size * trainer.accumulate_grad_batches * trainer.world_size if isinstance(size, int) else 0
