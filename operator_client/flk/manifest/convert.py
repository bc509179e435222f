"""Convert a PyTorchJob of any origin to the fields of a job file that trains the same.

What flk itself decides (ranks, ports, rendezvous, restarts of containers) is left out. What a job file has a field for
becomes that field, and the rest of the pod template stays as it is, as the job's ``patch``. A field of the PyTorchJob
that has no counterpart is refused by its path.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from itertools import count, dropwhile, takewhile
from pathlib import PurePosixPath
from typing import Any, Final

from flk.errors import UsageError
from flk.manifest.pod import USER, patched
from flk.manifest.render import dumped
from flk.spec import labels
from flk.spec.fields import RUNTIME
from flk.spec.file import mapping
from flk.spec.job import validated
from flk.targets.pytorchjob import PyTorchJob
from flk_runtime.contract import pod_layout, user_env
from flk_runtime.contract.values import dataclass

_ROLES: Final = ("Master", "Worker")
_PODS: Final = "pytorchReplicaSpecs"
_SHELL: Final = re.compile(r"(?:/bin/|/usr/bin/)?(?:ba|da|z)?sh")
_PYTHON: Final = re.compile(r"(?:\S*/)?python[0-9.]*")
_LAUNCHERS: Final = ("torch.distributed.run", "torch.distributed.launch")
# torchrun's options without a value, but those that change what is started.
_SWITCHES: Final = ("--standalone", "--use-env", "--virtual-local-rank")
_CHANGES: Final = ("--no-python", "--run-path")
_DYNAMIC: Final = frozenset("`$|<>;&*?(){}")  # what a shell would do something about
_EXPANDED: Final = frozenset("`$*~")  # also in the value of a variable
_BY_GPUS: Final = re.compile(r"gpu|\$[({]?PET_NPROC_PER_NODE[)}]?")  # or as the manifest says otherwise
# A setup has a shell of its own. Its variables do not reach the ranks, nor do other changes of the shell itself.
_OF_VARIABLES: Final = (
    *("cd", "pushd", "export", "source", ".", "read", "mapfile", "readarray"),
    *("declare", "typeset", "let", "local", "readonly"),
)
_OF_SHELLS: Final = (
    *("eval", "exec", "alias", "trap", "ulimit", "umask", "unset"),
    *("{", "if", "for", "while", "until", "case", "function"),
)
_ASSIGNMENT: Final = re.compile(r"\w+=")
_NAMED: Final = re.compile(r"\$\$|\$\((\w+)\)")  # which Kubernetes replaces, $$ by $
_UNEXPANDED: Final = re.compile(r"""('[^']*')|"(?:\\.|[^"\\])*"|(?:\\.|[^'"\\])+""", re.DOTALL)  # in its group
_EXPANSION: Final = re.compile(r"\\.|\$(\w+)|\$\{(\w+)(?::?-[^}]*)?\}", re.DOTALL)
_QUOTED: Final = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.|(?<!\S)#[^\n]*""", re.DOTALL)  # or a comment
_COMMAND: Final = re.compile(rf"""(?:{_QUOTED.pattern}|[^&;\n]|(?<!&)&(?!&))+""", re.DOTALL)
# In the background; or a test whose failure leaves out a change of the shell, and none of the commands after it.
_NO_SETUP: Final = re.compile(
    r"(?<![&>])&(?![&>])|(?:^|[;&\n])\s*(?:test|\[\[?)\s[^&;\n]*&&\s*(?:cd|export)\s[^&;\n]*[;\n]"
)
_OUTSIDE: Final = re.compile(r"(?:-[^=]*=)?(?:\./)*\.\.(?:/|$)")
_SHELL_PROGRAM: Final = "is a shell program of its own: name the script and its arguments, and give the rest as setup"
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
    documents = [mapping(part, source) for part in re.split(r"(?m)^---.*$", text)]
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
        if value.get("kind") == PyTorchJob.kind and _PODS in (value.get("spec") or {}):
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
        outer = self._mapping("metadata", document.get("metadata"))
        self.outer = self._mapping("metadata.labels", outer.get("labels"))
        self.metadata = self._mapping("metadata", manifest.get("metadata"))
        self.spec = self._mapping("spec", manifest.get("spec"))
        self.ranks: Any = None  # of a pod, as the job says

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
        fields = self._of_job()
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

    def _of_job(self) -> dict[str, Any]:
        """Take what belongs to the job as a whole."""
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
        annotations = self._mapping("metadata.annotations", self.metadata.get("annotations"))
        for name, given in (("labels", own), ("annotations", annotations)):
            if given:
                self.notes.append(f"metadata.{name} are left out: {', '.join(given)}")
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
        count = role.get("replicas")
        template = self._mapping(f"{above}.template", role.get("template"))
        spec = self._mapping(path, template.get("spec"))
        spec.pop("restartPolicy", None)
        containers = self._mappings(f"{path}.containers", spec.pop("containers", None))
        named = [container for container in containers if container.get("name") == PyTorchJob.container]
        if not (named or len(containers) == 1):
            self.refused.append(f"{path}.containers: none of {len(containers)} is named {PyTorchJob.container}")
            return 0, {}
        main = (named or containers)[0]
        others = [container for container in containers if container is not main]
        fields = {**({"restarts": 0} if role.get("restartPolicy") == "Never" else {}), **self._container(path, main)}
        main.pop("name", None)
        users = [spec, main, *others, *self._mappings(f"{path}.initContainers", spec.pop("initContainers", None))]
        self._name_volumes(path, users)
        self._keep_security(path, users, setup=fields["setup"].startswith("("))
        inits = users[2 + len(others) :]
        spec |= {"initContainers": inits} if inits else {}
        if {"serviceAccountName", "serviceAccount"} & spec.keys():
            spec.setdefault("automountServiceAccountToken", None)  # as Kubernetes has it
        if main or others:
            spec["containers"] = [{"name": PyTorchJob.container, **main}, *others]
        metadata = self._mapping(f"{above}.template.metadata", template.get("metadata"))
        if left := sorted(metadata.keys() - {"name", "creationTimestamp", "labels", "annotations"}):
            self.notes.append(f"template.metadata is left out: {', '.join(left)}")
        kinds = {key: self._mapping(f"{above}.template.metadata.{key}", metadata.get(key)) for key in _MARKS}
        metadata = {key: value for key, value in kinds.items() if value}
        patch = {**({"metadata": metadata} if metadata else {}), **({"spec": spec} if spec else {})}
        if count is not None and not isinstance(count, int):
            self.refused.append(f"spec.{_PODS}.{name}.replicas: must be a number (is {count!r})")
            count = None
        return 1 if count is None else count, {**fields, **({"patch": patch} if patch else {})}

    def _name_volumes(self, path: str, users: list[dict[str, Any]]) -> None:
        """Rename the volumes of a pod, of its training container and of others that have the names of flk's own."""
        for user in users:
            for key in [key for key in ("volumes", "volumeMounts", "volumeDevices") if key in user]:
                if items := self._mappings(f"{path}.{key}", user.pop(key)):  # an empty list would remove flk's
                    user[key] = items
        mounts = users[1].get("volumeMounts", [])
        in_memory = any((mount.get("name"), mount.get("mountPath")) == ("shm", pod_layout.SHM) for mount in mounts)
        own = [*_VOLUMES, *([] if in_memory else ["shm"])]
        taken = [volume.get("name") for volume in users[0].get("volumes", [])]
        names = {name: next(new for n in count(1) if (new := name + n * "-data") not in taken) for name in own}
        parts = [part for user in users for key in user if key.startswith("volume") for part in user[key]]
        for part in [part for part in parts if part.get("name") in names]:
            part["name"] = names[part["name"]]

    def _keep_security(self, path: str, users: list[dict[str, Any]], *, setup: bool) -> None:
        """Remove flk's security contexts from a pod that has one; together they are what neither means."""
        if any(user.get("securityContext") for user in users):
            for user, nulls in zip(users, (_POD_NULLS, _CONTAINER_NULLS), strict=False):
                given = self._mapping(f"{path}.securityContext", user.get("securityContext"))
                user["securityContext"] = patched(nulls, given) if given else None
        elif setup:
            self.notes.append(
                f"setup runs as user {USER} in the folder of the image: where only root may write there, "
                "patch.spec.securityContext says who runs it"
            )

    def _container(self, path: str, main: dict[str, Any]) -> dict[str, Any]:
        """Take what flk has fields for out of the training container."""
        where = f"{path}.containers[{PyTorchJob.container}]"
        image = str(main.pop("image", None) or "")
        tagged = image.rpartition("/")[2].partition(":")[2] not in ("", "latest") or "@" in image
        policy = main.pop("imagePullPolicy", "IfNotPresent" if tagged else "Always")
        main["ports"] = [
            port
            for port in self._mappings(f"{where}.ports", main.pop("ports", None))
            if port.get("name") != PyTorchJob.port_name
        ]
        words = [
            str(word) for name in ("command", "args") for word in self._items(f"{where}.{name}", main.pop(name, None))
        ]
        folder = str(main.pop("workingDir", None) or ".")
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
            folder, command = _command(words, folder, env, fields.get("processes", self.ranks))
            env |= self._env(f"{where}.command", command.pop("exported", None), fields)[0]
            fields |= command
        except ValueError as error:
            self.refused.append(f"{where}.command: {error}")
        if (ranks := fields.get("processes", self.ranks)) == "cpu":
            self.refused.append("spec.nprocPerNode: must be a number (is 'cpu', a rank for each CPU of the node)")
        elif ranks == "auto":
            fields.pop("processes", None)
            if "gpu" not in fields.get("resources", {}):
                self.notes.append(
                    "nprocPerNode auto became one rank in each pod, which names no GPUs; processes: N gives others"
                )
        # Ranks start in a folder of their own, where they may write. There they find the files of this one, also those
        # that the setup adds to it.
        links = f"ln -sf {_place(folder)}/* ."
        fields["setup"] = f"{fields['setup']} && {links}" if "setup" in fields else links
        for mount in self._mappings(f"{where}.volumeMounts", main.get("volumeMounts")):
            if PurePosixPath(folder).is_relative_to(str(mount.get("mountPath"))):
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
        for variable in self._mappings(path, given):
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
        elif name in ("memory", "ephemeral-storage") or name.startswith("hugepages-"):
            kept.add(name)
        elif not amount.isdecimal():
            raise ValueError(f"{name}: must be a number (is {amount!r})")
        elif name == _GPU:
            resources["gpu"] = int(amount)
        else:
            resources.setdefault("extended", {})[name] = int(amount)
    return {name: amount for name, amount in resources.items() if amount is not None}, kept


def _command(words: list[str], folder: str, env: Mapping[str, str], ranks: Any) -> tuple[str, dict[str, Any]]:
    """Return the folder in which a container's command runs, and the fields for it. ``ranks``: those of a pod so far.

    A folder that is relative is one in the image's WORKDIR. The fields are ``command``, and where it says so
    ``processes``, ``setup`` and others; ``exported`` has the variables of a shell as a container's ``env`` has them.
    Raises ValueError, which says why it cannot be the command of a job.
    """
    if not words:
        raise ValueError("is that of the image, which flk does not know: write it into the manifest")
    words = [_NAMED.sub(lambda found: env.get(found[1], found[0]) if found[1] else "$", word) for word in words]
    setup, dynamic = dict[str, Any](), frozenset("$")
    if _SHELL.fullmatch(words[0]):
        folder, setup, words = _shell(words, folder, env)
        dynamic = _DYNAMIC
    if launched := _launched(words, ranks):
        fields, words = launched
    elif _PYTHON.fullmatch(words[0]):
        fields, words = {"processes": 1}, _options(words)
    elif words[0].startswith("-"):
        raise ValueError(
            "has arguments only, of the program that the image starts: write its command into the manifest"
        )
    elif not words[0].endswith(".py"):
        raise ValueError(
            f"starts {words[0]}: a job starts a Python script or a module, or by torchrun or accelerate launch"
        )
    else:
        fields = {"processes": 1}
    if not words or (words[0] != "-m" and words[0].startswith("-")):
        raise ValueError("has no script and no module")
    if changed := next((word for word in words if dynamic & {*word}), None):
        raise ValueError(f"{changed}: a job's arguments are as they are written, and no shell changes them")
    if words[0] != "-m":
        words = [str(PurePosixPath(folder if folder.startswith("/") else "") / words[0]), *words[1:]]
    if outside := next((word for word in words if _OUTSIDE.match(word)), None):
        raise ValueError(f"{outside}: ranks start in a folder of their own: give the full path")
    return folder, {"command": words, **fields, **setup}


def _options(words: list[str]) -> list[str]:
    """Return the words after ``python`` and its options that change nothing for ranks."""
    return [*dropwhile(lambda word: word in ("-u", "-O", "-B", "-s"), words[1:])]


def _launched(words: list[str], ranks: Any = None) -> tuple[dict[str, Any], list[str]] | None:
    """Return the fields, and the script with its arguments, of a command that starts ranks; None of any other."""
    module = _options(words) if _PYTHON.fullmatch(words[0]) else words
    if module[:2] in (["accelerate", "launch"], ["-m", "accelerate.commands.launch"]):
        return {}, ["-m", "flk_hosts.accelerate_launch", *module[2:]]
    if PurePosixPath(words[0]).name == "torchrun":
        return _torchrun(words[1:], ranks)
    starts = module[:1] == ["-m"] and {*module[1:2]} & {*_LAUNCHERS}
    return _torchrun(module[2:], ranks, passes_rank=module[1] == _LAUNCHERS[-1]) if starts else None


def _torchrun(words: list[str], ranks: Any, *, passes_rank: bool = False) -> tuple[dict[str, Any], list[str]]:
    """Return the fields that torchrun's options become, and the script with its arguments.

    ``ranks`` are those of a pod, unless an option says so. ``passes_rank``: without --use-env, the launcher gives the
    script the number of the rank in its pod, too.
    """
    fields: dict[str, Any] = {}
    module = False
    while words and words[0].startswith("-"):
        option, _, value = words[0].partition("=")
        option = option.replace("_", "-")  # torchrun takes both
        if option in _CHANGES:
            raise ValueError(f"{option} starts another program than a Python script")
        words, passes_rank = words[1:], passes_rank and option != "--use-env"
        if option in ("-m", "--module"):
            module = True
        elif option not in _SWITCHES and not value:
            value, words = words[0] if words else "", words[1:]
        if option == "--nproc-per-node" and value.isdecimal():
            fields["processes"] = int(value)
        elif option == "--nproc-per-node" and value == "auto":
            fields["processes"] = value
        elif option == "--nproc-per-node" and not _BY_GPUS.fullmatch(value):
            raise ValueError(f"{option}: must be a number (is {value!r})")
        elif option == "--max-restarts":
            fields["restarts"] = int(value) if value.isdecimal() else value
        elif option == "--nnodes" and (sizes := re.fullmatch(r"(\d+):(\d+)", value)) and sizes[1] != sizes[2]:
            fields["elastic"] = {"min": int(sizes[1]), "max": int(sizes[2])}
    if passes_rank and str(fields.get("processes", ranks)) != "1":
        raise ValueError(
            f"{_LAUNCHERS[-1]} gives each rank its --local-rank: add --use-env, for a script that needs none"
        )
    local_rank = ["--local-rank=0"] if passes_rank else []
    return fields, [*(["-m"] if module else []), *words[:1], *local_rank, *words[1:]]


def _shell(words: list[str], folder: str, env: Mapping[str, str]) -> tuple[str, dict[str, Any], list[str]]:
    """Return the folder, the fields and the command of ``sh -c TEXT``: the last command, which those before set up.

    The fields are ``exported`` and ``setup``. Raises ValueError for any other program of a shell.
    """
    *options, text = words[1:] or [""]
    if (
        not options
        or not all(re.fullmatch(r"-\w+|--login|pipefail", word) for word in options)
        or not options[-1].endswith("c")
    ):
        raise ValueError("runs a shell script: name the Python script that it starts, and give the rest as setup")
    text = _QUOTED.sub(lambda found: "" if found[0].startswith("#") else found[0], text)
    text = text.replace("\\\n", " ").strip("; \t\n")
    commands = [found for found in _COMMAND.finditer(text) if found[0].strip()]
    try:
        *before, command = [shlex.split(found[0]) for found in commands]
    except ValueError:  # no command, or a quote without an end
        before, command = [], []
    given = [*takewhile(_ASSIGNMENT.match, command)]
    if command[len(given) :] in ([], ["exec"]) or _NO_SETUP.search(_QUOTED.sub("", text)):
        raise ValueError(_SHELL_PROGRAM)
    entered, exported = _effects([*before, ["export", *given]], folder)
    fields: dict[str, Any] = {"exported": exported}
    known = {**env, **{row["name"]: row["value"] for row in exported[: len(exported) - len(given)]}}
    command = shlex.split(_UNEXPANDED.sub(lambda part: _expanded(part, known), commands[-1][0]))[len(given) :]
    if command[:1] == ["exec"]:
        command.pop(0)
    if any(parts[0] not in ("cd", "export", "set") for parts in before):
        setup = text[: commands[-2].end()].strip()
        if "&&" not in text[commands[-2].end() : commands[-1].start()]:  # the last one runs also after another failed
            setup = f"{text[: commands[-1].start()]} true"
        fields["setup"] = f"(cd {_place(folder)} && {shlex.join([*words[:-1], setup])})"
    return entered, fields, command


def _expanded(part: re.Match[str], known: Mapping[str, str]) -> str:
    """Return a part of a shell's command with the values of known variables, which it replaces but in single quotes."""
    return part[0] if part[1] else _EXPANSION.sub(lambda found: _value(found, known), part[0])


def _value(found: re.Match[str], known: Mapping[str, str]) -> str:
    """Return the value that a shell puts in place of a variable; what was found, unless it is known and one word."""
    value = known.get(found[1] or found[2], "")
    return value if shlex.quote(value) == value else found[0]


def _effects(commands: list[list[str]], folder: str) -> tuple[str, list[dict[str, str]]]:
    """Return the folder and the exported variables after the commands of a shell.

    Raises ValueError for a command that starts ranks, or whose effect on those of the last command a setup lacks.
    """
    exported = []
    for words in commands:
        parts = [*dropwhile(_ASSIGNMENT.match, words)] or [""]
        known = not any(_EXPANDED & {*part} for part in parts)
        if {*_LAUNCHERS} & {*parts} or _launched(parts):
            raise ValueError(f"{' '.join(words)}: is a training before the last command: make a job of each")
        if parts[0] in _OF_SHELLS:
            raise ValueError(f"{' '.join(words)}: {_SHELL_PROGRAM}")
        if parts[0] == "cd" and known and (entered := _entered(parts[1:], folder)):
            folder = entered
        elif parts[0] == "export" and known and all(map(_ASSIGNMENT.match, parts[1:])):
            exported += [dict(zip(("name", "value"), part.split("=", 1), strict=True)) for part in parts[1:]]
        elif (
            parts[0] in ("", *_OF_VARIABLES)
            or parts[1:2] == ["activate"]
            or re.search(r"\|\| (cd|export|source|\.) |^printf -v ", " ".join(words))
        ):
            raise ValueError(
                f"{' '.join(words)}: ranks do not see what a shell before them does: give it as env or workingDir"
            )
    return folder, exported


def _entered(words: list[str], folder: str) -> str | None:
    """Return the folder after a ``cd`` with these words; None if it depends on more than the manifest says."""
    if not words or words[0].startswith("-") or words[1:] not in ([], ["||", "exit"], ["||", "exit", "1"]):
        return None
    return str(PurePosixPath(folder) / words[0])


def _place(folder: str) -> str:
    """Return the word of a setup command for a folder. The launcher, whose shell runs it, is in the image's WORKDIR."""
    start = "" if folder.startswith("/") else '"$(readlink /proc/$PPID/cwd)"/'
    return (start + shlex.quote(folder)).removesuffix("/.")


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
    comments = "".join(f"# {note}\n" for note in converted.notes)
    return comments + dumped([converted.fields])
