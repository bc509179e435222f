"""Statuses: the latest status of every rank of the job, which the leader keeps packed to save memory."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Final

from flk_runtime.launcher.hangs.phases import PHASES
from flk_runtime.launcher.hangs.status import RankStatus

_LAYOUT: Final = struct.Struct("=qqddddqqBdqd")  # the fields of RankStatus, the phase as its place in _NAMES
_PHASE: Final = RankStatus._fields.index("phase")
_NAMES: Final = tuple(PHASES)
_PLACES: Final = {name: place for place, name in enumerate(_NAMES)}


class Statuses:
    """The latest statuses of all ranks. A pod of 8 ranks takes 0.8 kB, and 3.3 kB as objects.

    Iterating makes the statuses anew, so that a large job never has all of them at once.
    """

    def __init__(self) -> None:
        self._packed: dict[int, bytes] = {}

    def put(self, pod: int, ranks: Sequence[RankStatus]) -> None:
        """Replace the statuses of a pod. A phase that this version of flk does not know counts as the start."""
        self._packed[pod] = b"".join(
            _LAYOUT.pack(*each[:_PHASE], _PLACES.get(each.phase, 0), *each[_PHASE + 1 :]) for each in ranks
        )

    def clear(self) -> None:
        """Forget all pods."""
        self._packed.clear()

    @property
    def pods(self) -> int:
        """The number of pods whose ranks are known."""
        return len(self._packed)

    def by_pod(self) -> Iterator[tuple[int, RankStatus]]:
        """Each status, with its pod."""
        for pod, packed in self._packed.items():
            for row in _LAYOUT.iter_unpack(packed):
                yield pod, RankStatus._make((*row[:_PHASE], _NAMES[row[_PHASE]], *row[_PHASE + 1 :]))

    def __iter__(self) -> Iterator[RankStatus]:
        return (status for _, status in self.by_pod())

    def __len__(self) -> int:
        return sum(map(len, self._packed.values())) // _LAYOUT.size
