"""`flk doctor`: find what would prevent jobs from running."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flk.cli.options import Context, Namespace, load_job_file, output_format
from flk.cli.output import table
from flk.user.terminal import one_line
from flk_runtime.contract import ExitCode

if TYPE_CHECKING:
    from flk.health.cluster import Result


def doctor(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE]",
            help="Job file to check the cluster for. Default: flk.yaml, if it exists.",
            show_default=False,
        ),
    ] = None,
    context: Context = None,
    namespace: Namespace = None,
    output: Annotated[str, output_format("text", "json")] = "text",
) -> int | None:
    """Check whether a cluster and a namespace can run jobs, and with a job file whether they can run this one.

    Creates nothing. Exits with 104 if a check has failed. A check that needs objects which
    you may not read is unknown, and does not count as failed.
    """
    from flk.health.cluster import Level, Pods
    from flk.health.table import examine
    from flk.jobs.cluster import read_cluster
    from flk.jobs.submission import prepare
    from flk.observe.client import JobClient

    client = JobClient.connect(context, namespace)
    pods = None
    if file is not None or Path("flk.yaml").exists():
        loaded = load_job_file(file)
        pods = Pods(prepare(loaded.job, loaded.root, client).manifests[0])
    results = examine(read_cluster(client, pods), pods)
    if output == "json":
        document = [{**vars(result), "level": result.level.value} for result in results]
        print(json.dumps({"checks": document}, indent=2))
    else:
        rows: list[tuple[str, str, str]] = []
        for result, remedy in with_remedies(results):
            rows.append((result.level.value, result.check, one_line(result.found)))
            if remedy and result.level is not Level.OK:
                rows.append((" ", " ", f"remedy: {one_line(remedy)}"))
        print("\n".join(table(("RESULT", "CHECK", "FOUND"), rows)))
    return int(ExitCode.INFRASTRUCTURE) if any(r.level is Level.FAILED for r in results) else None


def with_remedies(results: Sequence[Result]) -> Iterator[tuple[Result, str]]:
    """Yield each result with its remedy; of results in a row that have the same one, only the last has it."""
    for result, following in zip_longest(results, results[1:]):
        yield result, "" if following is not None and following.remedy == result.remedy else result.remedy
