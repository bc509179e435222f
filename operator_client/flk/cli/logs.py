"""`flk logs`: show what every rank of a job prints."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from flk.cli.options import Context, JobName, Namespace, note, seconds
from flk.errors import UsageError
from flk_runtime.contract import ExitCode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flk.jobs.client import JobClient
    from flk.jobs.logs import LogLine


def logs(
    job: JobName,
    context: Context = None,
    namespace: Namespace = None,
    follow: Annotated[
        bool,
        typer.Option("--follow/--no-follow", "-f", help="Show lines until the job ends (default), or those so far."),
    ] = True,
    rank: Annotated[str | None, typer.Option("--rank", metavar="R,…", help="Only these ranks: 0,2 or 0-3.")] = None,
    tail: Annotated[
        int | None, typer.Option("--tail", metavar="N", min=0, help="Begin with the last N lines of each pod.")
    ] = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="DURATION", help="Only logs newer than this: 5m, 1h.")
    ] = None,
    previous: Annotated[
        bool,
        typer.Option("--previous", "-p", help="Logs of the containers before their last restart; does not follow."),
    ] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Keep control characters and flk's records.")] = False,
) -> int | None:
    """Show what every rank of a job prints, from all its pods, until it ends.

    Waits for pods that are not up yet. Ctrl-C detaches: the job goes on.
    """
    ranks, seconds_ago = parse_ranks(rank), seconds(since, "--since")
    from flk.jobs import logs as job_logs
    from flk.jobs.client import JobClient

    options = job_logs.LogOptions(
        ranks=ranks, tail=tail, since=seconds_ago, previous=previous, raw=raw, colour=_is_coloured()
    )
    client = JobClient.connect(context, namespace)
    if follow and not previous:
        try:
            _print(job_logs.follow(client, job, options))
        except KeyboardInterrupt:
            note_detached(client, job)
            return int(ExitCode.INTERRUPTED)
    else:
        _print(job_logs.dump(client, job, options))
    return None


def follow_to_end(client: JobClient, name: str, uid: str | None, *, timeout: float | None = None) -> int | None:
    """Print the lines of a job until it ends, then raise the error of a job that failed: `flk submit --follow`."""
    from flk.jobs import logs as job_logs
    from flk.jobs.wait import raise_for_state, run_time_text, wait_until_finished

    try:
        _print(job_logs.follow(client, name, job_logs.LogOptions(colour=_is_coloured()), timeout=timeout))
        state = wait_until_finished(client, name, uid=uid)
    except KeyboardInterrupt:
        note_detached(client, name)
        return int(ExitCode.INTERRUPTED)
    raise_for_state(state, client)
    note(f"job {name} succeeded{run_time_text(state)}")
    return None


def note_detached(client: JobClient, name: str) -> None:
    """Say that the job goes on although flk does not follow it any more."""
    note(f"detached: job {name} goes on. To attach again: {client.command('logs', name)}")


def parse_ranks(text: str | None) -> frozenset[int]:
    """Return the ranks in ``0,2`` or ``0-3,7``, none for None. Raises UsageError for anything else."""
    chosen: set[int] = set()
    for part in (text or "").split(",") if text is not None else []:
        first, dash, last = part.strip().partition("-")
        ends = [first, last] if dash else [first, first]
        if not all(end.isascii() and end.isdigit() and len(end) < 7 for end in ends):
            raise UsageError(f"--rank: must be ranks like 0,2 or 0-3 (is {text!r})")
        chosen |= set(range(int(ends[0]), int(ends[1]) + 1))
    if text is not None and not chosen:
        raise UsageError(f"--rank: names no rank (is {text!r})")
    return frozenset(chosen)


def _is_coloured() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _print(lines: Iterable[LogLine]) -> None:
    for line in lines:
        if line.note:
            note(line.text)
        else:
            sys.stdout.write(line.text + "\n")
            sys.stdout.flush()
