"""Names of the checks of the preflight, and the variable that switches them off."""

from __future__ import annotations

from typing import Final

# Checks of the preflight that FLK_PREFLIGHT can switch off. docs/concepts/preflight.md describes them.
PREFLIGHT_CHECKS: Final = (
    "world-size",
    "torch",
    "flk",
    "code",
    "backend",
    "strategy",
    "seed",
    "interface",
    "loopback",
    "gpu",
    "local-rank",
    "shm",
    "options",
    "health",
)


def parse_preflight(text: str) -> frozenset[str]:
    """Return the checks that a value of FLK_PREFLIGHT switches off: none for on, all for off, or a list of checks.

    Raises ValueError if the value is neither on nor off nor a list of checks, each with a minus sign before its name.
    """
    if text in ("", "on"):
        return frozenset()
    if text == "off":
        return frozenset(PREFLIGHT_CHECKS)
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name.removeprefix("-") not in PREFLIGHT_CHECKS or not name.startswith("-"):
            raise ValueError(f"{name!r} is not on, off, or a minus sign and one of {', '.join(PREFLIGHT_CHECKS)}")
    return frozenset(name.removeprefix("-") for name in names)
