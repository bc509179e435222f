"""flk_runtime: the launcher and the training library that run in the pods of a job.

    import flk_runtime as flk

    run = flk.init()
    model, optimizer = run.parallelize(model, optimizer)
    for epoch in (loader := run.loader(dataset, batch_size=32)).epochs(10):
        for batch in loader:
            ...
            run.step(loss=loss)

Training scripts import the names in ``__all__``, which are loaded on first use: importing this package imports only
`flk_runtime.contract`. So the client, which has no torch, can import the contract too, and the launcher handles signals
before torch is imported. The launcher (`flk_runtime.launcher`) and the library that ranks import do not import each
other.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flk_runtime.contract import VERSION as __version__

if TYPE_CHECKING:
    from flk_runtime.checkpoint.stateful import per_rank, replicated
    from flk_runtime.data import EvaluationLoader, Loader, shard
    from flk_runtime.discovery import RankInfo
    from flk_runtime.distributed import all_reduce, main_process_first, synchronize
    from flk_runtime.distributed.optimizer import DistributedOptimizer
    from flk_runtime.errors import CheckpointError, DiscoveryError, PeerError, RendezvousError, SetupError
    from flk_runtime.parallel.precision import Precision
    from flk_runtime.shared.progress import heartbeat
    from flk_runtime.training.entry.adopt import adopt
    from flk_runtime.training.entry.init import init
    from flk_runtime.training.entry.script import must_stop, restore, save
    from flk_runtime.training.loop import Loop
    from flk_runtime.training.run import Run

_MODULES = {
    "CheckpointError": "errors",
    "DiscoveryError": "errors",
    "DistributedOptimizer": "distributed.optimizer",
    "EvaluationLoader": "data",
    "Loader": "data",
    "Loop": "training.loop",
    "PeerError": "errors",
    "Precision": "parallel.precision",
    "RankInfo": "discovery",
    "RendezvousError": "errors",
    "Run": "training.run",
    "SetupError": "errors",
    "adopt": "training.entry.adopt",
    "all_reduce": "distributed",
    "heartbeat": "shared.progress",
    "must_stop": "training.entry.script",
    "per_rank": "checkpoint.stateful",
    "restore": "training.entry.script",
    "save": "training.entry.script",
    "init": "training.entry.init",
    "main_process_first": "distributed",
    "replicated": "checkpoint.stateful",
    "shard": "data",
    "synchronize": "distributed",
}

__all__ = [
    "CheckpointError",
    "DiscoveryError",
    "DistributedOptimizer",
    "EvaluationLoader",
    "Loader",
    "Loop",
    "PeerError",
    "Precision",
    "RankInfo",
    "RendezvousError",
    "Run",
    "SetupError",
    "__version__",
    "adopt",
    "all_reduce",
    "heartbeat",
    "init",
    "main_process_first",
    "must_stop",
    "per_rank",
    "replicated",
    "restore",
    "save",
    "shard",
    "synchronize",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
