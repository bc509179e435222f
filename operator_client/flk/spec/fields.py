"""Types of the job's fields: each checks one value, and converts it where the job file allows a short form.

A validator returns the value or raises ValueError with a message that continues "<field>: ", such as "must be …".
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Final

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)

from flk import units
from flk.spec import names
from flk.spec.fabric import fabrics
from flk_runtime.contract.pod_env import BATCHES
from flk_runtime.contract.strategies import AUTO, STRATEGIES, parse_strategy

# The names of torch.distributed.fsdp.ShardingStrategy, which a job may use too. A job stores flk's own names.
TORCH_STRATEGIES: Final = ("NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
TARGETS: Final = (AUTO, "pytorchjob", "trainjob", "jobset", "job")
GANGS: Final = (AUTO, "native", "volcano", "coscheduling", "none")
_STRENGTHS: Final = ("required", "preferred")
_EFFECTS: Final = ("NoSchedule", "PreferNoSchedule", "NoExecute")


class Part(BaseModel):
    """Base of the job and its parts: immutable, without unknown keys and without conversions between types."""

    # Strict: a number in quotes is text. An error that names the field is better than a guess.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=False)


class OrText:
    """Annotation: the JSON schema allows text, the short form, beside the value itself."""

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> Any:
        return {"anyOf": [{"type": "string"}, handler(core_schema)]}


def one_of(known: Iterable[str]) -> AfterValidator:
    """Return a validator that accepts the values of ``known`` only."""
    allowed = tuple(known)

    def check(value: str) -> str:
        if value not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)} (is {value!r})")
        return value

    return AfterValidator(check)


def split_command(value: Any) -> Any:
    """Split a command line into words as a shell does. Return anything but text unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return shlex.split(value)
    except ValueError as error:
        raise ValueError(f"cannot be split into words: {str(error).lower()}") from None


def split_mount(value: str) -> tuple[str, str]:
    """Split ``PVC:/PATH`` into the name of the PersistentVolumeClaim and the path where it is mounted."""
    claim, colon, path = value.partition(":")
    if not colon:
        raise ValueError(f"must be PVC:/PATH (is {value!r})")
    return (
        _checked("the PersistentVolumeClaim", names.object_name, claim),
        _checked("the path", names.mount_path, path),
    )


def _mount(value: str) -> str:
    return ":".join(split_mount(value))


def _secret_key(value: str) -> str:
    secret, colon, key = value.partition(":")
    if not colon:
        raise ValueError("must be SECRET:KEY, the name of a Secret and a key in it")
    return f"{_checked('the secret', names.object_name, secret)}:{_checked('the key', names.data_key, key)}"


def _checked(what: str, check: Callable[[str], str], value: str) -> str:
    try:
        return check(value)
    except ValueError as error:
        raise ValueError(f"{what} {error}") from None


def _number_as_text(value: Any) -> Any:
    """YAML reads ``cpu: 2`` as a number; the quantity "2" means the same."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _seconds(value: Any) -> Any:
    seconds = units.parse_duration(value) if isinstance(value, str) else value
    if seconds == 0:
        raise ValueError(f"must be at least one second (is {value!r})")
    return seconds


def _seconds_or_zero(value: Any) -> Any:
    return 0 if value in (0, "0") else units.parse_duration(value) if isinstance(value, str) else value


def _save_every(value: Any) -> Any:
    if value == AUTO or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31):
        return value
    raise ValueError(f"must be {AUTO} or a number of steps, at least 1 (is {value!r})")


def _strategy(value: str) -> str:
    try:
        return parse_strategy(value)
    except ValueError:
        raise ValueError(f"must be one of {', '.join(STRATEGIES)} (is {value!r})") from None


def split_topology(value: str) -> tuple[str, str]:
    """Split ``KEY[:required|preferred]`` into the label of nodes and the strength, required if it is left out."""
    key, colon, strength = value.partition(":")
    if colon and strength not in _STRENGTHS:
        raise ValueError(f"must be KEY, KEY:required or KEY:preferred (is {value!r})")
    return names.label_key(key), strength or _STRENGTHS[0]


def _topology(value: str) -> str:
    return ":".join(split_topology(value))


def _effect(value: str) -> str:
    if value and value not in _EFFECTS:
        raise ValueError(f"must be one of {', '.join(_EFFECTS)} (is {value!r})")
    return value


def _ship(value: Any) -> Any:
    if not isinstance(value, bool | list):
        raise ValueError(f"must be true, false or a list of patterns (is {value!r})")
    return value


_QUANTITY_SCHEMA: Final = WithJsonSchema({"type": ["string", "number"], "exclusiveMinimum": 0})

Text = Annotated[str, AfterValidator(names.text)]
Image = Annotated[str, AfterValidator(names.image)]
Queue = Annotated[str, AfterValidator(names.queue)]
Variable = Annotated[str, AfterValidator(names.variable)]
LabelKey = Annotated[str, AfterValidator(names.label_key)]
OwnKey = Annotated[str, AfterValidator(names.own_key)]
ObjectName = Annotated[str, AfterValidator(names.object_name)]
ExtendedResource = Annotated[str, AfterValidator(names.extended_resource)]
LabelValue = Annotated[str, AfterValidator(names.label_value)]
Command = Annotated[list[Text], BeforeValidator(split_command), OrText()]
Mount = Annotated[str, AfterValidator(_mount), WithJsonSchema({"type": "string", "pattern": "^[^:]+:/.*$"})]
SecretKey = Annotated[str, AfterValidator(_secret_key), WithJsonSchema({"type": "string", "pattern": "^[^:]+:[^:]+$"})]
Cpu = Annotated[str, BeforeValidator(_number_as_text), AfterValidator(units.cpu), _QUANTITY_SCHEMA]
Memory = Annotated[str, BeforeValidator(_number_as_text), AfterValidator(units.memory), _QUANTITY_SCHEMA]
Seconds = Annotated[
    int,
    BeforeValidator(_seconds),
    Field(ge=1, le=units.LONGEST_DURATION),
    PlainSerializer(units.duration_text, return_type=str),
    WithJsonSchema({"type": ["string", "integer"], "minimum": 1}),
]
SecondsOrZero = Annotated[
    int,
    BeforeValidator(_seconds_or_zero),
    Field(ge=0, le=units.LONGEST_DURATION),
    PlainSerializer(units.duration_text, return_type=str),
    WithJsonSchema({"type": ["string", "integer"], "minimum": 0}),
]
SaveEvery = Annotated[
    int | str,
    PlainValidator(_save_every),
    WithJsonSchema({"anyOf": [{"const": AUTO}, {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}]}),
]
Strategy = Annotated[str, AfterValidator(_strategy), WithJsonSchema({"enum": [*STRATEGIES, *TORCH_STRATEGIES]})]
FabricName = Annotated[str, one_of(fabrics()), WithJsonSchema({"enum": list(fabrics())})]
TargetName = Annotated[str, one_of(TARGETS), WithJsonSchema({"enum": list(TARGETS)})]
GangName = Annotated[str, one_of(GANGS), WithJsonSchema({"enum": list(GANGS)})]
Topology = Annotated[str, AfterValidator(_topology)]
Ship = Annotated[bool | list[Text], BeforeValidator(_ship)]


class Checkpoint(Part):
    """Where checkpoints go: a PersistentVolumeClaim and the path where it is mounted, or an address in S3.

    As text ``PVC:/PATH`` or ``s3://BUCKET/PREFIX``.
    """

    volume: Annotated[str, AfterValidator(names.object_name)] | None = None
    path: Annotated[str, AfterValidator(names.mount_path)] | None = None
    address: Annotated[str, AfterValidator(names.s3_address)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if "://" in value:
            return {"address": value}
        if ":" not in value:
            raise ValueError(f"must be PVC:/PATH or s3://BUCKET/PREFIX (is {value!r})")
        return dict(zip(("volume", "path"), split_mount(value), strict=True))

    @model_validator(mode="after")
    def _check(self) -> Checkpoint:
        if self.address and (self.volume or self.path):
            raise ValueError("has an address in S3 and a volume: leave out one of the two")
        if not self.address and not (self.volume and self.path):
            raise ValueError(f"{'path' if self.volume else 'volume'} is missing: write PVC:/PATH or s3://BUCKET/PREFIX")
        return self

    @property
    def claim(self) -> tuple[str, str] | None:
        """The PersistentVolumeClaim and the path where it is mounted; None for an address in S3."""
        return (self.volume, self.path) if self.volume and self.path else None


class Elastic(Part):
    """How few and how many pods may train, and what becomes of the global batch; as text ``MIN:MAX``."""

    min: int = Field(ge=1, description="pods with which the job may train")
    max: int = Field(ge=1, description="most pods that it may have")
    batch: Annotated[str, one_of(BATCHES)] = Field(
        default="keep", description="keep: a step has as many samples with fewer pods as with all; scale: fewer"
    )

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        least, colon, most = value.partition(":")
        if not colon or not (least.isdecimal() and most.isdecimal()):
            raise ValueError(f"must be MIN:MAX, two numbers of pods (is {value!r})")
        return {"min": int(least), "max": int(most)}

    @model_validator(mode="after")
    def _check(self) -> Elastic:
        if self.min > self.max:
            raise ValueError(f"min is {self.min}, more than max, which is {self.max}")
        return self


class Toleration(Part):
    """A taint that the pods tolerate: the fields of Kubernetes, or ``KEY[=VALUE][:EFFECT]`` as in kubectl."""

    key: str = ""
    operator: Annotated[str, one_of(("Exists", "Equal"))] = "Equal"
    value: LabelValue = ""
    effect: Annotated[str, AfterValidator(_effect)] = ""
    tolerationSeconds: int | None = Field(default=None, ge=-(2**31), le=2**31 - 1)

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        taint, _, effect = value.partition(":")
        key, equals, wanted = taint.partition("=")
        if not key:
            raise ValueError(f"must be KEY[=VALUE][:EFFECT] (is {value!r})")
        return {"key": key, "effect": effect} | ({"value": wanted} if equals else {"operator": "Exists"})

    @model_validator(mode="after")
    def _check(self) -> Toleration:
        if self.key:
            _checked("key", names.label_key, self.key)
        elif self.operator != "Exists":
            raise ValueError("without a key its operator must be Exists")
        if self.operator == "Exists" and self.value:
            raise ValueError("with the operator Exists it has no value")
        if self.tolerationSeconds is not None and self.effect != "NoExecute":
            raise ValueError("tolerationSeconds needs the effect NoExecute")
        return self


Tolerations = list[Annotated[Toleration, OrText()]]
