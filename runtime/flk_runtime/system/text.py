"""Text for messages."""

from __future__ import annotations


def plural(count: int, noun: str) -> str:
    """The count with its noun: ``plural(2, "pod")`` is ``2 pods``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
