"""A script with metrics, and what the sinks of its run have afterwards."""

from __future__ import annotations

import json
import re

from flk_runtime.contract.metrics_line import AT

Point = tuple[str, int]  # a name and a step


def printed(log: str) -> list[dict[Point, float]]:
    """The numbers of the lines of metrics in a log, in their order, without the time that only a printed line has."""
    lines = []
    for text in re.findall(r'^(?:\[rank 0\] )?(\{"step".*\})$', log, re.MULTILINE):
        line = json.loads(text)
        line.pop(AT, None)
        step = line.pop("step")
        line |= {f"part/{name}": value for name, value in line.pop("part", {}).items()}
        lines.append({(name, step): value for name, value in line.items() if not isinstance(value, str)})
    return lines


def last(lines: list[dict[Point, float]]) -> dict[Point, float]:
    """For each name and step the value that was printed last."""
    return {point: value for line in lines for point, value in line.items()}
