"""The store of the ranks of one attempt: a TCPStore of torch that the launcher of pod 0 serves."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

_TIMEOUT = timedelta(seconds=30)  # of the server's own connection to itself


class AttemptStore:
    """An empty TCPStore on a free port of this pod. It is closed with the last reference to this object."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self._store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            "0.0.0.0",  # noqa: S104 - the ranks of all pods connect to it
            0,
            is_master=True,
            timeout=_TIMEOUT,
            wait_for_workers=False,
        )
        self.port = int(self._store.port)
