"""What the user wants: the job, as flags and flk.yaml together say it, checked completely.

What passes here the API server accepts too, so a mistake costs a line before anything was created. The model is the one
description of the job file: its JSON schema and the file that `flk init` writes come from it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from flk import units as quantity
from flk.spec import file, names
from flk.spec.fabric import fabrics
from flk.spec.validation import usage_error
from flk_runtime.contract import STRATEGIES, VERSION, parse_strategy

DEFAULT_IMAGE: Final = {"cpu": f"flktrain/flk:{VERSION}-cpu", "cuda": f"flktrain/flk:{VERSION}-cuda"}
# The job is on record in an annotation of its PyTorchJob, and all annotations of an object may have 256 KiB.
SIZE_LIMIT: Final = 200_000
# As torch.distributed.fsdp.ShardingStrategy writes them: accepted as well, and stored as flk writes them.
TORCH_STRATEGIES: Final = ("NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
_EFFECTS: Final = ("NoSchedule", "PreferNoSchedule", "NoExecute")


def _number_text(value: Any) -> Any:
    """YAML reads ``cpu: 2`` as a number; as a quantity it is the same."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def split_words(value: Any) -> Any:
    """A command line as words, split as a shell would; anything but text stays as it is."""
    if not isinstance(value, str):
        return value
    try:
        return shlex.split(value)
    except ValueError as error:
        raise ValueError(f"cannot be split into words: {str(error).lower()}") from None


def _seconds(value: Any) -> Any:
    seconds = quantity.duration(value) if isinstance(value, str) else value
    if seconds == 0:
        raise ValueError(f"must be at least one second (is {value!r})")
    return seconds


def _claim(value: str) -> str:
    claim, colon, path = value.partition(":")
    if not colon:
        raise ValueError(f"must be CLAIM:/PATH (is {value!r})")
    return f"{_named('the claim', names.object_name, claim)}:{_named('the path', names.mount_path, path)}"


def _secret(value: str) -> str:
    secret, colon, key = value.partition(":")
    if not colon:
        raise ValueError(f"must be SECRET:KEY (is {value!r})")
    return f"{_named('the secret', names.object_name, secret)}:{_named('the key', names.data_key, key)}"


def _named(what: str, check: Any, value: str) -> str:
    try:
        return str(check(value))
    except ValueError as error:
        raise ValueError(f"{what} {error}") from None


def one_of(known: tuple[str, ...] | list[str]) -> AfterValidator:
    def check(value: str) -> str:
        if value not in known:
            raise ValueError(f"must be one of {', '.join(known)} (is {value!r})")
        return value

    return AfterValidator(check)


def _strategy(value: str) -> str:
    try:
        return parse_strategy(value)
    except ValueError:
        raise ValueError(f"must be one of {', '.join(STRATEGIES)} (is {value!r})") from None


def _effect(value: str) -> str:
    if value and value not in _EFFECTS:
        raise ValueError(f"must be one of {', '.join(_EFFECTS)} (is {value!r})")
    return value


class _OrText:
    """In the JSON schema: the value itself, or its short form as text."""

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> Any:
        return {"anyOf": [{"type": "string"}, handler(core_schema)]}


_QUANTITY_SCHEMA: Final = {"type": ["string", "number"], "exclusiveMinimum": 0}
Text = Annotated[str, AfterValidator(names.text)]
Variable = Annotated[str, AfterValidator(names.variable)]
Claim = Annotated[str, AfterValidator(_claim), WithJsonSchema({"type": "string", "pattern": "^[^:]+:/.*$"})]
SecretKey = Annotated[str, AfterValidator(_secret), WithJsonSchema({"type": "string", "pattern": "^[^:]+:[^:]+$"})]
Cpu = Annotated[str, BeforeValidator(_number_text), AfterValidator(quantity.cpu), WithJsonSchema(_QUANTITY_SCHEMA)]
Memory = Annotated[
    str, BeforeValidator(_number_text), AfterValidator(quantity.memory), WithJsonSchema(_QUANTITY_SCHEMA)
]
Seconds = Annotated[
    int,
    BeforeValidator(_seconds),
    Field(ge=1, le=quantity.LONGEST),
    PlainSerializer(quantity.duration_text, return_type=str),
    WithJsonSchema({"type": ["string", "integer"], "minimum": 1}),
]


class _Part(BaseModel):
    # Strict: a number in quotes is text, and saying so with the field's path beats guessing what was meant.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=False)


class Resources(_Part):
    """What each pod asks for; what is left out is not asked for. It is the limit too, except for processors."""

    cpu: Cpu | None = Field(default=None, description="cores that each pod asks for: 4, 500m")
    memory: Memory | None = Field(default=None, description="memory of each pod, its limit too: 16Gi")
    gpu: int = Field(default=0, ge=0, le=1024, description="NVIDIA GPUs of each pod")
    shm: Memory | None = Field(
        default=None, description="size of /dev/shm, which counts as memory; without it only memory bounds it"
    )


class Checkpoint(_Part):
    """A claim for snapshots, and where it is mounted."""

    volume: Annotated[str, AfterValidator(names.object_name)]
    path: Annotated[str, AfterValidator(names.mount_path)]


def _ship(value: Any) -> Any:
    if not isinstance(value, bool | list):
        raise ValueError(f"must be true, false or a list of patterns (is {value!r})")
    return value


def _checkpoint(value: Any) -> Any:
    if isinstance(value, str):
        claim, _, path = _claim(value).partition(":")
        return {"volume": claim, "path": path}
    return value


class Toleration(_Part):
    """A taint that the pods tolerate, with the fields of Kubernetes."""

    key: str = ""
    operator: Annotated[str, one_of(("Exists", "Equal"))] = "Equal"
    value: Annotated[str, AfterValidator(names.label_value)] = ""
    effect: Annotated[str, AfterValidator(_effect)] = ""
    tolerationSeconds: int | None = Field(default=None, ge=-(2**31), le=2**31 - 1)

    @model_validator(mode="after")
    def _check(self) -> Toleration:
        if self.key:
            _named("key", names.label_key, self.key)
        elif self.operator != "Exists":
            raise ValueError("without a key its operator must be Exists")
        if self.operator == "Exists" and self.value:
            raise ValueError("with the operator Exists it has no value")
        if self.tolerationSeconds is not None and self.effect != "NoExecute":
            raise ValueError("tolerationSeconds needs the effect NoExecute")
        return self


def toleration(value: Any) -> Any:
    """``key=value:Effect``, ``key:Effect``, ``key=value`` or ``key``, as kubectl writes taints."""
    if not isinstance(value, str):
        return value
    body, _, effect = value.partition(":")
    key, equals, wanted = body.partition("=")
    if not key:
        raise ValueError(f"must be KEY[=VALUE][:EFFECT] (is {value!r})")
    return {"key": key, "effect": effect} | ({"value": wanted} if equals else {"operator": "Exists"})


class Nodes(_Part):
    """Which nodes the pods may run on."""

    selector: dict[
        Annotated[str, AfterValidator(names.label_key)], Annotated[str, AfterValidator(names.label_value)]
    ] = Field(default_factory=dict, description="labels that a node must have")
    tolerations: list[
        Annotated[
            Toleration,
            BeforeValidator(toleration),
            _OrText(),
        ]
    ] = Field(
        default_factory=list, description="taints that the pods tolerate: key=value:Effect, or Kubernetes' fields"
    )


class Job(_Part):
    """A training job: ``replicas`` pods with ``processes`` ranks each, all running ``command``."""

    name: str | None = Field(
        default=None, description="name of the job; left out: the script's, and five random characters"
    )
    image: Annotated[str, AfterValidator(names.image)] | None = Field(
        default=None, description="container image with torch"
    )
    command: Annotated[
        list[Text],
        BeforeValidator(split_words),
        _OrText(),
    ] = Field(description="the script and its arguments, or -m and a module; text is split as a shell would")
    replicas: int = Field(
        default=1, ge=1, le=150_000, description="number of pods"
    )  # a cluster holds at most 150,000 pods
    processes: int | None = Field(
        default=None, ge=1, le=1024, description="ranks in each pod; left out: one for each GPU, and one without GPUs"
    )
    resources: Resources = Field(default=Resources(), description="what each pod asks for")
    strategy: Annotated[str, AfterValidator(_strategy), WithJsonSchema({"enum": [*STRATEGIES, *TORCH_STRATEGIES]})] = (
        Field(default="ddp", description=f"how the ranks share the model: {', '.join(STRATEGIES)}")
    )
    fabric: Annotated[str, one_of(list(fabrics())), WithJsonSchema({"enum": list(fabrics())})] = Field(
        default="auto", description="preset of NCCL's variables for the network between the GPUs"
    )
    restarts: int = Field(default=3, ge=0, le=100_000, description="how often all ranks start again after a failure")
    deadline: Seconds | None = Field(default=None, description="time the job may take, from its start: 75s, 1h30m")
    checkpoint: (
        Annotated[
            Checkpoint,
            BeforeValidator(_checkpoint),
            _OrText(),
        ]
        | None
    ) = Field(default=None, description="claim for snapshots, as CLAIM:/PATH; left out: they live as long as their pod")
    save_every: int | None = Field(default=None, ge=1, le=2**31 - 1, description="steps between two snapshots")
    queue: Annotated[str, AfterValidator(names.queue)] | None = Field(
        default=None, description="queue of Kueue to wait in"
    )
    env: dict[Variable, Text] = Field(default_factory=dict, description="environment of every rank")
    secrets: dict[Variable, SecretKey] = Field(
        default_factory=dict, description="environment from secrets: VARIABLE: SECRET:KEY"
    )
    volumes: list[Claim] = Field(default_factory=list, description="claims to mount, as CLAIM:/PATH")
    nodes: Nodes = Field(default=Nodes(), description="which nodes the pods may run on")
    patch: dict[str, Any] = Field(
        default_factory=dict, description="metadata and spec laid over the pod's template, last"
    )
    ship: Annotated[bool | list[Text], BeforeValidator(_ship)] = Field(
        default=True, description="false: the code is in the image; a list: patterns of further files to ship"
    )

    @model_validator(mode="after")
    def _check(self) -> Job:
        if self.name is not None:
            _at("name", names.job_name, self.name, self.replicas)
        _check_command(self.command)
        for name in self.env.keys() & self.secrets.keys():
            raise ValueError(f"secrets.{name}: is in env too")
        mounts = [claim.partition(":")[2] for claim in self.volumes] + (
            [self.checkpoint.path] if self.checkpoint else []
        )
        for path in mounts:
            if mounts.count(path) > 1:
                raise ValueError(f"volumes: two claims are mounted at {path}")
        for key in self.patch.keys() - {"metadata", "spec"}:
            raise ValueError(f"patch.{key}: a pod's template has only metadata and spec")
        try:
            json.dumps(self.patch, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            raise ValueError("patch: holds what cannot be written as JSON") from None
        size = len(self.model_dump_json())
        if size > SIZE_LIMIT:
            raise ValueError(
                f"the whole job takes {size:,} bytes and may take {SIZE_LIMIT:,}: large values belong into files"
            )
        return self

    @classmethod
    def from_file(cls, path: str | Path) -> Job:
        """The job that a job file describes; ``-`` is stdin. UsageError names the file and the field."""
        return validated(file.job_fields(str(path)), source=file.source_name(str(path)))

    @property
    def processes_per_pod(self) -> int:
        """Ranks in each pod."""
        return self.processes if self.processes is not None else max(1, self.resources.gpu)

    @property
    def world_size(self) -> int:
        """Ranks in the whole job."""
        return self.replicas * self.processes_per_pod

    @property
    def image_or_default(self) -> str:
        """The image that the pods run: the job's, else flk's own for what the pods ask for."""
        return self.image or DEFAULT_IMAGE["cuda" if self.resources.gpu else "cpu"]

    def named(self) -> Job:
        """This job, with a name made of its script's and five random characters where it has none."""
        if self.name is not None:
            return self
        return self.changed(name=names.default_name(self.command, self.replicas))

    def changed(self, **fields: Any) -> Job:
        """This job with other values for some fields, checked again. UsageError where they do not fit."""
        return validated({name: getattr(self, name) for name in self.model_fields_set} | fields)


def _at(field: str, check: Any, *values: Any) -> None:
    try:
        check(*values)
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from None


def _check_command(command: list[str]) -> None:
    if not command or not command[0]:
        raise ValueError("command: names no script")
    first = PurePosixPath(command[0]).name
    if first == "torchrun" or (first.startswith("python") and not first.endswith(".py")):
        raise ValueError(f"command: begins with the script or with -m, not with {first}: flk starts the ranks itself")
    if command[0] == "-m":
        if len(command) < 2:
            raise ValueError("command: -m needs a module")
        _at("command", names.module, command[1])
    elif command[0].startswith("-"):
        raise ValueError(f"command: begins with the script or with -m (is {command[0]!r})")


def validated(data: Mapping[str, Any], *, where: Mapping[str, str] | None = None, source: str = "") -> Job:
    """A job from plain data. UsageError with the field's path; ``where`` maps paths to the flags that set them."""
    try:
        return Job.model_validate(data)
    except ValidationError as error:
        raise usage_error(error, Job, where=where or {}, source=source) from None
