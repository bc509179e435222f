"""Answers that several sets of messages have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Done:
    """Answer: the request is done."""


@dataclass(frozen=True)
class Failed:
    """Answer: the request was not done."""

    reason: str


@dataclass(frozen=True)
class Refused:
    """Answer: the receiver cannot take part and has to leave."""

    reason: str
