"""`flk logs`: show what every rank of a job, or of several, prints."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from flk.cli.options import Context, Namespace, note, output_format, seconds
from flk.cli.several import Chosen, Jobs, Selector
from flk.errors import JobNotFoundError, UsageError
from flk.local.shown import MetricsText
from flk.user.terminal import has_colours
from flk_runtime.contract import ExitCode

if TYPE_CHECKING:
    from flk.jobs.logs import LogLine, LogOptions
    from flk.observe.client import JobClient, JobRef


def logs(
    jobs: Jobs = None,
    context: Context = None,
    namespace: Namespace = None,
    selector: Selector = None,
    follow: Annotated[
        bool,
        typer.Option("--follow/--no-follow", "-f", help="Show lines until the job ends (default), or those so far."),
    ] = True,
    rank: Annotated[str | None, typer.Option("--rank", metavar="R,…", help="Only these ranks: 0,2 or 0-3.")] = None,
    pod: Annotated[
        str | None, typer.Option("--pod", metavar="P,…", help="Only these pods, by index or name: 0,gpt-worker-3.")
    ] = None,
    container: Annotated[
        str, typer.Option("--container", "-c", metavar="NAME", help="This container of the pods. Default: the ranks'.")
    ] = "",
    tail: Annotated[
        int | None, typer.Option("--tail", metavar="N", min=0, help="Begin with the last N lines of each pod.")
    ] = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="DURATION", help="Only logs newer than this: 5m, 1h.")
    ] = None,
    output: Annotated[str, output_format("text", "json", explained="text, or json: an object a line")] = "text",
) -> int | None:
    """Show what every rank of a job prints, from all its pods, until it ends, and exit with the job's exit code.

    With several jobs, each line begins with the name of its job, and the worst exit code counts. On a terminal, equal
    lines of several ranks are one: [ranks 0-7].
    Waits for pods that are not up yet. If the job is stuck, ends with the exit code of the cause, as `flk wait` does.
    Ctrl-C detaches: the job goes on. With --no-follow the exit code is 0. If the job or its pods are gone, shows the
    last lines that flk has kept on this machine.
    """
    ranks, seconds_ago = parse_ranks(rank), seconds(since, "--since")
    from flk.jobs import logs as job_logs

    is_text = output == "text"
    options = job_logs.LogOptions(
        ranks=ranks,
        pods=_parse_pods(pod),
        tail=tail,
        since=seconds_ago,
        container=container,
        fold=is_text and sys.stdout.isatty(),
        colour=is_text and has_colours(sys.stdout),
    )
    chosen = Chosen.of(jobs, selector, context, namespace, command="logs")
    written = LogOutput(as_json=not is_text, several=chosen.are_several)

    def show(client: JobClient, job: JobRef) -> None:
        written.write_all(job_logs.dump(client, job.name, options))

    if not follow:
        return chosen.in_turn(show)
    try:
        return chosen.at_once(lambda client, job, ended: _follow(client, job.name, options, written, ended))
    except KeyboardInterrupt:
        note_detached(chosen)
        return int(ExitCode.INTERRUPTED)


class LogOutput:
    """Writes lines to stdout as text or JSON, and notes to stderr.

    Of ``several`` jobs each line begins with its job's name. Several threads may use one output. On a terminal, lines
    of metrics are for people.
    """

    def __init__(self, *, as_json: bool = False, several: bool = False) -> None:
        self._as_json, self._several = as_json, several
        self._for_people = not as_json and sys.stdout.isatty()
        self._metrics: dict[str, MetricsText] = {}  # by the names of jobs
        self._lock = threading.Lock()

    def write_all(self, lines: Generator[LogLine, None, None], ended: threading.Event | None = None) -> None:
        """Write lines as they come, until ``ended`` is set. The generator is closed then, and if writing fails."""
        with closing(lines):
            for line in lines:
                if ended is not None and ended.is_set():
                    return
                with self._lock:
                    if line.note:
                        note(line.message)
                    else:
                        sys.stdout.write(self._text(line) + "\n")
                        sys.stdout.flush()

    def _text(self, line: LogLine) -> str:
        if self._as_json:
            return json.dumps(line.to_dict(), ensure_ascii=False)
        shown = self._metrics.setdefault(line.job, MetricsText()).text(line.text) if self._for_people else None
        return f"{line.job} " * self._several + (shown or line.text)


def _follow(
    client: JobClient, name: str, options: LogOptions, written: LogOutput, ended: threading.Event
) -> int | None:
    """Write the lines of a job until it ends, or those that are kept of one that is gone."""
    from flk.jobs import logs as job_logs
    from flk.jobs.answer import look
    from flk.jobs.wait import raise_for_state

    try:
        uid = client.get_job(name)["metadata"]["uid"]
    except JobNotFoundError:
        written.write_all(job_logs.dump(client, name, options))  # what is kept; raises the error if nothing is
        raise_for_state(look(client, name).state, client)
        return None
    return _follow_to_end(client, name, uid, options, written, ended)


def follow_to_end(client: JobClient, name: str, uid: str | None) -> int | None:
    """Print the lines of a job until it ends, then raise the error of a job that failed: `flk submit --follow`."""
    from flk.jobs import logs as job_logs

    options = job_logs.LogOptions(colour=has_colours(sys.stdout), fold=sys.stdout.isatty())
    try:
        return _follow_to_end(client, name, uid, options, LogOutput())
    except KeyboardInterrupt:
        note_detached(Chosen(client, [client.ref(name)], by_labels=False))
        return int(ExitCode.INTERRUPTED)


def _follow_to_end(
    client: JobClient,
    name: str,
    uid: str | None,
    options: LogOptions,
    written: LogOutput,
    ended: threading.Event | None = None,
) -> int | None:
    from flk.jobs import logs as job_logs
    from flk.jobs.wait import raise_for_state, run_time_text, wait_for

    written.write_all(job_logs.follow(client, name, options), ended)
    if ended is not None and ended.is_set():
        return None
    waited = wait_for(client, name, uid=uid)
    raise_for_state(waited.state, client, waited.outcome)
    note(f"job {name} succeeded{run_time_text(waited.state)}")
    return None


def note_detached(chosen: Chosen, verb: str = "logs") -> None:
    """Say that the jobs are left as they are, running or suspended; ``verb`` is the command that follows them again."""
    what = f"{len(chosen.jobs)} jobs" if chosen.are_several else f"job {chosen.jobs[0].name}"
    note(
        f"detached: this changes nothing for {what}. To attach again: {chosen.client.commands.flk(verb, chosen.names)}"
    )


def parse_ranks(text: str | None) -> frozenset[int]:
    """Return the ranks in ``0,2`` or ``0-3,7``, none for None. Raises UsageError for anything else."""
    if text is None:
        return frozenset()
    chosen: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        ends = [first, last] if dash else [first, first]
        if not all(end.isascii() and end.isdigit() and len(end) < 7 for end in ends):
            raise UsageError(f"--rank: must be ranks like 0,2 or 0-3 (is {text!r})")
        chosen |= set(range(int(ends[0]), int(ends[1]) + 1))
    if not chosen:
        raise UsageError(f"--rank: names no rank (is {text!r})")
    return frozenset(chosen)


def _parse_pods(text: str | None) -> frozenset[str]:
    """Return the names and indexes in ``0,gpt-worker-3``. Raises UsageError if there is none."""
    if text is None:
        return frozenset()
    pods = [part.strip().rpartition("/")[2] for part in text.split(",")]
    if not all(pods):
        raise UsageError(f"--pod: must be indexes or names of pods like 0,gpt-worker-3 (is {text!r})")
    return frozenset(pods)
