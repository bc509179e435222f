"""Answers that several sets of messages have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Done:
    """It is done."""


@dataclass(frozen=True)
class Failed:
    """It was not done."""

    reason: str


@dataclass(frozen=True)
class Refused:
    """The receiver has to leave: it cannot take part."""

    reason: str
