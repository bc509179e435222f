"""init(): discover this process's rank, run the preflight check, open the process group and make the Run."""

from __future__ import annotations

import atexit
import dataclasses
import importlib.util
import os
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from flk_runtime import automatic
from flk_runtime.checkpoint.interval import COMPUTED
from flk_runtime.contract import VERSION, pod_env, user_env
from flk_runtime.contract.preflight import PREFLIGHT_CHECKS
from flk_runtime.contract.strategies import AUTO, DILOCO
from flk_runtime.contract.variable import T, Variable, VariableError
from flk_runtime.diloco import DiLoCo, Membership, choose_options
from flk_runtime.discovery import RankInfo, discover
from flk_runtime.distributed import process_group
from flk_runtime.errors import RendezvousError, SetupError
from flk_runtime.parallel import choose_strategy
from flk_runtime.preflight import RankReport, exchange_reports, report
from flk_runtime.preflight.bootstrap import connect_store
from flk_runtime.preflight.options import skipped_checks
from flk_runtime.run import Run
from flk_runtime.shared import progress
from flk_runtime.shared.progress import Phase
from flk_runtime.system import device as devices
from flk_runtime.system import rng, trial
from flk_runtime.system.torch_version import check_torch

_TIMEOUT = 1800.0
_ERROR_TIMEOUT = 10.0  # seconds that a rank which cannot start waits for the others, to tell them why
_LOG_EVERY = 10
_CPU = torch.device("cpu")
# By strategy: a module that travels with a job only if the job is submitted with the strategy.
_SHIPPED_ON_REQUEST = {AUTO: "flk_runtime.plan", DILOCO: "flk_runtime.diloco.worker"}

_current: Run | None = None
_arguments: dict[str, Any] = {}


def init(
    *,
    strategy: str | None = None,
    diloco: DiLoCo | None = None,
    seed: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    save_every: int | str | None = None,
    keep: int | None = None,
    keep_every: int | None = None,
    log_every: int = _LOG_EVERY,
    device: str | torch.device | None = None,
    backend: str | None = None,
    timeout: float = _TIMEOUT,
    step_timeout: float | None = None,
    preflight: float | None = None,
) -> Run:
    """Open the process group and return this process's `Run`. Collective.

    Works under every launcher that `flk_runtime.discovery` knows, and without one as a world of one rank. A second call
    returns the same run.

    - ``strategy``: how `Run.parallelize` shares a model; default $FLK_STRATEGY, else ddp. auto: rank 0 plans the
      script in another process, or uses results of `flk bench`, and chooses for all ranks.
    - ``diloco``: options of strategy diloco, which trains several workers, each with an inner strategy; default
      $FLK_DILOCO, else those of `flk_runtime.DiLoCo`.
    - ``seed``: default $FLK_SEED, else 0. Python's, NumPy's and torch's generators are seeded alike on all ranks until
      `Run.parallelize`, so that all ranks build the same model, and differently afterwards.
    - ``checkpoint``: folder of checkpoints that all ranks see, or ``s3://BUCKET/PREFIX``; default $FLK_CHECKPOINT, else
      none are written.
    - ``save_every``: steps between two checkpoints; default $FLK_SAVE_EVERY, else 100; 0: only at the end; ``auto``:
      computed from what a save costs and how often the job failed.
    - ``keep``: number of the newest checkpoints that stay; default $FLK_KEEP, else 2.
    - ``keep_every``: checkpoints of which the step is a multiple of it stay too; default $FLK_KEEP_EVERY, else none.
    - ``log_every``: steps between two lines of metrics; 0: none.
    - ``device``: default ``cuda:LOCAL_RANK`` if torch finds CUDA, else cpu.
    - ``backend``: of torch.distributed; default by the device.
    - ``timeout``: seconds that a collective may take.
    - ``step_timeout``: seconds that a collective may take after the first step; default $FLK_STEP_TIMEOUT, else
      ``timeout``.
    - ``preflight``: seconds that the ranks may take to connect and to compare their environments before the group
      opens; default $FLK_PREFLIGHT_TIMEOUT, else 300; 0 or FLK_PREFLIGHT=off: they do not compare.

    Raises SetupError, on all ranks, if an argument or a variable is wrong or the ranks' environments do not match:
    DiscoveryError if the launcher's variables contradict each other, RendezvousError if a rank cannot connect,
    CheckpointError if rank 0 cannot use the checkpoint folder.
    """
    global _current, _arguments
    given = {
        "strategy": strategy, "diloco": diloco, "seed": seed, "checkpoint": checkpoint, "save_every": save_every,
        "keep": keep, "keep_every": keep_every,
        "log_every": log_every, "device": device, "backend": backend, "timeout": timeout,
        "step_timeout": step_timeout, "preflight": preflight,
    }  # fmt: skip
    if _current is not None and not _current.closed:
        defaults = init.__kwdefaults__ or {}
        changed = [name for name, value in given.items() if value != defaults[name] and value != _arguments[name]]
        if changed:
            raise SetupError(
                f"init was already called with another {changed[0]}, and a process has one run: close that run before"
            )
        return _current

    rank_info = discover()
    progress.own_page().phase = Phase.RENDEZVOUS
    owns_group = not dist.is_initialized()
    options = InitOptions.read(rank_info, given, defer_error=owns_group)
    if owns_group:
        open_group(rank_info, options)
    elif options.error:
        raise options.error
    try:
        strategy = options.strategy
        if strategy == AUTO:
            strategy = automatic.choose(rank_info, options.device, options.timeout)
        rng.seed_all(options.seed)
        _current = Run(
            rank_info,
            device=options.device,
            strategy=strategy,
            diloco=options.diloco,
            seed=options.seed,
            checkpoint=os.fspath(options.folder) if options.folder else None,
            save_every=options.save_every,
            keep=(options.keep, options.keep_every),
            log_every=options.log_every,
            owns_group=owns_group,
            keep_batch=pod_env.BATCH.read(os.environ) == "keep",
            timeouts=process_group.Timeouts(timeout, options.step_timeout),
        )
    except BaseException:
        if owns_group:
            process_group.leave(at_once=True)
        raise
    _arguments = given
    return _current


@dataclass(frozen=True)
class InitOptions:
    """The arguments of `init`, completed from the environment and checked."""

    strategy: str = "ddp"  # of the ranks of the process group
    diloco: DiLoCo | None = None  # they are one of several workers
    seed: int = user_env.SEED.default
    folder: str | os.PathLike[str] | None = None
    save_every: int = 0
    keep: int = user_env.KEEP.default
    keep_every: int = user_env.KEEP_EVERY.default
    log_every: int = _LOG_EVERY
    device: torch.device = _CPU
    backend: str = "gloo"
    timeout: float = _TIMEOUT
    step_timeout: float | None = None
    preflight: float = user_env.PREFLIGHT_TIMEOUT.default
    skipped: frozenset[str] = frozenset()  # checks of PREFLIGHT_CHECKS that are switched off
    error: SetupError | None = None  # what is wrong with the options, if the other ranks are still to be told

    @classmethod
    def read(cls, rank_info: RankInfo, given: dict[str, Any], *, defer_error: bool) -> InitOptions:
        """Check the arguments ``given`` to `init` and complete them from the environment.

        Raises SetupError. ``defer_error``: return it in ``error`` instead, so that this rank reports it to the others
        in the preflight check, where there is one.
        """
        limit = _seconds("preflight", given.get("preflight"), user_env.PREFLIGHT_TIMEOUT) or 0.0
        skipped = skipped_checks()
        off = len(skipped) == len(PREFLIGHT_CHECKS)
        defaults = cls(preflight=0.0 if off else limit, skipped=skipped)
        try:
            check_torch()
            device = devices.select(rank_info, given.get("device"))
            if device.type == "cuda":
                torch.cuda.set_device(device)
            strategy, diloco = choose_strategy(given.get("strategy")), None
            _require_shipped(strategy)
            folder = given.get("checkpoint") or user_env.CHECKPOINT.read(os.environ) or None
            if trial.is_trial():
                folder = None
            if strategy == DILOCO:
                diloco = choose_options(given.get("diloco"))
                strategy = diloco.inner
                member = Membership.read(diloco)
                if folder and member.workers > 1:  # they may share a volume
                    folder = f"{os.fspath(folder)}/worker-{member.worker}"
            elif given.get("diloco"):
                raise SetupError(f"diloco= has no effect under strategy {strategy}, only under diloco")
            return cls(
                strategy=strategy,
                diloco=diloco,
                seed=_count("seed", given.get("seed"), user_env.SEED),
                folder=folder,
                save_every=_save_every(given.get("save_every")),
                keep=max(1, _count("keep", given.get("keep"), user_env.KEEP)),
                keep_every=_count("keep_every", given.get("keep_every"), user_env.KEEP_EVERY),
                log_every=_checked_count("log_every", given.get("log_every", _LOG_EVERY)),
                device=device,
                backend=given.get("backend") or devices.backend(device),
                timeout=given.get("timeout", _TIMEOUT),
                step_timeout=_step_timeout(given.get("step_timeout")),
                preflight=defaults.preflight,
                skipped=skipped,
            )
        except SetupError as error:
            if not (defer_error and defaults.preflight and rank_info.world_size > 1):
                raise
            return dataclasses.replace(defaults, error=error)


def open_group(rank_info: RankInfo, options: InitOptions) -> list[RankReport]:
    """Connect to the other ranks, run the preflight check, and open the process group. Collective.

    Returns the reports of all ranks on rank 0 if they were compared, else an empty list. Raises SetupError as `init`
    does.
    """
    reports: list[RankReport] = []
    if rank_info.world_size > 1:
        store, reports = _meet(rank_info, options)
        store.set_timeout(timedelta(seconds=options.timeout))
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
    bound: dict[str, Any] = {"device_id": options.device} if "nccl" in options.backend else {}
    if bound:
        # The gloo group beside NCCL's serves small collectives. Without this, all ranks connect to all at the start.
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    dist.init_process_group(
        options.backend,
        store=distributed_c10d.PrefixStore("group", store),
        rank=rank_info.rank,
        world_size=rank_info.world_size,
        timeout=timedelta(seconds=options.timeout),
        **bound,
    )
    return reports


def _meet(rank_info: RankInfo, options: InitOptions) -> tuple[Any, list[RankReport]]:
    """Connect to the store and run the preflight check. A rank that cannot start tells the others if they are there."""
    began = time.monotonic()
    limit = options.preflight or options.timeout
    if options.error:
        limit = min(limit, _ERROR_TIMEOUT)
    try:
        store = connect_store(rank_info, limit)
        reports = _run_preflight(store, rank_report(rank_info, options), options, limit, began)
    except RendezvousError:
        if options.error:
            raise options.error from None
        raise
    return store, reports


def _run_preflight(store: Any, own: RankReport, options: InitOptions, timeout: float, began: float) -> list[RankReport]:
    if not options.preflight:
        return []
    result, reports = exchange_reports(store, own, timeout, began, options.skipped)
    if result.faults:
        raise result.error
    if own.rank == 0:
        for line in result.warnings:
            print(f"flk: {line}", file=sys.stderr, flush=True)
    return reports


def rank_report(rank_info: RankInfo, options: InitOptions) -> RankReport:
    """This rank's report for the preflight check, which compares those of all ranks."""
    return RankReport(
        rank=rank_info.rank,
        world_size=rank_info.world_size,
        local_rank=rank_info.local_rank,
        local_world_size=rank_info.local_world_size,
        node_rank=rank_info.node_rank,
        pid=os.getpid(),
        launcher=rank_info.launcher,
        torch=torch.__version__,
        flk=VERSION,
        code=report.code_version(),
        backend=options.backend,
        strategy=f"diloco ({options.diloco})" if options.diloco else options.strategy,
        seed=options.seed,
        device=str(options.device),
        gpu=devices.unique_id(options.device),
        problem=str(options.error or ""),
        **report.node_fields(rank_info, options.backend),
    )


def _step_timeout(given: float | None) -> float | None:
    value = _seconds("step_timeout", given, user_env.STEP_TIMEOUT)
    if value is not None and not value > 0:
        raise SetupError(f"step_timeout={value:g}: expected more than 0 seconds")
    if value is not None and not process_group.can_set_timeout():
        raise SetupError(
            f"step_timeout: torch {torch.__version__} cannot change a process group's timeout; leave it out, or "
            "update torch"
        )
    return value


def _require_shipped(strategy: str) -> None:
    """Raise SetupError if the modules of a strategy have not travelled with this job."""
    module = _SHIPPED_ON_REQUEST.get(strategy)
    if module and importlib.util.find_spec(module) is None:
        raise SetupError(
            f"the script asks for strategy {strategy}, whose modules travel only with jobs that are submitted with it: "
            f"use --strategy {strategy}"
        )


def _seconds(name: str, value: float | None, variable: Variable[Any]) -> float | None:
    """A duration in seconds from an argument, else from a variable; None if neither is given."""
    if value is None:
        name, value = variable, _read(variable)
    if value is not None and not 0 <= value < float("inf"):
        raise SetupError(f"{name}={value}: expected a finite number of seconds, 0 or more")
    return value


def _save_every(value: int | str | None) -> int:
    if value is None:
        value = _read(user_env.SAVE_EVERY)
    if value == AUTO:
        return COMPUTED
    if isinstance(value, str):
        raise SetupError(f"save_every={value!r}: expected a number of steps, or auto")
    return _checked_count("save_every", value)


def _count(name: str, value: int | None, variable: Variable[int]) -> int:
    """An integer of 0 or more from an argument, else from a variable."""
    return _read(variable) if value is None else _checked_count(name, value)


def _checked_count(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise SetupError(f"{name}={value!r}: expected an integer, 0 or more")
    return value


def _read(variable: Variable[T]) -> T:
    try:
        return variable.read(os.environ)
    except VariableError as error:
        raise SetupError(str(error)) from None


@atexit.register
def _abandon() -> None:
    """Leave the process group of a run that was not closed. Other ranks may have died, so this does not wait."""
    if _current is not None:
        _current.abandon()
