"""Convert a PyTorchJob of any origin to the fields of a job file that trains the same.

What flk itself decides (ranks, ports, rendezvous, restarts of containers) is left out. What a job file has a field for
becomes that field, and the rest of the pod template stays as it is, as the job's ``patch``. A field of the PyTorchJob
that has no counterpart is refused by its path.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

import yaml

from flk.errors import UsageError
from flk.spec import labels
from flk.spec.file import mapping
from flk.spec.job import validated
from flk.targets.pytorchjob import PyTorchJob

_ROLES: Final = ("Master", "Worker")
_PODS: Final = "pytorchReplicaSpecs"
_SHELL: Final = re.compile(r"(?:/bin/|/usr/bin/)?(?:ba|da|z)?sh")
_PYTHON: Final = re.compile(r"(?:\S*/)?python[0-9.]*")
_LAUNCHERS: Final = ("torch.distributed.run", "torch.distributed.launch")
# torchrun's options without a value, but those that change what is started.
_SWITCHES: Final = ("--standalone", "--use-env", "--virtual-local-rank")
_CHANGES: Final = ("--no-python", "--run-path")
# What each launcher sets for its ranks: a manifest that sets it by hand does what flk does.
_OF_RANKS: Final = re.compile(r"(MASTER_(ADDR|PORT)|(LOCAL_)?(RANK|WORLD_SIZE)|NODE_RANK|NNODES|PET_.*)")
_DYNAMIC: Final = re.compile(r"[`$|<>;&*?(){}]")  # what a shell would do something about
_OF_ITSELF: Final = ("source", ".", "eval", "ulimit", "umask", "unset")  # what a shell does for its own process only
_EXPANDED: Final = re.compile(r"[$`~*]")
_COMPOUND: Final = ("if", "for", "while", "case", "function", "trap")
_GPU: Final = "nvidia.com/gpu"
_IGNORED: Final = ("creationTimestamp", "uid", "resourceVersion", "generation", "managedFields", "selfLink")


@dataclass(frozen=True)
class Converted:
    """The fields of a job file, and a line for each difference between its pods and the manifest's."""

    fields: dict[str, Any]
    notes: list[str]


def convert(text: str, source: str) -> Converted:
    """Return the job that trains as the only PyTorchJob in YAML text does. ``source`` names the text in errors.

    Raises UsageError with a line for each field that a job cannot have.
    """
    found = [job for part in re.split(r"(?m)^---.*$", text) for job in _jobs_in(mapping(part, source))]
    if len(found) != 1:
        raise UsageError(f"{source}: has {len(found)} PyTorchJobs: expected one")
    conversion = _Conversion(found[0])
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

    def __init__(self, manifest: Mapping[str, Any]) -> None:
        self.refused: list[str] = []
        self.notes: list[str] = []
        self.metadata = self._mapping("metadata", manifest.get("metadata"))
        self.spec = self._mapping("spec", manifest.get("spec"))

    def _mapping(self, path: str, value: Any) -> dict[str, Any]:
        """Return a mapping of the manifest, and refuse another value; empty if there is none."""
        if isinstance(value, dict):
            return dict(value)
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
        return [self._mapping(f"{path}[{i}]", item) for i, item in enumerate(self._items(path, value))]

    def job(self) -> dict[str, Any]:
        """Return the fields of the job."""
        roles = self._mapping(f"spec.{_PODS}", self.spec.pop(_PODS, None))
        fields = self._of_job()
        each = [self._role(role, roles[role]) for role in _ROLES if role in roles]
        self.refused += [f"spec.{_PODS}.{role}: is no role of a PyTorchJob" for role in {*roles} - {*_ROLES}]
        if not each:
            self.refused.append(f"spec.{_PODS}: has no pods")
            return fields
        for path in _differences(each[0][1], each[-1][1]):
            self.refused.append(f"Master and Worker differ in {path}: all pods of a job are equal")
        replicas = sum(count for count, _ in each)
        pod = each[-1][1]
        processes = fields.pop("processes", None)
        if processes is not None and pod.pop("by_launcher", False):
            pod.setdefault("processes", processes)
        pod.pop("by_launcher", None)
        if sizes := fields.pop("elastic", None):
            bounds = {kind: replicas if size is None else size for kind, size in sizes.items()}
            if bounds["min"] < bounds["max"]:
                fields["elastic"] = bounds
        return {**fields, "replicas": replicas, **pod, "ship": False}

    def _of_job(self) -> dict[str, Any]:
        """Take what belongs to the job as a whole."""
        policy = self._mapping("spec.runPolicy", self.spec.pop("runPolicy", None))
        elastic = self._mapping("spec.elasticPolicy", self.spec.pop("elasticPolicy", None))
        policy.pop("cleanPodPolicy", None)  # pods of flk stay, with their logs, until the job is deleted
        own = self._mapping("metadata.labels", self.metadata.get("labels"))
        fields = {
            "name": self.metadata.get("name"),
            "queue": own.pop(labels.QUEUE, None),
            "queue_priority": own.pop(labels.QUEUE_PRIORITY, None),
            "restarts": _first(policy.pop("backoffLimit", None), elastic.pop("maxRestarts", None)),
            "deadline": policy.pop("activeDeadlineSeconds", None),
            "ttl": policy.pop("ttlSecondsAfterFinished", None),
        }
        if policy.pop("suspend", False) and not fields["queue"]:
            self.notes.append("spec.runPolicy.suspend is left out: flk suspend JOB suspends the job")
        if policy.pop("schedulingPolicy", None):
            fields["gang"] = "auto"
            self.notes.append("spec.runPolicy.schedulingPolicy became gang: auto, all pods or none")
        sizes = {kind: elastic.pop(f"{kind}Replicas", None) for kind in ("min", "max")}
        wrong = [kind for kind, size in sizes.items() if not isinstance(size, int | None)]
        self.refused += [f"spec.elasticPolicy.{kind}Replicas: must be a number (is {sizes[kind]!r})" for kind in wrong]
        if not wrong and sizes != {"min": None, "max": None}:
            fields["elastic"] = sizes
        for name in [key for key in elastic if key.startswith("rdzv") or key == "standalone"]:
            del elastic[name]  # flk's launchers meet by themselves
        if elastic.pop("metrics", None):
            self.notes.append(
                "spec.elasticPolicy.metrics are left out: flk scale JOB changes the number of pods, no autoscaler"
            )
        processes = _first(self.spec.pop("nprocPerNode", None), elastic.pop("nProcPerNode", None))
        if str(processes).isdecimal():
            fields["processes"] = int(str(processes))
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
        if main or others:
            spec["containers"] = [{"name": PyTorchJob.container, **main}, *others]
        metadata = self._mapping(f"{above}.template.metadata", template.get("metadata"))
        metadata = {key: value for key, value in metadata.items() if value and key not in _IGNORED}
        metadata.pop("name", None)
        patch = {**({"metadata": metadata} if metadata else {}), **({"spec": spec} if spec else {})}
        if count is not None and not isinstance(count, int):
            self.refused.append(f"spec.{_PODS}.{name}.replicas: must be a number (is {count!r})")
            count = None
        return 1 if count is None else count, {**fields, **({"patch": patch} if patch else {})}

    def _container(self, path: str, main: dict[str, Any]) -> dict[str, Any]:
        """Take what flk has fields for out of the training container."""
        where = f"{path}.containers[{PyTorchJob.container}]"
        image = str(main.pop("image", None) or "")
        tag = image.rpartition("/")[2].partition(":")[2] or "latest"
        policy = main.pop("imagePullPolicy", "Always" if tag == "latest" and "@" not in image else "IfNotPresent")
        main["ports"] = [
            port
            for port in self._mappings(f"{where}.ports", main.pop("ports", None))
            if port.get("name") != PyTorchJob.port_name
        ]
        words = [
            str(word) for name in ("command", "args") for word in self._items(f"{where}.{name}", main.pop(name, None))
        ]
        folder = main.pop("workingDir", None)
        folder = None if folder is None else str(folder)
        fields: dict[str, Any] = {"image": image, "image_pull_policy": policy}
        env, kept = self._env(f"{where}.env", main.pop("env", None), fields)
        processes = fields.pop("processes", None)
        given = self._mapping(f"{where}.resources", main.pop("resources", None))
        amounts = {kind: self._mapping(f"{where}.resources.{kind}", given.get(kind)) for kind in ("limits", "requests")}
        try:
            fields |= _resources(amounts["limits"], amounts["requests"], self.notes)
        except ValueError as error:
            self.refused.append(f"{where}.resources: {error}")
        try:
            fields |= _command(words, folder)
        except ValueError as error:
            self.refused.append(f"{where}.command: {error}")
        if processes and fields.get("by_launcher"):
            fields.setdefault("processes", processes)
        if exported := fields.pop("env", None):
            env |= exported
        folder = fields.pop("folder", folder)
        if folder:
            # Ranks start in a folder of their own, where they may write. There they find the files of this one.
            links = f"ln -sf {shlex.quote(folder)}/* ."
            fields["setup"] = f"{links}\n{fields['setup']}" if "setup" in fields else links
        else:
            self.notes.append(
                "ranks start in /flk/work, not in the WORKDIR of the image, unless the manifest has workingDir"
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
            elif _OF_RANKS.fullmatch(name):
                self.notes.append(f"the variable {name} is left out: flk's launcher sets it")
            elif {"name", "key"} <= secret.keys() and not secret.get("optional"):
                fields.setdefault("secrets", {})[name] = f"{secret['name']}:{secret['key']}"
            elif source or "$(" in str(value):
                kept.append(variable)
            else:
                env[name] = "" if value is None else str(value)
        return env, kept


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _resources(limited: Mapping[str, Any], requested: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return the fields for resources. What only limits name is requested too, as in Kubernetes."""
    limits = {name: str(amount) for name, amount in limited.items()}
    requests = {**limits, **{name: str(amount) for name, amount in requested.items()}}
    storage = "ephemeral-storage"
    if storage in limits and requests[storage] != limits[storage]:
        requests[storage] = limits[storage]
        notes.append(f"{storage} is requested as its limit, {limits[storage]}: a job has one amount for both")
    notes += [
        f"{name} gets its request as its limit, {requests[name]}"
        for name in ("memory", storage)
        if name in requests and name not in limits
    ]
    resources: dict[str, Any] = {}
    for name in ("cpu", "memory", "ephemeral-storage"):
        if name in requests:
            resources[name.replace("-", "_")] = requests.pop(name)
    for name in ("cpu", "memory"):
        if name in limits and (name == "cpu" or limits[name] != resources[name]):
            resources[f"{name}_limit"] = limits[name]
    if wrong := next((name for name, amount in requests.items() if not amount.isdecimal()), None):
        raise ValueError(f"{wrong}: must be a number (is {requests[wrong]!r})")
    if _GPU in requests:
        resources["gpu"] = int(requests.pop(_GPU))
    if requests:
        resources["extended"] = {name: int(amount) for name, amount in requests.items()}
    return {"resources": resources} if resources else {}


def _command(words: list[str], folder: str | None) -> dict[str, Any]:
    """Return the fields for a container's command: ``command``, and where it says so ``processes``, ``setup``, ``env``.

    Raises ValueError, which says why it cannot be the command of a job.
    """
    if not words:
        raise ValueError("is that of the image, which flk does not know: write it into the manifest")
    if _SHELL.fullmatch(words[0]):
        return _shell(words, folder)
    processes: dict[str, Any] = {"processes": 1}
    if words[0] == "accelerate" and words[1:2] == ["launch"]:
        _refuse_variables(words)
        return {"command": ["-m", "flk_hosts.accelerate_launch", *words[2:]], "by_launcher": True}
    if _is_torchrun(words[0]):
        processes, words = _torchrun(words[1:])
    elif _PYTHON.fullmatch(words[0]):
        words = words[1:]
        while words and words[0] in ("-u", "-O", "-B", "-s"):
            words = words[1:]
        if words[:1] == ["-m"] and words[1:2] and words[1] in _LAUNCHERS:
            processes, words = _torchrun(words[2:])
    elif words[0].startswith("-"):
        raise ValueError(
            "has arguments only, of the program that the image starts: write its command into the manifest"
        )
    elif not words[0].endswith(".py"):
        raise ValueError(
            f"starts {words[0]}: a job starts a Python script or a module, or by torchrun or accelerate launch"
        )
    if not words or (words[0] != "-m" and words[0].startswith("-")):
        raise ValueError("has no script and no module")
    if words[0] != "-m" and not words[0].startswith("/"):
        if folder is None:
            raise ValueError(
                f"{words[0]} is relative to the WORKDIR of the image: add workingDir, or name its whole path"
            )
        words = [str(PurePosixPath(folder) / words[0]), *words[1:]]
    _refuse_variables(words)
    return {"command": words, **processes}


def _refuse_variables(words: list[str]) -> None:
    if dynamic := next((word for word in words if "$" in word), None):
        raise ValueError(
            f"{dynamic}: a job's arguments are as they are written, and nothing replaces variables in them"
        )


def _torchrun(words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the fields that torchrun's options become, and the script with its arguments."""
    fields: dict[str, Any] = {"by_launcher": True}
    module = False
    while words and words[0].startswith("-"):
        option, _, value = words[0].partition("=")
        option = option.replace("_", "-")  # torchrun takes both
        if option in _CHANGES:
            raise ValueError(f"{option} starts another program than a Python script")
        words = words[1:]
        if option in ("-m", "--module"):
            module = True
        elif option not in _SWITCHES and not value:
            value, words = words[0] if words else "", words[1:]
        if option == "--nproc-per-node" and value.isdecimal():
            fields["processes"] = int(value)
        elif option == "--max-restarts":
            if not value.isdecimal():
                raise ValueError(f"{option}: must be a number (is {value!r})")
            fields["restarts"] = int(value)
        elif option == "--nnodes" and (sizes := re.fullmatch(r"(\d+):(\d+)", value)) and sizes[1] != sizes[2]:
            fields["elastic"] = {"min": int(sizes[1]), "max": int(sizes[2])}
    return fields, (["-m", *words] if module else words)


def _shell(words: list[str], start: str | None) -> dict[str, Any]:
    """Return the fields for ``sh -c TEXT``: the last command is the script's, and those before it are the setup."""
    flags = [word for word in words[1:-1] if not re.fullmatch(r"-\w+|--login", word)]
    if not any(re.fullmatch(r"-\w*c", word) for word in words[1:-1]):
        raise ValueError("runs a shell script: name the Python script that it starts, and give the rest as setup")
    if flags:
        raise ValueError("is a shell with more than one text: put the commands into one")
    text = words[-1].replace("\\\n", " ").strip()
    commands = [
        part.strip() for part in re.split(r"&&|\n|;", text) if part.strip() and not part.strip().startswith("#")
    ]
    if not commands:
        raise ValueError("is a shell without commands")
    *before, last = commands
    env: dict[str, str] = {}
    folder = start
    setup = text[: text.rindex(last)].rstrip("&; \n")
    try:
        pieces = [*_without_variables(shlex.split(last.removeprefix("exec ")))]
        words_before = [parts for command in before if (parts := shlex.split(command))]
    except ValueError:  # of a text with quotes over several commands
        pieces, words_before = ["("], []
    if any(map(_DYNAMIC.search, pieces)) or any(command.split()[0] in _COMPOUND for command in commands):
        raise ValueError("is a shell program of its own: name the script and its arguments, and give the rest as setup")
    for parts in words_before:
        _refuse_of_shell(parts)
        if parts[0] == "cd":
            folder = str(PurePosixPath(folder or "/") / parts[1])
        elif parts[0] == "export":
            env |= dict(part.split("=", 1) for part in parts[1:])
    fields = _command(pieces, folder)
    if any(parts[0] not in ("cd", "export", "set", "echo") for parts in words_before):
        setup = f"cd {shlex.quote(start)}\n{setup}" if start else setup
        # /bin/sh runs a setup: another shell, or one with options, is named.
        plain = words[0].rpartition("/")[2] == "sh" and words[1:-1] == ["-c"]
        fields["setup"] = setup if plain else shlex.join([*words[:-1], setup])
    return {**fields, **({"env": env} if env else {}), **({"folder": folder} if folder else {})}


def _refuse_of_shell(parts: list[str]) -> None:
    """Raise ValueError for a command before the script that starts ranks, or whose effect ends with its shell."""
    if _starts_with_torchrun(parts) or parts[:2] == ["accelerate", "launch"]:
        raise ValueError(f"{' '.join(parts)}: a training before the last command: make a job of each")
    lost = parts[0] in _OF_ITSELF or parts[1:2] == ["activate"]
    if parts[0] == "cd":
        lost = len(parts) != 2 or parts[1].startswith("-") or bool(_EXPANDED.search(parts[1]))
    elif parts[0] == "export":
        lost = any("=" not in part or _EXPANDED.search(part) for part in parts[1:])
    if lost:
        raise ValueError(f"{' '.join(parts)}: ranks do not see what a shell before them computes")


def _is_torchrun(program: str) -> bool:
    return PurePosixPath(program).name == "torchrun"


def _starts_with_torchrun(words: list[str]) -> bool:
    """Return whether a command begins with torchrun, or with its module in Python."""
    return bool(words) and (_is_torchrun(words[0]) or any(word in _LAUNCHERS for word in words[:4]))


def _without_variables(words: list[str]) -> Iterator[str]:
    """Yield the words; of torchrun's options, values that are variables count as any value, since flk sets them."""
    in_options = _starts_with_torchrun(words)
    for word in words:
        in_options = in_options and not word.endswith(".py")
        yield re.sub(r"\$\{?\w+\}?", "auto", word) if in_options else word


def _differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Return the paths at which two values differ, the deepest ones."""
    if one == other:
        return []
    if isinstance(one, dict) and isinstance(other, dict):
        keys = dict.fromkeys([*one, *other])
        return [p for key in keys for p in _differences(one.get(key), other.get(key), f"{path}.{key}".lstrip("."))]
    return [path]


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as such."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def job_file(converted: Converted) -> str:
    """Return the text of a job file, which begins with the notes as comments."""
    comments = "".join(f"# {note}\n" for note in converted.notes)
    return comments + yaml.dump(converted.fields, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
