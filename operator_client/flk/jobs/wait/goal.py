"""Goal: the state or the condition of a job that `flk wait --for` waits for."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from flk.jobs.state import Phase, State
from flk.kube import Object
from flk.targets import TARGETS, Target, target_of

_DELETION: Final = ("delete", "deleted")
_SLIP: Final = 2  # letters more or less that a misspelt name has at most


@dataclass(frozen=True)
class Goal:
    """A phase, or (``condition``) a condition of the job's object with its status."""

    text: str  # as the user has written it
    phase: Phase | None = None
    condition: str = ""
    status: str = "True"

    @classmethod
    def parse(cls, text: str) -> Goal:
        """Return the goal in ``Running``, ``delete`` or ``condition=Succeeded``. Raises ValueError for others."""
        kind, equals, rest = text.partition("=")
        if equals and kind == "condition" and rest:
            condition, _, status = rest.partition("=")
            goal = cls(text, None, condition.lower(), status or "True")
            known = _conditions(*TARGETS.values())
            near = _nearest(goal.condition, known)
            if near and goal.condition not in known and _is_slip(goal.condition, near):
                names = ", ".join(known.values())
                raise ValueError(f"jobs have no condition {condition}: did you mean {known[near]}? flk knows {names}")
            return goal
        if text.lower() in _DELETION:
            return cls(text, Phase.DELETED)
        for phase in Phase:
            if text.lower() == phase.value.lower():
                return cls(text, phase)
        phases = ", ".join(phase.value for phase in Phase)
        raise ValueError(f"must be {phases}, delete, or condition=TYPE (is {text!r})")

    @property
    def is_deletion(self) -> bool:
        """Whether the goal is the deletion of the job, which a job that has ended may still reach."""
        return self.phase == Phase.DELETED

    def doubt(self, job: Object) -> str:
        """Return what to say of a condition that nothing known sets in an object like ``job``; empty for others."""
        target = target_of(job)
        known = _conditions(target)
        if self.phase is not None or self.condition in known:
            return ""
        near = _nearest(self.condition, known)
        hint = f"did you mean {known[near]}?" if near else f"flk knows {', '.join(known.values())}"
        return f"flk knows nothing that sets {self.text} in a {target.kind}, and waits until something does; {hint}"

    def is_met(self, state: State, job: Object | None) -> bool:
        """Return whether the job has reached the goal. ``job`` is None once it was deleted."""
        if self.is_deletion:
            return job is None
        if self.phase is not None:
            # A short job may end before flk sees it run.
            ran = self.phase == Phase.RUNNING and state.phase == Phase.SUCCEEDED
            return state.phase == self.phase or ran
        if job is None:
            return False
        names = target_of(job).condition_names()  # in PyTorchJobs, which may be given for every kind
        return any(
            self.condition in (c["type"].lower(), names.get(c["type"], "").lower()) and c.get("status") == self.status
            for c in (job.get("status") or {}).get("conditions") or []
        )


def _conditions(*targets: Target) -> dict[str, str]:
    """Return the names of the conditions of these kinds, and those that they have in PyTorchJobs, by small letters.

    Other controllers may add conditions of their own.
    """
    pairs = (pair for target in targets for pair in target.condition_names().items())
    return {name.lower(): name for pair in pairs for name in pair}


def _nearest(condition: str, known: Iterable[str]) -> str:
    """Return the known name that is most like a condition, if one is; empty otherwise."""
    return next(iter(difflib.get_close_matches(condition, known, n=1, cutoff=0.8)), "")


def _is_slip(condition: str, near: str) -> bool:
    """Whether a condition is a known one misspelt. A controller's own may have a known name with more words to it."""
    return abs(len(condition) - len(near)) <= _SLIP and condition not in near and near not in condition
