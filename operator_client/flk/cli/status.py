"""`flk status`: show the state of jobs, their attempts and their pods, and why they ended."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

from flk.cli.options import Context, Namespace, note, output_format
from flk.cli.several import Chosen, Jobs, Selector, worst
from flk.errors import FlkError

if TYPE_CHECKING:
    from flk.jobs.answer import Answer
    from flk.observe.client import JobClient, JobRef


def status(
    jobs: Jobs = None,
    context: Context = None,
    namespace: Namespace = None,
    selector: Selector = None,
    output: Annotated[
        str,
        output_format(
            "text", "wide", "json", "yaml", "name", explained="text, wide (all pods, in full), json, yaml, name"
        ),
    ] = "text",
) -> int | None:
    """Show the status of a job: its phase, its attempts and why each ended, its pods and why they do not run.

    Exits with 103 if a job was deleted before it had ended, else with 0; `flk wait --timeout 0` exits with the job's
    exit code. `flk top` shows a job live.
    """
    from flk.cli.output import data_text, items_text

    chosen = Chosen.of(jobs, selector, context, namespace, command="status")
    states: list[dict[str, Any]] = []
    code = _show_all(chosen, output, states)
    if output in ("json", "yaml"):
        sys.stdout.write(items_text(states, output) if chosen.as_list else data_text(states[0], output))
    return code


def _show_all(chosen: Chosen, output: str, states: list[dict[str, Any]]) -> int:
    """Print the status of the jobs, or add their states as data to ``states``; return the worst exit code."""
    from flk.jobs.listing import look_at_all

    notes: dict[JobRef, str] = {}
    codes = []
    for job, looked in look_at_all(chosen.client, chosen.jobs, notes.__setitem__):
        try:
            if isinstance(looked, FlkError):
                raise looked
            if job in notes:
                note(notes[job])
            if output in ("text", "wide") and job != chosen.jobs[0]:
                print()
            codes.append(_show(chosen.client.for_job(job), looked, output, states))
        except FlkError as error:
            codes.append(chosen.failed(job, error))
    return worst(codes)


def _show(client: JobClient, answer: Answer, output: str, states: list[dict[str, Any]]) -> int:
    """Print the status of a job, or add its state as data to ``states``; return the job's share of the exit code."""
    state = answer.state
    if output in ("json", "yaml"):
        states.append(state.to_dict())
    elif output == "name":
        from flk.observe.resources import qualified

        print(qualified(state.kind, state.name))
    else:
        from flk.cli.status_text import status_text

        sys.stdout.write(status_text(state, client, wide=output == "wide"))
        sys.stdout.flush()
    return state.code if state.was_deleted else 0
