"""NamespaceDefaults: values from a ConfigMap for the jobs of its namespace that do not set them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import Field, ValidationError

from flk.spec import file, labels
from flk.spec.fields import (
    FabricName,
    Image,
    ObjectName,
    Queue,
    Seconds,
    StrictModel,
    TargetName,
    Tolerations,
)
from flk.spec.job import Job
from flk.spec.parts import Nodes
from flk.spec.validation import usage_error


class NamespaceDefaults(StrictModel):
    """Defaults of one namespace. A job's own values win; the tolerations are added to the job's."""

    image: Image | None = None
    fabric: FabricName | None = None
    queue: Queue | None = None
    target: TargetName | None = None
    records: ObjectName | None = None
    stuck_after: Seconds | None = None
    tolerations: Tolerations = Field(default_factory=list)


def parse(texts: Iterable[tuple[str, str]]) -> NamespaceDefaults:
    """Return the defaults in ``texts``, pairs of a ConfigMap's name and its YAML.

    Where two ConfigMaps set the same key, the one whose name sorts later wins, and lists are added to each other.
    Raises UsageError for wrong YAML.
    """
    merged: dict[str, Any] = {}
    for name, text in sorted(texts):
        source = f"ConfigMap {name}, {labels.DEFAULTS_KEY}"
        data = {key: value for key, value in file.mapping(text, source).items() if value not in (None, "", [])}
        try:
            NamespaceDefaults.model_validate(data)
        except ValidationError as error:
            raise usage_error(error, NamespaceDefaults, where={}, source=source) from None
        for key, value in data.items():
            if isinstance(value, list):
                before = merged.get(key, [])
                value = [*before, *(each for each in value if each not in before)]
            merged[key] = value
    return NamespaceDefaults.model_validate(merged)


def apply(job: Job, defaults: NamespaceDefaults) -> Job:
    """Return the job with the defaults for what it does not set."""
    own = {name for name in job.model_fields_set if getattr(job, name) is not None}
    given = {name: getattr(defaults, name) for name in NamespaceDefaults.model_fields if name in Job.model_fields}
    fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None and name not in own}
    added = [t for t in defaults.tolerations if t not in job.nodes.tolerations]
    if added:
        fields["nodes"] = Nodes(**{**dict(job.nodes), "tolerations": [*job.nodes.tolerations, *added]})
    return job.changed(**fields) if fields else job
