"""torchtitan.train with flk: ``-m flk_hosts.torchtitan`` in the place of ``-m torchtitan.train``.

Importing this module is enough too. torchtitan calls its checkpoint manager at the start and after each step; flk keeps
the same states there, in memory and, if there is a place, in storage. torchtitan's own checkpoints are independent.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan import train
from torchtitan.components import checkpointer
from torchtitan.components.checkpointer.base import BaseCheckpointManager

from flk_runtime.checkpoint.stateful import per_rank, replicated
from flk_runtime.distributed import parameters_in
from flk_runtime.run.adopt import adopt_training
from flk_runtime.run.elastic import refuse_elastic
from flk_runtime.run.loop import Loop
from flk_runtime.shared.progress import Phase, own_page
from flk_runtime.system import pytree

_SPMD = "spmd_types"  # the backend whose parameters are this rank's part of a tensor, without saying so


class _Kept:
    """What flk keeps for one checkpoint manager of torchtitan."""

    def __init__(self, objects: dict[str, Any]) -> None:
        self._objects = objects
        self._trainer = objects["states"]["train_state"]
        self._loop: Loop | None = None
        self._tokens = 0
        self._logged: dict[str, Any] = {}

    def load(self) -> None:
        """Restore flk's checkpoint, if it is of a later step than what torchtitan has loaded."""
        refuse_elastic("torchtitan", "its loader would not find its place in the data at another number of ranks")
        trainer, counters = self._trainer, dict[str, Any]()
        theirs = trainer.step
        self._loop = loop = adopt_training(log_every=0, trainer=per_rank(counters))
        if theirs > loop.steps:
            loop.begin_at(theirs)
        elif loop.steps:
            trainer.load_state_dict(counters)
        loop.register(**_states(self._objects, trainer))
        self._counters, self._tokens = counters, trainer.ntokens_seen
        trainer.batch_generator = self._resumed(trainer.batch_generator)
        trainer.metrics_processor.log = self._noting(trainer.metrics_processor.log)

    def step(self) -> None:
        """Count a step, with all that is due after it."""
        if self._loop is None:  # torchtitan writes a seed checkpoint
            return
        trainer, logged = self._trainer, self._logged
        self._logged = {}
        tokens, self._tokens = trainer.ntokens_seen - self._tokens, trainer.ntokens_seen
        self._counters.update(trainer.state_dict())
        mesh = trainer.parallel_dims.get_optional_mesh("batch")
        own_page().phase = Phase.TRAINING
        self._loop.step(tokens=tokens * (mesh.size() if mesh else 1), report=bool(logged), **logged)
        if trainer.config.validator.enable and trainer.validator.should_validate(trainer.step):
            own_page().phase = Phase.EVALUATING

    def close(self) -> None:
        if self._loop and sys.exc_info()[1] is None:
            self._loop.close()
        elif self._loop:
            self._loop.abandon()

    def _resumed(self, read: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def batches(loader: Any) -> Iterator[Any]:
            for number, batch in enumerate(read(loader)):
                if number == 0 and self._loop:
                    self._loop.restore_random_state()
                yield batch

        return batches

    def _noting(self, log: Callable[..., None]) -> Callable[..., None]:
        def run(step: int, loss: float, max_loss: float, grad_norm: float, *more: Any, **named: Any) -> None:
            log(step, loss, max_loss, grad_norm, *more, **named)
            has_loss = not self._trainer.parallel_dims.pp_enabled or self._trainer.pp_has_last_stage
            total = self._trainer.config.training.steps
            self._logged = {"loss": loss if has_loss else None, "grad_norm": grad_norm, "total_steps": total}

        return run


def _states(objects: dict[str, Any], trainer: Any) -> dict[str, Any]:
    """The states of a training, by their names in flk's checkpoints.

    They fit another mesh, unless the ranks hold parts of parameters that are no DTensors.
    """
    parts, optimizers = objects["model_parts"], objects["optimizers"].optimizers
    dims = trainer.parallel_dims
    hidden = trainer.config.parallelism.spmd_backend == _SPMD and max(dims.tp, dims.ep, dims.cp) > 1
    states = {"scheduler": replicated(objects["lr_schedulers"])}
    if objects["dataloader"] is not None:
        states["loader"] = per_rank(_Loader(objects["dataloader"]))
    if hidden:
        return states | {"part": per_rank(_Part(parts, optimizers))}
    # The stages of a pipeline that this rank holds are parts of one model.
    models = {"model": parts} if dims.pp_enabled else {f"model-{number}": each for number, each in enumerate(parts)}
    return states | models | {f"optimizer-{number}": each for number, each in enumerate(optimizers)}


class _Loader:
    """A loader of torchtitan, whose state has bytes."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        state = self._loader.state_dict()
        return {name: ["bytes", each.hex()] if isinstance(each, bytes) else each for name, each in state.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        given = {name: bytes.fromhex(each[1]) if isinstance(each, list) else each for name, each in state.items()}
        self._loader.load_state_dict(given)


class _Part:
    """This rank's part of models and optimizers, as plain tensors. It fits the same mesh only."""

    def __init__(self, parts: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
        self._parts, self._optimizers = parts, optimizers

    def state_dict(self) -> dict[str, Any]:
        return {
            "models": [pytree.map_leaves(part.state_dict(), _local) for part in self._parts],
            "optimizers": [pytree.map_leaves(each.state_dict(), _local) for each in self._optimizers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Not into the tensors of state_dict(): a model may make them anew, as parts of a fused parameter.
        with torch.no_grad():
            for part, saved in zip(self._parts, state["models"], strict=True):
                part.load_state_dict({name: _as(own, saved[name]) for name, own in part.state_dict().items()})
            for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(_as_parameters(optimizer, saved))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _as(like: Any, local: Any) -> Any:
    """A value of a rank's own part, as a DTensor if ``like`` is one that has such a part."""
    if not isinstance(like, DTensor) or local.dim() == 0 or local.shape != like.to_local().shape:
        return local
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _as_parameters(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """The state of an optimizer, whose tensors of a parameter's shape are made DTensors as the parameter is."""
    parameters = parameters_in(optimizer)
    states = {
        number: {
            name: _as(parameters[number], each) if isinstance(each, torch.Tensor) else each
            for name, each in state.items()
        }
        for number, state in saved["state"].items()
    }
    return {**saved, "state": states}


def _adopt_all() -> None:
    """Have all checkpoint managers that torchtitan makes from now on keep their states through flk too."""
    for manager in {checkpointer.CheckpointManager, *BaseCheckpointManager.__subclasses__()}:
        manager.__init__ = _remembering(manager.__init__)
    BaseCheckpointManager.load = _with(BaseCheckpointManager.load, _Kept.load)
    BaseCheckpointManager.save = _with(BaseCheckpointManager.save, _Kept.step)
    BaseCheckpointManager.close = _with(BaseCheckpointManager.close, _Kept.close)


def _remembering(make: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(make)
    def made(manager: Any, config: Any, **objects: Any) -> None:
        make(manager, config, **objects)
        manager.flk = _Kept(objects)

    return made


def _with(method: Callable[..., Any], then: Callable[[_Kept], None]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(manager: Any, *arguments: Any, **named: Any) -> Any:
        result = method(manager, *arguments, **named)
        if kept := getattr(manager, "flk", None):
            then(kept)
        return result

    return run


_adopt_all()

if __name__ == "__main__":
    train.main()
