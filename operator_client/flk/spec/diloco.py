"""The section `diloco` of a job: how the workers of strategy diloco train together, and where they meet."""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import AfterValidator, Field, model_validator

from flk.spec.fields import ObjectName, OneOf, Seconds, SecretKey, Strategy, StrictModel
from flk_runtime.contract.options import INNER_STRATEGIES, OUTER_DTYPES

HUB_MODULE: Final = "flk_diloco"  # program of the extension that is the hub
TLS_FOLDER: Final = "/flk/hub"  # mount path of the Secret that `tls` names
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
    tls: ObjectName | None = Field(
        default=None, description="Secret with ca.crt, and tls.crt and tls.key in the job where they meet"
    )
    wait: Seconds = Field(default=300, description="time that the first workers wait for the others at the start")
    timeout: Seconds = Field(default=600, description="time that a round waits for a late worker")

    @model_validator(mode="after")
    def _check(self) -> DiLoCo:
        for wrong, problem in (
            (self.site >= self.sites, f"site: must be below sites, {self.sites}, since it counts from 0"),
            (self.sites > 1 and not self.secret, "secret: is missing: sites authenticate each other with it"),
            (self.site > 0 and not self.hub, "hub: is missing: the address of site 0, where its hub is reached"),
        ):
            if wrong:
                raise ValueError(problem)
        return self

    def options(self) -> str:
        """The options that the ranks read, as the value of FLK_DILOCO."""
        # Not of model_dump, which writes a duration as people do.
        values = {name: getattr(self, name) for name in _OPTIONS}
        fields = type(self).model_fields
        return ",".join(f"{name}={value}" for name, value in values.items() if value != fields[name].default)
