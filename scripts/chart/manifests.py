"""The objects of a job as `flk.manifest.render` makes them, with marks in the place of values, for the chart.

There is a file for each target: the objects of a job without options, and the patch that each option adds to them. The
template of the pods, and the patches of it that are the same for all targets, are in a file of their own. A mark is a
number or a text that stands for a value. templates/_objects.tpl of the chart puts the values in their place and merges
the patches. files/options.json says which mark stands for what.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

from flk.errors import UsageError
from flk.manifest import Bundle, render
from flk.manifest.pod import LAUNCHER_GRACE, pod_template
from flk.spec import names
from flk.spec.fields import Checkpoint, Elastic, StrictModel
from flk.spec.job import DEFAULT_IMAGE, Job
from flk.spec.parts import PodSettings, Resources
from flk.spec.schema import schema_of
from flk.targets import DEFAULT, TARGETS, Target
from flk.targets.controllers import CONTROLLERS
from flk.targets.gang import GANGS
from flk.targets.indexed import restart_limit
from flk.targets.trainjob import OF_TRAINER, PATCHABLE, PATCHABLE_OF_CONTAINER
from flk_runtime.contract import pod_layout
from scripts.chart.text import compact_json

Object = dict[str, Any]

_RUNTIME: Final = Bundle(runtime=b"x")
_CREATED, _MOST, _LEAST, _PROCESSES = range(71_110_010, 71_110_050, 10)  # no other number of a manifest is like these
_FIRST: Final = 71_110_101
POD: Final = "pod"  # name of the file with what all targets have in common
# What a template has of its target, by the names in files/options.json. The mark of a value is <target.NAME>.
_OF_TEMPLATE: Final[dict[str, Callable[[Target], str]]] = {
    "container": lambda target: target.container,
    "portName": lambda target: target.port_name,
    "indexField": lambda target: target.index_field,
    "host": lambda target: target.pod_host("<name>", 0),
}
_PARTS: Final[dict[str, type[StrictModel]]] = {"resources": Resources, "pods": PodSettings}


class _Marked(Job):
    """A job whose values are marks."""

    created_pods = property(lambda self: _CREATED)
    most_pods = property(lambda self: _MOST)
    least_pods = property(lambda self: _LEAST)
    processes_per_pod = property(lambda self: _PROCESSES)


def options() -> str:
    """The text of files/options.json: the marks, and the data about options and targets that the templates read."""
    marks, durations = _marks()
    defaults = Job.model_construct().model_dump(mode="json")
    data = {
        "marks": marks,
        "numbers": {  # marks of computed values
            "created": _CREATED,
            "most": _MOST,
            "least": _LEAST,
            "processes_per_pod": _PROCESSES,
            "port": pod_layout.RDZV_PORT,
            "last": _MOST - 1,
            "restart_limit": restart_limit(_Marked.model_construct(**_base(marks))),
            "grace_and_launcher": marks["grace"] + LAUNCHER_GRACE,
        },
        "durations": durations,
        "defaults": {name: value for name, value in defaults.items() if name in marks and value is not None},
        "images": DEFAULT_IMAGE,
        "targets": {t.name: _target(t) for t in TARGETS.values()},
        "gangs": {name: [f"{gang.group}/{version}" for version in gang.versions] for name, gang in GANGS.items()},
        "trainjob": {"pod": PATCHABLE, "container": PATCHABLE_OF_CONTAINER, "trainer": OF_TRAINER},
    }
    return compact_json(data) + "\n"


def _target(target: Target) -> dict[str, Any]:
    install = next((controller.install for controller in CONTROLLERS[target.name]), "")
    known = {"kind": target.kind, "apiVersion": target.api_version, "scalable": target.scalable, "install": install}
    return known | {name: value(target) for name, value in _OF_TEMPLATE.items()}


def manifests(name: str) -> str:
    """The text of files/manifests/NAME.json, of a target or POD: the objects, and the patches of the options."""
    marks, _ = _marks()
    base = _objects(DEFAULT.name if name == POD else name, _base(marks))
    template = base.pop("template")
    data = {
        **({} if name == POD else {"lastPod": names.longest(marks["name"], _MOST, name)}),
        "base": {"template": template} if name == POD else base,
        "patches": _patches()[name],
    }
    return compact_json(data) + "\n"


@functools.cache
def _patches() -> dict[str, list[Object]]:
    """The patches of the options by the file that has them: those of templates in POD, if no target has another one."""
    found: dict[str, list[Object]] = {name: [] for name in (POD, *TARGETS)}
    for path, end, without, with_it in _options(_marks()[0]):
        added = {target: _added(_objects(target, without), _objects(target, with_it)) for target in TARGETS}
        common, *others = [patch.get("template") for patch in added.values()]
        if common and all(other == common for other in others):
            for patch in added.values():
                del patch["template"]
            added[POD] = {"template": common}
        for name, patch in added.items():
            if patch:
                found[name].append({"option": path, "end": end, "patch": patch})
    return found


def _marks() -> tuple[dict[str, Any], dict[str, int]]:
    """The marks of all options with one value, by their paths, and the least seconds of those that are durations."""
    schema = schema_of(Job)
    fields = dict(schema["properties"])
    for above, part in _PARTS.items():
        fields |= {f"{above}.{name}": value for name, value in schema["$defs"][part.__name__]["properties"].items()}
    marks: dict[str, Any] = {}
    durations: dict[str, int] = {}
    for path, field in fields.items():
        forms = field.get("anyOf", [field])
        kinds = [form.get("type", "string") for form in forms]
        if "$ref" in str(field) or any(kind in ("object", "array", "boolean") for kind in kinds):
            continue
        is_text = kinds[0] == ["string", "integer"] and "minimum" not in forms[0]  # numbers are a short form of it
        is_number = not is_text and any("integer" in kind for kind in kinds)
        marks[path] = _FIRST + len(marks) * 100 if is_number else f"<{path}>"
        if kinds[0] == ["string", "integer"] and not is_text:
            durations[path] = forms[0]["minimum"]
    return marks | {"elastic.batch": "<elastic.batch>", "topology": "marked-topology"}, durations


def _base(marks: dict[str, Any]) -> dict[str, Any]:
    """The fields that every job has."""
    always = ("name", "image", "replicas", "strategy", "restarts", "disruptions", "grace")
    return {name: marks[name] for name in always} | {"command": [], "checkpoint": Checkpoint(address="s3://marked")}


def _options(marks: dict[str, Any]) -> Iterator[tuple[str, str | None, dict[str, Any], dict[str, Any]]]:
    """Each option that adds fields: its path, the end of its value, and the fields of a job without and with it.

    The end is empty if every value adds the same, and None where a missing value adds something.
    """
    base = _base(marks)
    for path, mark in marks.items():
        name, _, inner = path.partition(".")
        if path == "resources.gpu_type":
            continue  # its affinity is in files/gpus.json
        if name in _PARTS:
            yield path, "", base, base | {name: _PARTS[name].model_construct(**{inner: mark})}
        elif path == "queue_priority":
            yield path, "", base | {"queue": marks["queue"]}, base | {"queue": marks["queue"], path: mark}
        elif path not in base and path not in ("fabric", "target", "gang", "topology", "processes", "elastic.batch"):
            yield path, "", base, base | {path: mark}
    elastic = Elastic.model_construct(min=_LEAST, max=_MOST, batch=marks["elastic.batch"])
    yield "elastic", "", base, base | {"elastic": elastic}
    for strength in (":required", ":preferred"):
        yield "topology", strength, base, base | {"topology": marks["topology"] + strength}
    for gang in GANGS:
        yield "gang", gang, base, base | {"gang": gang}
    yield "checkpoint", None, base, base | {"checkpoint": None}


def _objects(target: str, fields: dict[str, Any]) -> Object:
    """The template of the pods, the job's object without it, its Service and its PodGroup.

    For fields that the target refuses, only the template is returned: the chart refuses them too.
    """
    job = _Marked.model_construct(**fields, target=target)
    template = _template(job)
    try:
        job_object, *others = render(job, Bundle())
    except UsageError:
        return {"template": template}
    del job_object["metadata"]["annotations"]
    return {"template": template, "job": _without_pods(job_object), **{other["kind"]: other for other in others}}


def _template(job: Job) -> Object:
    """The template of the pods of a job, with marks in the place of what depends on the target."""
    text = json.dumps(pod_template(job, _RUNTIME, [f"{job.name}-runtime-0"]))
    for name, value in _OF_TEMPLATE.items():
        own = re.escape(value(TARGETS[job.target_or_default]))
        text = re.sub(f'"{own}(?=[:"])', f'"<target.{name}>', text)
    template: Object = json.loads(text)
    return template


def _without_pods(value: Any) -> Any:
    """An object without the templates of pods in it, and a TrainJob without the fields of its container."""
    if isinstance(value, list):
        return [_without_pods(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {
        key: _without_pods(item)
        for key, item in value.items()
        if key not in ("image", "command", "env", "resourcesPerNode")
    }
    if "containers" in (kept.get("template") or {}).get("spec", {}):
        del kept["template"]
    return kept


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
