"""The page of a cause, for `flk explain` and for the reference."""

from __future__ import annotations

from flk.health.cause import Cause
from flk.units import short_duration


def page(cause: Cause) -> str:
    """Return what a cause means, whether it resolves by itself, and what to do, as plain text."""
    if cause.cured_by:
        resolves = f"It may resolve by itself, through {cause.cured_by}; `flk wait` waits."
    elif cause.grace:
        resolves = (
            f"It does not resolve by itself: after {short_duration(cause.grace)} the job is Stuck, and `flk wait` "
            f"ends with exit code {int(cause.exit_code)}."
        )
    else:
        resolves = (
            f"`flk wait` ends with exit code {int(cause.exit_code)}, or with the code that the failure itself has."
        )
    return f"{cause.code}: {cause.title}.\n\n{cause.meaning}\n\n{resolves}\n\nWhat to do: {cause.remedy}"
