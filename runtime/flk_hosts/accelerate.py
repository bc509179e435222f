"""adopt(): let flk keep the state of a training loop with an Accelerator."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from accelerate.utils import DistributedType

from flk_hosts.loaders import make_resumable
from flk_runtime.checkpoint.stateful import per_rank
from flk_runtime.distributed import process_group
from flk_runtime.errors import MismatchError, SetupError
from flk_runtime.training.elastic import refuse_elastic
from flk_runtime.training.entry.adopt import adopt_training
from flk_runtime.training.loop import Loop


def adopt(accelerator: Any, **options: Any) -> Loop:
    """Let flk keep what ``accelerator``, an accelerate.Accelerator, has prepared, and restore it. Collective.

    That is the models, optimizers, schedulers, the GradScaler, the loaders' positions, and what was passed to
    ``accelerator.register_for_checkpointing``. Call it after ``accelerator.prepare``. A loader continues after the
    batches that it has given, and its ``iteration`` is the number of epochs that it has completed. A step ends where
    its loader's next batch is drawn, so what follows the loop over an epoch belongs to the epoch's last step:

        loop = adopt(accelerator, save_every=100)
        for epoch in range(loader.iteration, epochs):
            for batch in loader:
                with accelerator.accumulate(model):
                    ...
                    optimizer.step()
                if accelerator.sync_gradients:
                    loop.step(loss=loss)
            evaluate()
        loop.close()

    ``options`` are options of `flk_runtime.adopt`, such as ``save_every``, and more objects. Raises SetupError as that
    does, and for DeepSpeed, Megatron-LM and StatefulDataLoader, and for loaders in an elastic job.
    """
    kind = accelerator.distributed_type
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise SetupError(f"adopt: flk cannot keep the state of an Accelerator with {kind.value}: let it save itself")
    if accelerator._dataloaders:
        refuse_elastic("adopt", "a loader of the Accelerator would not find its place at another number of ranks")
    loaders = [PreparedLoader(each) for each in accelerator._dataloaders]
    loop = adopt_training(
        **options,
        **_named("model", accelerator._models),
        **_named("optimizer", [each.optimizer for each in accelerator._optimizers]),
        **_named("scheduler", [each.scheduler for each in accelerator._schedulers]),
        **_named("scaler", [accelerator.scaler] if accelerator.scaler is not None else []),
        **_named("loader", [per_rank(each) for each in loaders]),
        **_named("registered", accelerator._custom_objects),
    )
    for each in loaders:
        each.loop = loop
    _Drawing(loop, loaders)
    return loop


def _named(name: str, objects: list[Any]) -> dict[str, Any]:
    return {name if number == 0 else f"{name}-{number}": each for number, each in enumerate(objects)}


class _Drawing:
    """Ends a step where the next batch of its loader is drawn, after an epoch's last step in the next epoch.

    So what a script does after the loop over an epoch belongs to the epoch's last step.
    """

    def __init__(self, loop: Loop, loaders: list[PreparedLoader]) -> None:
        self._loop, self._loaders = loop, loaders
        self._gave: list[PreparedLoader] = []  # the batch of the latest step
        loop.is_drawn_for = self._note_step
        for each in loaders:
            each.note_drawn(functools.partial(self._end_step, each))

    def _note_step(self) -> bool:
        self._gave = [each for each in self._loaders if each.is_active]
        return bool(self._gave)

    def _end_step(self, loader: PreparedLoader) -> None:
        if loader in self._gave:
            self._gave = []
            self._loop.end_drawn_step()


class PreparedLoader:
    """A loader that an Accelerator has prepared, whose place in the data is saved and restored."""

    def __init__(self, prepared: Any, is_over: Callable[[], bool] | None = None) -> None:
        """``is_over`` returns whether the latest epoch is over; by default it is asked of the Accelerator.

        Raises SetupError if the place in its data cannot be found.
        """
        known = isinstance(prepared, (DataLoaderShard, DataLoaderDispatcher))
        if not known or hasattr(prepared.base_dataloader, "load_state_dict"):
            raise SetupError(
                f"adopt: flk cannot find its place in a {type(prepared).__name__} of the Accelerator: pass it "
                "DataLoaderConfiguration(use_stateful_dataloader=False)"
            )
        self.loop: Loop | None = None
        self._prepared, self._inner, self._begins = prepared, prepared.base_dataloader, False
        self._is_over = is_over or (lambda: not self.is_active or self._begins)
        kind: Any = type(prepared)  # __class__ says that it is a DataLoader
        object.__dict__["__class__"].__set__(prepared, type(kind.__name__, (_Beginning, kind), {}))
        prepared.flk_begin = lambda batches: batches
        self._has_place = is_placeable(prepared)
        if self._has_place:
            # The Accelerator reads the next batch ahead, but at the end of an epoch.
            make_resumable(
                self._inner,
                read_ahead=lambda: 0 if prepared.end_of_dataloader else 1,
                resumed=self.note_resumed,
            )

    def state_dict(self) -> dict[str, Any]:
        position = self._inner.state_dict() if self._has_place else {}
        if self._has_place and self._inner.flk_position is None and self._is_over():
            position = {**position, "given": 0, "began": None}
        return {"iteration": self._prepared.iteration, **position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give the loader this place. Raises CheckpointError if other ranks have read its batches."""
        if ("began" in state) != self._has_place:
            raise MismatchError(
                f"it was saved with dispatch_batches={self._has_place}, which is {not self._has_place} now: other "
                "ranks have read the batches, and the loader would not find its place; resume with the same"
            )
        self._prepared.iteration = state["iteration"]
        if self._has_place:
            self._inner.load_state_dict(state)
        elif process_group.rank() == 0:
            print(
                "flk: rank 0 reads the batches of all ranks (dispatch_batches), and their place is in no checkpoint: "
                f"epoch {state['iteration']} begins anew; pass DataLoaderConfiguration(dispatch_batches=False)",
                file=sys.stderr,
                flush=True,
            )

    @property
    def is_active(self) -> bool:
        """Whether the script is in a loop over it."""
        return any(each is self._prepared for each in self._prepared.gradient_state.dataloader_references)

    def note_drawn(self, note: Callable[[], None]) -> None:
        """Have ``note`` be called before the script gets a batch, but not before it hears that there is none left."""
        prepared, begin = self._prepared, self._prepared.flk_begin

        def noting(batches: Iterator[Any]) -> Iterator[Any]:
            self._begins = True  # the epoch before is over, also if the script has left it with break
            note()
            self._begins = False
            for batch in begin(batches):
                yield batch
                if not prepared.end_of_dataloader:
                    note()

        prepared.flk_begin = noting

    def note_resumed(self, exhausted: bool) -> None:
        """The script has the batches that it had when it was saved; ``exhausted``: none was left."""
        if exhausted:
            self._prepared.iteration += 1  # the Accelerator does not count an epoch without batches
        if self.loop:
            self.loop.restore_random_state()


class _Beginning:
    """What the class of a loader of an Accelerator gets in front of it: an epoch begins where flk says."""

    flk_begin: Callable[[Iterator[Any]], Iterator[Any]]

    def __iter__(self) -> Iterator[Any]:
        return self.flk_begin(super().__iter__())  # type: ignore[misc]


def is_placeable(prepared: Any) -> bool:
    """Whether flk can find its place in the data of a loader that an Accelerator has prepared."""
    return isinstance(prepared, DataLoaderShard) and not hasattr(prepared.base_dataloader, "load_state_dict")
