"""init(): from whatever started this process to a run that has a rank, a device and a process group."""

from __future__ import annotations

import atexit
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flk_runtime import contract, group, parallel, randomness
from flk_runtime.discover import Place, discover
from flk_runtime.errors import SetupError
from flk_runtime.run import Run
from flk_runtime.snapshot import Folder

_TIMEOUT = 1800.0
_SAVE_EVERY = 100
_LOG_EVERY = 10

_current: Run | None = None
_arguments: dict[str, Any] = {}


def init(
    *,
    strategy: str | None = None,
    seed: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    save_every: int | None = None,
    log_every: int = _LOG_EVERY,
    device: str | torch.device | None = None,
    backend: str | None = None,
    timeout: float = _TIMEOUT,
) -> Run:
    """This process's run: under flk's launcher, torchrun, or alone as a world of one.

    What is not given comes from $FLK_STRATEGY (else ddp), $FLK_SEED (else 0), $FLK_CHECKPOINT (else no snapshots) and
    $FLK_SAVE_EVERY (steps, else 100; 0: at the end only). ``device`` is cuda:<local rank> where there is CUDA, else
    cpu; ``backend`` is torch.distributed's, by the device. ``timeout`` (seconds) is how long a collective may take.

    Python's, NumPy's and torch's generators are seeded: alike on all ranks until `Run.parallelize`, so that all build
    the same model, and differently from then on. A second call returns the same run. Raises SetupError (DiscoveryError,
    SnapshotError) where an argument, a variable or the snapshot folder is wrong. Collective: all ranks call it.
    """
    global _current, _arguments
    given = {
        "strategy": strategy, "seed": seed, "checkpoint": checkpoint, "save_every": save_every,
        "log_every": log_every, "device": device, "backend": backend, "timeout": timeout,
    }  # fmt: skip
    if _current is not None and not _current.closed:
        defaults = init.__kwdefaults__ or {}
        changed = [name for name, value in given.items() if value != defaults[name] and value != _arguments[name]]
        if changed:
            raise SetupError(f"init was called before with another {changed[0]}: one process has one run")
        return _current

    place = discover()
    strategy = parallel.choose(strategy)
    seed = _whole("seed", seed, contract.SEED, 0)
    save_every = _whole("save_every", save_every, contract.SAVE_EVERY, _SAVE_EVERY)
    log_every = _whole("log_every", log_every, "", _LOG_EVERY)
    folder = checkpoint or os.environ.get(contract.CHECKPOINT) or None
    chosen = _device(place, device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    randomness.seed_all(seed)
    owned = not dist.is_initialized()
    if owned:
        _join(place, chosen, backend, timeout)
    try:
        _current = Run(
            place,
            device=chosen,
            strategy=strategy,
            seed=seed,
            folder=Folder(Path(folder)) if folder else None,
            save_every=save_every,
            log_every=log_every,
            owns_group=owned,
        )
    except BaseException:
        if owned:
            group.leave(at_once=True)
        raise
    _arguments = given
    return _current


def _whole(name: str, value: int | None, variable: str, default: int) -> int:
    text = os.environ.get(variable) if value is None and variable else None
    if text:
        try:
            value, name = int(text), variable
        except ValueError:
            raise SetupError(f"{variable}={text} is not a whole number") from None
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise SetupError(f"{name}={value!r}: expected a whole number from 0 on")
    return value


def _device(place: Place, asked: str | torch.device | None) -> torch.device:
    if asked is not None:
        device = torch.device(asked)
        if device.type != "cuda" or device.index is not None:
            return device
    elif not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if place.local_rank >= count:
        raise SetupError(
            f"local rank {place.local_rank} has no GPU: this node shows {count} (CUDA_VISIBLE_DEVICES="
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}); start at most {count} processes per node, or "
            "pass device='cpu'"
        )
    return torch.device("cuda", place.local_rank)


def _join(place: Place, device: torch.device, backend: str | None, timeout: float) -> None:
    options: dict[str, Any] = {
        # Beside NCCL, gloo carries what lies on the CPU: random states, the numbers of an evaluation.
        "backend": backend or ("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"),
        "rank": place.rank,
        "world_size": place.world_size,
        "timeout": timedelta(seconds=timeout),
    }
    if device.type == "cuda" and "nccl" in options["backend"]:
        options["device_id"] = device
    if place.master is None:
        options["store"] = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(**options)


@atexit.register
def _leave() -> None:
    """At the end of a script that did not close its run, or failed: peers may be gone, so wait for nobody."""
    if _current is not None:
        _current.abandon()
