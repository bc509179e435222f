"""adopt(): let flk keep the state of a training loop with an Accelerator."""

from __future__ import annotations

from typing import Any

from accelerate.utils import DistributedType

from flk_runtime.checkpoint.stateful import per_rank
from flk_runtime.errors import SetupError
from flk_runtime.hosts.loaders import make_resumable
from flk_runtime.run.adopt import adopt as adopt_objects
from flk_runtime.run.loop import Loop


def adopt(accelerator: Any, **options: Any) -> Loop:
    """Let flk keep what ``accelerator``, an accelerate.Accelerator, has prepared, and restore it. Collective.

    That is the models, optimizers, schedulers, the GradScaler, the loaders' positions, and what was passed to
    ``accelerator.register_for_checkpointing``. Call it after ``accelerator.prepare``. A loader continues after the
    batches that it has given, and its ``iteration`` is the number of epochs that it has completed:

        loop = adopt(accelerator, save_every=100)
        for epoch in range(loader.iteration, epochs):
            for batch in loader:
                with accelerator.accumulate(model):
                    ...
                    optimizer.step()
                if accelerator.sync_gradients:
                    loop.step(loss=loss)
        loop.close()

    ``options`` are options of `flk_runtime.adopt`, such as ``save_every``, and more objects. Raises SetupError as that
    does, and for DeepSpeed, Megatron-LM, dispatched batches and StatefulDataLoader.
    """
    kind = accelerator.distributed_type
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise SetupError(f"adopt: flk cannot keep the state of an Accelerator with {kind.value}: let it save itself")
    loaders = [_Loader(each) for each in accelerator._dataloaders]
    loop = adopt_objects(
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
    return loop


def _named(name: str, objects: list[Any]) -> dict[str, Any]:
    return {name if number == 0 else f"{name}-{number}": each for number, each in enumerate(objects)}


class _Loader:
    """A loader that the Accelerator has prepared."""

    def __init__(self, prepared: Any) -> None:
        inner: Any = getattr(prepared, "base_dataloader", None)
        if type(prepared).__name__ != "DataLoaderShard" or hasattr(inner, "load_state_dict"):
            raise SetupError(
                f"adopt: flk cannot find its place in a {type(prepared).__name__} of the Accelerator: pass it "
                "DataLoaderConfiguration(dispatch_batches=False, use_stateful_dataloader=False)"
            )
        self.loop: Loop | None = None
        self._prepared, self._inner = prepared, inner
        make_resumable(inner, read_ahead=self._read_ahead, resumed=self._resumed)

    def state_dict(self) -> dict[str, Any]:
        prepared, position = self._prepared, self._inner.state_dict()
        iterates = any(each is prepared for each in prepared.gradient_state.dataloader_references)
        if self._inner.flk_position is None and not iterates:  # the latest epoch is over
            position = {"given": 0, "began": None}
        return {"iteration": prepared.iteration, **position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._prepared.iteration = state["iteration"]
        self._inner.load_state_dict(state)

    def _read_ahead(self) -> int:
        """The Accelerator reads one batch ahead, but at the end of an epoch."""
        return int(not self._prepared.end_of_dataloader)

    def _resumed(self, exhausted: bool) -> None:
        if exhausted:
            self._prepared.iteration += 1  # the Accelerator does not count an epoch without batches
        if self.loop:
            self.loop.restore_random_state()
