"""The checkpoint manager: which objects of a run are saved, and when each of them is restored."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flk_runtime.checkpoint import storage
from flk_runtime.checkpoint.broadcast import broadcast_newest, fetch
from flk_runtime.checkpoint.stateful import DistributedStateful, Stateful
from flk_runtime.data import EpochLoader
from flk_runtime.distributed import process_group
from flk_runtime.errors import CheckpointError, SetupError
from flk_runtime.system import rng


class CheckpointManager:
    """Restores registered objects from the newest checkpoint until the first step, and writes checkpoints.

    ``folder`` None: nothing is read or written. ``seed`` is the run's; a rank derives the seed of its own random
    numbers from it. ``log`` prints a line on rank 0. The constructor, `register` and `save` are collective.
    """

    def __init__(self, folder: storage.CheckpointFolder | None, seed: int, log: Callable[[str], None]) -> None:
        self.steps = 0  # optimizer steps that the checkpoint was taken after
        self._folder, self._seed, self._log = folder, seed, log
        self._objects: dict[str, Stateful | DistributedStateful] = {}
        self._restored: dict[str, Any] = {}  # states in the checkpoint, until the first step
        self._unclaimed: set[str] = set()  # names in the checkpoint for which no object is registered yet
        self._rng_state: dict[str, Any] | None = None  # of this rank, from the checkpoint
        self._rng_started = False  # whether this rank draws random numbers of its own
        self._finished = False  # restoring: the first step has been made
        self._saved: Any = None  # the progress at the latest checkpoint
        if folder:
            self._resume(folder)

    def _resume(self, folder: storage.CheckpointFolder) -> None:
        newest = broadcast_newest(folder, lambda text: print(f"flk: {text}", file=sys.stderr, flush=True))
        if newest is None:
            return
        path, content = newest
        self.steps = content["steps"]
        self._restored = content["objects"]
        self._unclaimed = set(self._restored)
        rank = dist.get_rank()
        if rank < content["world_size"]:
            self._rng_state = content["random"][rank]
        else:  # the checkpoint was written by fewer ranks
            rng.seed_all(rng.derive_seed("rank", self._seed, rank, self.steps))
            self._rng_state = rng.get_state()
        self._saved = _progress(self.steps, self._restored)
        self._log(f"flk: resumed at step {self.steps} from {path}")

    def register(self, name: str, thing: Stateful | DistributedStateful) -> None:
        """Save ``thing`` in checkpoints under ``name``, and restore it now if the newest one has it. Collective.

        Raises SetupError if the name is taken or comes too late, and CheckpointError if the state does not fit.
        """
        if name in self._objects:
            raise SetupError(f"an object is already registered as {name!r}: choose another name")
        if name in self._unclaimed and self._finished:
            raise SetupError(f"{name!r} is in the checkpoint that was resumed: register it before the first step")
        self._objects[name] = thing
        if name not in self._restored:
            return
        self._unclaimed.discard(name)
        self._load(name, thing)
        for other, earlier in self._objects.items():
            if isinstance(earlier, DistributedStateful) and other in self._restored:
                # The constructor of a scheduler sets the first step's learning rate in an optimizer restored before.
                earlier.reload_hyperparameters(self._restored[other])

    def check_model(self, name: str, model: nn.Module) -> None:
        """Raise CheckpointError if the checkpoint does not fit ``model``, which is not parallelized yet."""
        if name in self._restored and (mismatch := _mismatch(model, self._restored[name])):
            raise CheckpointError(f"the checkpoint in {self._path} does not fit the model: {mismatch}")

    def start_rank_rng(self) -> None:
        """Until the first step, set the random generators to where this rank's training starts or resumes."""
        if self._finished:
            return
        if self._rng_state is not None:
            rng.set_state(self._rng_state)
        elif not self._rng_started:
            rng.seed_all(rng.derive_seed("rank", self._seed, dist.get_rank(), 0))
        self._rng_started = True

    def finish_restoring(self) -> None:
        """At the first step, warn about entries that no registered object has claimed, and free the rest.

        Raises CheckpointError if the unclaimed entry is the model.
        """
        self._finished = True
        if "model" in self._unclaimed:
            raise CheckpointError(
                f"the checkpoint in {self._path} holds a model, but this script registers none: call parallelize "
                "before the first step"
            )
        for name in sorted(self._unclaimed):
            self._log(f"flk: ignoring {name!r} in the checkpoint in {self._path}: this script does not register it")
        self._restored = {}

    def has_progress_since_save(self, steps: int) -> bool:
        """Whether a step or a loader has advanced since the latest checkpoint."""
        return bool(self._saved != self._current_progress(steps))

    @property
    def can_save(self) -> bool:
        """Whether there is a folder, and a registered model to save."""
        return self._folder is not None and "model" in self._objects

    def save(self, steps: int) -> None:
        """Write a checkpoint, taken after ``steps`` optimizer steps. Call only if `can_save`. Collective.

        Raises CheckpointError on rank 0 if the file cannot be written.
        """
        rng_states = process_group.gather(rng.get_state())
        main = dist.get_rank() == 0
        objects = {
            name: thing.state_dict()
            for name, thing in self._objects.items()
            if main or isinstance(thing, DistributedStateful)
        }
        if main and self._folder:
            header = storage.header(steps=steps, world_size=dist.get_world_size())
            self._folder.write({**header, "objects": objects, "random": rng_states}, steps)
        self._saved = self._current_progress(steps)

    @property
    def _path(self) -> Path | str:
        return self._folder.path if self._folder else ""

    def _load(self, name: str, thing: Stateful | DistributedStateful) -> None:
        state = self._restored[name]
        if not isinstance(thing, DistributedStateful):
            state = fetch(state)
        try:
            thing.load_state_dict(state)
        except (ValueError, KeyError, RuntimeError, AttributeError, TypeError) as error:
            raise CheckpointError(f"cannot restore {name!r} from the checkpoint in {self._path}: {error}") from error

    def _current_progress(self, steps: int) -> Any:
        loaders = {name: thing.state_dict() for name, thing in self._objects.items() if isinstance(thing, EpochLoader)}
        return _progress(steps, loaders)


def _progress(steps: int, states: Mapping[str, Any]) -> Any:
    """The number of steps, and the position of each loader in ``states``."""
    return steps, {name: state for name, state in states.items() if "consumed" in state}


def _mismatch(model: nn.Module, state: Mapping[str, Any]) -> str | None:
    """The first difference between ``model`` and a saved ``state``; None if there is none."""
    own = model.state_dict()
    for name in own:
        if name not in state:
            return f"missing key {name!r}"
    for name in state:
        if name not in own:
            return f"unexpected key {name!r}"
    for name, value in own.items():
        if isinstance(value, torch.Tensor) and state[name].shape != value.shape:
            return (
                f"size mismatch for {name!r}: {tuple(state[name].shape)} in the checkpoint, "
                f"{tuple(value.shape)} in the model"
            )
    return None
