"""A site's defaults: what a team sets once in a ConfigMap, for every job of its namespace that says nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError

from flk import labels
from flk.spec import file as jobfile
from flk.spec import names
from flk.spec.fabric import fabrics
from flk.spec.job import Job, Nodes, Toleration, one_of, toleration
from flk.spec.validation import usage_error


class NamespaceDefaults(BaseModel):
    """Defaults of one namespace; a job's own values win, and tolerations are added to the job's."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    image: Annotated[str, AfterValidator(names.image)] | None = None
    fabric: Annotated[str, one_of(list(fabrics()))] | None = None
    queue: Annotated[str, AfterValidator(names.queue)] | None = None
    tolerations: list[Annotated[Toleration, BeforeValidator(toleration)]] = []


def parse(texts: Iterable[tuple[str, str]]) -> NamespaceDefaults:
    """The defaults in (name of the ConfigMap, its YAML) pairs; of two ConfigMaps the later by name wins, key by key."""
    merged: dict[str, Any] = {}
    for name, text in sorted(texts):
        source = f"ConfigMap {name}, {labels.DEFAULTS_KEY}"
        data = {key: value for key, value in jobfile.mapping(text, source).items() if value not in (None, "", [])}
        try:
            NamespaceDefaults.model_validate(data)
        except ValidationError as error:
            raise usage_error(error, NamespaceDefaults, where={}, source=source) from None
        merged |= data
    return NamespaceDefaults.model_validate(merged)


def apply(job: Job, site: NamespaceDefaults) -> Job:
    """The job with the site's defaults where it says nothing itself."""
    fields: dict[str, Any] = {}
    if site.image and job.image is None:
        fields["image"] = site.image
    if site.fabric and "fabric" not in job.model_fields_set:
        fields["fabric"] = site.fabric
    if site.queue and job.queue is None:
        fields["queue"] = site.queue
    added = [t for t in site.tolerations if t not in job.nodes.tolerations]
    if added:
        fields["nodes"] = Nodes(selector=job.nodes.selector, tolerations=[*job.nodes.tolerations, *added])
    return job.changed(**fields) if fields else job
