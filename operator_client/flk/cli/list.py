"""`flk list`: list the jobs of a namespace, or of all namespaces."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from flk.cli.options import Context, Namespace, note
from flk.errors import UsageError
from flk_runtime.contract.exit_codes import ExitCode

if TYPE_CHECKING:
    from flk.cli.data_output import DataOutput
    from flk.jobs.listing import ListedJob
    from flk.jobs.state import State
    from flk.observe.client import JobClient
    from flk.observe.reader import Reader


_KEYS: Final[dict[str, Callable[[State], Any]]] = {
    "age": lambda state: (state.created, state.namespace, state.name),
    "name": lambda state: (state.name, state.namespace),
    "phase": lambda state: (state.phase.value, state.created),
    "pods": lambda state: (state.replicas, state.created),
    "owner": lambda state: (state.owner, state.created),
}


def list_(
    context: Context = None,
    namespace: Namespace = None,
    all_namespaces: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="List jobs in all namespaces.")
    ] = False,
    selector: Annotated[
        str | None, typer.Option("--selector", "-l", metavar="LABELS", help="List jobs with these labels: team=nlp.")
    ] = None,
    mine: Annotated[
        bool,
        typer.Option("--mine", help="List the jobs that your user of the cluster has submitted."),
    ] = False,
    phase: Annotated[
        list[str] | None,
        typer.Option("--phase", metavar="PHASE", help="List jobs in this phase: Running, Stuck, … Repeatable."),
    ] = None,
    sort: Annotated[
        str, typer.Option("--sort", metavar="KEY", help="Sort by age (newest last), name, phase, pods or owner.")
    ] = "age",
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show the list again whenever it changes, until Ctrl-C.")
    ] = False,
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="FORMAT",
            help="Output format: text, wide (the cause too), json, yaml, name, jsonpath=TEMPLATE, "
            "custom-columns=HEADER:PATH,…; paths are as in json.",
        ),
    ] = "text",
    raw: Annotated[
        bool, typer.Option("--raw", help="The objects as the API server has them, as json, yaml or by a template.")
    ] = False,
) -> int | None:
    """List jobs, the newest last, with the phase of each and the code of what keeps it from running or ended it.

    On a terminal --watch renews the screen; elsewhere it prints a line for each job and each change.
    """
    from flk.cli.data_output import DataOutput

    form = DataOutput.parse(output, raw=raw, watch=watch)
    if sort not in _KEYS:
        raise UsageError(f"--sort: must be {', '.join(_KEYS)} (is {sort!r})")
    phases = _phases(phase or [])
    if all_namespaces and namespace:
        raise UsageError("--namespace and --all-namespaces exclude each other")
    from flk.jobs.listing import is_of, list_observed, me, with_records
    from flk.observe.client import JobClient

    client = JobClient.connect(context, namespace)
    user = me(client) if mine else ""
    readers: dict[str, Reader] = {}

    def read() -> list[ListedJob]:
        collects = gc.isenabled()
        gc.disable()  # it would look at all objects of a long list again and again
        try:
            every = list_observed(client, all_namespaces=all_namespaces, selector=selector)
            every = with_records(client, every, readers)
        finally:
            if collects:
                gc.enable()
        listed = [
            each
            for each in every
            if (not phases or each.state.phase.value in phases) and (not mine or is_of(user, each.seen.job))
        ]
        return sorted(listed, key=lambda each: _KEYS[sort](each.state))

    chosen = " that match" if selector or mine or phases else ""
    nothing = f"there are no jobs{chosen}" + ("" if all_namespaces else f" in namespace {client.namespace}")
    if watch:
        from flk.cli.list_watch import watch_list

        try:
            watch_list(client, read, form, all_namespaces=all_namespaces, nothing=nothing)
        except KeyboardInterrupt:
            return int(ExitCode.INTERRUPTED)
    listed = read()
    _print(client, listed, form, raw=raw, all_namespaces=all_namespaces, nothing=nothing)
    return None


def _print(
    client: JobClient, listed: list[ListedJob], form: DataOutput, *, raw: bool, all_namespaces: bool, nothing: str
) -> None:
    from flk.cli.data_output import data_of, raw_object
    from flk.cli.list_text import list_text
    from flk.observe.resources import qualified

    states = [each.state for each in listed]
    if form.is_data:
        objects = [raw_object(each.seen.job or {}) if raw else each.state.to_dict() for each in listed]
        sys.stdout.write(form.text(data_of(objects, raw)))
    elif form.kind == "name":
        for state in states:
            print(qualified(state.kind, state.name))
    elif states:
        wide = form.kind == "wide"
        sys.stdout.write(list_text(states, client.now(), wide=wide, all_namespaces=all_namespaces))
    elif not all_namespaces and client.lacks_namespace():
        note(f"there is no namespace {client.namespace} in this cluster")
    else:
        note(nothing)


def _phases(given: list[str]) -> set[str]:
    from flk.jobs.state import Phase

    known = {phase.value.lower(): phase.value for phase in Phase}
    for text in given:
        if text.lower() not in known:
            raise UsageError(f"--phase: must be one of {', '.join(known.values())} (is {text!r})")
    return {known[text.lower()] for text in given}
