"""The checkpoint manager: which objects of a run are saved, and when each of them is restored."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from flk_runtime.checkpoint.adapters.optimizer import OptimizerState, hyperparameters_of, set_hyperparameters
from flk_runtime.checkpoint.adapters.placed import PlacedOptimizer
from flk_runtime.checkpoint.memory import Restorable
from flk_runtime.checkpoint.state import SplitState, encode_whole, split_tensors
from flk_runtime.checkpoint.stateful import (
    DistributedStateful,
    Stateful,
    inside_of,
    is_replicated,
    load_into,
    state_of,
    values_of,
)
from flk_runtime.checkpoint.values import decode
from flk_runtime.contract import user_env
from flk_runtime.data import EpochLoader
from flk_runtime.distributed import find_difference, first_far, process_group
from flk_runtime.errors import CheckpointError, MismatchError, RuntimeFailure, SetupError, checkpoint_error
from flk_runtime.shared.progress import Phase, own_page
from flk_runtime.system import device as devices
from flk_runtime.system import rng
from flk_runtime.system.bits import compared_part, is_compared

if TYPE_CHECKING:
    from flk_runtime.checkpoint.load import SavedObject
    from flk_runtime.checkpoint.save import Saver

INTERNAL = "flk."
"""The beginning of the names of flk's own objects. A checkpoint has them or not, depending on the strategy, so no
line is printed about one that is missing or left over."""
NO_VOLUME = "no checkpoints, since the pods share no volume: --checkpoint PVC:/PATH names one"
_BY_ORDER = re.compile(r"loader(-\d+)?")  # names of loaders that the script has not named


def is_passed(every: int, before: int, steps: int) -> bool:
    """Whether a multiple of ``every`` lies after ``before`` steps and up to ``steps``; 0: none does."""
    return every > 0 and steps // every != before // every


def next_multiple(every: int, steps: int) -> int:
    """The first multiple of ``every`` after ``steps``; with 0 there is none."""
    return (steps // every + 1) * every if every else sys.maxsize


Progress = tuple[int, dict[str, tuple[int, ...]]]  # steps, and the numbers of loaders' positions by name


@dataclass(frozen=True)
class CheckpointOptions:
    """Options of checkpoints: their place, how many stay, and whether one is restored."""

    place: str | None  # a folder or an address; None: there is none
    seed: int  # of the run; a rank derives the seed of its own random numbers from it
    metadata: Mapping[str, Any]  # of the writer of the checkpoints: job, code, versions
    timeout: float  # seconds that a rank waits for the file of another
    keep: int = user_env.KEEP.default  # the newest checkpoints that stay
    store_every: int | None = None
    """Steps between two checkpoints in storage, where memory keeps more; 0: only at the end; None: each is stored."""
    resume: bool = True  # whether an existing checkpoint is restored
    needs_model: bool = True  # nothing is saved, and no step made, before a model is registered
    in_memory: bool = True  # the memory of the pods is used too; it has room for checkpoints of one place
    goes_back: bool = False
    """This process has saved there before. Then only storage is read, since launchers offer the checkpoint with which
    their attempt began."""


@dataclass(frozen=True)
class Resumed:
    """What this rank resumes from a checkpoint. It is freed at the first step."""

    place: str  # the name of the checkpoint in messages
    steps: int  # optimizer steps that it was taken after
    objects: Mapping[str, SavedObject]  # states that it has once
    own: Mapping[str, Any]  # states that this rank has saved for itself; empty at another number of ranks
    own_of_rank_0: Mapping[str, Any]
    random: dict[str, Any]  # states of the generators of this rank
    progress: Progress
    saved_for: str | None  # the place that was given when it was saved

    def load(self, name: str, thing: Stateful | DistributedStateful) -> None:
        """Give ``thing`` its state. Raises CheckpointError if that does not fit."""
        try:
            if name in self.objects:
                if isinstance(thing, DistributedStateful):
                    thing.load_state(self.objects[name])
                else:
                    load_into(thing, self.objects[name].state_dict())
            elif not isinstance(thing, DistributedStateful) and name in (
                own := self.own_of_rank_0 if is_replicated(thing) else self.own
            ):
                load_into(thing, decode(own[name], {}))
            elif not name.startswith(INTERNAL):
                raise MismatchError(
                    "each rank has a state of its own, which flk.per_rank(…) or another number of ranks has saved; "
                    "resume as then, pass the object as flk.replicated(…) if rank 0's state is right for all ranks, "
                    "or pass it under another name so that it starts anew"
                )
        except (CheckpointError, ValueError, KeyError, RuntimeError, AttributeError, TypeError) as error:
            raise checkpoint_error(
                f"cannot restore {name!r} from {self.place}: {' '.join(str(error).split())}", error
            ) from error


class CheckpointManager:
    """Restores registered objects from the newest checkpoint until the first step, and writes checkpoints.

    `open_checkpoints` makes it. `register` and `save` are collective. A manager goes through two phases:

    - Restoring: `register` gives an object its state in the checkpoint that is resumed, and takes its name off the
      unclaimed ones. The random generators are set once, by whichever call comes first.
    - After `finish_restoring`, at the first step: names that nobody has claimed are errors or ignored, and the state
      that was read is freed. Further objects begin anew.

    `save` may be called in both.
    """

    _unstored: ClassVar[Restorable | None] = None
    """What this process has restored from memory, and has not stored. Nothing was saved there since."""

    def __init__(
        self,
        options: CheckpointOptions,
        log: Callable[[str], None],
        saver: Saver | None = None,
        resumed: Resumed | None = None,
        *,
        in_memory: Restorable | None = None,
        refusal: str = "",
    ) -> None:
        """Make a manager that has ``resumed`` to give to the objects; None: there is no checkpoint to resume.

        ``saver`` is None if there is no place for checkpoints, for the reason ``refusal`` if one was asked for.
        ``in_memory`` is the checkpoint that is resumed, if it is in the memory of the pods.
        """
        self.options = options
        self.steps = resumed.steps if resumed else 0
        """Optimizer steps that the checkpoint was taken after."""
        self.source = "memory" if in_memory else "storage" if resumed else "start"
        """Where the state comes from, as in SOURCES."""
        self._log, self._saver, self._refusal = log, saver, refusal
        self._objects: dict[str, Stateful | DistributedStateful] = {}
        CheckpointManager._unstored = in_memory or CheckpointManager._unstored
        self._resumed = resumed  # until the first step
        self._rates: dict[Optimizer, list[dict[str, Any]]] = {}  # restored hyperparameters of each group
        self._unclaimed = {*resumed.objects, *resumed.own_of_rank_0} if resumed else set()
        """Names in the checkpoint for which no object is registered yet."""
        self.restored_by_script: set[str] = set()
        """Names that `flk.restore` has taken from this place."""
        self._rng_state = resumed.random if resumed else None  # from which this rank's random numbers go on
        self._rng_started = False  # whether this rank draws random numbers of its own, or those of the checkpoint
        self._finished = False  # restoring: the first step has been made
        self._saved = resumed.progress if resumed else None  # the progress at the latest checkpoint
        self._saves = 0  # of this manager

    @property
    def has_saved(self) -> bool:
        """Whether `save` has been called."""
        return self._saves > 0

    @property
    def has_storage(self) -> bool:
        """Whether checkpoints go to storage."""
        return self._saver is not None and self._saver.storage is not None

    def register(self, name: str, thing: Stateful | DistributedStateful, *, internal: bool = False) -> None:
        """Save ``thing`` in checkpoints under ``name``, and restore it now if the newest one has it. Collective.

        ``internal``: it is an object of flk's own. Raises SetupError if the name is taken, reserved, or comes too late,
        and CheckpointError if the state does not fit.
        """
        if name.startswith(INTERNAL) != internal:
            raise SetupError(
                f"{name!r}: names that begin with {INTERNAL!r} are for flk's own objects: choose another name"
            )
        if name in self._objects:
            raise SetupError(f"an object is already registered as {name!r}: choose another name")
        if name in self._unclaimed and self._finished:
            raise SetupError(f"{name!r} is in the checkpoint that was resumed: register it before the first step")
        self._objects[name] = thing
        if self._saver is not None and (values := values_of(thing)) is not None:
            encode_whole(values, (name,))  # raises now if it cannot be saved
        if self._resumed is None or name not in self._unclaimed:
            if self._resumed and not name.startswith(INTERNAL):
                self._log(f"flk: {name!r} is not in {self._resumed.place}, and begins anew")
            return
        self._unclaimed.discard(name)
        self._resumed.load(name, thing)
        inside = inside_of(thing)
        if isinstance(inside, OptimizerState | PlacedOptimizer):
            self._rates[inside.optimizer] = hyperparameters_of(inside.optimizer)
        # The constructor of a scheduler sets the first step's learning rate in an optimizer restored before. One of
        # torch marks the groups whose rate it sets. An object that flk does not know may be one of another library.
        only_scheduled = values_of(thing) is not None or isinstance(
            inside, torch.optim.lr_scheduler.LRScheduler | torch.amp.GradScaler | EpochLoader | DistributedStateful
        )
        for optimizer, groups in self._rates.items():
            set_hyperparameters(optimizer, groups, only_scheduled=only_scheduled)

    def get(self, name: str) -> Stateful | DistributedStateful | None:
        """The object that is registered under ``name``; None if there is none."""
        return self._objects.get(name)

    def replace(self, name: str, thing: Stateful | DistributedStateful) -> None:
        """Save ``thing`` in the place of the object that was registered under ``name``. Nothing is restored."""
        self._objects[name] = thing

    def start_rank_rng(self) -> None:
        """Until the first step, set the random generators to where this rank's training starts or resumes."""
        if not self._finished:
            self._set_rng()

    def begin_rank_rng(self) -> None:
        """Set the random generators when the training begins, unless `start_rank_rng` has.

        Ranks without a run start alike, and go on so.
        """
        if self._awaits_rng:
            self._set_rng()

    @property
    def _awaits_rng(self) -> bool:
        """Whether the random generators are still to be set."""
        return not self._rng_started and (self.options.needs_model or self._rng_state is not None)

    def _set_rng(self) -> None:
        if self._rng_state is not None:
            rng.set_state(self._rng_state)
        elif not self._rng_started:
            rng.seed_all(rng.derive_seed("rank", self.options.seed, process_group.rank(), 0))
        self._rng_started = True

    def finish_restoring(self) -> None:
        """At the first step, warn about entries that no registered object has claimed, and free the rest.

        Raises CheckpointError if the unclaimed entry is the model that the script has to register, and if it is a model
        while another one has not been in the checkpoint: it may have got another name. Raises SetupError if it is the
        position of a loader without a name while there are others.
        """
        self._finished = True
        resumed, self._resumed = self._resumed, None
        if resumed:
            self._check_unclaimed(resumed)
        if self._saver:
            self._saver.finish_restoring()

    def _check_unclaimed(self, resumed: Resumed) -> None:
        place = resumed.place
        unclaimed = self._unclaimed - self.restored_by_script
        if self.options.needs_model and "model" in unclaimed:
            raise MismatchError(
                f"{place} holds a model, but this script registers none: call parallelize before the first step"
            )
        left = sorted(name for name in unclaimed if not name.startswith(INTERNAL))
        renamed = [name for name in left if name in resumed.objects and resumed.objects[name].is_of_model()]
        anew = [
            name
            for name, thing in self._objects.items()
            if name not in resumed.objects and isinstance(thing, DistributedStateful) and thing.is_of_model
        ]
        if renamed and anew:
            raise MismatchError(
                f"{place} holds the model {renamed[0]!r}, which this script does not register, and has no {anew[0]!r}, "
                "which would begin anew while the rest goes on: register it under its name in the checkpoint, or name "
                "another place for checkpoints"
            )
        loaders = [name for name, thing in self._objects.items() if isinstance(thing, EpochLoader)]
        by_order = any(map(_BY_ORDER.fullmatch, loaders))
        for name in left:
            state = resumed.objects[name].plain if name in resumed.objects else {}
            if by_order and _BY_ORDER.fullmatch(name) and _is_position(state) and state["trained"]:
                raise SetupError(
                    f"{name!r} is in {place}, and this script makes fewer loaders before its first step than the one "
                    "that has saved it, so their positions may be those of other loaders: without name=, they go by "
                    "the order of calls; pass each loader the name= that it has in the checkpoint"
                )
            if _is_position(state):  # a loader that is made later begins anew, at each restart
                self._unclaimed.discard(name)
            self._log(f"flk: ignoring {name!r} in {place}: this script does not register it before its first step")

    def ignore_checkpoint(self, steps: int) -> None:
        """Restore nothing from the checkpoint, since the script has restored another one, of ``steps`` steps."""
        self.steps, self.source, self._saved = steps, "", progress_of(steps, {})
        self._resumed = self._rng_state = None
        self._unclaimed = set()

    def has_progress_since_save(self, steps: int) -> bool:
        """Whether a step or a loader has advanced since the latest checkpoint, or the one that was restored."""
        return self._saved != self._current_progress(steps)

    @property
    def keeps_iterable(self) -> bool:
        """Whether an object of the script is saved over which it can loop, such as a DataLoader with a state."""
        return any(
            hasattr(inside, "__iter__") and not isinstance(inside, EpochLoader | nn.Module)
            for inside in map(inside_of, self._objects.values())
        )

    @property
    def keeps_in_memory(self) -> bool:
        """Whether the memory of the pods keeps checkpoints."""
        return self._saver is not None and self._saver.held is not None

    @property
    def can_save(self) -> bool:
        """Whether there is a place for checkpoints, and a state to save: a model where one is needed."""
        if self._saver is None or not self._saver.can_save:
            return False
        return "model" in self._objects if self.options.needs_model else bool(self._objects)

    @property
    def refusal(self) -> str:
        """Why nothing is saved; empty if no place has refused."""
        return self._saver.refusal if self._saver else self._refusal

    def save(self, steps: int) -> None:
        """Save the state after ``steps`` optimizer steps. Call only if `can_save`. Collective.

        Storage gets it too, unless it has an interval of its own that is not over. Returns when the state is copied; a
        thread writes it. Raises CheckpointError on all ranks if the write before this one failed, and CheckpointError
        or SetupError if a state cannot be saved.
        """
        if self._saver is None or not self._saver.can_save:
            return
        with own_page().during(Phase.SAVING):
            self._save(self._saver, steps)

    def _save(self, saver: Saver, steps: int) -> None:
        devices.synchronize()  # a script may step on a stream of its own, for which the copy does not wait
        self._saves += 1
        if process_group.world_size() > 1 and is_compared(self._saves):
            self._compare()
        # The training has begun after all, without a call that `begin_rank_rng` would see.
        self._rng_started |= steps != self.steps
        states, own, problem = self._collect()
        plain = {
            "steps": steps,
            "objects": {name: state.plain for name, state in states.items()} if process_group.rank() == 0 else {},
            "own": own,
            # What the script draws before the training begins is no part of it.
            "random": self._rng_state if self._awaits_rng else rng.get_state(),
            "place": self.options.place,  # the memory of the pods may be asked for the checkpoint of another one
        }
        chunks = [chunk for state in states.values() for chunk in state.chunks]
        every = self.options.store_every
        if saver.held is not None:
            CheckpointManager._unstored = None
        saver.save(steps, chunks, plain, problem, store=every is None or is_passed(every, saver.stored, steps))
        self._saved = self._current_progress(steps)

    def _compare(self) -> None:
        """Raise CheckpointError on all ranks if they hold apart what a checkpoint has only once. Collective."""
        held: dict[str, torch.Tensor] | None = None
        problem: Exception | None = None
        try:
            held = {
                f"{key} of {name}": value
                for name, thing in self._objects.items()
                if isinstance(thing, DistributedStateful)
                for key, value in thing.held_alike().items()
            }
        except MismatchError:  # with which the save ends after this, on all ranks
            pass
        except Exception as error:  # raised below: ranks without an error would wait for this one
            problem = error
        if not process_group.all_true(held is not None) or held is None:
            if problem:
                raise problem
            return
        described = [(key, f"a tensor of {value.dtype} {tuple(value.shape)}") for key, value in held.items()]
        found = find_difference("a save", described)
        if not found:
            parts = {key: compared_part(value, self._saves) for key, value in held.items()}
            if key := first_far(held, dist.group.WORLD, parts):
                found = f"{key} has other values on other ranks"
        if found:
            raise MismatchError(
                f"{found}, and a checkpoint has one of each: keep it alike on all ranks, as DDP does, or pass "
                "flk.per_rank(…) of the model and of its optimizer, to save each rank's, or flk.replicated(…), if rank "
                "0's is right for all"
            )

    def _collect(self) -> tuple[dict[str, SplitState], dict[str, Any], RuntimeFailure | None]:
        """This rank's share of the common state, its own states, and the reason why one cannot be saved.

        The reason is None if all states can be saved. States are by name.
        """
        main = process_group.rank() == 0
        states: dict[str, SplitState] = {}
        own: dict[str, Any] = {}
        problem: RuntimeFailure | None = None
        for name, thing in self._objects.items():
            try:
                if isinstance(thing, EpochLoader):
                    thing.gather()
                if isinstance(thing, DistributedStateful):
                    state = thing.save_state(name)
                    if main:
                        beside = split_tensors(state.plain, (name,))
                        state = SplitState([*state.chunks, *beside.chunks], beside.plain)
                    states[name] = state
                elif not is_replicated(thing):
                    own[name] = encode_whole(state_of(thing), (name,))
                elif main:
                    states[name] = split_tensors(state_of(thing), (name,))
            except RuntimeFailure as error:  # other ranks may have none, and the next state may be collective
                problem = problem or error
        return states, own, problem

    def poll(self) -> bool:
        """Call ``on_saved`` if the latest checkpoint has become complete in memory, and return at once.

        Returns whether a later call may do so.
        """
        return self._saver is not None and self._saver.held is not None and self._saver.held.poll()

    def wait(self, *, together: bool = False, at_end: bool = False) -> None:
        """Wait until the latest checkpoint is complete, and stored if there is storage.

        The latest one may be one that was restored from memory. Raises CheckpointError on all ranks if it could not be.
        ``together``: as in `Saver.wait`, and raise SetupError if the pods share no place. ``at_end``: as there.
        """
        if together and self._refusal:
            raise SetupError(self._refusal)
        if self._saver is None:
            return
        with own_page().during(Phase.SAVING):
            if self.has_saved:
                self._saver.wait(together=together, at_end=at_end)
            elif self.has_storage and self.source == "memory" and (restored := CheckpointManager._unstored):
                CheckpointManager._unstored = None
                if self._saver.stored < self.steps:
                    self._saver.store_restored(restored, at_end=at_end)

    def finish_write(self) -> None:
        """Wait for the write that is going on, if there is one. Raises CheckpointError if it fails."""
        if self._saver is not None:
            with own_page().during(Phase.SAVING):
                self._saver.finish_write()

    def close(self) -> None:
        """Wait for what this manager has saved, and free its copies of the state: another one goes on in its place."""
        if self.has_saved:
            self.wait()
        if self._saver is not None:
            self._saver.close()

    def _current_progress(self, steps: int) -> Progress:
        return progress_of(
            steps, {name: thing.state_dict() for name, thing in self._objects.items() if isinstance(thing, EpochLoader)}
        )


def progress_of(steps: int, states: Mapping[str, Any]) -> Progress:
    """The number of steps, and the numbers of the position of each loader in ``states``.

    What else a position has may be encoded, or hold arrays, which cannot be compared.
    """
    return steps, {
        name: (state["seed"], state["epoch"], state["consumed"])
        for name, state in states.items()
        if _is_position(state)
    }


def _is_position(state: Any) -> bool:
    return isinstance(state, dict) and all(isinstance(state.get(key), int) for key in ("seed", "epoch", "consumed"))
