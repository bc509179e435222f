"""A stand-in for `horovod.torch` under a real horovodrun: what flk calls of it, over horovodrun's rendezvous server.

Horovod's own is C++, whose build takes minutes of processor time. Like it, this takes ranks from horovodrun's
variables, and matches the tensors of all ranks by name. It becomes a module of horovodrun's package. horovodrun imports
it to ask what was built, so it imports torch when a rank needs it.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from horovod.runner.http.http_client import put_data_into_kvstore, read_data_from_kvstore

if TYPE_CHECKING:
    import torch

PATIENCE = 120.0  # seconds that a rank waits for another
Average = object()
_broadcasts = itertools.count()
_names = Counter[str]()


def gloo_built() -> bool:
    return True  # horovodrun asks before it starts ranks


def init() -> None:
    """As Horovod's, a rank goes on when all have come."""
    _exchange("init", rank())


def rank() -> int:
    return int(os.environ["HOROVOD_RANK"])


def size() -> int:
    return int(os.environ["HOROVOD_SIZE"])


def broadcast_object(value: Any, root_rank: int) -> Any:
    return _exchange(f"broadcast-{next(_broadcasts)}", value)[root_rank]


def allreduce_async_(tensor: torch.Tensor, *, op: object, name: str) -> tuple[torch.Tensor, str]:
    assert op is Average
    _names[name] += 1
    key = f"{name}-{_names[name]}"
    _put(key, tensor.tolist())
    return tensor, key


def synchronize(handle: tuple[torch.Tensor, str]) -> None:
    import torch

    tensor, key = handle
    tensor.copy_(torch.tensor(_all(key), dtype=torch.float64).mean(0))


def _exchange(key: str, value: Any) -> list[Any]:
    """The values of all ranks."""
    _put(key, value)
    return _all(key)


def _server() -> tuple[str, str]:
    return os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]


def _put(key: str, value: Any) -> None:
    put_data_into_kvstore(*_server(), "stand-in", f"{key}-{rank()}", value)


def _all(key: str) -> list[Any]:
    return [_get(f"{key}-{each}") for each in range(size())]


def _get(key: str) -> Any:
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return read_data_from_kvstore(*_server(), "stand-in", key)
        except RuntimeError:  # it is not there yet
            if time.monotonic() > until:
                raise
            time.sleep(0.02)
