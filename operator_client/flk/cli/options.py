"""Options that commands share: their names, types and help texts.

``Context``, ``Namespace`` and the like are types for parameters of any command. A command that takes a job is decorated
with ``takes_job``, which gives it the options of a job and calls it with the job that they describe.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from flk.cli.help import show_all
from flk.errors import FlkError, UsageError
from flk.user.terminal import one_line
from flk_runtime.contract import user_env
from flk_runtime.contract.options import AUTO
from flk_runtime.contract.values import dataclass

if TYPE_CHECKING:
    from flk.observe.client import JobClient, JobRef
    from flk.spec.job import Job

# The flags of the job's fields, written by `make docs`: reading the job's model itself would load pydantic for a help.
FLAGS_FILE: Final = Path(__file__).with_name("job_flags.json")
COMPLETION_TIMEOUT: Final = 1.0  # seconds for the API server: a completion must not take longer


@dataclass(frozen=True)
class LoadedJob:
    """A job, and the folder that contains its code."""

    job: Job
    root: Path

    def started_in(self, folder: Path) -> Job:
        """Return the job with the path of its script that is right in this folder."""
        script, *arguments = self.job.command
        if script == "-m" or self.root == folder:
            return self.job
        return self.job.changed(command=[str(self.root / script), *arguments])


def note(text: str) -> None:
    """Print a line on stderr that is not an error."""
    sys.stderr.write(f"flk: {one_line(text)}\n")  # in one piece: threads may print at once
    sys.stderr.flush()


def seconds(value: str | None, flag: str) -> int | None:
    """Return the seconds of a duration given to ``flag``; None stays None. Raises UsageError for anything else."""
    from flk_runtime.contract.quantities import parse_duration

    return None if value is None else _checked(flag, parse_duration, value)


def _namespace(value: str | None) -> str | None:
    from flk.spec import names

    return None if value is None else _checked("--namespace", names.namespace, value)


def job_ref(value: str) -> JobRef:
    """Return the job that ``NAME`` or ``KIND/NAME`` means. Raises UsageError for anything else."""
    from flk.observe.client import JobRef

    return JobRef.parse(value)


def open_job(value: str, context: str | None, namespace: str | None) -> tuple[JobClient, str]:
    """Return a client for which the name of a job means this job only, and the name."""
    from flk.observe.client import JobClient

    ref = job_ref(value)
    return JobClient.connect(context, namespace).for_job(ref), ref.name


def _nodes(values: list[str] | None) -> list[str]:
    from flk.spec import names

    return [str(_checked("--avoid-node", names.object_name, value)) for value in values or []]


def valid_jobs(value: Any) -> Any:
    """Return the name of a job, or several or none, as an argument has them. Raises UsageError for what is no name."""
    for name in [value] if isinstance(value, str) else value or []:
        job_ref(name)
    return value


def _checked(flag: str, check: Callable[[str], Any], value: str) -> Any:
    try:
        return check(value)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from None


def output_format(*formats: str, explained: str = "") -> Any:
    """Return the option --output of a command with these formats, which another help text may explain."""
    *first, last = formats
    words = f"{', '.join(first)} or {last}" if first else last

    def check(value: str | None) -> str | None:
        if value not in (None, *formats):
            raise UsageError(f"--output: must be {words} (is {value!r})")
        return value

    text = f"Output format: {explained or ', '.join(formats)}."
    return typer.Option("--output", "-o", metavar="FORMAT", callback=check, help=text)


def job_names(context: typer.Context) -> list[str]:
    """Return the names of the jobs in the namespace that the words so far choose, sorted; none after an error."""
    from flk.kube import ConnectionOptions, set_connection_options
    from flk.observe.client import JobClient
    from flk.user.commands import Connection

    try:
        kubeconfig, user = (str(_chosen(context, name) or "") for name in ("kubeconfig", "as_user"))
        set_connection_options(ConnectionOptions(Connection(kubeconfig=kubeconfig, user=user), COMPLETION_TIMEOUT))
        client = JobClient.connect(_chosen(context, "context"), _chosen(context, "namespace"))
        items = client.list_jobs(metadata_only=True)
    except FlkError:
        return []
    return sorted(str(item["metadata"]["name"]) for item in items)


def _chosen(context: typer.Context, name: str) -> Any:
    """Return the value of an option that stands after the subcommand, or before it."""
    parent = context.parent.params if context.parent else {}
    return context.params.get(name) or parent.get(name)


def complete_jobs(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of jobs that begin with what the user has typed; none if the cluster does not answer at once."""
    return [name for name in job_names(context) if name.startswith(incomplete)]


Context = Annotated[str | None, typer.Option("--context", metavar="NAME", help="Context of the kubeconfig.")]
Namespace = Annotated[
    str | None,
    typer.Option("--namespace", "-n", metavar="NAME", callback=_namespace, help="Namespace of the job."),
]
AvoidNode = Annotated[
    list[str] | None,
    typer.Option(
        "--avoid-node",
        metavar="NAME",
        callback=_nodes,
        help="Node that the pods do not run on any more, by its name. Repeatable.",
    ),
]
LoseProgress = Annotated[
    bool,
    typer.Option(
        "--lose-progress",
        help="End the pods of a job whose checkpoints only their memory has.",
    ),
]
JobName = Annotated[
    str,
    typer.Argument(
        metavar="JOB", help="Name of the job.", show_default=False, callback=valid_jobs, autocompletion=complete_jobs
    ),
]
Wait = Annotated[
    bool, typer.Option("--wait/--no-wait", help="Wait until the pods are gone (default), or return at once.")
]
Timeout = Annotated[
    str | None,
    typer.Option("--timeout", metavar="DURATION", help="Give up after this time: 75s, 1h30m."),
]


def _command_options(  # its signature is what `takes_job` adds to a command before the flags of the job's fields
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT [-- ARGS]",
            help="The training script. What follows `--` is passed to the script unchanged.",
            show_default=False,
        ),
    ] = None,
    module: Annotated[
        str | None, typer.Option("--module", "-m", metavar="MODULE", help="Run a module, as `python -m` does.")
    ] = None,
    file: Annotated[
        str | None,
        typer.Option("--file", "-f", metavar="FILE", help="Job file; - is stdin. Default: flk.yaml, if it exists."),
    ] = None,
    no_ship: Annotated[
        bool, typer.Option("--no-ship", help="Ship nothing: the image contains the code and flk_runtime.")
    ] = False,
    help_all: Annotated[
        bool, typer.Option("--help-all", is_eager=True, callback=show_all, help="Show all options by topic, and exit.")
    ] = False,
) -> None: ...


@functools.cache
def _job_parameters() -> dict[str, inspect.Parameter]:
    """Return the parameters of a command that takes a job; the flags of the job's fields come from FLAGS_FILE."""
    first = dict(inspect.signature(_command_options, eval_str=True).parameters)
    last = {name: first.pop(name) for name in ("no_ship", "help_all")}
    flags = json.loads(FLAGS_FILE.read_text())
    return first | {parameter.name: parameter for parameter in map(_parameter, flags)} | last


def _parameter(flag: dict[str, Any]) -> inspect.Parameter:
    kind = list[str] if flag["repeatable"] else str
    option = typer.Option(*flag["flags"], metavar=flag["metavar"], help=flag["help"])
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(flag["name"], keyword, default=None, annotation=Annotated[kind | None, option])


def takes_job(function: Callable[..., Any], *, here: bool = False) -> Callable[..., Any]:
    """Give a command the options of a job, and call it with the ``LoadedJob`` that they describe as first argument.

    ``here``: the command runs the job on this machine, without the image.
    """
    of_job = _job_parameters()

    def command(**given: Any) -> Any:
        flags = {name: given.pop(name) for name in of_job}
        return function(_load(flags, here=here), **given)

    own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    return with_signature(function, command, [*of_job.values(), *own])


def with_signature(
    function: Callable[..., Any], command: Callable[..., Any], parameters: Iterable[inspect.Parameter]
) -> Callable[..., Any]:
    """Return ``command`` with the name and help of ``function`` and with ``parameters``, which Typer makes options."""
    keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in keywords}
    command.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    return command


def load_job_file(file: str | None) -> LoadedJob:
    """Return the job of a job file (None: flk.yaml), as a command that takes a job does without other options."""
    return _load({name: parameter.default for name, parameter in _job_parameters().items()} | {"file": file})


def _load(flags: dict[str, Any], *, here: bool = False) -> LoadedJob:
    from flk.manifest.environment import warnings
    from flk.manifest.files import check_files
    from flk.spec.overlay import load_job

    job, root = load_job(flags, os.environ, note)
    check_files(job, root, here=here)
    for warning in warnings(job):
        note(warning)
    if job.strategy == AUTO and user_env.MEASURED not in job.env:
        from flk.local.bench import measured

        results = measured(job)
        if results:
            job = job.changed(env=job.env | {user_env.MEASURED: json.dumps(results, separators=(",", ":"))})
    return LoadedJob(job, root)
