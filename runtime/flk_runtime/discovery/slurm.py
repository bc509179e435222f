"""Slurm's compact lists: the hosts of a job (``a[1-3,07],b12``) and the tasks on each node (``2(x3),1``).

A short list can name millions of hosts, so names are generated one at a time. The syntax is the same as in `scontrol
show hostnames` and in the variables of srun's manual page.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

_HOST = re.compile(r"(?:[^\[\],\s]|\[[0-9,-]+\])+")
_PART = re.compile(r"\[([^\]]*)\]")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_DIMENSIONS = 5  # Slurm's own limit (HIGHEST_DIMENSIONS in slurm.h)
_TASKS = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def hosts(text: str) -> Iterator[str]:
    """Yield the hosts in ``text`` in their order; of several brackets in a name, the last one varies fastest.

    Leading zeros of a range's first number set its width. Raises ValueError if ``text`` is not such a list.
    """
    for item in _items(text):  # checks all items before the first name is yielded
        yield from _names(_PART.split(item))


def first_host(text: str) -> str:
    """The first host in ``text``. Raises ValueError if ``text`` is not a list of hosts."""
    return next(hosts(text))


def tasks_of(text: str, node: int) -> tuple[int, int, int]:
    """(tasks of the node with number ``node``, number of nodes, sum of all tasks) of a list of tasks per node.

    The first is 0 if the list has no such node. Raises ValueError if ``text`` is not such a list.
    """
    own = nodes = total = 0
    for item in text.split(","):
        match = _TASKS.fullmatch(item)
        if not match:
            raise ValueError(f"{item!r} is not a number of tasks: expected 2, or 2(x3) for three nodes")
        tasks, repeated = int(match[1]), int(match[2] or 1)
        if nodes <= node < nodes + repeated:
            own = tasks
        nodes += repeated
        total += tasks * repeated
    return own, nodes, total


def _items(text: str) -> list[str]:
    """Split ``text`` at the commas outside of brackets, and check each item."""
    items = []
    position = 0
    while True:
        match = _HOST.match(text, position)
        if not match:
            raise ValueError(f"{text!r} is not a list of hosts: expected names like a[1-3,07],b12")
        insides = _PART.findall(match[0])
        if len(insides) > _DIMENSIONS:
            raise ValueError(
                f"{match[0][:40]!r}… has more than {_DIMENSIONS} brackets, the limit for a name in a list of hosts"
            )
        for inside in insides:
            for piece in inside.split(","):
                bounds = _RANGE.fullmatch(piece)
                if not bounds or (bounds[2] and int(bounds[1]) > int(bounds[2])):
                    raise ValueError(f"{piece!r} in {text!r} is not a range of numbers")
        items.append(match[0])
        position = match.end()
        if position == len(text):
            return items
        if text[position] != ",":
            raise ValueError(f"{text[position]!r} is unexpected in the list of hosts {text!r}")
        position += 1


def _names(parts: list[str]) -> Iterator[str]:
    """Yield all names of one item; ``parts`` are plain text and contents of brackets in turn."""
    if len(parts) == 1:
        yield parts[0]
        return
    for number in itertools.chain.from_iterable(map(_numbers, parts[1].split(","))):
        for rest in _names(parts[2:]):
            yield parts[0] + number + rest


def _numbers(piece: str) -> Iterator[str]:
    low, _, high = piece.partition("-")
    for number in range(int(low), int(high or low) + 1):
        yield str(number).zfill(len(low))
