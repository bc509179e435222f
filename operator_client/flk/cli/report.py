"""`flk report`: write an HTML file about a job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flk.cli.options import Context, JobName, Namespace, note, open_job
from flk.errors import UsageError


def report(
    job: JobName,
    context: Context = None,
    namespace: Namespace = None,
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="FILE", help="Write the page to this file. Default: JOB.report.html here."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that flk report has not made.")] = False,
) -> None:
    """Write one HTML file about a job: what was submitted, state and cause, attempts, charts, pods and logs.

    The file needs no network and no flk, and holds no secrets that flk knows of. It can be made while the job runs,
    after its end, and after its deletion from what flk has kept. Prints the path of the file.
    """
    path = to or Path(f"{job.rpartition('/')[2]}.report.html")
    if not force:
        _refuse_other(path)
    client, name = open_job(job, context, namespace)
    from flk.report.build import collect
    from flk.report.page import MISSING, drawing_script, page_of

    made = collect(client, name, note)
    script = drawing_script()
    if script is None:
        note(MISSING)
    try:
        path.write_text(page_of(made, script), encoding="utf-8", errors="replace")  # half of a character
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
    print(path)


def _refuse_other(path: Path) -> None:
    """Raise UsageError for an existing file that flk report has not made."""
    from flk.report.page import MARK

    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            if MARK in file.read(200):
                return
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
    raise UsageError(
        f"{path} exists and was not made by flk report", hint="--force replaces it, --to names another file"
    )
