"""What docs/data.md shows, run as it stands there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


def test_the_page_runs(ranks: Callable[..., list[Any]]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 8
    checks = """
assert mean == 0.25 and metrics["loss"] == 0.5 and metrics["right"].tolist() == [6, 8], metrics
assert setting["name"] == "made by rank 0" and total == 1
assert stream.epoch == 1 and own.epoch == 1 and loader.epoch == 3
"""
    ended = ranks("\n".join([*blocks, checks]), 2, {"FLK_STRATEGY": "none"})
    said = [[line for line in one.lines if not line.startswith('{"step"')] for one in ended]
    assert said == [["3 ['a', 'b', 'c']", "only on rank 0 of all nodes"], ["2 ['d', 'e']"]]
