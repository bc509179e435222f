"""init(): from whatever started this process to a run that has a rank, a device and a process group."""

from __future__ import annotations

import atexit
import dataclasses
import os
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from flk_runtime import contract
from flk_runtime.checkpoint.storage import Folder
from flk_runtime.discovery import RankInfo, discover
from flk_runtime.distributed import process_group as group
from flk_runtime.errors import SetupError
from flk_runtime.parallel import strategies as parallel
from flk_runtime.preflight import RankReport, exchange, report
from flk_runtime.preflight.bootstrap import connect_store
from flk_runtime.run import Run
from flk_runtime.system import device as devices
from flk_runtime.system import rng as randomness

_TIMEOUT = 1800.0
_SAVE_EVERY = 100
_LOG_EVERY = 10
_CPU = torch.device("cpu")

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
    step_timeout: float | None = None,
    preflight: float | None = None,
) -> Run:
    """This process's run: under any launcher that `discover` knows, or alone as a world of one.

    What is not given comes from $FLK_STRATEGY (else ddp), $FLK_SEED (else 0), $FLK_CHECKPOINT (else no snapshots) and
    $FLK_SAVE_EVERY (steps, else 100; 0: at the end only). ``device`` is cuda:<local rank> where there is CUDA, else
    cpu; ``backend`` is torch.distributed's, by the device. Times are in seconds. ``timeout`` is how long a collective
    may take, ``step_timeout`` (else $FLK_STEP_TIMEOUT, else the same) how long once the first step is done.
    ``preflight`` (else $FLK_PREFLIGHT_TIMEOUT, else 30) is how long the ranks may take to meet before the group opens,
    and to compare what they see; 0, or FLK_PREFLIGHT=off: they do not compare.

    Python's, NumPy's and torch's generators are seeded: alike on all ranks until `Run.parallelize`, so that all build
    the same model, and differently from then on. A second call returns the same run. Raises SetupError (DiscoveryError,
    RendezvousError, CheckpointError) where an argument, a variable or the checkpoint folder is wrong, or where the
    ranks do not fit together: then on all ranks. Collective: all ranks call it.
    """
    global _current, _arguments
    given = {
        "strategy": strategy, "seed": seed, "checkpoint": checkpoint, "save_every": save_every,
        "log_every": log_every, "device": device, "backend": backend, "timeout": timeout,
        "step_timeout": step_timeout, "preflight": preflight,
    }  # fmt: skip
    if _current is not None and not _current.closed:
        defaults = init.__kwdefaults__ or {}
        changed = [name for name, value in given.items() if value != defaults[name] and value != _arguments[name]]
        if changed:
            raise SetupError(f"init was called before with another {changed[0]}: one process has one run")
        return _current

    place = discover()
    owned = not dist.is_initialized()
    choices = InitOptions.read(place, given, together=owned)
    if owned:
        open_group(place, choices)
    elif choices.problem:
        raise choices.problem
    randomness.seed_all(choices.seed)
    try:
        _current = Run(
            place,
            device=choices.device,
            strategy=choices.strategy,
            seed=choices.seed,
            folder=Folder(Path(choices.folder)) if choices.folder else None,
            save_every=choices.save_every,
            log_every=choices.log_every,
            owns_group=owned,
            timeouts=group.Timeouts(timeout, choices.step_timeout),
        )
    except BaseException:
        if owned:
            group.leave(at_once=True)
        raise
    _arguments = given
    return _current


@dataclass(frozen=True)
class InitOptions:
    """What a rank was told by arguments and variables."""

    strategy: str = "ddp"
    seed: int = 0
    folder: str | os.PathLike[str] | None = None
    save_every: int = _SAVE_EVERY
    log_every: int = _LOG_EVERY
    device: torch.device = _CPU
    backend: str = "gloo"
    timeout: float = _TIMEOUT
    step_timeout: float | None = None
    preflight: float = exchange.TIMEOUT
    problem: SetupError | None = None  # what is wrong with them, where the other ranks shall hear of it too

    @classmethod
    def read(cls, place: RankInfo, given: dict[str, Any], *, together: bool) -> InitOptions:
        """Check what was ``given`` to `init` and fill the rest from the environment.

        Where ``together``, what is wrong is kept, so that this rank can tell the others instead of not coming.
        """
        limit = _seconds("preflight", given.get("preflight"), contract.PREFLIGHT_TIMEOUT)
        limit = exchange.TIMEOUT if limit is None else limit
        switch = os.environ.get(contract.PREFLIGHT) or "on"
        if switch not in ("on", "off"):
            raise SetupError(f"{contract.PREFLIGHT}={switch}: expected on or off")
        known = cls(preflight=0.0 if switch == "off" else limit)
        try:
            device = devices.choose(place, given.get("device"))
            if device.type == "cuda":
                torch.cuda.set_device(device)
            return cls(
                strategy=parallel.choose(given.get("strategy")),
                seed=_whole("seed", given.get("seed"), contract.SEED, 0),
                folder=given.get("checkpoint") or os.environ.get(contract.CHECKPOINT) or None,
                save_every=_whole("save_every", given.get("save_every"), contract.SAVE_EVERY, _SAVE_EVERY),
                log_every=_whole("log_every", given.get("log_every"), "", _LOG_EVERY),
                device=device,
                backend=given.get("backend") or devices.backend(device),
                timeout=given.get("timeout", _TIMEOUT),
                step_timeout=_step_timeout(given.get("step_timeout")),
                preflight=known.preflight,
            )
        except SetupError as error:
            if not (together and known.preflight and place.world_size > 1):
                raise
            return dataclasses.replace(known, problem=error)


def open_group(place: RankInfo, choices: InitOptions) -> list[RankReport]:
    """Meet the other ranks, compare, and open the process group. Collective.

    Returns the reports of all ranks on rank 0, where they were compared. Raises SetupError as `init` does.
    """
    everybody: list[RankReport] = []
    if place.world_size > 1:
        began = time.monotonic()
        store = connect_store(place, choices.preflight or choices.timeout)
        if choices.preflight:
            everybody = _compare(store, rank_report(place, choices), choices.preflight, began)
        store.set_timeout(timedelta(seconds=choices.timeout))
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
    options: dict[str, Any] = {"device_id": choices.device} if "nccl" in choices.backend else {}
    dist.init_process_group(
        choices.backend,
        store=distributed_c10d.PrefixStore("group", store),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=choices.timeout),
        **options,
    )
    return everybody


def _compare(store: Any, mine: RankReport, timeout: float, began: float) -> list[RankReport]:
    result, everybody = exchange.exchange_reports(store, mine, timeout, began)
    if result.faults:
        raise result.error
    if mine.rank == 0:
        for line in result.warnings:
            print(f"flk: {line}", file=sys.stderr, flush=True)
    return everybody


def rank_report(place: RankInfo, choices: InitOptions) -> RankReport:
    """What this rank knows of itself, for the others to compare."""
    return RankReport(
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        node_rank=place.node_rank,
        pid=os.getpid(),
        launcher=place.launcher,
        torch=torch.__version__,
        flk=contract.VERSION,
        code=report.code_version(),
        backend=choices.backend,
        strategy=choices.strategy,
        seed=choices.seed,
        device=str(choices.device),
        gpu=devices.identity(choices.device),
        problem=str(choices.problem or ""),
        **report.node_fields(place, choices.backend),
    )


def _step_timeout(given: float | None) -> float | None:
    value = _seconds("step_timeout", given, contract.STEP_TIMEOUT)
    if value is not None and not value > 0:
        raise SetupError(f"step_timeout={value:g}: expected more than 0 seconds")
    if value is not None and not group.can_set_timeout():
        raise SetupError(
            f"step_timeout needs a torch that can change a group's timeout, and {torch.__version__} cannot"
        )
    return value


def _seconds(name: str, value: float | None, variable: str) -> float | None:
    text = os.environ.get(variable) if value is None else None
    if text:
        name = variable
        try:
            value = float(text)
        except ValueError:
            raise SetupError(f"{variable}={text} is not a number of seconds") from None
    if value is not None and not 0 <= value < float("inf"):
        raise SetupError(f"{name}={value}: expected seconds from 0 on")
    return value


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


@atexit.register
def _leave() -> None:
    """At the end of a script that did not close its run, or failed: peers may be gone, so wait for nobody."""
    if _current is not None:
        _current.abandon()
