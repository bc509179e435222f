"""Follow the states of jobs: until they end, get stuck, reach a goal or are deleted.

`wait_for_all` follows them, `Quiet` chooses the states that are worth a line, `raise_for_state` turns the last one into
an exit code. Commands and `JobHandle` import it.
"""

from flk.jobs.wait.conclusion import describe, progress_text, raise_for_state, run_time_text
from flk.jobs.wait.follow import (
    Goal,
    Outcome,
    Quiet,
    Waited,
    follow_states,
    wait_for,
    wait_for_all,
    wait_until_finished,
)

__all__ = [
    "Goal",
    "Outcome",
    "Quiet",
    "Waited",
    "describe",
    "follow_states",
    "progress_text",
    "raise_for_state",
    "run_time_text",
    "wait_for",
    "wait_for_all",
    "wait_until_finished",
]
