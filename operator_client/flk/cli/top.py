"""`flk top`: watch a job on a terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from flk.cli.options import Context, JobName, Namespace, note, open_job
from flk.errors import ApiError, FlkError

if TYPE_CHECKING:
    from flk.cli.top_text import Line
    from flk.observe.client import JobClient
    from flk_runtime.contract.telemetry import Telemetry

_DRAW: Final = 0.5  # seconds after which the view is drawn again, for its times
_QUIET: Final = 0.1  # seconds between two drawings at least
_NO_RANKS: Final = (
    "the launchers have told none yet, the job does not run with them or with an older flk, or the right to create "
    "pods/exec is missing"
)
Lines = Callable[[int], "list[Line]"]


def top(
    job: JobName,
    context: Context = None,
    namespace: Namespace = None,
) -> None:
    """Watch a job live: its steps, loss and throughput, each node with its ranks, slow ranks, pods.

    Keys: q quits, arrows or j and k scroll. Elsewhere than on a terminal it prints the view once. Ranks need the rights
    to get and create pods/exec. `watch flk list` shows all jobs.
    """
    from flk.cli.output import width_of
    from flk.cli.top_text import TopData, job_lines
    from flk.jobs.answer import look
    from flk.jobs.live import LiveJob

    client, name = open_job(job, context, namespace)
    state = look(client, name, note).state
    live = LiveJob(client, name, state, measure)
    if state.finished or not (sys.stdout.isatty() and sys.stdin.isatty()):
        try:
            live.telemetry, live.missing = measure(client, name)
        except FlkError as error:
            live.missing = str(error)
        shown = job_lines(TopData(state, client.now(), live.telemetry, live.missing), width_of(sys.stdout) or 200)
        print("\n".join(line.text for line in shown), flush=True)
        return

    def lines(width: int) -> list[Line]:
        if live.error is not None:
            raise live.error
        seen = TopData(live.state, client.now(), live.telemetry, live.missing, live.outage)
        return job_lines(seen, width)

    live.start()
    try:
        _show(lines, live.changed)
    finally:
        live.close()


def measure(client: JobClient, name: str) -> tuple[Telemetry, str]:
    """Return the telemetry of a job, and why its ranks are not in it. Raises JobNotFoundError."""
    from flk.jobs.telemetry import read_telemetry
    from flk_runtime.contract.telemetry import Telemetry

    try:
        found = read_telemetry(client, name)
    except ApiError as error:
        return Telemetry(client.now()), str(error)
    return found, "" if found.ranks else _NO_RANKS


def _show(lines: Lines, changed: threading.Event) -> None:
    """Draw the view until q. Raises KeyboardInterrupt at Ctrl-C, and what ``lines`` raises."""
    from flk.cli.live_screen import LiveScreen

    scroll = 0
    with LiveScreen().opened() as screen:
        while True:
            changed.clear()
            width, height = screen.size
            found = lines(width)
            shown, scroll = window(found, height, scroll)
            screen.draw([line._replace(text=line.text[:width]) for line in shown])
            until = time.monotonic() + _DRAW
            key = ""
            while not key and time.monotonic() < until and (width, height) == screen.size:
                key = screen.key(_QUIET)
                if changed.is_set() and not key:
                    break
            if key == "q":
                return
            scroll += {"j": 1, "k": -1, "page down": height - 2, "page up": 2 - height}.get(key, 0)


def window(lines: list[Line], height: int, scroll: int) -> tuple[list[Line], int]:
    """Return the lines that a terminal of this height shows, with a last one of keys, and how far it is scrolled."""
    from flk.cli.top_text import Line

    room = max(1, height - 1)
    scroll = max(0, min(scroll, len(lines) - room))
    left = len(lines) - scroll - room
    more = f"   and {left} more lines" if left > 0 else ""
    foot = Line(f"q quit   j/k scroll{more}", "dim")
    shown = lines[scroll : scroll + room]
    return ([*shown, foot] if height > 1 else shown), scroll
