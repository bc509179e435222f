"""`flk list --watch`: the list again whenever it changes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from flk.cli.json_text import json_text
from flk.cli.options import note
from flk.errors import ApiError
from flk.kube.watch import OUTAGE

if TYPE_CHECKING:
    from flk.cli.data_output import DataOutput
    from flk.jobs.listing import ListedJob
    from flk.jobs.state import State
    from flk.observe.client import JobClient

EVERY: Final = 2.0  # seconds between two lists
SHARE: Final = 10  # and at least so many times the duration of the last one, for clusters with many jobs
_Key = tuple[str, str]  # namespace and UID


def watch_list(
    client: JobClient,
    read: Callable[[], list[ListedJob]],
    form: DataOutput,
    *,
    all_namespaces: bool,
    nothing: str,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Print the list until Ctrl-C. ``nothing`` says that it is empty.

    Raises the error of the first list, and the error of a server that does not answer for five minutes.
    """
    from flk.cli.list_text import list_text
    from flk.cli.screen import Screen

    screen = Screen(sys.stdout)
    renewed = screen.is_terminal and form.kind != "json"
    known: dict[_Key, State] | None = None
    failing: float | None = None
    while True:
        began = clock()
        try:
            listed = read()
        except ApiError as error:
            if not error.is_outage or known is None or (failing is not None and began - failing > OUTAGE):
                raise
            if failing is None:
                note(f"{error}; the list is as it was before")
            failing = began if failing is None else failing
        else:
            failing, states = None, [each.state for each in listed]
            now = {(state.namespace, state.uid): state for state in states}
            if renewed:
                wide = form.kind == "wide"
                text = list_text(states, client.now(), wide=wide, all_namespaces=all_namespaces)
                screen.show(text if states else f"{nothing}\n")
            else:
                if not states and known is None:
                    note(nothing)
                _print_changes(known or {}, now, form, all_namespaces)
            known = now
        sleep(max(EVERY, SHARE * (clock() - began)))


def _print_changes(before: dict[_Key, State], now: dict[_Key, State], form: DataOutput, all_namespaces: bool) -> None:
    """Print a line for each job that is new, has changed or is not in the list any more."""
    from flk.jobs.state import SCHEMA
    from flk.jobs.wait import describe
    from flk.terminal import printable

    def text_of(state: State) -> str:
        if form.kind == "json":
            return json_text(state.to_dict(), indent=None)
        return printable(f"{state.namespace}/" * all_namespaces + describe(state))

    lines = [
        text_of(state) for key, state in now.items() if key not in before or text_of(before[key]) != text_of(state)
    ]
    for state in (before[key] for key in before if key not in now):
        if form.kind == "json":
            known = {"name": state.name, "namespace": state.namespace, "uid": state.uid}
            lines.append(json_text({"schema": SCHEMA, **known, "listed": False}, indent=None))
        else:
            lines.append(
                printable(f"{state.namespace}/" * all_namespaces + f"{state.name} is not in the list any more")
            )
    for line in lines:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
