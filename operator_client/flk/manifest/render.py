"""Render a job as Kubernetes objects, the object of its target and the ConfigMaps that hold its code, and as text.

Rendering is a pure function, so what `flk render` prints is what `flk submit` creates. Every field whose default
differs between operators, clusters or versions is set.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import Any, Final

import yaml

from flk.errors import UsageError
from flk.manifest.bundle import Bundle
from flk.manifest.pod import pod_template
from flk.spec import labels
from flk.spec.hardware import FABRICS
from flk.spec.job import Job
from flk.spec.parts import PodSettings
from flk.targets import TARGETS, Parts
from flk.targets.gang import pod_groups
from flk.targets.rendezvous import name_secret
from flk_runtime.contract import VERSION, pod_layout

CHUNK: Final = 900_000  # bytes of data in a ConfigMap; the API server accepts 1 MiB


def render(
    job: Job,
    bundle: Bundle,
    *,
    namespace: str | None = None,
    submission: str = "",
    owner: str = "",
    commit: str = "",
    shared: bool = False,
) -> list[dict[str, Any]]:
    """Return the object of ``job``, which has a name, and then the objects that it owns.

    ``submission`` is an id that is equal in all attempts to create this job, ``owner`` who submits it, by the names on
    the machine, ``commit`` the commit of the code.
    With ``shared``, the ConfigMaps have the names of their hashes, and `flk.jobs.lifecycle` has all jobs of the
    namespace share them. Otherwise they have the job's name: kubectl, which cannot share them, creates and deletes
    them with the job.
    Equal arguments give equal manifests. Raises UsageError if the job's patch does not fit the
    pod template, if the target cannot express the job, or if the gang is still ``auto``.
    """
    if job.name is None:
        raise ValueError("the job has no name yet")
    own_labels = {**labels.MANAGED_BY, labels.JOB: job.name}
    in_namespace = {"namespace": namespace} if namespace else {}
    whose = {labels.SHARED: "true"} if shared else {labels.JOB: job.name}
    config_maps = _config_maps(job, bundle, {**in_namespace, "labels": {**labels.MANAGED_BY, **whose}}, shared)
    pods = job.pods or PodSettings.model_construct()
    annotations = {
        **pods.annotations,
        labels.VERSION: VERSION,
        labels.SPEC: job.model_dump_json(exclude_none=True),
        **({labels.CODE_HASH: bundle.sha256} if bundle.code is not None else {}),
        **({labels.COMMIT: commit} if commit else {}),
        **({labels.SUBMISSION: submission} if submission else {}),
        **({labels.OWNER: owner} if owner else {}),
    }
    target = TARGETS[job.target_or_default]
    if (job.elastic or job.spares) and not target.ends_with_first:
        option = "--elastic" if job.elastic else "--spares"
        able = " or ".join(f"--target {name}" for name, other in TARGETS.items() if other.ends_with_first)
        raise UsageError(
            f"{option}: a {target.kind} needs the success of all its pods: only its runtime, which belongs to the "
            "administrator and serves all jobs, could say otherwise",
            hint=f"choose {able}",
        )
    template = pod_template(job, bundle, [config_map["metadata"]["name"] for config_map in config_maps], namespace)
    queue = {labels.QUEUE: job.queue} if job.queue else {}
    if job.queue_priority:
        queue[labels.QUEUE_PRIORITY] = job.queue_priority
    limits = {} if job.stuck_after is None else {labels.STUCK_AFTER: str(job.stuck_after)}
    metadata = {
        "name": job.name,
        **in_namespace,
        "labels": {**pods.labels, **own_labels, **queue, **limits},
        "annotations": annotations,
    }
    manifest, *others = target.render(Parts(job, metadata, template))
    name_secret(manifest)
    return [manifest, *others, *pod_groups(job, in_namespace), *config_maps]


def _config_maps(job: Job, bundle: Bundle, metadata: dict[str, Any], shared: bool) -> list[dict[str, Any]]:
    """Return the ConfigMaps with the archives of the bundle: the runtime in one, the code in as many as it needs."""
    found = []
    for kind, archive in bundle.archives.items():
        key = pod_layout.RUNTIME_ARCHIVE
        pieces = [archive[begin : begin + CHUNK] for begin in range(0, len(archive), CHUNK)]
        owner = f"flk-{kind}-{hashlib.sha256(archive).hexdigest()[:16]}" if shared else f"{job.name}-{kind}"
        for number, piece in enumerate(pieces):
            if kind == "code":
                key = f"{pod_layout.CODE_ARCHIVE}.{number:03}"
            found.append(
                {
                    "apiVersion": "v1",
                    "kind": "ConfigMap",
                    "metadata": {"name": f"{owner}-{number}", **metadata},
                    "immutable": True,
                    "binaryData": {key: base64.b64encode(piece).decode("ascii")},
                }
            )
    return found


# Text that every version of YAML reads as text. Parsers differ in 1e3, 0o7, 1_000, y and others, so these are quoted.
_PLAIN: Final = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*(?::[A-Za-z0-9_./-]+)*", re.ASCII)
_WORDS: Final = frozenset(
    {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "none", "nan", "inf", "infinity"}
)

_Base: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # the dumper of libyaml is many times faster


class _Dumper(_Base):  # type: ignore[misc]
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: Any, value: str) -> Any:
    plain = _PLAIN.fullmatch(value) and value.lower() not in _WORDS
    return dumper.represent_scalar("tag:yaml.org,2002:str", str(value), style=None if plain else '"')


def _list(dumper: Any, value: list[Any]) -> Any:
    numbers = bool(value) and all(isinstance(item, int) for item in value)  # exit codes, which fill pages otherwise
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=numbers)


_Dumper.add_representer(str, _text)
_Dumper.add_multi_representer(str, _text)  # names of variables, which are a type of their own
_Dumper.add_representer(list, _list)


def note_on_apply(manifests: list[dict[str, Any]]) -> str:
    """Return why kubectl apply alone cannot create the manifests; empty if it can. `to_yaml` says in short what can."""
    if max(len(str(each)) for each in manifests) <= 2**18:
        return ""
    return (
        "create this with kubectl create, or kubectl apply --server-side: apply alone copies each object into an "
        "annotation of at most 256 KiB, and the archive is larger"
    )


def to_yaml(manifests: list[dict[str, Any]], job: Job | None = None) -> str:
    """Return the manifests as YAML documents. With ``job``, a comment names the source of its fabric's values."""
    head = [f"# Rendered by flk {VERSION}. Create it: kubectl create -f FILE (or apply --server-side: code is large)."]
    if job is not None:
        fabric = FABRICS[job.fabric]
        head.append(f"# fabric {fabric.name}: {fabric.description}. Values from: {fabric.source}.")
        if fabric.needs:
            head.append(f"# It also needs {fabric.needs}.")
    return "\n".join(head) + "\n" + dumped(manifests)


def dumped(documents: list[dict[str, Any]]) -> str:
    """Return mappings as YAML documents in which every parser reads the same."""
    return str(
        yaml.dump_all(
            documents, Dumper=_Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True, width=2**31 - 1
        )
    )


def to_json(manifests: list[dict[str, Any]]) -> str:
    """Return the manifests as a JSON List of Kubernetes."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests}, indent=2, ensure_ascii=False) + "\n"
