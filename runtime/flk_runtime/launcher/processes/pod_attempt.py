"""PodAttempt: the state of one attempt in one pod, and how the launcher judges the ends of the pod's ranks."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from flk_runtime.contract.failure import ExitCode, Failure, Kind
from flk_runtime.contract.record import Attempt
from flk_runtime.launcher.preemption import PodPreemption
from flk_runtime.launcher.processes.output import RankPipes
from flk_runtime.launcher.transport.messages import AttemptStarted
from flk_runtime.shared.progress import ProgressPage


@dataclass
class PodAttempt:
    """One attempt as the launcher of one pod knows it. Each attempt has a new one."""

    started: AttemptStarted
    failures: list[Failure] = field(default_factory=list)  # of this pod
    clean_exits: list[Failure] = field(default_factory=list)  # code 0: reported as EARLY only if another rank fails
    step: int | None = None  # most steps that a rank of this pod that has ended had done
    begun: bool = False  # a rank has made a step, and the leader knows after which one the attempt began
    ranks_ended: bool = False  # all have, and the leader does not know yet
    idle: bool = False  # the leader has been told that no GPU does anything
    gpus_known_at: float = field(default_factory=time.monotonic)  # when all were known last, or the attempt began
    told_of_gpus: bool = False  # the log says that they are not
    grouped: bool = False  # a rank that has ended had opened a process group, or it is not known whether it had
    preemption: PodPreemption | None = None
    end: Failure | None = None  # why the attempt ended in all pods
    unprinted: list[tuple[RankPipes, str]] = field(default_factory=list)  # ranks' tracebacks of secondary failures

    @property
    def history(self) -> list[Attempt]:
        """The latest attempts of the job, this one included."""
        return self.started.history

    @property
    def all_failures(self) -> list[Failure]:
        """The failures that this pod reports when it joins again. A rank that ends early breaks others' connections."""
        return [*self.failures, *self.clean_exits]

    @property
    def suspicious(self) -> bool:
        """Whether a broken node, or its network, may have ended the attempt."""
        return any(failure.kind.suspicious for failure in (*self.failures, self.end) if failure)

    def print_secondary(self) -> None:
        """Print tracebacks of secondary failures if the attempt has ended without another cause.

        Otherwise they are consequences: of the failure of another rank, or of ranks that launchers have ended.
        """
        if self.end and self.end.secondary:
            for pipes, text in self.unprinted:
                pipes.write_stderr(text)
            self.unprinted.clear()

    def end_rank(self, page: ProgressPage) -> None:
        """Note how far the rank with this page had come when it ended."""
        self.grouped = self.grouped or page.grouped >= 0
        if page.step >= 0:
            self.step = max(self.step or 0, page.step)

    def judge_terminated(self, failure: Failure) -> Failure:
        """The failure of a rank that the launcher had told to end: STOPPED, if SIGTERM is probably why it failed.

        SIGTERM is not why, if another rank has failed in the same way.
        """
        known = [*self.failures, self.end] if self.end else self.failures
        alike = any(failure.signature == each.signature for each in known)
        answers = failure.kind.meaning.answers_sigterm and not alike
        return replace(failure, kind=Kind.STOPPED) if answers else failure

    def stopped_as_told(self, page: ProgressPage, code: int) -> bool:
        """Whether the rank with this page has ended with this code because it was told to save and end."""
        return code == ExitCode.PREEMPTED and self.preemption is not None and self.preemption.stopped(page)
