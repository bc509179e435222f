"""Lead: the outer optimizer and the connection to the hub, which rank 0 of a worker has alone."""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from flk_diloco import compression
from flk_diloco.exchange import HubExchange
from flk_diloco.messages import Begin, CatchUp, Data, FromHub, Give, Result
from flk_diloco.options import DiLoCo, Membership
from flk_diloco.outer import OuterOptimizer
from flk_runtime.errors import RuntimeFailure
from flk_runtime.shared import progress

READY, JOINED, STOP, WAITING = "ready", "joined", "stop", ""  # outcomes of `Lead.poll`
_POLL = 1.0  # seconds that rank 0 waits for the hub before it tells the other ranks that it still waits


class Lead:
    """The agreed parameters of a worker, on the CPU of its rank 0, and its connection to the other workers."""

    def __init__(
        self,
        shapes: Mapping[str, torch.Size],
        start: torch.Tensor,
        version: int,
        options: DiLoCo,
        membership: Membership,
    ) -> None:
        """``start`` holds this worker's parameters, of these names and shapes, which count as ``version`` rounds."""
        self._shapes, self._options, self._membership = shapes, options, membership
        self.outer = OuterOptimizer(start, options)
        self.outer.version = version
        self.workers = 1  # that take part, as the hub last said
        self._fresh = True  # no round has changed the parameters yet
        self._result: Data | None = None  # an average that is not applied yet
        self._begun = False
        self._joining = False  # this worker has to catch up before it takes part
        self._exchange: HubExchange | None = None  # None: this worker is alone

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the outer optimizer from a checkpoint."""
        self.outer.load_state_dict(state)
        self._fresh = False

    def connect(self) -> None:
        """Start to connect to the hub; without an address, train alone: the average is the own contribution."""
        if not self._membership.address:
            self._begun = True
            return
        options = self._options
        layout = {
            "model": zlib.crc32(repr([(name, tuple(shape)) for name, shape in self._shapes.items()]).encode()),
            "size": len(self.outer.parameters),
            "workers": self._membership.workers,
            **{key: getattr(options, key) for key in ("every", "dtype", "lr", "momentum", "wait", "timeout")},
        }
        self._exchange = HubExchange(
            self._membership,
            layout,
            self.outer.version,
            f"{zlib.crc32(compression.encode(self.outer.parameters, 'fp32')):08x}" if self._fresh else "",
            patience=options.timeout,
        )

    def submit(self, local: torch.Tensor) -> None:
        """Send the outer gradient, unless the round is over or this worker has to catch up.

        Raises RuntimeFailure if ``local`` is not finite: the average would make the parameters of all workers so.
        """
        if not self._joining and self._result is None:
            if not local.isfinite().all():
                raise RuntimeFailure(
                    f"worker {self._membership.worker} has parameters that are not finite at round "
                    f"{self.outer.version + 1}, and does not send them: look at its loss and its learning rate"
                )
            data = self.outer.outer_gradient(local)
            if self._exchange:
                self._exchange.submit(self.outer.version + 1, data)
            else:
                self._result = data

    def apply(self) -> None:
        """Take the outer step: the average has arrived."""
        assert self._result is not None  # noqa: S101
        self.outer.apply(self._result)
        self._result, self._fresh = None, False

    def poll_begin(self) -> str:
        """Wait a second for the hub's permission to begin."""
        return self._poll(lambda: self._begun)

    def poll_result(self) -> str:
        """Wait a second for the average."""
        return self._poll(lambda: self._result is not None)

    @property
    def missing(self) -> str:
        """The party that this worker waits for, in words."""
        return self._exchange.missing if self._exchange else "the others"

    def close(self) -> None:
        """Tell the hub that this worker has finished."""
        if self._exchange:
            self._exchange.close()

    def _poll(self, ready: Callable[[], bool]) -> str:
        """Handle the hub's messages, for a second or until there is an outcome."""
        until = time.monotonic() + _POLL
        while True:
            if not self._joining and ready():
                return READY
            message = self._exchange.get(max(0.0, until - time.monotonic())) if self._exchange else None
            if message is None:
                break
            if self._handle(*message):
                return JOINED
        return STOP if progress.own_page().hold else WAITING

    def _handle(self, message: FromHub, data: Data) -> bool:
        """Handle one message. Returns whether this worker has just caught up."""
        if isinstance(message, (Begin, CatchUp, Result)):
            self.workers = message.workers
        match message:
            case Begin():
                self._begun = True
            case Give() if self._exchange:
                self._exchange.give(self.outer.version, self.outer.to_bytes())
            case CatchUp(version, _, joins):
                self.outer.from_bytes(data, version)
                self._result = None
                self._begun, self._fresh = True, False
                self._joining = not joins
                return joins
            case Result():
                return self._handle_result(message, data)
        return False

    def _handle_result(self, result: Result, data: Data) -> bool:
        if result.version != self.outer.version + 1:
            return False  # it is in the parameters that this worker has received
        if self._begun and not self._joining:
            self._result = data
            return False
        self.outer.apply(data)
        if self._joining and result.joins:
            self._joining = False
            return True
        return False


def say(text: str) -> None:
    """Print a line for people on stderr."""
    print(f"flk: {text}", file=sys.stderr, flush=True)
