"""Parts of a job: the resources of a pod, settings of pods, and the nodes that they run on."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from flk import units
from flk.spec import gpus
from flk.spec.fields import (
    Cpu,
    ExtendedResource,
    GpuType,
    LabelKey,
    LabelValue,
    Memory,
    ObjectName,
    OrText,
    OwnKey,
    StrictModel,
    Text,
    Tolerations,
)
from flk.spec.options import Form, Option


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
        default=None, description=f"which nodes the pods may run on, by their GPUs: {', '.join(gpus.gpu_types())}"
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
            name, number = gpus.split_gpus(value["gpu"])
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
        for name in ("cpu", "memory"):
            request, limit = getattr(self, name), getattr(self, f"{name}_limit")
            if request and limit and units.parse_quantity(limit) < units.parse_quantity(request):
                raise ValueError(f"{name}_limit: is {limit}, less than {name}, which is {request}")
        if self.gpu_type and not self.gpu:
            raise ValueError(f"gpu_type: needs a number of GPUs: {self.gpu_type}:1")
        return self

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
