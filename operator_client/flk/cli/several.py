"""Commands on several jobs: which ones the names or a selector choose, and what the command does with each of them.

With one job, an error ends the command. With several, it is printed, the command goes on with the others, and its exit
code is the worst of all.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

from flk.cli.options import complete_jobs, job_ref, note, valid_jobs
from flk.errors import FlkError, JobNotFoundError, UsageError
from flk.user.commands import program_name
from flk.user.terminal import print_error
from flk_runtime.contract import ExitCode
from flk_runtime.contract.quantities import plural

if TYPE_CHECKING:
    from flk.observe.client import JobClient, JobRef

# The exit codes, the worst first: what flk does not know, then how jobs have ended, then that they have not.
_WORST_FIRST: Final = (
    ExitCode.INTERRUPTED,
    ExitCode.ERROR,
    ExitCode.USAGE,
    ExitCode.TRAINING,
    ExitCode.INFRASTRUCTURE,
    ExitCode.CANCELLED,
    ExitCode.NOT_FOUND,
    ExitCode.TIMEOUT,
    ExitCode.RUNNING,
    ExitCode.DONE,
)
_LAST: Final = 2.0  # seconds after Ctrl-C in which threads may keep what they have seen
Act = Callable[["JobClient", "JobRef"], "int | None"]
Tell = Callable[[str], None]


Jobs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="JOB...", help="Names of jobs.", show_default=False, callback=valid_jobs, autocompletion=complete_jobs
    ),
]
Selector = Annotated[
    str | None,
    typer.Option("--selector", "-l", metavar="LABELS", help="The jobs with these labels, in place of names: team=nlp."),
]


class Chosen:
    """The jobs of a command, in one namespace."""

    def __init__(self, client: JobClient, jobs: Sequence[JobRef], *, by_labels: bool) -> None:
        self.client, self.jobs = client, jobs
        self.are_several = len(jobs) > 1
        self.as_list = by_labels or self.are_several  # in JSON, as kubectl has it
        self._hints: set[str] = set()  # that were printed, without the name of a job

    @classmethod
    def of(
        cls,
        values: list[str] | None,
        selector: str | None,
        context: str | None,
        namespace: str | None,
        *,
        command: str,
        own: bool = False,
    ) -> Chosen:
        """Return the jobs of these names, or those with these labels; with ``own`` only such as flk has made.

        Raises UsageError for both and for neither, JobNotFoundError if no job has the labels.
        """
        from flk.observe.client import JobClient, JobRef
        from flk.spec import labels
        from flk.targets import target_of

        if selector is not None and not selector.strip():
            raise UsageError("--selector: is empty", hint="it names labels: -l team=nlp")
        if values and selector is not None:
            raise UsageError("name jobs, or choose them with -l, but not both")
        client = JobClient.connect(context, namespace)
        if selector is None:
            if not values:
                hint = f"{program_name()} {command} JOB..., or -l LABELS; {client.commands.flk('list')} lists jobs"
                raise UsageError("no job was named", hint=hint)
            return cls(client, list(dict.fromkeys(map(job_ref, values))), by_labels=False)
        found = client.list_jobs(selector=f"{labels.JOB},{selector}" if own else selector, metadata_only=True)
        if not found:
            made = " that flk has made" if own else ""
            raise JobNotFoundError(
                f"there is no job{made} with the labels {selector} in namespace {client.namespace}",
                hint=f"{client.commands.flk('list')} lists those that exist",
            )
        found.sort(key=lambda job: (str(job["metadata"].get("creationTimestamp")), str(job["metadata"]["name"])))
        refs = [JobRef(job["metadata"]["name"], target_of(job), job["metadata"]["uid"], named=False) for job in found]
        return cls(client, refs, by_labels=True)

    @property
    def names(self) -> str:
        """The names of the jobs, as a command takes them."""
        return " ".join(map(self.client.word, self.jobs))

    def in_turn(self, act: Act) -> int:
        """Call ``act`` for each job, and return the worst exit code. Raises the error of a single job."""
        return worst([self._code(act, job) for job in self.jobs])

    def in_parallel(self, act: Callable[[JobClient, JobRef, Tell], int | None]) -> int:
        """Call ``act`` for some jobs at a time, and return the worst exit code. Raises the error of a single job.

        What it tells by its last argument, and the errors, are printed in the order of the jobs.
        """
        from flk.jobs.listing import in_parallel

        if not self.are_several:
            return act(self.client.for_job(self.jobs[0]), self.jobs[0], note) or 0
        told: dict[JobRef, list[str]] = {job: [] for job in self.jobs}
        codes = []
        for job, result in in_parallel(self.jobs, lambda job: act(self.client.for_job(job), job, told[job].append)):
            for text in told[job]:
                note(text)
            codes.append(self.failed(job, result) if isinstance(result, FlkError) else result or 0)
        return worst(codes)

    def failed(self, job: JobRef, error: FlkError, *, others: Sequence[JobRef] = ()) -> int:
        """Print the error of one of several jobs, with the hint if no other job had the same; return its exit code.

        ``others`` are further jobs that have this error, too. Raises the error of a single job.
        """
        if not self.are_several:
            raise error
        hint = re.sub(rf"(?<![\w-]){re.escape(job.name)}(?![\w-])", "", error.hint or "")
        named = f"job {job.name}" + (f" and {plural(len(others), 'other job')}" if others else "")
        print_error(error, hint=hint not in self._hints, about="" if named in str(error) else f"{named}: ")
        self._hints.add(hint)
        return int(error.code)

    def _code(self, act: Act, job: JobRef) -> int:
        try:
            return act(self.client.for_job(job), job) or 0
        except FlkError as error:
            return self.failed(job, error)

    def at_once(self, act: Callable[[JobClient, JobRef, threading.Event], int | None]) -> int:
        """Call ``act`` for all jobs at once, and return the worst exit code. Raises the error of a single job.

        Each call has a thread. It should end when the event is set, which happens at Ctrl-C.
        """
        ended = threading.Event()
        if not self.are_several:
            return act(self.client.for_job(self.jobs[0]), self.jobs[0], ended) or 0
        results: queue.SimpleQueue[int | BaseException] = queue.SimpleQueue()

        def run(job: JobRef) -> None:
            try:
                results.put(self._code(lambda client, ref: act(client, ref, ended), job))
            except BaseException as error:  # of any kind: the main thread raises it
                results.put(error)

        threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in self.jobs]
        for thread in threads:
            thread.start()
        codes: list[int] = []
        try:
            for _ in threads:
                result = results.get()
                if isinstance(result, BaseException):
                    raise result
                codes.append(result)
        finally:
            ended.set()
            until = time.monotonic() + _LAST
            for thread in threads:
                thread.join(max(0.0, until - time.monotonic()))
        return worst(codes)


def worst(codes: Iterable[int]) -> int:
    """Return the worst of exit codes, 0 for none."""
    order = {int(code): rank for rank, code in enumerate(_WORST_FIRST)}
    return min(codes, key=lambda code: order.get(code, -1), default=0)
