"""Tests under an old torch: what flk or torch refuses there is skipped, with the line that says so."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest

_REFUSED = re.compile(r"[^\n:]* needs torch (\d+)\.(\d+) or newer, and this is torch (\d+)\.(\d+)[^\n]*")
_here = tuple(map(int, metadata.version("torch").split(".")[:2]))
# What torch 2.6 itself says to a script, and what it means.
_OF_TORCH = {
    "'Stream' object has no attribute 'record_event'": "torch's fully_shard needs torch 2.7 or newer on CPUs",
    "Only single local shard is supported.": "torch 2.6 tells no state of an FSDP1 model with ranks that have no shard",
}


def needs_torch(release: tuple[int, int], reason: str) -> pytest.MarkDecorator:
    """Skip a test with a torch older than ``release``, which does not say itself what it lacks."""
    return pytest.mark.skipif(_here < release, reason=f"needs torch {release[0]}.{release[1]}: {reason}")


def refusal(texts: Iterable[str]) -> str | None:
    """The first line in which flk or torch refuses something since this torch is too old for it."""
    for text in texts:
        for found in _REFUSED.finditer(text):
            needed, here = tuple(map(int, found.groups()[:2])), tuple(map(int, found.groups()[2:]))
            if here < needed:
                return found.group().strip()
        for words, reason in _OF_TORCH.items() if _here < (2, 7) else ():
            if words in text:
                return reason
    return None


def outputs(folder: Path) -> Iterable[str]:
    """The outputs of the ranks and launchers that a test has run in ``folder``."""
    for path in (*folder.rglob("output-*"), *folder.rglob("log.*")):
        if path.is_file():
            yield path.read_text(errors="replace")
