"""`flk report`: write an HTML file about a job, or about two side by side, or serve it while the job runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from flk.cli.options import Context, Namespace, note, open_job
from flk.errors import UsageError
from flk_runtime.contract.exit_codes import ExitCode

if TYPE_CHECKING:
    from flk.report.model import Report
    from flk.report.server import Collect

_SEVERAL: Final = 2  # jobs in one report


def report(
    jobs: Annotated[list[str], typer.Argument(metavar="JOB [JOB]", help="Name of the job, or of two to compare.")],
    context: Context = None,
    namespace: Namespace = None,
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE|FORMAT",
            help="Write this file, whose name ends in .html, or print the data as json or yaml. Default: "
            "JOB.report.html in this folder.",
        ),
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace a file that flk report has not made.")] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve the page on this machine and renew it, until Ctrl-C.")
    ] = False,
    port: Annotated[
        int, typer.Option("--port", metavar="PORT", min=0, max=65535, help="Port for --serve. Default: a free one.")
    ] = 0,
) -> int | None:
    """Write one HTML file about a job: what was submitted, state and cause, attempts, charts, pods and logs.

    The file needs no network and no flk, and holds no secrets that flk knows of. It can be made while the job runs,
    after its end, and after its deletion from what flk has kept. Of two jobs it also shows what differs. Prints the
    path of the file. Ctrl-C ends --serve and leaves the job as it is.
    """
    if len(jobs) > _SEVERAL or len(set(jobs)) < len(jobs):
        raise UsageError(f"JOB: must be one job or {_SEVERAL} different ones (is {' '.join(jobs)})")
    printed = output in ("json", "yaml")
    if output and not printed and not output.endswith((".html", ".htm")):
        raise UsageError(f"--output: must be json, yaml or a file that ends in .html (is {output!r})")
    if serve and output:
        raise UsageError("--serve and --output exclude each other")
    if port and not serve:
        raise UsageError("--port needs --serve")
    path = Path(output or f"{'-'.join(job.rpartition('/')[2] for job in jobs)}.report.html")
    if not (printed or serve or force):
        _refuse_other(path)

    opened = [open_job(job, context, namespace) for job in jobs]
    told: set[int] = set()  # which jobs are gone, which is said once

    def tell(number: int, text: str) -> None:
        if number not in told:
            told.add(number)
            note(text)

    def collect() -> Sequence[Report]:
        from flk.report.collect import collect

        return [collect(*each, partial(tell, number)) for number, each in enumerate(opened)]

    if serve:
        return _serve(collect, port)
    reports = collect()
    if printed:
        _print([each.to_dict() for each in reports], output)
        return None
    from flk.report.page import page_of

    try:
        path.write_text(page_of(reports, _script()), encoding="utf-8", errors="replace")  # half of a character
    except OSError as error:
        raise UsageError(f"--output: {path} cannot be written: {error.strerror}") from None
    print(path)
    return None


def _script() -> str | None:
    from flk.report.script import MISSING, drawing_script

    script = drawing_script()
    if script is None:
        note(MISSING)
    return script


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
        raise UsageError(f"--output: {path} cannot be written: {error.strerror}") from None
    raise UsageError(f"{path} exists and was not made by flk report", hint="--force replaces it, -o names another file")


def _print(found: list[dict[str, Any]], form: str) -> None:
    from flk.cli.data_output import DataOutput

    data = found[0] if len(found) == 1 else {"items": found}
    sys.stdout.write(DataOutput(form).text(data))


def _serve(collect: Collect, port: int) -> int:
    from flk.report.server import HOST, ReportServer

    collect()  # a job that does not exist is an error before anything is served
    try:
        server = ReportServer(collect, _script(), port)
    except OSError as error:
        raise UsageError(f"--port: {port} on {HOST} cannot be used: {error.strerror}") from None
    note("Ctrl-C ends this; the job goes on")
    print(server.url, flush=True)
    try:
        server.serve()
    except KeyboardInterrupt:
        pass
    finally:
        server.close()
    return int(ExitCode.INTERRUPTED)
