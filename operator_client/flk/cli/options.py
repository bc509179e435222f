"""The options that commands share, and how flags and job file together become a job.

``Context``, ``Namespace`` and the like are types for parameters of any command. Commands that take a job are decorated
with ``takes_job``: their first parameter is then filled with the job that flags, flk.yaml and $FLK_IMAGE together say.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from flk.errors import UsageError

if TYPE_CHECKING:
    from flk.spec.job import Job

JOB_FILE: Final = "flk.yaml"
IMAGE_VARIABLE: Final = "FLK_IMAGE"
EXAMPLE: Final = Path(__file__).parent.parent / "bundled_gpt"
EXAMPLE_SCRIPT: Final = "train.py"


def note(text: str) -> None:
    """Tell people something on stderr that is not an error."""
    print(f"flk: {' '.join(text.split())}", file=sys.stderr)


def seconds(value: str | None, flag: str) -> int | None:
    """The seconds of a duration that was given to ``flag``; None stays None. UsageError for anything else."""
    from flk import units as quantity

    return None if value is None else _checked(flag, quantity.duration, value)


def _namespace(value: str | None) -> str | None:
    from flk.spec import names

    return None if value is None else _checked("--namespace", names.namespace, value)


def _checked(flag: str, check: Callable[[str], Any], value: str) -> Any:
    try:
        return check(value)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from None


Context = Annotated[str | None, typer.Option("--context", metavar="NAME", help="Context of the kubeconfig.")]
Namespace = Annotated[
    str | None,
    typer.Option("--namespace", "-n", metavar="NAME", callback=_namespace, help="Namespace of the job."),
]
JobName = Annotated[str, typer.Argument(metavar="JOB", help="Name of the job.", show_default=False)]
Timeout = Annotated[
    str | None,
    typer.Option("--timeout", metavar="DURATION", help="Give up after this time: 75s, 1h30m."),
]


@dataclass(frozen=True)
class Loaded:
    """A job, and the folder that its code is in."""

    job: Job
    root: Path


def _job_options(  # its signature is what `takes_job` adds to a command
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT [-- ARGS]",
            help="The training script, and what it is called with. flk's own options may stand before and after the "
            "script; all that follows `--` goes to the script as it stands.",
            show_default=False,
        ),
    ] = None,
    module: Annotated[
        str | None, typer.Option("--module", "-m", metavar="MODULE", help="Run a module, as `python -m` does.")
    ] = None,
    file: Annotated[
        str | None,
        typer.Option("--file", "-f", metavar="FILE", help="Job file; - is stdin. Default: flk.yaml, if it is here."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name", metavar="NAME", help="Name of the job. Default: the script's and five random characters."
        ),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(
            "--image", metavar="IMAGE", help="Container image with torch. Default: $FLK_IMAGE, else flk's own."
        ),
    ] = None,
    replicas: Annotated[str | None, typer.Option("--replicas", metavar="N", help="Number of pods.")] = None,
    processes: Annotated[
        str | None,
        typer.Option("--processes", metavar="N", help="Ranks in each pod. Default: one for each GPU, else one."),
    ] = None,
    cpu: Annotated[str | None, typer.Option("--cpu", metavar="QUANTITY", help="Cores of each pod: 4, 500m.")] = None,
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
            help="How the ranks share the model: ddp, none, no_shard, shard_grad_op, full_shard, hybrid_shard, "
            "hybrid_shard_zero2.",
        ),
    ] = None,
    fabric: Annotated[
        str | None,
        typer.Option(
            "--fabric",
            metavar="NAME",
            help="Network between GPUs: auto, socket, efa, tcpx, tcpxo, gib, infiniband, roce.",
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="K=V", help="Variable of every rank; K alone takes its value here. Repeatable."),
    ] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option("--secret", metavar="VAR=SECRET:KEY", help="Variable from a secret. Repeatable."),
    ] = None,
    volume: Annotated[
        list[str] | None,
        typer.Option("--volume", metavar="CLAIM:/PATH", help="Claim to mount. Repeatable."),
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", metavar="CLAIM:/PATH", help="Claim for the snapshots.")
    ] = None,
    save_every: Annotated[
        str | None, typer.Option("--save-every", metavar="STEPS", help="Steps between two snapshots.")
    ] = None,
    node_selector: Annotated[
        list[str] | None,
        typer.Option("--node-selector", metavar="K=V", help="Label that nodes must have. Repeatable."),
    ] = None,
    toleration: Annotated[
        list[str] | None,
        typer.Option("--toleration", metavar="KEY[=VALUE][:EFFECT]", help="Taint that pods tolerate. Repeatable."),
    ] = None,
    queue: Annotated[str | None, typer.Option("--queue", metavar="NAME", help="Queue of Kueue to wait in.")] = None,
    restarts: Annotated[
        str | None, typer.Option("--restarts", metavar="N", help="How often all ranks start again after a failure.")
    ] = None,
    deadline: Annotated[
        str | None,
        typer.Option("--deadline", metavar="DURATION", help="Time the job may take: 75s, 1h30m."),
    ] = None,
    patch: Annotated[
        str | None,
        typer.Option("--patch", metavar="FILE", help="YAML laid over the pod's template, last."),
    ] = None,
    ship: Annotated[
        list[str] | None,
        typer.Option("--ship", metavar="PATTERN", help="Further files to ship with the code. Repeatable."),
    ] = None,
    no_ship: Annotated[
        bool, typer.Option("--no-ship", help="Ship nothing: the code and flk_runtime are in the image.")
    ] = False,
) -> None: ...


_JOB_PARAMETERS: Final = inspect.signature(_job_options, eval_str=True).parameters


def takes_job(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of a job, and as its first argument the ``Loaded`` that they say."""
    own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]

    @functools.wraps(function)
    def command(**given: Any) -> Any:
        flags = {name: given.pop(name) for name in _JOB_PARAMETERS}
        return function(load_job(**flags), **given)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*_JOB_PARAMETERS.values(), *own)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    del command.__wrapped__  # or Typer would look at the inner function's hints
    return command


def load_job(
    *,
    words: Sequence[str] | None = None,
    module: str | None = None,
    file: str | None = None,
    image: str | None = None,
    env: Sequence[str] | None = None,
    secret: Sequence[str] | None = None,
    volume: Sequence[str] | None = None,
    node_selector: Sequence[str] | None = None,
    toleration: Sequence[str] | None = None,
    deadline: str | None = None,
    patch: str | None = None,
    ship: Sequence[str] | None = None,
    no_ship: bool = False,
    **simple: Any,
) -> Loaded:
    """The job that flags, job file and environment together say; says on stderr what was taken without being named."""
    from flk.manifest import bundle as shipping
    from flk.manifest import environment
    from flk.spec import file as jobfile
    from flk.spec.job import validated

    source = file
    if source is None and Path(JOB_FILE).is_file():
        source = JOB_FILE
        note(f"using {JOB_FILE}")
    data = jobfile.job_fields(source) if source else {}
    laid = _Overlay(data)
    command, root = _command(list(words or []), module, data.get("command"), source)
    if command != data.get("command"):
        laid.set("command", command, "-m" if module else "SCRIPT")
    for name in ("name", "strategy", "fabric", "checkpoint", "queue"):
        laid.set(name, simple.get(name), f"--{name}")
    for name in ("replicas", "processes", "save_every", "restarts"):
        laid.set(name, _whole(simple.get(name)), f"--{name.replace('_', '-')}")
    for name in ("cpu", "memory", "shm"):
        laid.set(f"resources.{name}", simple.get(name), f"--{name}")
    laid.set("resources.gpu", _whole(simple.get("gpu")), "--gpu")
    laid.set("deadline", deadline, "--deadline")
    laid.set("image", image, "--image")
    if data.get("image") is None:
        laid.set("image", os.environ.get(IMAGE_VARIABLE) or None, f"${IMAGE_VARIABLE}")
    for name, value in map(_env, env or []):
        laid.set(f"env.{name}", value, "--env")
    for name, value in (_pair(text, "--secret", "VAR=SECRET:KEY") for text in secret or []):
        laid.set(f"secrets.{name}", value, "--secret")
    for name, value in (_pair(text, "--node-selector", "K=V") for text in node_selector or []):
        laid.set(f"nodes.selector.{name}", value, "--node-selector")
    laid.add("volumes", volume, "--volume")
    laid.add("nodes.tolerations", toleration, "--toleration")
    if patch is not None:
        laid.set("patch", jobfile.read(patch), f"--patch {patch}")
    if no_ship and ship:
        raise UsageError("--ship and --no-ship exclude each other")
    if no_ship:
        laid.set("ship", False, "--no-ship")
    elif ship:
        if isinstance(data.get("ship"), bool):
            del data["ship"]
        laid.add("ship", ship, "--ship")

    job = validated(data, where=laid.where, source=jobfile.source_name(source or ""))
    if job.ship is not False:
        shipping.find_script(job, root)
    for warning in environment.warnings(job):
        note(warning)
    return Loaded(job, root)


def _command(words: list[str], module: str | None, written: Any, source: str | None) -> tuple[Any, Path]:
    """What to run, and the folder it is in: the flags' script, else the job file's, else the bundled example."""
    here = Path.cwd()
    if module is not None:
        return ["-m", module, *words], here
    if words and not words[0].startswith("-"):  # a word with a dash can only have followed `--`
        return words, here
    if source is not None:
        if written is None:
            raise UsageError(
                f"{source} has no command, and no script is named",
                hint="write `command: train.py` into it, or name a script: flk run train.py",
            )
        from flk.spec.job import split_words

        return (written if not words else [*_listed(split_words, written), *words]), here
    note(
        "neither a script nor flk.yaml is here, so the bundled example trains: a character-level GPT "
        "(`flk init` writes a job file)"
    )
    return [EXAMPLE_SCRIPT, *words], EXAMPLE


def _listed(split: Callable[[Any], Any], written: Any) -> list[Any]:
    try:
        value = split(written)
    except ValueError:
        return [written]  # the model will say what is wrong with it
    return value if isinstance(value, list) else [value]


class _Overlay:
    """A job file's data with flags laid over it, remembering for errors which flag set what."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.where: dict[str, str] = {}

    def set(self, path: str, value: Any, flag: str) -> None:
        """Replace one value. None leaves the file's."""
        if value is None:
            return
        self.where[path] = flag
        *above, last = self._split(path)
        node = self.data
        for key in above:
            inner = node.get(key)
            node[key] = inner = {} if inner is None else inner
            if not isinstance(inner, dict):
                return  # the model will say what is wrong with the file
            node = inner
        node[last] = value

    def add(self, path: str, values: Sequence[str] | None, flag: str) -> None:
        """Append to a list."""
        if not values:
            return
        node: Any = self.data
        for key in self._split(path):
            node = node.get(key) if isinstance(node, dict) else None
        if node is not None and not isinstance(node, list):
            return
        before = node or []
        self.set(path, [*before, *values], flag)
        del self.where[path]
        self.where |= {f"{path}[{i}]": flag for i in range(len(before), len(before) + len(values))}

    @staticmethod
    def _split(path: str) -> list[str]:
        # Only the first parts are names of fields; what follows is a key of the user's, which may have dots itself.
        head, _, rest = path.partition(".")
        if head == "nodes":
            second, _, rest = rest.partition(".")
            return [head, second, rest] if rest else [head, second]
        return [head, rest] if rest else [head]


def _whole(text: str | None) -> int | str | None:
    """A number that was given to a flag; other text stays as it is, for the model to say what is wrong with it."""
    return int(text) if text is not None and re.fullmatch(r"[-+]?[0-9]{1,18}", text, re.ASCII) else text


def _env(text: str) -> tuple[str, str]:
    if "=" in text:
        return _pair(text, "--env", "K=V or K")
    name = text
    if name not in os.environ:
        raise UsageError(f"--env: {name} is not set here", hint=f"give it a value: --env {name}=VALUE")
    return name, os.environ[name]


def _pair(text: str, flag: str, form: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"{flag}: must be {form} (is {text!r})")
    return name, value
