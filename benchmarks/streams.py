"""Measure how DataLoader workers speed up a stream whose elements are tokenized, or transformed otherwise.

    python benchmarks/streams.py [--rounds 8]

A stream of numbers is read with `run.loader(stream, collate_fn=…)`; the transformation of an element takes 2 ms. It
sleeps, so that two processors suffice. Each round is an epoch with four workers, which persist, and one with none.

Goal: with four workers at least 3 times the samples per second of none.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch

import flk_runtime
import measure

GOAL = measure.at_least(3)
WORKERS, BATCH, STEPS = 4, 16, 40
SECONDS = 0.002  # for the transformation of an element


class Numbers:
    """The stream: it has neither a length nor an index."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(BATCH * STEPS))


def transform(numbers: list[int]) -> torch.Tensor:
    time.sleep(SECONDS * len(numbers))
    return torch.stack([torch.full((64,), number) for number in numbers])


def rate(loader: Iterable[torch.Tensor]) -> float:
    """Samples per second of an epoch."""
    began = time.perf_counter()
    samples = sum(len(batch) for batch in loader)
    assert samples == BATCH * STEPS
    return samples / (time.perf_counter() - began)


def main() -> int:
    arguments = measure.parser(__doc__, rounds=8).parse_args()
    report = measure.Report("streams", arguments)
    with flk_runtime.init(device="cpu", log_every=0) as run:
        options: dict[str, dict[str, Any]] = {
            "four": {"num_workers": WORKERS, "persistent_workers": True},
            "none": {"num_workers": 0},
        }
        loaders = {
            name: run.loader(Numbers(), BATCH, collate_fn=transform, name=name, **each)
            for name, each in options.items()
        }
        cases = {name: partial(rate, loader) for name, loader in loaders.items()}
        rates = measure.alternate(cases, arguments.rounds, warmup=1)
    report.compare(
        "rate of a stream with a transformation of 2 ms, 4 workers / none", rates["four"], rates["none"], GOAL, "1/s"
    )
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
