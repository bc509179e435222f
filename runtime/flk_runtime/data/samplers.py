"""Samplers of the script: all ranks draw the same order of an epoch from one, and a restart draws it again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sized
from itertools import chain, islice
from typing import Any, Final

from flk_runtime.errors import SetupError
from flk_runtime.system import rng

_REPEATS: Final = 4  # entries for each sample; an order that has more is taken for one without an end
_FEW: Final = 1 << 20  # entries that any order may have


class SampledOrder:
    """The order of an epoch that a sampler gave: of indices, or of batches of them. See `EpochOrder`."""

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

    def __init__(self, sampler: Iterable[Any], name: str, *, batched: bool, samples: int) -> None:
        """``samples``: of the dataset. Raises SetupError for a sampler that splits the data over the ranks."""
        # A batch sampler has the sampler of its indices.
        if any(getattr(each, "num_replicas", 1) != 1 for each in (sampler, getattr(sampler, "sampler", None))):
            raise SetupError(
                f"{name}: a {type(sampler).__name__} splits the data over the ranks, and the loader splits it again: "
                "leave it out, or pass the sampler of one process"
            )
        self._sampler, self._name, self.batched = sampler, name, batched
        self._drawn = 0  # iterations of the sampler
        # Entries of an epoch.
        self._most = _REPEATS * max(samples, len(sampler) if isinstance(sampler, Sized) else 0) + _FEW
        self._latest: SampledOrder | None = None

    @property
    def length(self) -> int:
        """The entries of an epoch, as the sampler says. Raises TypeError if it does not."""
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
                f"{self._name}: the {type(self._sampler).__name__} gives another order in epoch {epoch} than before "
                "the restart, so samples would come twice or never: resume with the same sampler, and seed its own "
                "random generator"
            )
        self._latest = order
        return order

    def _draw(self, seed: int, epoch: int) -> SampledOrder:
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        with rng.OwnNumbers(rng.derive_seed("sampler", seed, epoch)).used():
            # A sampler may fill the same list again for the next batch, so each is copied.
            entries = [list(entry) if self.batched else entry for entry in islice(self._sampler, self._most + 1)]
        if len(entries) > self._most:
            raise SetupError(
                f"{self._name}: the {type(self._sampler).__name__} has given more than {self._most} entries in an "
                "epoch, as one without an end does: give it an end, such as itertools.islice in its __iter__"
            )
        self._drawn = epoch + 1
        return SampledOrder(entries, batched=self.batched)


def compare(of_ranks: Iterable[Mapping[str, tuple[int, str] | None]]) -> None:
    """Raise SetupError if ranks have different orders in one epoch. ``of_ranks`` are the marks of loaders, by name.

    A rank that has only looked at batches of a loader may be in another epoch of it.
    """
    digests: dict[tuple[str, int], str] = {}
    for marks in of_ranks:
        for name, mark in marks.items():
            if mark and digests.setdefault((name, mark[0]), mark[1]) != mark[1]:
                raise SetupError(
                    f"{name}: the sampler gives ranks different orders in epoch {mark[0]}, so samples would come twice "
                    "or never: seed its own random generator alike on all ranks, and leave the split over ranks to the "
                    "loader"
                )
