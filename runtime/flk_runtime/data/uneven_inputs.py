"""join_batches(): ranks with different numbers of batches all stop at the same step.

torch's Join context manager (torch.distributed.algorithms.Join) solves the same problem by shadowing the collectives of
ranks that have ended. Here the ranks agree before each step whether all have a batch, and the rest is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TypeVar

from flk_runtime.distributed import process_group

T = TypeVar("T")

_SHOWN = 8  # ranks in a message


def join_batches(batches: Iterable[T], report: Callable[[str], None]) -> Iterator[T]:
    """Yield this rank's ``batches`` until one of the ranks has no more. Collective: all ranks iterate.

    One batch is fetched ahead: the ranks ask each other whether all have a next batch while the current step is
    computed. At the end ``report`` is called on rank 0 with a sentence that says how many batches were left on which
    ranks, if any were.
    """
    iterator = iter(batches)
    steps = 0
    batch, found = _next(iterator)
    all_found = process_group.all_true(found)
    while all_found():
        current = batch
        batch, found = _next(iterator)
        all_found = process_group.all_true(found)
        yield current  # type: ignore[misc]  # not None, since all ranks had a batch
        steps += 1
    known = isinstance(batches, Sized)
    left = 0
    if found:
        left = max(1, len(batches) - steps) if isinstance(batches, Sized) else 1
    left_by_rank = process_group.gather((left, known))
    if left_by_rank and any(count for count, _ in left_by_rank):
        report(_sentence(steps, left_by_rank))


def _next(iterator: Iterator[T]) -> tuple[T | None, bool]:
    try:
        return next(iterator), True
    except StopIteration:
        return None, False


def _sentence(steps: int, left_by_rank: list[tuple[int, bool]]) -> str:
    """The report of rank 0; ``left_by_rank`` has the batches left on each rank, and whether that number is exact."""
    ended = [str(rank) for rank, (count, _) in enumerate(left_by_rank) if not count]
    left = [
        f"{'' if known else 'at least '}{count} on rank {rank}"
        for rank, (count, known) in enumerate(left_by_rank)
        if count
    ]
    return (
        f"stopped after {steps} steps, when rank{'s' * (len(ended) > 1)} {_listed(ended)} had no more batches; "
        f"left: {_listed(left)}"
    )


def _listed(texts: list[str]) -> str:
    more = len(texts) - _SHOWN
    return ", ".join(texts[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
