"""Departures: launchers that have to stop, and the parts of a checkpoint in memory that they give to pods that stay.

A launcher that has to stop does not end while it holds a part that the next attempt restores and that no pod that stays
holds. The leader names a pod that takes these parts. When that pod holds them, the launcher may end.

This module decides. `leader` sends the messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from flk_runtime.launcher.replication import Inventory
from flk_runtime.launcher.replication.plan import Part, newest_whole
from flk_runtime.launcher.transport.messages import HandOver, LetGo

_LEADER = 0  # the pod whose launcher leads


@dataclass
class _Departure:
    """A launcher that has to stop."""

    inventory: Inventory
    target: int | None = None  # the pod to which it hands parts over now
    tried: set[int] = field(default_factory=set)  # pods to which it has handed over, or could not
    free: bool = False  # it may end


class Departures:
    """The launchers that have to stop and are still connected."""

    def __init__(self) -> None:
        self._departures: dict[int, _Departure] = {}

    def add(self, pod: int, inventory: Inventory) -> None:
        """Note that the launcher of a pod has to stop, and what its memory holds."""
        self._departures[pod] = _Departure(inventory)

    def remove(self, pod: int) -> None:
        """Note that the launcher of a pod has disconnected."""
        self._departures.pop(pod, None)

    @property
    def pods(self) -> set[int]:
        """The pods of these launchers."""
        return set(self._departures)

    @property
    def unfinished(self) -> bool:
        """Whether a launcher may not end yet."""
        return not all(departure.free for departure in self._departures.values())

    def handed_over(self, pod: int) -> None:
        """Note that the launcher of a pod has done what HandOver asked for, or could not."""
        departure = self._departures.get(pod)
        if departure and departure.target is not None:
            departure.tried.add(departure.target)
            departure.target = None

    def decide(self, staying: Mapping[int, Inventory | None]) -> list[tuple[int, HandOver | LetGo]]:
        """What launchers do next, given the memory of the pods that stay. Returns messages with their receivers.

        Of several launchers that hold a part, the first hands it over. The parts are spread over the pods that stay.
        The leader's own launcher is let go last.
        """
        messages: list[tuple[int, HandOver | LetGo]] = []
        needed = self._needed(staying)
        for pod, departure in sorted(self._departures.items(), key=lambda item: item[0] == _LEADER):
            if departure.free or departure.target is not None:
                continue
            target = self._target(departure, staying) if pod in needed else None
            inventory = None if target is None else staying[target]
            if target is not None and inventory:
                departure.target = target
                messages.append((pod, HandOver(target, inventory.host, inventory.port, needed[pod])))
            elif pod != _LEADER or all(other.free for each, other in self._departures.items() if each != pod):
                departure.free = True
                messages.append((pod, LetGo()))
        return messages

    def _needed(self, staying: Mapping[int, Inventory | None]) -> dict[int, list[Part]]:
        """The parts that each launcher has to hand over: those of the newest whole checkpoint that would be lost."""
        leaving = {pod: departure.inventory for pod, departure in self._departures.items()}
        restore = newest_whole({pod: each for pod, each in {**staying, **leaving}.items() if each})
        needed: dict[int, list[Part]] = {}
        for rank, pods in enumerate(restore.holders if restore else []):
            if restore and all(pod in leaving for pod in pods):
                needed.setdefault(pods[0], []).append(Part(restore.checkpoint, rank))
        return needed

    def _target(self, departure: _Departure, staying: Mapping[int, Inventory | None]) -> int | None:
        """The pod that takes the parts of a launcher, one to which the fewest others hand over; None: there is none."""
        used = [other.target for other in self._departures.values()]
        able = [pod for pod, inventory in staying.items() if inventory and pod not in departure.tried]
        return min(able, key=lambda pod: (used.count(pod), pod), default=None)


def with_parts(inventory: Inventory, parts: Sequence[Part]) -> Inventory:
    """The inventory of a pod that holds these parts too."""
    return replace(inventory, parts=sorted({*inventory.parts, *parts}))
