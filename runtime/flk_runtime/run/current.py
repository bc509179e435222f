"""The run of this process: `init` begins one at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flk_runtime.run.loop import Loop
    from flk_runtime.run.run import Run
    from flk_runtime.run.saves import Saves

run: Run | None = None
"""The latest run, which may be closed."""
loop: Loop | None = None
"""The latest loop that `adopt` has begun, which may be closed."""


def is_open() -> bool:
    """Whether a run or a loop has begun that is not closed."""
    return any(each is not None and not each.closed for each in (run, loop))


def saves() -> Saves | None:
    """The saves of the run or the loop, of the open one if there is one; None if there is neither."""
    owner = next((each for each in (run, loop) if each is not None and not each.closed), run or loop)
    return owner._saves if owner else None
