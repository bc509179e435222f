"""The bundled GPT example, as a script and as a module."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

EXAMPLE: Final = Path(__file__).parents[1] / "examples" / "gpt" / "train.py"
WARM_UP: Final = 20  # steps that are not counted


def load_example() -> Any:
    """The module of the example."""
    spec = importlib.util.spec_from_file_location("gpt_example", EXAMPLE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def encode_text(text: str) -> tuple[list[int], int]:
    """The characters of a text as the example numbers them, and how many different ones there are."""
    letters = sorted(set(text))
    number_of = {letter: number for number, letter in enumerate(letters)}
    return [number_of[letter] for letter in text], len(letters)


def step_times(output: Iterable[str]) -> dict[int, float]:
    """When the lines of metrics of a run's output arrived, by their steps; in seconds, by time.monotonic."""
    times: dict[int, float] = {}
    for line in output:
        now = time.monotonic()
        _, brace, rest = line.partition("{")
        record = json.loads(brace + rest) if brace else {}
        if "step" in record and "loss" in record:
            times[record["step"]] = now
    return times


def rate(times: Mapping[int, float]) -> float:
    """Steps per second after step WARM_UP, from what `step_times` returns."""
    last = max(times)
    return (last - WARM_UP) / (times[last] - times[WARM_UP])
