"""`flk status`: show the state of a job, its attempts and its pods, and why it ended."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from flk.cli.options import Context, JobName, Namespace, note, open_job
from flk.errors import UsageError
from flk_runtime.contract.exit_codes import ExitCode

if TYPE_CHECKING:
    from flk.jobs.state import State
    from flk.observe.client import JobClient


def status(
    job: JobName,
    context: Context = None,
    namespace: Namespace = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show the status again whenever it changes, until the job ends.")
    ] = False,
    output: Annotated[
        str,
        typer.Option(
            "--output", "-o", metavar="FORMAT", help="Output format: text, wide (all pods, in full), json, yaml, name."
        ),
    ] = "text",
) -> int | None:
    """Show the status of a job: its phase, its attempts and why each ended, its pods and why they do not run.

    Exits with 103 if the job was deleted before it had ended, else with 0; `flk wait --timeout 0` exits with the job's
    exit code. On a terminal --watch renews the screen; elsewhere it prints a line for each change.
    """
    if output not in ("text", "wide", "json", "yaml", "name"):
        raise UsageError(f"--output: must be text, wide, json, yaml or name (is {output!r})")
    if watch and output in ("yaml", "name"):
        raise UsageError(f"--watch and --output {output} exclude each other")
    from flk.jobs.wait import get_state

    client, job = open_job(job, context, namespace)
    if watch:
        try:
            _watch(client, job, output)
        except KeyboardInterrupt:
            return int(ExitCode.INTERRUPTED)
        return None
    state = get_state(client, job, note)
    _print(state, client, output)
    return state.code if state.was_deleted else None


def _print(state: State, client: JobClient, output: str) -> None:
    if output == "json":
        print(json.dumps(state.to_dict(), indent=2))
    elif output == "yaml":
        import yaml

        print(yaml.safe_dump(json.loads(json.dumps(state.to_dict())), sort_keys=False, allow_unicode=True), end="")
    elif output == "name":
        from flk.observe.client import qualified

        print(qualified(state.kind, state.name))
    else:
        from flk.cli.status_text import status_text

        sys.stdout.write(status_text(state, client, wide=output == "wide"))


def _watch(client: JobClient, job: str, output: str) -> None:
    """Print the status at each change, until the job has ended."""
    from flk.cli.screen import Screen
    from flk.cli.status_text import progress_line, status_text
    from flk.jobs.wait import describe, follow_states

    screen = Screen(sys.stdout)
    shown = ""
    for state in follow_states(client, job):
        if output == "json":
            text = json.dumps(state.to_dict()) + "\n"
        elif screen.is_terminal:
            text = status_text(state, client, wide=output == "wide") + progress_line(state) + "\n"
        else:
            text = f"{describe(state)}\n"
        if screen.is_terminal and output != "json":
            screen.show(text)
        elif text != shown:
            sys.stdout.write(text)
            sys.stdout.flush()
        shown = text
        if state.finished:
            return
