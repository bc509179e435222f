"""`flk status`: show the state of jobs, their attempts and their pods, and why they ended."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flk.cli.json_text import json_text
from flk.cli.options import Context, Namespace, note
from flk.cli.several import Chosen, Jobs, Selector, worst
from flk.errors import FlkError, JobNotFoundError, UsageError
from flk_runtime.contract.exit_codes import ExitCode

if TYPE_CHECKING:
    from flk.cli.data_output import DataOutput
    from flk.jobs.answer import Answer
    from flk.jobs.state import State
    from flk.observe.client import JobClient, JobRef


def status(
    jobs: Jobs = None,
    context: Context = None,
    namespace: Namespace = None,
    selector: Selector = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show the status again whenever it changes, until the job ends.")
    ] = False,
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="FORMAT",
            help="Output format: text, wide (all pods, in full), json, yaml, name, jsonpath=TEMPLATE, "
            "custom-columns=HEADER:PATH,…; paths are as in json.",
        ),
    ] = "text",
    raw: Annotated[
        bool, typer.Option("--raw", help="The object as the API server has it, as json, yaml or by a template.")
    ] = False,
) -> int | None:
    """Show the status of a job: its phase, its attempts and why each ended, its pods and why they do not run.

    Exits with 103 if a job was deleted before it had ended, else with 0; `flk wait --timeout 0` exits with the job's
    exit code. On a terminal --watch renews the screen; elsewhere it prints a line for each change.
    """
    from flk.cli.data_output import DataOutput, data_of

    form = DataOutput.parse(output, raw=raw, watch=watch)
    chosen = Chosen.of(jobs, selector, context, namespace, command="status")
    if watch and chosen.are_several:
        shown = chosen.client.commands.flk("list")
        raise UsageError("--watch shows one job", hint=f"{shown} --watch shows all of a namespace, and -l some of them")
    if watch:
        try:
            return chosen.in_turn(lambda client, job: _watch(client, job.name, form))
        except KeyboardInterrupt:
            return int(ExitCode.INTERRUPTED)
    found: list[dict[str, Any]] = []
    code = _show_all(chosen, form, raw, found)
    if form.is_data:
        sys.stdout.write(form.text(data_of(found, raw) if chosen.as_list else found[0]))
    return code


def _show_all(chosen: Chosen, form: DataOutput, raw: bool, found: list[dict[str, Any]]) -> int:
    """Print the status of the jobs, or add their data to those that were found; return the worst exit code."""
    from flk.jobs.listing import look_at_all

    told: dict[JobRef, str] = {}
    codes = []
    for job, looked in look_at_all(chosen.client, chosen.jobs, told.__setitem__):
        try:
            if isinstance(looked, FlkError):
                raise looked
            if job in told:
                note(told[job])
            if not form.is_data and form.kind != "name" and job != chosen.jobs[0]:
                print()
            codes.append(_show(chosen.client.for_job(job), looked, form, raw, found) or 0)
        except FlkError as error:
            codes.append(chosen.failed(job, error))
    return worst(codes)


def _show(client: JobClient, answer: Answer, form: DataOutput, raw: bool, found: list[dict[str, Any]]) -> int | None:
    """Print the status of a job, or add its data to those that were found."""
    from flk.cli.data_output import raw_object

    state, job = answer.state, answer.view.seen.job if answer.view else None
    if raw and job is None:
        raise JobNotFoundError(f"job {state.name} is gone, and flk has kept no object of it")
    if raw:
        found.append(raw_object(job or {}))
    elif form.is_data:
        found.append(state.to_dict())
    elif form.kind == "name":
        from flk.observe.resources import qualified

        print(qualified(state.kind, state.name))
    else:
        _print(state, client, form)
    return state.code if state.was_deleted else None


def _print(state: State, client: JobClient, form: DataOutput) -> None:
    from flk.cli.status_text import status_text

    sys.stdout.write(status_text(state, client, wide=form.kind == "wide"))
    sys.stdout.flush()


def _watch(client: JobClient, job: str, form: DataOutput) -> int | None:
    """Print the status at each change until the job has ended, or the last one of a job that is gone."""
    from flk.cli.screen import Screen
    from flk.cli.status_text import progress_line, status_text
    from flk.jobs.answer import get_state
    from flk.jobs.wait import describe, follow_states

    def states() -> Iterator[State]:
        try:
            yield from follow_states(client, job)
        except JobNotFoundError:
            if shown:
                raise
            yield get_state(client, job, note)

    screen = Screen(sys.stdout)
    shown = ""
    for state in states():
        if form.kind == "json":
            text = json_text(state.to_dict(), indent=None) + "\n"
        elif screen.is_terminal:
            text = status_text(state, client, wide=form.kind == "wide") + progress_line(state) + "\n"
        else:
            text = f"{describe(state)}\n"
        if screen.is_terminal and form.kind != "json":
            screen.show(text)
        elif text != shown:
            sys.stdout.write(text)
            sys.stdout.flush()
        shown = text
        if state.finished:
            return state.code if state.was_deleted else None
    return None
