"""save(), restore() and must_stop(): checkpoints for scripts with a loop of their own, with or without `init`."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import nn

from flk_runtime.checkpoint.adapters.adapt import adapt
from flk_runtime.checkpoint.adapters.optimizer import OptimizerState
from flk_runtime.checkpoint.manager import CheckpointManager, CheckpointOptions
from flk_runtime.checkpoint.opening import open_checkpoints
from flk_runtime.checkpoint.stateful import DistributedStateful
from flk_runtime.contract import VERSION, user_env
from flk_runtime.contract.pod_layout import is_same_place
from flk_runtime.distributed import process_group
from flk_runtime.errors import SetupError, setting
from flk_runtime.shared import progress
from flk_runtime.system import trial
from flk_runtime.system.torch_version import check_torch
from flk_runtime.training.elastic import refuse_per_rank
from flk_runtime.training.ending import complete_at_the_end, forget
from flk_runtime.training.options import place_of
from flk_runtime.training.process import Place, current
from flk_runtime.training.step.first_pass import DRAWN, set_random_states_at_first_pass

_TIMEOUT = 1800.0  # seconds that a rank waits in the background for the file of another
_DRAWN = "flk: " + DRAWN.format(call="flk.restore", advice="split the data before it, and pass it random_now=True")


def save(step: int, /, checkpoint: str | os.PathLike[str] | None = None, wait: bool = False, **objects: Any) -> None:
    """Write a checkpoint of ``objects``, taken after ``step`` optimizer steps. Collective.

    The objects are modules, optimizers of these modules, anything with ``state_dict`` and ``load_state_dict``
    (schedulers, GradScaler, loaders), and dictionaries of plain values. Of learning rate schedulers, GradScaler and
    dictionaries rank 0's state is saved, of all other objects each rank's own; `replicated` and `per_rank` say
    otherwise. The random states of every rank are saved too. Training stops until the state is copied; a thread writes
    it, and the end of the process waits for that, and this call if ``wait``. ``checkpoint``: folder or
    ``s3://BUCKET/PREFIX``; default $FLK_CHECKPOINT. Only checkpoints in the default place are kept in the memory of the
    pods too. $FLK_KEEP says how many stay in storage, as for `init`.

    Raises SetupError if there is no place for checkpoints or no process group, the run of `init` saves there, or an
    object cannot be saved, and CheckpointError on all ranks if the write before this one failed, or this one if
    ``wait``. Without ``wait``, training goes on where neither memory nor storage takes the state; a line says so.
    """
    if trial.is_trial():
        return
    place, manager = _opened(checkpoint, resume=False)
    of_run = current.manager
    if place.saved_by == "training" or (of_run and of_run.can_save and is_same_place(of_run.options.place, place.name)):
        if not current.is_training:
            raise SetupError(f"flk.save: {_of_closed(place)}")
        raise SetupError(
            f"the run saves its own state in {place.name}: use run.register() and run.save(), or pass another "
            "checkpoint="
        )
    _register(manager, objects)
    manager.save(step)
    if current.stops and not manager.can_save:
        _print(f"flk: step {step} is not saved: {manager.refusal}")
        return
    place.saved_by = "script"
    if wait:
        manager.wait(together=True)


def restore(checkpoint: str | os.PathLike[str] | None = None, *, random_now: bool = False, **objects: Any) -> int:
    """Restore ``objects`` from the newest whole checkpoint; return its step, and 0 if there is none. Collective.

    Give the objects that `save` gets. Each rank reads only what it needs, at any world size and sharding. The random
    states of the ranks are restored when a module among them is called first with gradients, so that all ranks draw
    alike until then, as for a split of the data; at once without a module, and if ``random_now``, for a script that
    draws its batches itself by the global generators, and splits the data before. A script that has saved and goes back
    waits for its latest write, and needs a checkpoint in storage. Raises SetupError as `save` does, and if this process
    has trained another optimizer in that place, from whose state this one would resume, or a run or a loop has saved in
    it; CheckpointError if a state does not fit, or if each rank of another number of ranks has saved its own.
    """
    if trial.is_trial():
        return 0
    _check_other_training(checkpoint, objects)
    place, manager = _opened(checkpoint, resume=True)
    _register(manager, objects)
    manager.finish_restoring()
    place.restored.update(objects)
    if manager.steps:
        modules = [thing for thing in objects.values() if isinstance(thing, nn.Module) and not random_now]
        set_random_states_at_first_pass(modules, manager.begin_rank_rng, functools.partial(_print, _DRAWN))
    return manager.steps


def must_stop(step: int, /) -> bool:
    """Whether all ranks must save and end after ``step`` optimizer steps, because a pod of the job must go.

    Call it on all ranks after each step, with the number that `save` gets. It needs no communication between ranks, and
    is true on all of them after the same step. A process that has saved ends with code 143:

        if flk.must_stop(step):
            flk.save(step, wait=True, model=model, optimizer=optimizer)
            sys.exit(143)

    After the last step ``flk.must_stop(-1)`` says that no other follows; it returns False. Without flk's launcher the
    answer is always False. `Run.step` and `Loop.step` stop by themselves where they save. Where no place takes the
    state, `save` prints a line and returns, so that the process ends with code 143 then, too.
    """
    page = progress.own_page()
    page.script_stops = True
    managers = current.managers
    for manager in managers:
        manager.poll()  # the latest save may have become complete
    if not managers or any(manager.can_save for manager in managers):
        current.stops = page.must_stop(step)
    else:
        current.stops = page.must_end_unsaved(step)
    return current.stops


def _opened(checkpoint: str | os.PathLike[str] | None, *, resume: bool) -> tuple[Place, CheckpointManager]:
    """The place of the checkpoints and its manager, a new one to restore from it. Collective."""
    name = place_of(checkpoint)
    if not name:
        raise SetupError(f"there is no place for checkpoints: pass checkpoint=, or set {user_env.CHECKPOINT}")
    check_torch()
    _check_group(name)
    place = current.place(name)
    before, default = place.manager, user_env.CHECKPOINT.read(os.environ)
    # Other places are for something beside the training, such as its best state so far.
    in_memory = (not default or is_same_place(default, place.name)) and current.takes_memory(place)
    if before and not resume:
        complete_at_the_end(before)  # this process may have been forked since
        return place, before
    if before:
        before.close()
        forget(before)
    page = progress.own_page()
    options = CheckpointOptions(
        place.name,
        seed=0,
        metadata={"job": os.environ.get(user_env.JOB, ""), "flk": VERSION, "torch": torch.__version__},
        timeout=_TIMEOUT,
        resume=resume,
        needs_model=False,
        in_memory=in_memory,
        goes_back=before is not None and before.has_saved,
        store_every=setting(user_env.STORE_EVERY),
        keep=max(1, setting(user_env.KEEP)),
    )
    manager = place.manager = open_checkpoints(
        options,
        _print,
        lambda step: setattr(page, "saved", step),
        lambda step: setattr(page, "stored", step),
    )
    if resume and in_memory and page.step < 0:  # other places are not this training's
        page.counts_optimizers = True
        page.begin_at(manager.steps, manager.source)
    complete_at_the_end(manager)
    return place, manager


def _check_other_training(checkpoint: str | os.PathLike[str] | None, objects: dict[str, Any]) -> None:
    """Raise SetupError if ``objects`` are of a training that would resume from another one of this process."""
    place = current.place(place_of(checkpoint))
    optimizers = {name: thing for name, thing in objects.items() if isinstance(thing, torch.optim.Optimizer)}
    if place.saved_by == "training" and optimizers and not current.is_training:
        raise SetupError(f"flk.restore: {_of_closed(place)}, or leave out the optimizer for the weights alone")
    for name, optimizer in optimizers.items():
        known = place.manager.get(name) if place.manager else None
        if isinstance(known, OptimizerState) and known.optimizer is not optimizer:
            raise SetupError(
                f"flk.restore: this process has trained another {name} with the checkpoints in {place.name}, and this "
                "one would resume from its state: pass each training, such as each fold, a checkpoint= of its own; to "
                "go back to that state, pass the optimizer that was given before"
            )


def _of_closed(place: Place) -> str:
    return (
        f"a run or a loop of this process, which is closed, has its state in {place.name}, so another training cannot "
        "have its own there: pass another checkpoint="
    )


def _print(text: str) -> None:
    if process_group.rank() == 0:
        print(text, flush=True)


def _check_group(place: str) -> None:
    """Raise SetupError if the ranks of a job would all save as rank 0, in one place."""
    ranks = int(os.environ.get("WORLD_SIZE") or 1)
    if ranks > 1 and process_group.world_size() == 1 and is_same_place(place, os.environ.get(user_env.CHECKPOINT)):
        raise SetupError(
            f"there are {ranks} ranks and no process group: call torch.distributed.init_process_group or flk.init "
            "before flk.save and flk.restore, or pass each rank a checkpoint= of its own"
        )


def _register(manager: CheckpointManager, objects: dict[str, Any]) -> None:
    modules = {name: thing for name, thing in objects.items() if isinstance(thing, nn.Module)}
    for name, thing in objects.items():
        known = manager.get(name)
        if isinstance(known, DistributedStateful) and known.is_of(thing, modules):
            continue
        adapted = adapt(name, thing, objects)
        refuse_per_rank("flk.save and flk.restore", {name: adapted})
        if known is None:
            manager.register(name, adapted)
        else:
            manager.replace(name, adapted)
