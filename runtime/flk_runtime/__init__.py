"""flk_runtime: what runs in the pods.

    import flk_runtime as flk

    run = flk.init()
    model, optimizer = run.parallelize(model, optimizer)
    for epoch in (loader := run.loader(dataset, batch_size=32)).epochs(10):
        for batch in loader:
            ...
            run.step(loss=loss)

Importing this package imports nothing else: the client shares `flk_runtime.contract` and has no torch, and the launcher
handles signals before torch is there.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from flk_runtime.contract import VERSION as __version__

if TYPE_CHECKING:
    from flk_runtime.data import Loader, shard
    from flk_runtime.discovery import RankInfo
    from flk_runtime.distributed import (
        DistributedOptimizer,
        all_reduce,
        broadcast,
        main_process_first,
        reduce,
        synchronize,
    )
    from flk_runtime.errors import CheckpointError, DiscoveryError, PeerError, RendezvousError, SetupError
    from flk_runtime.initialize import init
    from flk_runtime.parallel.precision import Precision
    from flk_runtime.run import Run

_MODULES = {
    "CheckpointError": "errors",
    "DiscoveryError": "errors",
    "DistributedOptimizer": "distributed",
    "Loader": "data",
    "PeerError": "errors",
    "Precision": "parallel.precision",
    "RankInfo": "discovery",
    "RendezvousError": "errors",
    "Run": "run",
    "SetupError": "errors",
    "all_reduce": "distributed",
    "broadcast": "distributed",
    "init": "initialize",
    "main_process_first": "distributed",
    "reduce": "distributed",
    "shard": "data",
    "synchronize": "distributed",
}

__all__ = [
    "CheckpointError",
    "DiscoveryError",
    "DistributedOptimizer",
    "Loader",
    "PeerError",
    "Precision",
    "RankInfo",
    "RendezvousError",
    "Run",
    "SetupError",
    "__version__",
    "all_reduce",
    "broadcast",
    "init",
    "main_process_first",
    "reduce",
    "shard",
    "synchronize",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
