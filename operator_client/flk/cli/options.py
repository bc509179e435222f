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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from flk.errors import UsageError
from flk.terminal import one_line
from flk_runtime.contract.strategies import AUTO
from flk_runtime.contract.user_env import MEASURED

if TYPE_CHECKING:
    from flk.spec.job import Job


@dataclass(frozen=True)
class LoadedJob:
    """A job, and the folder that contains its code."""

    job: Job
    root: Path


def note(text: str) -> None:
    """Print a line on stderr that is not an error."""
    print(f"flk: {one_line(text)}", file=sys.stderr)


def seconds(value: str | None, flag: str) -> int | None:
    """Return the seconds of a duration given to ``flag``; None stays None. Raises UsageError for anything else."""
    from flk import units

    return None if value is None else _checked(flag, units.parse_duration, value)


def _namespace(value: str | None) -> str | None:
    from flk.spec import names

    return None if value is None else _checked("--namespace", names.namespace, value)


def job_name(value: str) -> str:
    """Return the name of a job given as ``NAME`` or as ``pytorchjob.kubeflow.org/NAME``. Raises UsageError for none."""
    from flk.spec import names
    from flk.targets import TARGETS

    kind, slash, name = value.rpartition("/")
    known = {word for t in TARGETS.values() for s in (t.kind.lower(), t.plural) for word in (s, f"{s}.{t.group}")}
    if slash and kind not in known:
        raise UsageError(f"JOB: must be a name or pytorchjob.kubeflow.org/NAME (is {value!r})")
    return str(_checked("JOB", names.object_name, name))


def _checked(flag: str, check: Callable[[str], Any], value: str) -> Any:
    try:
        return check(value)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from None


def complete_jobs(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of jobs that begin with what the user has typed; none if the cluster does not answer at once."""
    from flk.cli.completion import job_names

    return [name for name in job_names(context) if name.startswith(incomplete)]


Context = Annotated[str | None, typer.Option("--context", metavar="NAME", help="Context of the kubeconfig.")]
Namespace = Annotated[
    str | None,
    typer.Option("--namespace", "-n", metavar="NAME", callback=_namespace, help="Namespace of the job."),
]
JobName = Annotated[
    str,
    typer.Argument(
        metavar="JOB", help="Name of the job.", show_default=False, callback=job_name, autocompletion=complete_jobs
    ),
]
Timeout = Annotated[
    str | None,
    typer.Option("--timeout", metavar="DURATION", help="Give up after this time: 75s, 1h30m."),
]


def _job_options(  # its signature is what `takes_job` adds to a command
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT [-- ARGS]",
            help="The training script and its arguments. flk's own options may come before and after the script; "
            "everything after `--` is passed to the script unchanged.",
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
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="NAME",
            help="Name of the job. Default: the name of the script and five random characters.",
        ),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(
            "--image", metavar="IMAGE", help="Container image with torch. Default: $FLK_IMAGE, else flk's own image."
        ),
    ] = None,
    replicas: Annotated[str | None, typer.Option("--replicas", metavar="N", help="Number of pods.")] = None,
    elastic: Annotated[
        str | None,
        typer.Option(
            "--elastic",
            metavar="MIN:MAX",
            help="Train with MIN to MAX pods, as many as there are. --replicas is then how many are created, MAX by "
            "default.",
        ),
    ] = None,
    spares: Annotated[
        str | None,
        typer.Option("--spares", metavar="N", help="More pods, which wait to take the place of one that is lost."),
    ] = None,
    processes: Annotated[
        str | None,
        typer.Option(
            "--processes",
            "--nproc-per-node",
            metavar="N",
            help="Ranks in each pod. Default: one for each GPU, one without GPUs.",
        ),
    ] = None,
    cpu: Annotated[
        str | None, typer.Option("--cpu", metavar="QUANTITY", help="Cores that each pod requests: 4, 500m.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="QUANTITY", help="Memory of each pod: 16Gi.")
    ] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", metavar="N", help="GPUs of each pod.")] = None,
    shm: Annotated[str | None, typer.Option("--shm", metavar="QUANTITY", help="Size of /dev/shm of each pod.")] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy",
            metavar="NAME",
            help="Parallelism strategy: ddp, none, no_shard, shard_grad_op, full_shard, hybrid_shard, "
            "hybrid_shard_zero2, diloco, or auto: the ranks choose one at their start.",
        ),
    ] = None,
    diloco: Annotated[
        list[str] | None,
        typer.Option(
            "--diloco",
            metavar="KEY=VALUE",
            help="Option of strategy diloco: inner=full_shard, workers=4, every=100, dtype=int8. Repeatable.",
        ),
    ] = None,
    fabric: Annotated[
        str | None,
        typer.Option(
            "--fabric",
            metavar="NAME",
            help="Preset for the network between GPUs: auto, socket, efa, tcpx, tcpxo, gib, infiniband, roce.",
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            "--env", metavar="K=V", help="Variable of every rank; K alone takes its value from this shell. Repeatable."
        ),
    ] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option("--secret", metavar="VAR=SECRET:KEY", help="Variable from a Secret. Repeatable."),
    ] = None,
    volume: Annotated[
        list[str] | None,
        typer.Option("--volume", metavar="PVC:/PATH", help="PersistentVolumeClaim to mount. Repeatable."),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint",
            metavar="PLACE",
            help="Where checkpoints go: a PersistentVolumeClaim, as PVC:/PATH, or s3://BUCKET/PREFIX.",
        ),
    ] = None,
    save_every: Annotated[
        str | None,
        typer.Option(
            "--save-every",
            metavar="STEPS|auto",
            help="Steps between two checkpoints, or auto: computed from what a save costs.",
        ),
    ] = None,
    keep: Annotated[
        str | None, typer.Option("--keep", metavar="N", help="How many of the newest checkpoints stay. Default: 2.")
    ] = None,
    keep_every: Annotated[
        str | None,
        typer.Option("--keep-every", metavar="STEPS", help="Checkpoints whose step is a multiple of this stay too."),
    ] = None,
    node_selector: Annotated[
        list[str] | None,
        typer.Option("--node-selector", metavar="K=V", help="Label that nodes must have. Repeatable."),
    ] = None,
    toleration: Annotated[
        list[str] | None,
        typer.Option("--toleration", metavar="KEY[=VALUE][:EFFECT]", help="Taint that pods tolerate. Repeatable."),
    ] = None,
    resource: Annotated[
        list[str] | None,
        typer.Option("--resource", metavar="NAME=N", help="Resource of a device plugin: amd.com/gpu=8. Repeatable."),
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option("--label", metavar="K=V", help="Label of the job and its pods. Repeatable.")
    ] = None,
    annotation: Annotated[
        list[str] | None,
        typer.Option("--annotation", metavar="K=V", help="Annotation of the job and its pods. Repeatable."),
    ] = None,
    service_account: Annotated[
        str | None, typer.Option("--service-account", metavar="NAME", help="ServiceAccount of the pods.")
    ] = None,
    pull_secret: Annotated[
        list[str] | None,
        typer.Option("--pull-secret", metavar="NAME", help="Secret with which nodes pull the image. Repeatable."),
    ] = None,
    priority_class: Annotated[
        str | None, typer.Option("--priority-class", metavar="NAME", help="PriorityClass of the pods.")
    ] = None,
    queue: Annotated[
        str | None, typer.Option("--queue", metavar="NAME", help="Kueue queue in which the job waits.")
    ] = None,
    queue_priority: Annotated[
        str | None,
        typer.Option("--queue-priority", metavar="NAME", help="WorkloadPriorityClass of the job in its queue."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            metavar="KIND",
            help="What the job becomes: pytorchjob, trainjob, jobset, job, or auto for what the cluster serves. "
            "Default: pytorchjob.",
        ),
    ] = None,
    gang: Annotated[
        str | None,
        typer.Option(
            "--gang",
            metavar="SCHEDULER",
            help="Start all pods together or none: native, volcano, coscheduling, or auto for what the cluster has. "
            "Default: none.",
        ),
    ] = None,
    topology: Annotated[
        str | None,
        typer.Option(
            "--topology",
            metavar="KEY[:preferred]",
            help="Label of nodes whose value all pods' nodes must have in common, or should: a rack or a block.",
        ),
    ] = None,
    restarts: Annotated[
        str | None,
        typer.Option(
            "--restarts",
            "--max-restarts",
            metavar="N",
            help="How often all ranks start again after a failure of the training code.",
        ),
    ] = None,
    disruptions: Annotated[
        str | None,
        typer.Option(
            "--disruptions",
            "--max-disruptions",
            metavar="N",
            help="How often all ranks start again after a disruption: a lost or preempted pod, a lost connection.",
        ),
    ] = None,
    deadline: Annotated[
        str | None,
        typer.Option("--deadline", metavar="DURATION", help="Time that the job may take: 75s, 1h30m."),
    ] = None,
    ttl: Annotated[
        str | None,
        typer.Option("--ttl", metavar="DURATION", help="Time after its end after which the job is deleted: 12h, 7d."),
    ] = None,
    hang_timeout: Annotated[
        str | None,
        typer.Option(
            "--hang-timeout",
            metavar="DURATION",
            help="Time without progress that counts as a hang; 0: never. Default: 8m.",
        ),
    ] = None,
    grace: Annotated[
        str | None,
        typer.Option(
            "--grace",
            metavar="DURATION",
            help="Time that the ranks have to save and end when their pod is stopped: 30s, 5m. Default: 30s.",
        ),
    ] = None,
    patch: Annotated[
        str | None,
        typer.Option("--patch", metavar="FILE", help="YAML file that is merged into the pod template, last."),
    ] = None,
    ship: Annotated[
        list[str] | None,
        typer.Option("--ship", metavar="PATTERN", help="More files to ship with the code. Repeatable."),
    ] = None,
    no_ship: Annotated[
        bool, typer.Option("--no-ship", help="Ship nothing: the image contains the code and flk_runtime.")
    ] = False,
) -> None: ...


_JOB_PARAMETERS: Final = inspect.signature(_job_options, eval_str=True).parameters


def takes_job(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of a job, and call it with the ``LoadedJob`` that they describe as first argument."""
    own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]

    @functools.wraps(function)
    def command(**given: Any) -> Any:
        flags = {name: given.pop(name) for name in _JOB_PARAMETERS}
        return function(_load(flags), **given)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*_JOB_PARAMETERS.values(), *own)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    del command.__wrapped__  # Typer would follow it and read the parameters of the inner function
    return command


def load_job_file(file: str | None) -> LoadedJob:
    """Return the job of a job file (None: flk.yaml), as a command that takes a job does without other options."""
    return _load({name: parameter.default for name, parameter in _JOB_PARAMETERS.items()} | {"file": file})


def _load(flags: dict[str, Any]) -> LoadedJob:
    from flk.manifest.environment import warnings
    from flk.manifest.files import find_script
    from flk.spec.overlay import load_job

    job, root = load_job(flags, os.environ, note)
    if job.ship is not False:
        find_script(job, root)
    for warning in warnings(job):
        note(warning)
    if job.strategy == AUTO and MEASURED not in job.env:
        from flk.bench import measured

        results = measured(job)
        if results:
            job = job.changed(env=job.env | {MEASURED: json.dumps(results, separators=(",", ":"))})
    return LoadedJob(job, root)
