"""Types of the job's fields: each checks one value, and converts it where the job file allows a short form.

A validator returns the value or raises ValueError with a message that continues "<field>: ", such as "must be …".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import core_schema

from flk.spec import mounts, names, units
from flk.spec.hardware import FABRICS, GPU_TYPES
from flk.spec.validation import usage_error
from flk_runtime.contract import pod_env, pod_layout, quantities
from flk_runtime.contract.options import (
    AUTO,
    MOST_STEPS,
    STRATEGIES,
    check_interval,
    parse_sinks,
    parse_strategy,
)
from flk_runtime.contract.variable import words

# The names of torch.distributed.fsdp.ShardingStrategy, which a job may use too. A job stores flk's own names.
TORCH_STRATEGIES: Final = ("NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
GANGS: Final = (AUTO, "native", "volcano", "coscheduling", names.NO_GANG)
PULL_POLICIES: Final = ("IfNotPresent", "Always", "Never")  # the default first
_EFFECTS: Final = ("NoSchedule", "PreferNoSchedule", "NoExecute")


class _Raises(type(BaseModel)):  # type: ignore[misc]  # it has no public name
    """The class of models whose calls raise UsageError, with what was probably meant, in place of pydantic's error."""

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        try:
            return super().__call__(*args, **fields)
        except ValidationError as error:
            raise usage_error(error, cls, where={}) from None


if TYPE_CHECKING:
    _Model = BaseModel  # whose calls take the fields of a model
else:

    class _Model(BaseModel, metaclass=_Raises):
        pass


class StrictModel(_Model):
    """Base of the job and its parts: immutable, without unknown keys and without conversions between types."""

    # Strict: a number in quotes is text. An error that names the field is better than a guess.
    # Built when it is used first: a job builds its parts with it, and needs none of them by itself. So their defaults
    # are made by model_construct.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=False, defer_build=True)


class OrText:
    """Annotation: the JSON schema allows text, the short form, beside the value itself."""

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> Any:
        return {"anyOf": [{"type": "string"}, handler(core)]}


class OneOf:
    """Annotation: a text that is one of those known."""

    def __init__(self, *known: str) -> None:
        self._known = known

    def _check(self, value: str) -> str:
        if value not in self._known:
            raise ValueError(f"must be one of {', '.join(filter(None, self._known))} (is {value!r})")
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> Any:
        return {"enum": list(self._known)}


def split_command(value: Any) -> Any:
    """Split a command line into words as a shell does. Return anything but text unchanged."""
    return [*_of_the_ranks(words, value)] if isinstance(value, str) else value


def _secret_key(value: str) -> str:
    secret, colon, key = value.partition(":")
    if not colon:
        raise ValueError("must be SECRET:KEY, the name of a Secret and a key in it")
    return f"{names.checked('the secret', names.object_name, secret)}:{names.checked('the key', names.data_key, key)}"


def _number_as_text(value: Any) -> Any:
    """YAML reads ``cpu: 2`` as a number; the quantity "2" means the same."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _seconds(value: Any) -> Any:
    seconds = quantities.parse_duration(value) if isinstance(value, str) else value
    if seconds == 0:
        raise ValueError(f"must be at least one second (is {value!r})")
    return seconds


def _hang_timeout(value: Any) -> Any:
    """Return the text of a hang timeout, which the launchers read too."""
    quantities.parse_duration(str(value))
    return str(value)


def _sinks(value: str) -> str:
    _of_the_ranks(parse_sinks, value)
    return value


def _of_the_ranks(parse: Callable[[Any], Any], value: Any) -> Any:
    """Return what the ranks' own function reads in ``value``; its error says what was expected."""
    try:
        return parse(value)
    except ValueError as error:
        raise ValueError(f"{str(error).replace('expected', 'must be')} (is {value!r})") from None


def _shell_command(value: str) -> str:
    if not names.text(value).strip():
        raise ValueError("must be a shell command, not empty")
    return value


def _arguments(value: str) -> str:
    if not words(names.text(value)):
        raise ValueError("must be arguments of the script, not empty")
    return value


def _modules(value: str) -> str:
    if not all(re.fullmatch(_MODULE, name) for name in value.split(" ")):
        raise ValueError(f"must be names of modules with a space between them, like transformers (is {value!r})")
    return value


def _strategy(value: str) -> str:
    try:
        return parse_strategy(value)
    except ValueError:
        raise ValueError(f"must be one of {', '.join(STRATEGIES)} (is {value!r})") from None


RUNTIME: Final = "runtime"
IN_IMAGE: Final = (False, RUNTIME)  # values of ``ship`` of a job whose code is in the image


def _ship(value: Any) -> Any:
    if not isinstance(value, bool | list) and value != RUNTIME:
        raise ValueError(f"must be true, false, {RUNTIME} or a list of patterns (is {value!r})")
    return value


# The schemas say which types a value may have. Whether a text is right is the model's to say: its error says why.
_QUANTITY: Final = WithJsonSchema({"type": ["string", "number"], "exclusiveMinimum": 0})
_ONE_SLASH: Final = "^s3:/[^/]"  # an address in S3 that lacks a slash, and not a claim s3
_MODULE: Final = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*"

Text = Annotated[str, AfterValidator(names.text)]
JobName = str  # Job checks it: the target matters
Image = Annotated[str, AfterValidator(names.image)]
Queue = Annotated[str, AfterValidator(names.queue)]
Variable = Annotated[str, AfterValidator(names.variable)]
LabelKey = Annotated[str, AfterValidator(names.label_key)]
OwnKey = Annotated[str, AfterValidator(names.own_key)]
ObjectName = Annotated[str, AfterValidator(names.object_name)]
ExtendedResource = Annotated[str, AfterValidator(names.extended_resource)]
LabelValue = Annotated[str, AfterValidator(names.label_value)]
Command = Annotated[list[Text], BeforeValidator(split_command), OrText()]
Mount = Annotated[str, AfterValidator(lambda value: str(mounts.Mount.parse(value)))]
SecretKey = Annotated[str, AfterValidator(_secret_key)]
Cpu = Annotated[str, BeforeValidator(_number_as_text), AfterValidator(units.cpu), _QUANTITY]
Memory = Annotated[str, BeforeValidator(_number_as_text), AfterValidator(units.memory), _QUANTITY]
Seconds = Annotated[
    int,
    BeforeValidator(_seconds),
    Field(ge=1, le=quantities.LONGEST),
    PlainSerializer(units.duration_text, return_type=str),
    WithJsonSchema({"type": ["string", "integer"], "minimum": 1, "maximum": quantities.LONGEST}),
]
HangTimeout = Annotated[
    str,
    PlainValidator(_hang_timeout),
    WithJsonSchema({"type": ["string", "integer"], "exclusiveMinimum": -1, "maximum": quantities.LONGEST}),
]
Sinks = Annotated[str, AfterValidator(_sinks)]
SaveEvery = Annotated[
    int,
    PlainValidator(lambda value: _of_the_ranks(lambda steps: check_interval(steps, 1), value)),
    WithJsonSchema({"type": "integer", "minimum": 1, "maximum": MOST_STEPS}),
]
Strategy = Annotated[str, AfterValidator(_strategy), WithJsonSchema({"enum": [*STRATEGIES, *TORCH_STRATEGIES]})]
FabricName = Annotated[str, OneOf(*FABRICS)]
TargetName = Annotated[str, OneOf(AUTO, *names.TARGETS)]
GpuType = Annotated[str, OneOf(*GPU_TYPES)]
PullPolicy = Annotated[str, OneOf(*PULL_POLICIES)]
GangName = Annotated[str, OneOf(*GANGS)]
Topology = Annotated[str, AfterValidator(lambda value: ":".join(names.split_topology(value)))]
Package = Annotated[str, AfterValidator(names.package)]
CodeFile = Annotated[str, AfterValidator(names.requirements_path)]
Arguments = Annotated[str, AfterValidator(_arguments)]
ShellCommand = Annotated[str, AfterValidator(_shell_command)]
Modules = Annotated[str, AfterValidator(_modules)]
Ship = Annotated[bool | str | list[Text], BeforeValidator(_ship)]


class Checkpoint(StrictModel):
    """Where checkpoints go: a PersistentVolumeClaim and the path where it is mounted, or an address in S3.

    As text ``PVC:/PATH`` or ``s3://BUCKET/PREFIX``.
    """

    SHORT: ClassVar[OrText] = OrText()
    model_config = ConfigDict(
        json_schema_extra={"anyOf": [{"required": ["volume", "path"]}, {"required": ["address"]}]}
    )

    volume: ObjectName | None = None
    path: Annotated[str, AfterValidator(names.mount_path)] | None = None
    address: Annotated[str, AfterValidator(names.s3_address)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if pod_layout.is_address(value):
            return {"address": value}
        if re.match(_ONE_SLASH, value):
            raise ValueError(
                f"must be s3://BUCKET/PREFIX, with two slashes (is {value!r}); for a PersistentVolumeClaim named s3 "
                "write {volume: s3, path: /PATH}"
            )
        if ":" not in value:
            raise ValueError(
                f"must be PVC:/PATH or s3://BUCKET/PREFIX (is {value!r}); `flk run` has a folder for each PVC, "
                ".flk/volumes/PVC"
            )
        claim, _, path = value.partition(":")
        return {
            "volume": names.checked("the PersistentVolumeClaim", names.object_name, claim),
            "path": names.checked("the path", names.mount_path, path),
        }

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


class Elastic(StrictModel):
    """How few and how many pods may train, and what becomes of the global batch; as text ``MIN:MAX``."""

    SHORT: ClassVar[OrText] = OrText()

    min: int = Field(ge=1, description="pods with which the job may train")
    max: int = Field(ge=1, description="most pods that it may have")
    batch: Annotated[str, OneOf(*pod_env.BATCHES)] = Field(
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


class Toleration(StrictModel):
    """A taint that the pods tolerate: the fields of Kubernetes, or ``KEY[=VALUE][:EFFECT]`` as in kubectl."""

    key: str = ""
    operator: Annotated[str, OneOf("Exists", "Equal")] = "Equal"
    value: LabelValue = ""
    effect: Annotated[str, OneOf("", *_EFFECTS)] = ""
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
            names.checked("key", names.label_key, self.key)
        elif self.operator != "Exists":
            raise ValueError("without a key its operator must be Exists")
        if self.operator == "Exists" and self.value:
            raise ValueError("with the operator Exists it has no value")
        if self.tolerationSeconds is not None and self.effect != "NoExecute":
            raise ValueError("tolerationSeconds needs the effect NoExecute")
        return self


Tolerations = list[Annotated[Toleration, OrText()]]
