"""Parts of a job: the resources of a pod, settings of pods, the nodes that they run on, and strategy diloco."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Final

from pydantic import AfterValidator, Field, field_validator, model_validator

from flk.spec import units
from flk.spec.fields import (
    Cpu,
    ExtendedResource,
    GpuType,
    LabelKey,
    LabelValue,
    Memory,
    ObjectName,
    OneOf,
    OrText,
    OwnKey,
    Seconds,
    SecretKey,
    Strategy,
    StrictModel,
    Text,
    Tolerations,
)
from flk.spec.hardware import GPU_TYPES, split_gpus
from flk.spec.options import Form, Option
from flk.spec.validation import check_all
from flk_runtime.contract.options import INNER_STRATEGIES, OUTER_DTYPES


class Resources(StrictModel):
    """What each pod requests. Requests are limits too, except for CPU, unless a limit is given.

    A field that is left out is not requested.
    """

    cpu: Annotated[Cpu | None, Option("QUANTITY")] = Field(
        default=None, description="cores that each pod requests: 4, 500m"
    )
    memory: Annotated[Memory | None, Option("QUANTITY")] = Field(
        default=None, description="memory of each pod, request and limit: 16Gi"
    )
    cpu_limit: Annotated[Cpu | None, Option("QUANTITY")] = Field(
        default=None, description="cores that each pod may use at most; left out: all of its node"
    )
    memory_limit: Annotated[Memory | None, Option("QUANTITY")] = Field(
        default=None, description="memory that each pod may use at most; left out: the request"
    )
    ephemeral_storage: Annotated[Memory | None, Option("QUANTITY")] = Field(
        default=None, description="disk of the node for each pod's own files, request and limit: 100Gi"
    )
    gpu: Annotated[int, OrText(), Option("N|TYPE:N", Form.NUMBER)] = Field(
        default=0, ge=0, le=1024, description="NVIDIA GPUs of each pod: 8, or with their type: H100:8"
    )
    gpu_type: Annotated[GpuType | None, Option()] = Field(
        default=None, description=f"which nodes the pods may run on, by their GPUs: {', '.join(GPU_TYPES)}"
    )
    shm: Annotated[Memory | None, Option("QUANTITY")] = Field(
        default=None, description="size of /dev/shm, which counts as memory; left out: limited by the memory only"
    )

    extended: Annotated[
        dict[ExtendedResource, int] | None,
        Option("NAME=N", Form.NUMBERS, ("--resource",)),
    ] = Field(default=None, description="resource of another device plugin for each pod: amd.com/gpu, and how many")

    @model_validator(mode="before")
    @classmethod
    def _split_gpus(cls, value: Any) -> Any:
        """``gpu: H100:8`` sets the type too."""
        if not isinstance(value, dict) or not isinstance(value.get("gpu"), str):
            return value
        try:
            name, number = split_gpus(value["gpu"])
        except ValueError as error:
            raise ValueError(f"gpu: {error}") from None
        return value | {"gpu": number, "gpu_type": name}

    @field_validator("extended")
    @classmethod
    def _check_extended(cls, value: dict[str, int] | None) -> dict[str, int] | None:
        for name, amount in (value or {}).items():
            if amount < 1:
                raise ValueError(f"{name} must be at least 1 (is {amount})")
        return value

    @model_validator(mode="after")
    def _check_limits(self) -> Resources:
        check_all(self._mistakes())
        return self

    def _mistakes(self) -> Iterator[str]:
        for name in ("cpu", "memory"):
            request, limit = getattr(self, name), getattr(self, f"{name}_limit")
            if request and limit and units.parse_quantity(limit) < units.parse_quantity(request):
                yield f"{name}_limit: is {limit}, less than {name}, which is {request}"
        if self.gpu_type and not self.gpu:
            yield f"gpu_type: needs a number of GPUs: {self.gpu_type}:1"

    @property
    def accelerators(self) -> int:
        """GPUs of each pod, of any vendor."""
        others = sum(amount for name, amount in (self.extended or {}).items() if name.endswith("/gpu"))
        return self.gpu + others


class PodSettings(StrictModel):
    """What the pods are called and what they may use."""

    labels: Annotated[dict[OwnKey, LabelValue], Option("K=V", Form.PAIR, ("--label",))] = Field(
        default_factory=dict, description="labels of the job and its pods"
    )
    annotations: Annotated[dict[OwnKey, Text], Option("K=V", Form.PAIR, ("--annotation",))] = Field(
        default_factory=dict, description="annotations of the job and its pods"
    )
    service_account: Annotated[ObjectName | None, Option("NAME")] = Field(
        default=None, description="ServiceAccount of the pods"
    )
    pull_secrets: Annotated[list[ObjectName], Option("NAME", Form.LIST, ("--pull-secret",))] = Field(
        default_factory=list, description="Secrets with which the nodes pull the image"
    )
    priority_class: Annotated[ObjectName | None, Option("NAME")] = Field(
        default=None, description="PriorityClass of the pods"
    )


class Nodes(StrictModel):
    """Which nodes the pods may run on."""

    selector: Annotated[dict[LabelKey, LabelValue], Option("K=V", Form.PAIR, ("--node-selector",))] = Field(
        default_factory=dict, description="labels that nodes must have"
    )
    tolerations: Annotated[Tolerations, Option("KEY[=VALUE][:EFFECT]", Form.LIST, ("--toleration",))] = Field(
        default_factory=list,
        description="taints that the pods tolerate, as in kubectl",
    )
    avoid: Annotated[list[ObjectName], Option("NAME", Form.LIST, ("--avoid-node",))] = Field(
        default_factory=list, description="nodes that the pods do not run on, by their names"
    )


HUB_MODULE: Final = "flk_diloco"  # program of the extension that is the hub
_ADDRESS: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+):([0-9]{1,5})")
# The fields that the ranks read, by the names of flk_diloco.DiLoCo's.
_OPTIONS: Final = (
    "inner", "every", "dtype", "lr", "momentum", "sites", "site", "wait", "timeout"
)  # fmt: skip


def _inner(value: str) -> str:
    if value not in INNER_STRATEGIES:
        raise ValueError(f"must be the strategy of the ranks within a worker, such as ddp or full_shard (is {value!r})")
    return value


def _address(value: str) -> str:
    match = _ADDRESS.fullmatch(value)
    if not match or not 0 < int(match[2]) < 1 << 16:
        raise ValueError(f"must be HOST:PORT (is {value!r})")
    return value


class DiLoCo(StrictModel):
    """How workers train by themselves and meet in rounds (strategy diloco)."""

    inner: Annotated[Strategy, AfterValidator(_inner)] = Field(
        default="ddp", description="strategy of the ranks within a worker"
    )
    workers: int | None = Field(
        default=None, ge=1, description="workers among which the replicas are divided; left out: one for each replica"
    )
    every: int = Field(default=100, ge=1, description="optimizer steps between two rounds")
    dtype: Annotated[str, OneOf(*OUTER_DTYPES)] = Field(
        default="fp16", description=f"what workers send to each other: {', '.join(OUTER_DTYPES)}"
    )
    lr: float = Field(default=0.7, gt=0, allow_inf_nan=False, description="learning rate of the outer optimizer, SGD")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="Nesterov momentum of the outer optimizer")
    sites: int = Field(default=1, ge=1, description="jobs that train together, in one cluster or several")
    site: int = Field(default=0, ge=0, description="number of this job among them, from 0")
    hub: Annotated[str, AfterValidator(_address)] | None = Field(
        default=None, description="HOST:PORT where the jobs meet; left out: in pod 0 of this job"
    )
    secret: SecretKey | None = Field(
        default=None, description="SECRET:KEY that all sites share; left out: flk makes one, for a job by itself"
    )
    wait: Seconds = Field(default=300, description="time that the first workers wait for the others at the start")
    timeout: Seconds = Field(default=600, description="time that a round waits for a late worker")

    @model_validator(mode="after")
    def _check(self) -> DiLoCo:
        check_all(self._mistakes())
        return self

    def _mistakes(self) -> Iterator[str]:
        if self.site >= self.sites:
            yield f"site: must be below sites, {self.sites}, since it counts from 0"
        if self.sites > 1 and not self.secret:
            yield "secret: is missing: sites authenticate each other with it"
        if self.site > 0 and not self.hub:
            yield "hub: is missing: the address of site 0, where its hub is reached"

    def options(self) -> str:
        """The options that the ranks read, as the value of FLK_DILOCO."""
        # Not of model_dump, which writes a duration as people do.
        values = {name: getattr(self, name) for name in _OPTIONS}
        fields = type(self).model_fields
        return ",".join(f"{name}={value}" for name, value in values.items() if value != fields[name].default)
