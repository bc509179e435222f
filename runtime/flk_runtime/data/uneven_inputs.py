"""Batches of uneven number: all ranks stop at the same step, so that none waits for a gradient that never comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TypeVar

from flk_runtime.distributed import process_group as group

T = TypeVar("T")

_SHOWN = 8  # ranks in a message


def join_batches(batches: Iterable[T], report: Callable[[str], None]) -> Iterator[T]:
    """The ``batches`` of this rank, until one of the ranks has no more. Collective: all ranks iterate.

    The next batch is taken, and the ranks asked whether all have one, before the current one is given out: so the
    answer travels while a step is computed. At the end ``report`` is told, on rank 0, what was left where.
    """
    iterator = iter(batches)
    steps = 0
    batch, there = _next(iterator)
    answer = group.all_true(there)
    while answer():
        current = batch
        batch, there = _next(iterator)
        answer = group.all_true(there)
        yield current  # type: ignore[misc]  # all ranks had one, so this one
        steps += 1
    left = 0
    known = isinstance(batches, Sized)
    if there:
        left = max(1, len(batches) - steps) if isinstance(batches, Sized) else 1
    lefts = group.gather((left, known))
    if lefts and any(count for count, _ in lefts):
        report(_sentence(steps, lefts))


def _next(iterator: Iterator[T]) -> tuple[T | None, bool]:
    try:
        return next(iterator), True
    except StopIteration:
        return None, False


def _sentence(steps: int, lefts: list[tuple[int, bool]]) -> str:
    ended = [str(rank) for rank, (count, _) in enumerate(lefts) if not count]
    more = [
        f"{'' if known else 'at least '}{count} on rank {rank}" for rank, (count, known) in enumerate(lefts) if count
    ]
    return (
        f"stopped after {steps} steps, when rank{'s' * (len(ended) > 1)} {_listed(ended)} had no more batches; "
        f"left: {_listed(more)}"
    )


def _listed(texts: list[str]) -> str:
    rest = len(texts) - _SHOWN
    return ", ".join(texts[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
