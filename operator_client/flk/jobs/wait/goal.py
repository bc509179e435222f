"""Goal: the state or the condition of a job that `flk wait --for` waits for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from flk.jobs.state import Phase, State
from flk.kube import Object

_DELETION: Final = ("delete", "deleted")


@dataclass(frozen=True)
class Goal:
    """A phase, or (``condition``) a condition of the PyTorchJob with its status."""

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
            return cls(text, None, condition.lower(), status or "True")
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

    def is_met(self, state: State, job: Object | None) -> bool:
        """Return whether the job has reached the goal. ``job`` is None once it was deleted."""
        if self.is_deletion:
            return job is None
        if self.phase is not None:
            # A short job may end before flk sees it run.
            ran = self.phase == Phase.RUNNING and state.phase == Phase.SUCCEEDED
            return state.phase == self.phase or ran
        conditions = ((job or {}).get("status") or {}).get("conditions") or []
        return any(
            str(c.get("type", "")).lower() == self.condition and str(c.get("status")) == self.status for c in conditions
        )
