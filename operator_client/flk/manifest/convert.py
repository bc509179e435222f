"""Convert a PyTorchJob of any origin to the fields of a job file that trains the same.

What flk itself decides (ranks, ports, rendezvous, restarts of containers) is left out. What a job file has a field for
becomes that field, and the rest of the pod template stays as it is, as the job's ``patch``. A field of the PyTorchJob
that has no counterpart is refused by its path.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import PurePosixPath
from typing import Any, Final

from flk.errors import UsageError
from flk.manifest.command import Command, command_of_job, shell_word
from flk.manifest.pod import LAUNCHER_GRACE, USER, patched
from flk.manifest.render import dumped
from flk.spec import labels
from flk.spec.fields import RUNTIME
from flk.spec.file import ManifestLoader, mapping
from flk.spec.job import validated
from flk.targets.pytorchjob import PyTorchJob
from flk_runtime.contract import pod_layout, user_env
from flk_runtime.contract.values import dataclass

_ROLES: Final = ("Master", "Worker")
_PODS: Final = "pytorchReplicaSpecs"
_VOLUMES: Final = ("api", "checkpoint", "ship", "work")
_POD_NULLS: Final = dict.fromkeys(
    ("runAsNonRoot", "runAsUser", "runAsGroup", "fsGroup", "fsGroupChangePolicy", "seccompProfile")
)
_CONTAINER_NULLS: Final = {"allowPrivilegeEscalation": None, "capabilities": {"drop": None}}
_MARKS: Final = ("labels", "annotations")
_GPU: Final = "nvidia.com/gpu"


@dataclass(frozen=True)
class Converted:
    """The fields of a job file, and a line for each difference between its pods and the manifest's."""

    fields: dict[str, Any]
    notes: list[str]


def convert(text: str, source: str) -> Converted:
    """Return the job that trains as the only PyTorchJob in YAML text does. ``source`` names the text in errors.

    Raises UsageError with a line for each field that a job cannot have.
    """
    documents = [mapping(part, source, ManifestLoader) for part in re.split(r"(?m)^---.*$", text)]
    found = [(document, job) for document in documents for job in _jobs_in(document)]
    if len(found) != 1:
        raise UsageError(f"{source}: has {len(found)} PyTorchJobs: expected one")
    conversion = _Conversion(*found[0])
    fields = conversion.job()
    if conversion.refused:
        raise UsageError.of([UsageError(f"{source}: {line}") for line in dict.fromkeys(conversion.refused)])
    validated(fields, source=source)
    return Converted(fields, [*dict.fromkeys(conversion.notes)])


def _jobs_in(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the PyTorchJobs in a document, also those inside of another object, such as an AppWrapper or a List."""
    if isinstance(value, dict):
        if value.get("kind") == PyTorchJob.kind and isinstance(spec := value.get("spec"), dict) and _PODS in spec:
            yield value
            return
        value = [*value.values()]
    for item in value if isinstance(value, list) else ():
        yield from _jobs_in(item)


class _Conversion:
    """Converts one manifest, and removes what it converts: a field of ``spec`` that is left has no counterpart."""

    def __init__(self, document: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
        """``document`` is the object around the manifest, whose queue is that of the job, or the manifest itself."""
        self.refused: list[str] = []
        self.notes: list[str] = []
        self.outer = self._mapping("metadata.labels", self._mapping("metadata", document.get("metadata")).get("labels"))
        self.metadata = self._mapping("metadata", manifest.get("metadata"))
        self.spec = self._mapping("spec", manifest.get("spec"))
        self.ranks: object = None  # the number of ranks in a pod, as the job as a whole says

    def _mapping(self, path: str, value: Any) -> dict[str, Any]:
        """Return a mapping of the manifest without its nulls, and refuse another value; empty if there is none."""
        if isinstance(value, dict):
            return {key: item for key, item in value.items() if item is not None}
        if value is not None:
            self.refused.append(f"{path}: must be a mapping (is {value!r})")
        return {}

    def _items(self, path: str, value: Any) -> list[Any]:
        """Return a list of the manifest, and refuse another value; empty if there is none."""
        if value is not None and not isinstance(value, list):
            self.refused.append(f"{path}: must be a list (is {value!r})")
            return []
        return list(value or [])

    def _mappings(self, path: str, value: Any) -> list[dict[str, Any]]:
        return [
            self._mapping(f"{path}[{i}]", item) for i, item in enumerate(self._items(path, value)) if item is not None
        ]

    def job(self) -> dict[str, Any]:
        """Return the fields of the job."""
        roles = self._mapping(f"spec.{_PODS}", self.spec.pop(_PODS, None))
        fields = self._fields_of_job()
        each = [self._role(role, roles[role]) for role in _ROLES if role in roles]
        self.refused += [f"spec.{_PODS}.{role}: is no role of a PyTorchJob" for role in {*roles} - {*_ROLES}]
        if not each:
            self.refused.append(f"spec.{_PODS}: has no pods")
            return fields
        replicas = sum(count for count, _ in each)
        pod = each[-1][1]
        patch = pod.get("patch", {})
        for path in _differences(each[0][1], pod):
            place = path.split(".", 3)  # the name of a label has dots too
            if place[:2] == ["patch", "metadata"] and f"'{place[-1]}'" not in str(patch.get("spec")):
                patch.get("metadata", {}).get(place[2], {}).pop(place[-1], None)
                self.notes.append(f"{path.removeprefix('patch.')} is left out: Master and Worker differ in it")
            else:
                self.refused.append(
                    f"Master and Worker differ in {path}: all pods of a job are equal, so give it to both"
                )
        bounds = {"min": replicas, "max": replicas, **fields.pop("elastic")}
        if bounds["min"] != bounds["max"]:
            fields["elastic"] = bounds
        return {**fields, "replicas": replicas, **pod, "ship": RUNTIME}

    def _fields_of_job(self) -> dict[str, Any]:
        """Take what belongs to the job as a whole out of the manifest, and return the fields for it."""
        policy = self._mapping("spec.runPolicy", self.spec.pop("runPolicy", None))
        elastic = self._mapping("spec.elasticPolicy", self.spec.pop("elasticPolicy", None))
        policy.pop("cleanPodPolicy", None)  # pods of flk stay, with their logs, until the job is deleted
        own = self._mapping("metadata.labels", self.metadata.get("labels"))
        fields = {
            "name": self.metadata.get("name"),
            "queue": own.pop(labels.QUEUE, self.outer.get(labels.QUEUE)),
            "queue_priority": own.pop(labels.QUEUE_PRIORITY, self.outer.get(labels.QUEUE_PRIORITY)),
            "restarts": policy.pop("backoffLimit", elastic.pop("maxRestarts", None)),
            "deadline": policy.pop("activeDeadlineSeconds", None),
            "ttl": policy.pop("ttlSecondsAfterFinished", None),
        }
        if policy.pop("suspend", False) and not fields["queue"]:
            self.notes.append("spec.runPolicy.suspend is left out: flk suspend JOB suspends the job")
        if scheduling := self._mapping("spec.runPolicy.schedulingPolicy", policy.pop("schedulingPolicy", None)):
            fields["gang"] = "auto"
            self.notes.append(
                f"spec.runPolicy.schedulingPolicy became gang: auto, all pods or none, without {', '.join(scheduling)}"
            )
        bounds = [kind for kind in ("min", "max") if f"{kind}Replicas" in elastic]
        fields["elastic"] = {kind: elastic.pop(f"{kind}Replicas") for kind in bounds}
        for name in [key for key in elastic if key.startswith("rdzv") or key == "standalone"]:
            del elastic[name]  # flk's launchers meet by themselves
        if elastic.pop("metrics", None):
            self.notes.append(
                "spec.elasticPolicy.metrics are left out: flk scale JOB changes the number of pods, no autoscaler"
            )
        self.ranks = self.spec.pop("nprocPerNode", elastic.pop("nProcPerNode", None))
        if str(self.ranks).isdecimal():
            fields["processes"] = int(str(self.ranks))
        left_out = {
            "labels": [*own],
            "annotations": [*self._mapping("metadata.annotations", self.metadata.get("annotations"))],
            "generateName": [*filter(None, [self.metadata.get("generateName")])],
        }
        for name, given in left_out.items():
            if given:
                self.notes.append(f"metadata.{name} is left out: {', '.join(given)}")
        if namespace := self.metadata.get("namespace"):
            self.notes.append(f"the namespace is no field: flk submit -n {namespace}")
        left = {"spec": self.spec, "spec.runPolicy": policy, "spec.elasticPolicy": elastic}
        self.refused += [f"{path}.{name}: has no counterpart in a job" for path, rest in left.items() for name in rest]
        return {name: value for name, value in fields.items() if value is not None}

    def _role(self, name: str, given: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of pods of a role, and the fields that say what each is."""
        above = f"spec.{_PODS}.{name}"
        path = f"{above}.template.spec"
        role = self._mapping(above, given)
        replicas = role.get("replicas", 1)
        template = self._mapping(f"{above}.template", role.get("template"))
        self.refused += [
            f"{above}.{key}: is no field of a role"
            for key in sorted(role.keys() - {"replicas", "restartPolicy", "template"})
        ]
        spec = self._mapping(path, template.get("spec"))
        spec.pop("restartPolicy", None)
        containers = self._mappings(f"{path}.containers", spec.pop("containers", None))
        named = [container for container in containers if container.get("name") == PyTorchJob.container]
        if not (named or len(containers) == 1):
            self.refused.append(f"{path}.containers: none of {len(containers)} is named {PyTorchJob.container}")
            return 0, {}
        main = (named or containers)[0]
        others = [container for container in containers if container is not main]
        fields: dict[str, Any] = {"restarts": 0} if role.get("restartPolicy") == "Never" else {}
        if isinstance(spec.get("terminationGracePeriodSeconds"), int):
            fields["grace"] = max(1, spec.pop("terminationGracePeriodSeconds") - LAUNCHER_GRACE)
        fields |= self._container(path, main)
        main.pop("name", None)
        inits = self._mappings(f"{path}.initContainers", spec.pop("initContainers", None))
        self._name_volumes(path, spec, main, [*others, *inits])
        self._keep_security(path, spec, main, [*others, *inits], setup=fields["setup"].startswith("("))
        if inits:
            spec["initContainers"] = inits
        if {"serviceAccountName", "serviceAccount"} & spec.keys():
            spec.setdefault("automountServiceAccountToken", None)  # as Kubernetes has it
        if main or others:
            spec["containers"] = [{"name": PyTorchJob.container, **main}, *others]
        metadata = self._mapping(f"{above}.template.metadata", template.get("metadata"))
        if left := sorted(metadata.keys() - {"name", "creationTimestamp", "labels", "annotations"}):
            self.notes.append(f"template.metadata is left out: {', '.join(left)}")
        kinds = {key: self._mapping(f"{above}.template.metadata.{key}", metadata.get(key)) for key in _MARKS}
        metadata = {key: value for key, value in kinds.items() if value}
        if patch := {key: part for key, part in (("metadata", metadata), ("spec", spec)) if part}:
            fields["patch"] = patch
        if not isinstance(replicas, int):
            self.refused.append(f"spec.{_PODS}.{name}.replicas: must be a number (is {replicas!r})")
            return 0, fields
        return replicas, fields

    def _name_volumes(
        self, path: str, spec: dict[str, Any], main: dict[str, Any], others: list[dict[str, Any]]
    ) -> None:
        """Rename the volumes of a pod that have the names of flk's own, where it has them and its containers use them.

        ``main`` is the training container.
        """
        users = [spec, main, *others]
        for user in users:
            for key in [key for key in ("volumes", "volumeMounts", "volumeDevices") if key in user]:
                if items := self._mappings(f"{path}.{key}", user.pop(key)):  # an empty list would remove flk's
                    user[key] = items
        mounts = main.get("volumeMounts", [])
        in_memory = any((mount.get("name"), mount.get("mountPath")) == ("shm", pod_layout.SHM) for mount in mounts)
        own = [*_VOLUMES, *([] if in_memory else ["shm"])]
        taken = [volume.get("name") for volume in spec.get("volumes", [])]
        names = {name: next(new for n in count(1) if (new := name + n * "-data") not in taken) for name in own}
        parts = [part for user in users for key in user if key.startswith("volume") for part in user[key]]
        for part in [part for part in parts if str(part.get("name")) in names]:
            part["name"] = names[part["name"]]

    def _keep_security(
        self, path: str, spec: dict[str, Any], main: dict[str, Any], others: list[dict[str, Any]], *, setup: bool
    ) -> None:
        """Remove flk's security contexts from a pod that has one; together they are what neither means."""
        if any(user.get("securityContext") for user in (spec, main, *others)):
            for user, nulls in ((spec, _POD_NULLS), (main, _CONTAINER_NULLS)):
                given = self._mapping(f"{path}.securityContext", user.get("securityContext"))
                user["securityContext"] = patched(nulls, given) if given else None
        elif setup:
            self.notes.append(
                f"setup runs as user {USER} in the folder of the image: where only root may write there, "
                "patch.spec.securityContext says who runs it"
            )

    def _container(self, path: str, main: dict[str, Any]) -> dict[str, Any]:
        """Take what flk has fields for out of the training container, and return these fields."""
        where = f"{path}.containers[{PyTorchJob.container}]"
        image = str(main.pop("image", None) or "")
        tagged = image.rpartition("/")[2].partition(":")[2] not in ("", "latest") or "@" in image
        policy = main.pop("imagePullPolicy", "IfNotPresent" if tagged else "Always")
        main["ports"] = [
            {"name": f"port-{number}", **port}  # without a name, they would take the place of flk's
            for number, port in enumerate(self._mappings(f"{where}.ports", main.pop("ports", None)))
            if port.get("name") != PyTorchJob.port_name
        ]
        words = [
            str(word) for name in ("command", "args") for word in self._items(f"{where}.{name}", main.pop(name, None))
        ]
        command = Command(words, str(main.pop("workingDir", None) or "."))
        fields: dict[str, Any] = {"image": image, "image_pull_policy": policy}
        env, kept = self._env(f"{where}.env", main.pop("env", None), fields)
        given = self._mapping(f"{where}.resources", main.pop("resources", None))
        amounts = {kind: self._mapping(f"{where}.resources.{kind}", given.get(kind)) for kind in ("limits", "requests")}
        try:
            resources, left = _resources(**amounts)
            fields |= {"resources": resources} if resources else {}
            main["resources"] = {kind: given[kind] for kind in given if kind not in amounts} | {
                kind: rest for kind, of in amounts.items() if (rest := {name: of[name] for name in of if name in left})
            }
        except ValueError as error:
            self.refused.append(f"{where}.resources: {error}")
        try:
            command = command_of_job(command, env, fields.get("processes", self.ranks))
            env |= self._env(f"{where}.command", command.exported, fields)[0]
            fields |= {"command": command.words, **command.fields}
        except ValueError as error:
            self.refused.append(f"{where}.command: {error}")
        if (ranks := fields.get("processes", self.ranks)) == "cpu":
            self.refused.append("spec.nprocPerNode: must be a number (is 'cpu', a rank for each CPU of the node)")
        elif ranks in ("auto", None):  # the default, too
            fields.pop("processes", None)
            amounts = fields.get("resources", {})
            if not any(name.endswith("gpu") for name in (*amounts, *amounts.get("extended", {}))):
                self.notes.append(
                    "nprocPerNode auto became one rank in each pod, which names no GPUs; processes: N gives others"
                )
        # Ranks start in a folder of their own, where they may write. There they find the files of this one, also those
        # that the setup adds to it.
        links = f"ln -sf {shell_word(command.folder)}/* ."
        fields["setup"] = f"{command.setup} && {links}" if command.setup else links
        for mount in self._mappings(f"{where}.volumeMounts", main.get("volumeMounts")):
            if PurePosixPath(command.folder).is_relative_to(str(mount.get("mountPath"))):
                self.notes.append(
                    f"ranks start in {pod_layout.WORK_FOLDER}, not in the volume at {mount.get('mountPath')}: "
                    "what they write there by a relative path is lost with the pod"
                )
        if env:
            fields["env"] = env
        main |= {"env": kept}
        for name in [name for name, value in main.items() if value in ([], {}, None)]:
            del main[name]
        return fields

    def _env(self, path: str, given: Any, fields: dict[str, Any]) -> tuple[dict[str, str], list[Any]]:
        """Return the variables with values, and those that stay in the patch; secrets and processes become fields."""
        env: dict[str, str] = {}
        kept = []
        # As in Kubernetes, the last one of a name counts.
        for variable in {str(each.get("name")): each for each in self._mappings(path, given)}.values():
            name, value = variable.get("name"), variable.get("value")
            source = self._mapping(f"{path}[{name}].valueFrom", variable.get("valueFrom"))
            secret = self._mapping(f"{path}[{name}].valueFrom.secretKeyRef", source.get("secretKeyRef"))
            if not isinstance(name, str):
                self.refused.append(f"{path}: a variable has no name")
            elif name == "PET_NPROC_PER_NODE" and str(value).isdecimal():
                fields["processes"] = int(str(value))
            elif user_env.is_reserved(name):  # a manifest that sets it by hand does what flk does
                self.notes.append(f"the variable {name} is left out: flk's launcher sets it")
            elif {"name", "key"} <= secret.keys() and not secret.get("optional"):
                fields.setdefault("secrets", {})[name] = f"{secret['name']}:{secret['key']}"
            elif source or "$(" in str(value):
                kept.append(variable)
            else:
                env[name] = "" if value is None else str(value).replace("$$", "$")
        return env, kept


def _resources(limits: Mapping[str, Any], requests: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Return the field for resources, and the names of those that stay in the patch.

    What only limits name is requested too, as in Kubernetes. Memory that is only requested has no limit.
    """
    resources: dict[str, Any] = {}
    kept = set()
    for name, given in {**limits, **requests}.items():
        amount, limit = str(given), str(limits.get(name, ""))
        if name == "cpu":
            resources |= {"cpu": amount, "cpu_limit": limit or None}
        elif name == "memory" and limit:
            resources |= {"memory": amount, "memory_limit": limit if limit != amount else None}
        elif name == "ephemeral-storage" and limit == amount:
            resources["ephemeral_storage"] = amount
        elif amount == "0" or name in ("memory", "ephemeral-storage") or name.startswith("hugepages-"):
            kept.add(name)
        elif not amount.isdecimal():
            raise ValueError(f"{name}: must be a number (is {amount!r})")
        elif name == _GPU:
            resources["gpu"] = int(amount)
        else:
            resources.setdefault("extended", {})[name] = int(amount)
    return {name: amount for name, amount in resources.items() if amount is not None}, kept


def _differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Return the paths at which two values differ, the deepest ones."""
    if one == other:
        return []
    if isinstance(one, dict) and isinstance(other, dict):
        keys = dict.fromkeys([*one, *other])
        return [
            p for key in keys for p in _differences(one.get(key, {}), other.get(key, {}), f"{path}.{key}".lstrip("."))
        ]
    return [path]


def job_file(converted: Converted) -> str:
    """Return the text of a job file, which begins with the notes as comments."""
    return "".join(f"# {note}\n" for note in converted.notes) + dumped([converted.fields])
