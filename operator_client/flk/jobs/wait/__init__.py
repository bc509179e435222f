"""Follow the state of a job: until it ends, gets stuck, reaches a goal or is deleted.

`wait_for` follows it, `Quiet` chooses the states that are worth a line, `raise_for_state` turns the last one into an
exit code. `get_state` is the state now. Commands and `JobHandle` import it.
"""

from flk.jobs.wait.conclusion import describe, progress_text, raise_for_state, run_time_text
from flk.jobs.wait.follow import Outcome, Waited, follow_states, get_state, look, wait_for, wait_until_finished
from flk.jobs.wait.goal import Goal
from flk.jobs.wait.quiet import Quiet

__all__ = [
    "Goal",
    "Outcome",
    "Quiet",
    "Waited",
    "describe",
    "follow_states",
    "get_state",
    "look",
    "progress_text",
    "raise_for_state",
    "run_time_text",
    "wait_for",
    "wait_until_finished",
]
