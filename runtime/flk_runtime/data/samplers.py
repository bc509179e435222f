"""Samplers of the script: all ranks draw the same order of an epoch from one, and a restart draws it again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from flk_runtime.distributed import is_alike
from flk_runtime.errors import SetupError
from flk_runtime.system import rng


class SampledOrder:
    """The order of an epoch that a sampler gave: of indices, or of batches of them. See `Order`."""

    def __init__(self, entries: list[Any], *, batched: bool) -> None:
        self._entries, self._batched, self.length = entries, batched, len(entries)
        self.digest = hashlib.blake2b(repr(entries).encode(), digest_size=8).hexdigest()

    def indices(self, ranges: Iterator[range]) -> Iterator[list[Any]]:
        for positions in ranges:
            found = self._entries[positions.start : positions.stop]
            yield list(chain.from_iterable(found)) if self._batched else found

    def count(self, positions: range) -> int:
        found = self._entries[positions.start : positions.stop]
        return sum(map(len, found)) if self._batched else len(found)


class DrawnOrders:
    """The orders of all epochs that a sampler gives: the order of an epoch is the sampler's iteration of that number.

    Random numbers that it draws from the global generators are the same on all ranks and after a restart.
    """

    def __init__(self, sampler: Iterable[Any], name: str, *, batched: bool, world_size: int) -> None:
        """Raises SetupError for a sampler that splits the data over the ranks."""
        if getattr(sampler, "num_replicas", 1) != 1:
            raise SetupError(
                f"{name}: a {type(sampler).__name__} splits the data over the ranks, and the loader splits it again: "
                "leave it out, or pass the sampler of one process"
            )
        self._sampler, self._name, self.batched, self._world_size = sampler, name, batched, world_size
        self._drawn = 0  # iterations of the sampler
        self._compared: tuple[int, str] | None = None
        self._latest: SampledOrder | None = None

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]

    def of(self, epoch: int, seed: int, digest: str | None) -> SampledOrder:
        """The order of ``epoch``.

        ``digest``: that of the order in the checkpoint. Raises SetupError if it is another one than before a restart.
        """
        if self._latest and self._drawn == epoch + 1:
            return self._latest
        # Also the orders of the epochs before a restart: a random generator of the sampler's own goes on.
        for number in range(min(self._drawn, epoch), epoch + 1):
            order = self._draw(seed, number)
        if digest not in (None, order.digest):
            raise SetupError(
                f"{self._gives} another order in epoch {epoch} than before the restart, so samples would come twice or "
                "never: seed its own random generator"
            )
        self._latest = order
        return order

    def compare(self, epoch: int, digest: str) -> None:
        """Raise SetupError if the ranks have trained a step of ``epoch`` with different orders. Collective.

        It is not for `of`, which a single rank calls to look at a batch. An order is compared once.
        """
        if self._world_size == 1 or self._compared == (epoch, digest):
            return
        self._compared = epoch, digest
        if not is_alike(digest):
            raise SetupError(
                f"{self._gives} ranks different orders in epoch {epoch}, so samples would come twice or never: seed "
                "its own random generator alike on all ranks, and leave the split over ranks to the loader"
            )

    @property
    def _gives(self) -> str:
        return f"{self._name}: the {type(self._sampler).__name__} gives"

    def _draw(self, seed: int, epoch: int) -> SampledOrder:
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        with rng.OwnNumbers(rng.derive_seed("sampler", seed, epoch)).used():
            entries = [list(each) for each in self._sampler] if self.batched else list(self._sampler)
        self._drawn = epoch + 1
        return SampledOrder(entries, batched=self.batched)
