"""Tests under an old torch: what flk or torch refuses there is skipped, with the line that says so."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_REFUSED = re.compile(r"[^\n:]* needs torch (\d+)\.(\d+) or newer, and this is torch (\d+)\.(\d+)[^\n]*")
# What a script meets under torch 2.6 that calls torch's fully_shard itself on CPUs.
_OF_TORCH = re.compile(r"'Stream' object has no attribute 'record_event'")


def refusal(texts: Iterable[str]) -> str | None:
    """The first line in which flk or torch refuses something since this torch is too old for it."""
    for text in texts:
        for found in _REFUSED.finditer(text):
            needed, here = tuple(map(int, found.groups()[:2])), tuple(map(int, found.groups()[2:]))
            if here < needed:
                return found.group().strip()
        if _OF_TORCH.search(text):
            return "torch's fully_shard needs torch 2.7 or newer on CPUs"
    return None


def outputs(folder: Path) -> Iterable[str]:
    """The outputs of the ranks and launchers that a test has run in ``folder``."""
    for path in (*folder.rglob("output-*"), *folder.rglob("log.*")):
        if path.is_file():
            yield path.read_text(errors="replace")
