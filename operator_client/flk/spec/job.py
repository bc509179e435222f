"""The model of a job: the user's request from flags and flk.yaml, checked completely.

The API server accepts what these checks accept, so a mistake is reported before anything is created.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

from pydantic import ValidationError, field_validator, model_validator

from flk.spec import file, mounts, names
from flk.spec.fields import Elastic
from flk.spec.hardware import FABRICS
from flk.spec.table import JobOptions
from flk.spec.validation import check_all, usage_error
from flk_runtime.contract import user_env
from flk_runtime.contract.options import AUTO, DILOCO

# The job is recorded in an annotation of its object in the cluster, and all annotations of one may have 256 KiB.
SIZE_LIMIT: Final = 200_000


class Job(JobOptions):
    """A training job: ``replicas`` pods with ``processes`` ranks each, all running ``command``.

    A job is data. `flk.render` returns its manifests and `flk.submit` creates them.
    """

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: Any) -> Any:
        """An elastic job has all the pods that it may have, unless ``replicas`` says otherwise."""
        if not isinstance(data, dict) or data.get("elastic") is None or data.get("replicas") is not None:
            return data
        elastic = data["elastic"]
        most = elastic.partition(":")[2] if isinstance(elastic, str) else None
        if isinstance(elastic, dict | Elastic):
            most = str(elastic.get("max") if isinstance(elastic, dict) else elastic.max)
        return data | ({"replicas": int(most)} if most and most.isdecimal() and int(most) else {})

    @field_validator("command")
    @classmethod
    def _check_command(cls, value: list[str]) -> list[str]:
        _check_command(value)
        return value

    @model_validator(mode="after")
    def _check(self) -> Job:
        check_all(self._mistakes())
        return self

    def _mistakes(self) -> Iterator[str]:
        """Yield what is wrong with fields together, one line for each mistake, which begins with the field."""
        if self.name is not None:
            yield from _error("name", names.job_name, self.name, self.most_pods, self.target_or_default)
        yield from self._mistakes_of_pods()
        if self.queue_priority and not self.queue:
            yield "queue_priority: needs a queue"
        yield from _error(f"env.{user_env.PREFLIGHT}", user_env.PREFLIGHT.read, self.env)
        for name in sorted(self.env.keys() & self.secrets.keys()):
            yield f"secrets.{name}: {name} is in env too"
        yield from self._mistakes_of_mounts()
        resources = self.resources
        huge = [name for name in FABRICS[self.fabric].pod_limits(resources.gpu) if name.startswith("hugepages-")]
        if huge and not (resources.memory or resources.cpu):
            yield (
                f"resources.memory: is missing: fabric {self.fabric} requests {huge[0]}, "
                "which Kubernetes accepts only with memory or cpu"
            )
        for key in sorted(self.patch.keys() - {"metadata", "spec"}):
            yield f"patch.{key}: a pod template has only metadata and spec"
        try:
            json.dumps(self.patch, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            yield "patch: contains a value that JSON does not have"
            return
        size = len(self.model_dump_json())
        if size > SIZE_LIMIT:
            yield f"the job has {size:,} bytes and may have at most {SIZE_LIMIT:,}: put large values in a file"

    def _mistakes_of_mounts(self) -> Iterator[str]:
        """Yield the paths at which a container cannot have its volumes."""
        found = [mounts.Mount.parse(mount) for mount in self.volumes]
        paths = [mount.path for mount in found]
        if self.checkpoint and self.checkpoint.path:
            paths.append(self.checkpoint.path)
        for path in dict.fromkeys(paths):
            if paths.count(path) > 1:
                yield f"volumes: two volumes are mounted at {path}"
            for outer in found:
                if outer.is_read_only and path.startswith(f"{outer.path}/"):
                    yield (
                        f"volumes: {path} is inside of {outer}, which is read-only, so that no folder can be made "
                        "there to mount it: choose another path"
                    )

    def _mistakes_of_pods(self) -> Iterator[str]:
        elastic = self.elastic
        if elastic and self.spares:
            yield "spares: an elastic job goes on with fewer pods, so it has none: leave out one of the two"
        if elastic and not elastic.min <= self.replicas <= elastic.max:
            yield f"replicas: must be from {elastic.min} to {elastic.max} in this elastic job (is {self.replicas})"
        if self.strategy == DILOCO and (elastic or self.spares):
            yield f"{'elastic' if elastic else 'spares'}: workers of strategy {DILOCO} come and go anyway"
        if self.replicas % self.workers:
            yield f"diloco.workers: must divide replicas, {self.replicas} (is {self.workers})"

    @classmethod
    def from_file(cls, path: str | Path) -> Job:
        """Return the job that a job file describes; ``-`` is stdin. Raises UsageError with the file and the field."""
        return validated(file.job_fields(str(path)), source=file.source_name(str(path)))

    @property
    def processes_per_pod(self) -> int:
        """Ranks in each pod."""
        return self.processes if self.processes is not None else max(1, self.resources.accelerators)

    @property
    def created_pods(self) -> int:
        """Pods that are created, spares included."""
        return self.replicas + self.spares

    @property
    def least_pods(self) -> int:
        """The least number of pods with which the job trains."""
        return self.elastic.min if self.elastic else self.replicas

    @property
    def most_pods(self) -> int:
        """The most pods that the job may have, spares included."""
        return (self.elastic.max if self.elastic else self.replicas) + self.spares

    @property
    def workers(self) -> int:
        """Workers of strategy diloco among which the pods are divided; 1 under the other strategies."""
        if self.strategy != DILOCO:
            return 1
        return (self.diloco and self.diloco.workers) or self.replicas

    @property
    def world_size(self) -> int:
        """Ranks in the whole job."""
        return self.replicas * self.processes_per_pod

    @property
    def image_or_default(self) -> str:
        """The image that the pods run: the job's own, or a public one."""
        return self.image or names.DEFAULT_IMAGE

    @property
    def target_or_default(self) -> str:
        """The name of the target, without a cluster that decides: that of PyTorchJobs."""
        return self.target if self.target not in (None, AUTO) else names.DEFAULT_TARGET

    def named(self) -> Job:
        """Return this job, with a generated name if it has none."""
        if self.name is not None:
            return self
        return self.changed(name=names.default_name(self.command, self.most_pods, self.target_or_default))

    def changed(self, **fields: Any) -> Job:
        """Return a copy with other values for ``fields``. Raises UsageError if the new job is not valid."""
        return validated({name: getattr(self, name) for name in self.model_fields_set} | fields)


def validated(data: Mapping[str, Any], *, where: Mapping[str, str] | None = None, source: str = "") -> Job:
    """Return the job that plain data describes.

    Raises UsageError with the path of a wrong field. ``where`` maps paths to the flags that set them, and ``source``
    names the file of all others.
    """
    try:
        return Job.model_validate(data)
    except ValidationError as error:
        raise usage_error(error, Job, where=where or {}, source=source) from None


def _error(field: str, check: Callable[..., object], *values: Any) -> Iterator[str]:
    """Yield the error of ``check`` with ``values``, if there is one, after the field's name."""
    try:
        check(*values)
    except ValueError as error:
        yield f"{field}: {error}"


# Modules that start ranks of their own in each rank, which then train beside each other.
_LAUNCHERS: Final = ("torch.distributed.run", "torch.distributed.launch")
_ITSELF: Final = "flk starts the ranks itself"


def _check_command(command: list[str]) -> None:
    if not command or not command[0]:
        raise ValueError("names no script")
    first = PurePosixPath(command[0]).name
    if first == "torchrun" or (first.startswith("python") and not first.endswith(".py")):
        raise ValueError(f"begins with the script or with -m, not with {first}: {_ITSELF}")
    if command[0] == "-m":
        if len(command) < 2:
            raise ValueError("-m needs a module")
        names.module(command[1])
        if command[1] in _LAUNCHERS:
            raise ValueError(f"begins with the script or with -m, not with {command[1]}: {_ITSELF}")
    elif command[0].startswith("-"):
        raise ValueError(f"begins with the script or with -m (is {command[0]!r})")
