"""Goal: the state or the condition of a job that `flk wait --for` waits for."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Final

from flk.jobs.state import Phase, State
from flk.kube import Object
from flk.targets import target_of

_DELETION: Final = ("delete", "deleted")
# Of all kinds that a job can become. Other controllers may add conditions of their own.
_CONDITIONS: Final = (
    *("Created", "Running", "Restarting", "Succeeded", "Complete", "Completed", "Failed", "Suspended"),
    *("SuccessCriteriaMet", "FailureTarget", "StartupPolicyInProgress", "StartupPolicyCompleted"),
)


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
            known = {name.lower(): name for name in _CONDITIONS}
            near = difflib.get_close_matches(goal.condition, known, n=1, cutoff=0.8)
            if near and not goal.is_known:
                names = ", ".join(_CONDITIONS)
                raise ValueError(
                    f"jobs have no condition {condition}: did you mean {known[near[0]]}? flk knows {names}"
                )
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

    @property
    def is_known(self) -> bool:
        """Whether it is a phase, or a condition that some kind of jobs has without other controllers."""
        return self.phase is not None or self.condition in map(str.lower, _CONDITIONS)

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
