"""Pages of the documentation as parameters of tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts.documentation.pages import ROOT


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def parameters(pages: Sequence[Path], every_time: Sequence[str]) -> list[Any]:
    """The pages, of which the soak alone runs those that are not named. Raises ValueError for a name of no page."""
    if unknown := set(every_time).difference(map(name_of, pages)):
        raise ValueError(f"no such pages: {unknown}")
    return [pytest.param(page, marks=() if name_of(page) in every_time else pytest.mark.soak) for page in pages]
