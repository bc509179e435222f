"""What of a run is in its snapshots: models, optimizers, loaders, whatever else is registered, and random numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from flk_runtime.checkpoint import storage as snapshot
from flk_runtime.checkpoint.stateful import DistributedStateful, Stateful
from flk_runtime.data.loader import EpochLoader
from flk_runtime.distributed import process_group as group
from flk_runtime.errors import CheckpointError, SetupError
from flk_runtime.system import rng as randomness


class Checkpoint:
    """The registered objects of a run, their states of the newest snapshot until the first step, and the writing.

    ``folder`` None: nothing is written or read. All methods but `begin_random` are collective.
    """

    def __init__(self, folder: snapshot.Folder | None, seed: int, report: Callable[[str], None]) -> None:
        self.steps = 0  # those in the snapshot
        self._folder, self._seed, self._report = folder, seed, report
        self._objects: dict[str, Stateful] = {}
        self._restored: dict[str, Any] = {}  # states in the snapshot, until the first step
        self._unclaimed: set[str] = set()  # names of those that nothing has been registered for
        self._random: dict[str, Any] | None = None
        self._begun = False  # whether this rank's own random numbers have begun
        self._settled = False
        self._saved: Any = None
        if folder:
            self._resume(folder)

    def _resume(self, folder: snapshot.Folder) -> None:
        found = snapshot.agree(folder, lambda text: print(f"flk: {text}", file=sys.stderr, flush=True))
        if not found:
            return
        path, content = found
        self.steps = content["steps"]
        self._restored = content["objects"]
        self._unclaimed = set(self._restored)
        rank = dist.get_rank()
        if rank < content["world_size"]:
            self._random = content["random"][rank]
        else:  # a rank that was not there before
            randomness.seed_all(randomness.derive("rank", self._seed, rank, self.steps))
            self._random = randomness.get_state()
        self._saved = _positions(self.steps, self._restored)
        self._report(f"flk: resumed at step {self.steps} from {path}")

    def register(self, name: str, thing: Stateful) -> None:
        """Put ``thing`` into snapshots, and restore it if it is in the newest."""
        if name in self._objects:
            raise SetupError(f"{name!r} has been registered before")
        if name in self._unclaimed and self._settled:
            raise SetupError(f"{name!r} is in the snapshot, so it must be registered before the first step")
        self._objects[name] = thing
        if name not in self._restored:
            return
        self._unclaimed.discard(name)
        self._load(name, thing)
        for other, optimizer in self._objects.items():
            if isinstance(optimizer, DistributedStateful) and other in self._restored:
                # A scheduler that is made after its optimizer was restored has set the learning rate of the first step.
                optimizer.reload_hyperparameters(self._restored[other])

    def check_model(self, name: str, model: nn.Module) -> None:
        """Raise CheckpointError if the snapshot is of another model than this, which is not wrapped yet."""
        if name in self._restored and (different := snapshot.mismatch(model, self._restored[name])):
            raise CheckpointError(f"the snapshot in {self._path} is of another model: {different}")

    def begin_random(self) -> None:
        """Until the first step, go to where this rank's random numbers begin: nothing before is part of training."""
        if self._settled:
            return
        if self._random is not None:
            randomness.set_state(self._random)
        elif not self._begun:
            randomness.seed_all(randomness.derive("rank", self._seed, dist.get_rank(), 0))
        self._begun = True

    def settle(self) -> None:
        """At the first step: what the snapshot holds and nobody has registered is told, and let go."""
        self._settled = True
        if "model" in self._unclaimed:
            raise CheckpointError(
                f"the snapshot in {self._path} holds a model, and this script registers none: call parallelize"
            )
        for name in sorted(self._unclaimed):
            self._report(
                f"flk: the snapshot in {self._path} holds {name!r}, which this script does not register: left out"
            )
        self._restored = {}

    def is_due(self, steps: int) -> bool:
        """Whether something has changed since the latest snapshot."""
        return bool(self._saved != self._mark(steps))

    @property
    def writes(self) -> bool:
        """Whether there is a folder, and a registered model to write there."""
        return self._folder is not None and "model" in self._objects

    def save(self, steps: int) -> None:
        """Write a snapshot, where this checkpoint `writes`."""
        random = group.gather(randomness.get_state())
        main = dist.get_rank() == 0
        objects = {
            name: thing.state_dict()
            for name, thing in self._objects.items()
            if main or isinstance(thing, DistributedStateful)  # gathered from all ranks
        }
        if main and self._folder:
            header = snapshot.encode_header(steps=steps, world_size=dist.get_world_size())
            self._folder.write({**header, "objects": objects, "random": random}, steps)
        self._saved = self._mark(steps)

    @property
    def _path(self) -> Path | str:
        return self._folder.path if self._folder else ""

    def _load(self, name: str, thing: Stateful) -> None:
        state = self._restored[name]
        if not isinstance(thing, DistributedStateful):  # which take one tensor after the other
            state = snapshot.fetch(state)
        try:
            thing.load_state_dict(state)
        except (ValueError, KeyError, RuntimeError, AttributeError, TypeError) as error:
            raise CheckpointError(f"the {name} in the snapshot in {self._path} does not fit: {error}") from error

    def _mark(self, steps: int) -> Any:
        loaders = {name: thing.state_dict() for name, thing in self._objects.items() if isinstance(thing, EpochLoader)}
        return _positions(steps, loaders)


def _positions(steps: int, states: Mapping[str, Any]) -> Any:
    """How far the training has come."""
    return steps, {name: state for name, state in states.items() if "consumed" in state}
