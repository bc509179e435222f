"""The objects of a job as `flk.manifest.render` makes them, with marks in the place of values, for the chart.

There is a file for each target: the template of the pods, the job's object and its Service for a job in its common
form, and the patch that each further value adds to them. A mark is a number or a text that stands for a value.
templates/_job.tpl of the chart puts the values in their place and merges the patches. files/options.json has the marks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from flk.manifest import Bundle, render
from flk.manifest.pod import pod_template
from flk.spec import names
from flk.spec.fields import Checkpoint
from flk.spec.job import DEFAULT_IMAGE, Job
from flk.spec.parts import Resources
from flk.targets import TARGETS, Target
from flk.targets.indexed import restart_limit
from flk.targets.trainjob import OF_TRAINER, PATCHABLE, PATCHABLE_OF_CONTAINER, TrainJob
from scripts.chart.text import compact_json

Object = dict[str, Any]

TRAIN_JOB: Final = TrainJob.name
_REPLICAS: Final = 71_110_010  # no other number of a manifest is like these
MARKS: Final[dict[str, Any]] = {
    "name": "<name>",
    "image": "<image>",
    "strategy": "<strategy>",
    "queue": "<queue>",
    "records": "<records>",
    "checkpoint": "s3://<checkpoint>",
    "cpu": "<cpu>",
    "memory": "<memory>",
    "shm": "<shm>",
    "gpu": 71_110_200,
    "processes": 71_110_300,
    "replicas": _REPLICAS,
    "last": _REPLICAS - 1,
}


def options() -> str:
    """The text of files/options.json: the marks, and the data about images and targets that the templates read."""
    data = {
        "marks": MARKS,
        "attempts": restart_limit(_job()),
        "images": DEFAULT_IMAGE,
        "targets": {target.name: _target(target) for target in TARGETS.values()},
        "trainjob": {"pod": PATCHABLE, "container": PATCHABLE_OF_CONTAINER, "trainer": OF_TRAINER},
    }
    return compact_json(data) + "\n"


def _target(target: Target) -> dict[str, Any]:
    return {"kind": target.kind, "container": target.container, "portName": target.port_name}


def manifests(target: str) -> str:
    """The text of files/manifests/TARGET.json: the objects, and the patches of the values that not every job has."""
    base = _objects(_job(target=target))
    data = {
        "lastPod": names.longest(MARKS["name"], _REPLICAS, target),
        "spec": _job(target=target).model_dump(mode="json", exclude_none=True, exclude={"checkpoint"}),
        "base": base,
        "patches": [
            {"value": name, "given": given, "patch": _added(base, _objects(job))}
            for name, given, job in _others(target)
        ],
    }
    return compact_json(data) + "\n"


def _job(**fields: Any) -> Job:
    """A job with marks for what every job has. Its values are not validated: marks are none."""
    always = ("name", "image", "strategy", "replicas", "processes")
    base = {name: MARKS[name] for name in always} | {
        "command": [],
        "checkpoint": Checkpoint.model_construct(address=MARKS["checkpoint"]),
    }
    return Job.model_construct(**base | fields)


def _others(target: str) -> Iterator[tuple[str, bool, Job]]:
    """Each value that changes more than its mark: its name, whether it is given or missing then, and a job with it."""
    for name in ("cpu", "memory", "shm", "gpu"):
        yield name, True, _job(target=target, resources=Resources.model_construct(**{name: MARKS[name]}))
    for name in ("queue", "records"):
        yield name, True, _job(target=target, **{name: MARKS[name]})
    yield "checkpoint", False, _job(target=target, checkpoint=None)


def _objects(job: Job) -> Object:
    """The template of the pods, the job's object without it, and its Service, if it has one."""
    template = pod_template(job, Bundle(runtime=b"x"), [f"{job.name}-runtime-0"])
    job_object, *others = render(job, Bundle())
    del job_object["metadata"]["annotations"]
    if job.target == TRAIN_JOB:  # it has the template in pieces
        pieces = job_object["spec"]
        pieces["trainer"] = {key: value for key, value in pieces["trainer"].items() if key.startswith("num")}
        (patch,) = pieces["runtimePatches"]
        (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        node["template"]["spec"] = {}
    else:
        (holder,) = _with_template(job_object)
        template["spec"] = holder.pop("template")["spec"] | template["spec"]  # the target may have added to it
    return {"template": template, "job": job_object, **{other["kind"]: other for other in others}}


def _with_template(value: Any) -> Iterator[Object]:
    """The part of an object that has the template of the pods."""
    if isinstance(value, list):
        for item in value:
            yield from _with_template(item)
    elif isinstance(value, dict):
        if "containers" in ((value.get("template") or {}).get("spec") or {}):
            yield value
        else:
            for item in value.values():
                yield from _with_template(item)


def _added(before: Any, after: Any) -> Any:
    """The patch that makes ``after`` of ``before``, in the form of `flk.manifest.patched`."""
    if isinstance(before, dict) and isinstance(after, dict):
        return {key: _added(before.get(key), value) for key, value in after.items() if before.get(key) != value}
    if isinstance(before, list) and isinstance(after, list):
        for identity in ("mountPath", "name"):
            if all(isinstance(item, dict) and identity in item for item in (*before, *after)):
                known = {item[identity]: item for item in before}
                items = ((item[identity], item) for item in after if item not in before)
                return [{identity: name, **_added(known.get(name, {}), item)} for name, item in items]
    return after
