"""The delays between two tries to connect."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

import flk_runtime
from flk_runtime.wire import Backoff


def test_delays_double_up_to_the_longest_with_a_random_part_and_begin_anew() -> None:
    numbers = iter([0.0, 1.0, 0.5, 0.5, 0.5])
    backoff = Backoff(0.1, 0.3, lambda: next(numbers))
    assert [backoff.next() for _ in range(4)] == pytest.approx([0.05, 0.3, 0.3, 0.3])
    backoff.reset()
    assert backoff.next() == 0.1


def test_a_delay_leaves_the_numbers_of_the_script_as_they_are() -> None:
    before = random.getstate()
    Backoff(1.0, 8.0).next()
    assert random.getstate() == before


def test_nothing_in_the_runtime_draws_from_the_generator_of_the_script() -> None:
    draws = re.compile(r"(?<![\w.])random\.(random|uniform|randint|randrange|choice|choices|sample|shuffle|gauss)\b")
    sources = {path: path.read_text() for path in Path(flk_runtime.__path__[0]).rglob("*.py")}
    assert len(sources) > 100
    assert [str(path) for path, text in sources.items() if draws.search(text)] == []
