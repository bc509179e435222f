"""`flk logs`: what every rank prints."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from flk.cli.options import Context, JobName, Namespace, note, seconds
from flk.errors import UsageError
from flk_runtime.contract import ExitCode

if TYPE_CHECKING:
    from flk.jobs.client import JobClient
    from flk.jobs.logs import Options


def logs(
    job: JobName,
    context: Context = None,
    namespace: Namespace = None,
    follow_: Annotated[
        bool,
        typer.Option("--follow/--no-follow", "-f", help="Go on until the job ends (default), or show what is there."),
    ] = True,
    rank: Annotated[str | None, typer.Option("--rank", metavar="R,…", help="Only these ranks: 0,2 or 0-3.")] = None,
    tail: Annotated[
        int | None, typer.Option("--tail", metavar="N", min=0, help="Begin with the last N lines of each pod.")
    ] = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="DURATION", help="Begin with what is younger: 5m, 1h.")
    ] = None,
    previous: Annotated[
        bool, typer.Option("--previous", "-p", help="Of the containers before their last restart; does not follow.")
    ] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Keep control characters and flk's records.")] = False,
) -> int | None:
    """Show what every rank of a job prints, from all its pods, until it ends.

    Waits for pods that are not up yet. Ctrl-C detaches: the job goes on.
    """
    from flk.jobs import logs as reading
    from flk.jobs.client import JobClient

    options = reading.Options(
        ranks=ranks(rank),
        tail=tail,
        since=seconds(since, "--since"),
        previous=previous,
        raw=raw,
        colour=sys.stdout.isatty() and not os.environ.get("NO_COLOR"),
    )
    cluster = JobClient.connect(context, namespace)
    if follow_ and not previous:
        return show(cluster, job, options)
    for line in reading.dump(cluster, job, options):
        _write(line.text, note_=line.note)
    return None


def show(cluster: JobClient, name: str, options: Options) -> int | None:
    """Print the lines of a job until it ends; 130 after Ctrl-C."""
    from flk.jobs import logs as reading

    try:
        for line in reading.follow(cluster, name, options):
            _write(line.text, note_=line.note)
    except KeyboardInterrupt:
        detached(cluster, name)
        return int(ExitCode.INTERRUPTED)
    return None


def follow(cluster: JobClient, name: str, uid: str | None, *, timeout: float | None = None) -> int | None:
    """Print the lines of a job, then its record: what `flk submit --follow` does after the creation."""
    import signal
    from types import FrameType

    from flk.errors import WaitTimeoutError
    from flk.jobs import wait
    from flk.jobs.logs import Options

    def over(number: int, frame: FrameType | None) -> None:
        raise WaitTimeoutError(
            f"job {name} has not ended within {timeout:g} s", hint=f"it goes on; flk logs {name} shows the rest"
        )

    if timeout is not None:
        signal.signal(signal.SIGALRM, over)
        signal.setitimer(signal.ITIMER_REAL, max(timeout, 0.001))
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    code = show(cluster, name, Options(colour=colour))
    if code is not None:
        return code
    try:
        state = wait.until_end(cluster, name, uid=uid)
    except KeyboardInterrupt:
        detached(cluster, name)
        return int(ExitCode.INTERRUPTED)
    finally:
        if timeout is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
    wait.conclude(state)
    note(f"job {name} succeeded{wait.took(state)}")
    return None


def detached(cluster: JobClient, name: str) -> None:
    """Say that the job does not care that nobody watches it."""
    note(f"detached: job {name} goes on. To attach again: flk logs {name} -n {cluster.namespace}")


def ranks(text: str | None) -> frozenset[int]:
    """The ranks in ``0,2`` or ``0-3,7``; none for None."""
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


def _write(text: str, *, note_: bool) -> None:
    if note_:
        note(text)
    else:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
