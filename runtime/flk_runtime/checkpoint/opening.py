"""open_checkpoints(): opens the places of a training's checkpoints, and resumes from the newest one in them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flk_runtime.checkpoint.manager import NO_VOLUME, CheckpointManager, CheckpointOptions, Resumed, progress_of
from flk_runtime.checkpoint.memory import PodMemory, Restorable
from flk_runtime.contract import pod_env, pod_layout, user_env
from flk_runtime.distributed import process_group
from flk_runtime.errors import MismatchError, SetupError
from flk_runtime.shared.progress import Phase, own_page
from flk_runtime.shared.shard_file import value_name
from flk_runtime.system import rng

if TYPE_CHECKING:
    from flk_runtime.checkpoint.load import SavedCheckpoint
    from flk_runtime.checkpoint.storage import Destination

Step = Callable[[int], None]
_IN_MEMORY = "pod memory"  # the name in messages for checkpoints there


def open_checkpoints(
    options: CheckpointOptions, log: Callable[[str], None], on_saved: Step, on_stored: Step
) -> CheckpointManager:
    """The manager of the checkpoints in a place and in the memory of the pods, of which the newer one is resumed.

    ``log`` prints a line on rank 0. ``on_saved`` is called with the step of each checkpoint that is complete, and
    ``on_stored`` if it is in storage, as `Saver` says. Collective. Raises SetupError and CheckpointError.
    """
    memory, path = None, os.environ.get(pod_env.MEMORY) if options.in_memory else None
    if path and process_group.place().launcher == "flk":
        memory = PodMemory(path, user_env.ATTEMPT.read(os.environ), process_group.rank())
    elif path:
        log(
            "flk: the memory of the pods keeps no checkpoints of this training, since another launcher has started its "
            "ranks, or TORCHELASTIC_ERROR_FILE is not the one that flk has set"
        )
    if not options.place and memory is None:
        return CheckpointManager(options, log)
    with own_page().during(Phase.RESTORING if options.resume else Phase.SAVING):
        destination = _open_destination(options.place, memory, log)
        if destination is None and memory is None:
            return CheckpointManager(options, log, refusal=NO_VOLUME)
        return _open(options, log, memory, destination, on_saved, on_stored)


def _open(
    options: CheckpointOptions,
    log: Callable[[str], None],
    memory: PodMemory | None,
    destination: Destination | None,
    on_saved: Step,
    on_stored: Step,
) -> CheckpointManager:
    # torch.distributed.checkpoint takes long to import, and a run without checkpoints does not need it.
    from flk_runtime.checkpoint.load import open_stored
    from flk_runtime.checkpoint.save import Saver
    from flk_runtime.checkpoint.storage import find_newest

    if options.goes_back and destination is None:
        raise SetupError(
            "flk.restore cannot go back to a checkpoint that this attempt has saved in the memory of the pods: "
            "pass checkpoint= with storage that all pods see, or keep a copy of the states"
        )
    found = find_newest(destination, _warn) if destination and options.resume else None
    offered = memory.restorable() if memory and options.resume and not options.goes_back else None
    resumed = None
    if memory and offered and (found is None or offered.is_preferred_to(found.step)):
        resumed = _read_memory(memory, offered, options, log)
    if resumed is None:
        offered = None
        if destination and found:
            resumed = _read(open_stored(destination, found), found.world_size, options)
        elif options.resume and user_env.ATTEMPT.read(os.environ):
            log("flk: there is no checkpoint: training starts again at step 0")
    if resumed:
        log(f"flk: resumed at step {resumed.steps} from {resumed.place}")
    saver = Saver(
        destination,
        memory,
        keep=options.keep,
        metadata=options.metadata,
        timeout=options.timeout,
        on_saved=on_saved,
        warn=_warn,
        on_stored=on_stored,
        separate=options.store_every is not None and memory is not None,
        stored=found.step if found else 0,
    )
    return CheckpointManager(options, log, saver, resumed, in_memory=offered)


def _open_destination(place: str | None, memory: PodMemory | None, log: Callable[[str], None]) -> Destination | None:
    """The storage for checkpoints, ready for use; None if there is none that all ranks share. Collective."""
    from flk_runtime.checkpoint.storage import is_shared, open_destination

    without_volume = pod_layout.is_of_pod(place)
    if not place or (without_volume and memory):
        return None
    destination = open_destination(place)
    process_group.on_main(destination.prepare)
    if destination.folder is None or is_shared(destination.folder):
        return destination
    if without_volume:
        log(f"flk: {NO_VOLUME}")
        return None
    raise MismatchError(
        f"the ranks do not see the same checkpoint folder {place}: it has to be on a volume that all pods mount"
    )


def _read_memory(
    memory: PodMemory, offered: Restorable, options: CheckpointOptions, log: Callable[[str], None]
) -> Resumed | None:
    """Read what this rank resumes from the checkpoint in memory; None if it is of another place. Collective."""
    from flk_runtime.checkpoint.gather import PodReader  # not every job needs it
    from flk_runtime.checkpoint.load import SavedCheckpoint

    reader = PodReader(offered.readers, memory.open_shard, offered.processes, offered.copies)
    resumed = _read(SavedCheckpoint(_IN_MEMORY, reader), len(offered.readers), options)
    # Rank 0 decides, since paths may differ between pods.
    if process_group.on_main(lambda: pod_layout.is_same_place(resumed.saved_for, options.place)):
        return resumed
    log(f"flk: the checkpoint in {_IN_MEMORY} is of another place, {resumed.saved_for}, and is not used here")
    return None


def _read(checkpoint: SavedCheckpoint, world_size: int, options: CheckpointOptions) -> Resumed:
    """Read what this rank resumes from a checkpoint that ``world_size`` ranks have written."""
    from flk_runtime.checkpoint.load import SavedObject

    rank = process_group.rank()
    own = value_name(rank if rank < world_size else 0)
    values = checkpoint.read((), sorted({value_name(0), own}))
    content = values[value_name(0)]
    return Resumed(
        place=checkpoint.place,
        steps=content["steps"],
        objects={name: SavedObject(checkpoint, name, plain) for name, plain in content["objects"].items()},
        own=values[own]["own"] if world_size == process_group.world_size() else {},
        own_of_rank_0=content["own"],
        random=values[own]["random"] if rank < world_size else _fresh_rng_state(options.seed, content["steps"]),
        progress=progress_of(content["steps"], content["objects"]),
        saved_for=content["place"],
    )


def _fresh_rng_state(seed: int, steps: int) -> dict[str, Any]:
    """The random state of a rank of a checkpoint that fewer ranks have written."""
    before = rng.get_state()  # from which the script goes on
    rng.seed_all(rng.derive_seed("rank", seed, process_group.rank(), steps))
    fresh = rng.get_state()
    rng.set_state(before)
    return fresh


def _warn(text: str) -> None:
    print(f"flk: {text}", file=sys.stderr, flush=True)
