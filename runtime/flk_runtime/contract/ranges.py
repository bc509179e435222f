"""Text of sets of indexes: ``0-2,5``."""

from __future__ import annotations

from collections.abc import Sequence


def format_pods(pods: Sequence[int]) -> str:
    """Indexes of pods in their order, with ranges of consecutive ones: ``0-2,5``."""
    ranges: list[list[int]] = []
    for pod in pods:
        if ranges and pod == ranges[-1][-1] + 1:
            ranges[-1][1:] = [pod]
        else:
            ranges.append([pod])
    return ",".join("-".join(map(str, each)) for each in ranges)


def parse_pods(text: str) -> list[int]:
    """The indexes of pods that `format_pods` has written. Raises ValueError for other text."""
    pods: list[int] = []
    for part in text.split(",") if text else []:
        first, _, last = part.partition("-")
        pods += range(int(first), int(last or first) + 1)
    return pods
