"""adopt(): let flk keep the state of a training loop of the script's own."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Final

from flk_runtime.distributed import process_group
from flk_runtime.errors import SetupError
from flk_runtime.system import device, rng
from flk_runtime.training import extensions
from flk_runtime.training.context import RunContext
from flk_runtime.training.entry.group import entered
from flk_runtime.training.loop import Loop
from flk_runtime.training.options import LOG_EVERY
from flk_runtime.training.process import current

_STRATEGY: Final = "none"  # the script parallelizes its model itself


def adopt(
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    save_every: int | None = None,
    store_every: int | None = None,
    keep: int | None = None,
    log_every: int = LOG_EVERY,
    metrics: str | None = None,
    **objects: Any,
) -> Loop:
    """Let flk keep the state of a training loop of the script's own, and restore it. Collective.

    ``objects`` are the state of the loop, by names of your choice: modules, however they are wrapped (DDP, FSDP, tensor
    parallel DTensors on any DeviceMesh), lists of modules that are parts of one model with its names (the stages of a
    pipeline that this rank holds), optimizers of these modules, anything with ``state_dict`` and
    ``load_state_dict`` (schedulers, GradScaler, loaders), and dictionaries of plain values. They are saved as `save`
    does, and restored now if there is a checkpoint. The script then goes on after ``steps`` of the result:

        loop = flk.adopt(model=model, optimizer=optimizer, scheduler=scheduler, progress=progress)
        for step in range(loop.steps, 1000):
            ...
            optimizer.step()
            loop.step(loss=loss)
        loop.close()

    The script parallelizes its model and opens the process group itself. Without one, the group of `init` is opened for
    a job of several ranks. Seeds are left alone. The random states of every rank are restored when a batch of `Loop`'s
    loader is drawn or a module is called first with gradients, and at once without a module. So a split of the data
    between `adopt` and the loop is the same in every attempt. A script that draws its batches itself by the global
    generators calls `Loop.restore_random_state` before the first one; a line says so where it draws without that.
    `Loop.close` seeds the generators anew, as in `init`.
    ``checkpoint``, ``save_every``, ``store_every``, ``keep``, ``log_every`` and ``metrics`` are as in
    `init`; so is what a later training of the process begins with.

    Raises SetupError if an object cannot be saved, the ranks hold different objects or parameters (as pipeline stages
    do that are not in a list), or a run of `init` is open; CheckpointError if a state does not fit.
    """
    given = {**locals(), "strategy": _STRATEGY, "device": device.in_use(objects.values())}
    del given["objects"]
    if current.is_training:
        raise SetupError(
            "adopt: this process has a run or a loop already, which keeps its own state: give all objects to one call "
            "of adopt, add them to the run with run.register(name, thing), or close it before"
        )
    if not objects:
        raise SetupError("adopt: there is nothing to keep: pass the model and its optimizer by name, as model=model")
    with entered(given) as (rank_info, options, owns_group):
        extensions.verify("", rank_info, options.timeout)
        if not options.has_seed and (seed := process_group.on_main(rng.script_seed)) is not None:
            options = dataclasses.replace(options, seed=seed)  # of the order of loaders
        current.training = loop = Loop(RunContext.begin(rank_info, options), objects, owns_group=owns_group)
    return loop


def adopt_training(**given: Any) -> Loop:
    """Let flk keep a training of another package, which begins now: as `adopt`, but for the random states. Collective.

    They are restored at once, and again where the caller has `Loop.restore_random_state` do so.
    """
    loop = adopt(**given)
    loop.restore_random_state()
    return loop
