"""Convert a PyTorchJob of any origin to the fields of a job file that trains the same.

What flk itself decides (ranks, ports, rendezvous, restarts of containers) is left out. What a job file has a field for
becomes that field, and the rest of the pod template stays as it is, as the job's ``patch``. A field of the PyTorchJob
that has no counterpart is refused by its path.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from itertools import dropwhile, takewhile
from pathlib import PurePosixPath
from typing import Any, Final

from flk.errors import UsageError
from flk.manifest.render import dumped
from flk.spec import labels
from flk.spec.file import mapping
from flk.spec.job import validated
from flk.targets.pytorchjob import PyTorchJob
from flk_runtime.contract.values import dataclass

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
_DYNAMIC: Final = frozenset("`$|<>;&*?(){}")  # what a shell would do something about
_EXPANDED: Final = frozenset("`$*~")  # also in the value of a variable
_BY_GPUS: Final = re.compile(r"auto|gpu|\$[({]?PET_NPROC_PER_NODE[)}]?")  # or as the manifest says otherwise
# A setup has a shell of its own. Its variables do not reach the ranks, nor do other changes of the shell itself.
_OF_VARIABLES: Final = ("cd", "pushd", "export", "source", ".")
_OF_SHELLS: Final = (
    *("eval", "exec", "alias", "trap", "ulimit", "umask", "unset"),
    *("{", "if", "for", "while", "until", "case", "function"),
)
_ASSIGNMENT: Final = re.compile(r"\w+=")
_QUOTED: Final = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.|(?<!\S)#[^\n]*""", re.DOTALL)  # or a comment
_COMMAND: Final = re.compile(rf"""(?:{_QUOTED.pattern}|[^&;\n]|(?<!&)&(?!&))+""", re.DOTALL)
_BACKGROUND: Final = re.compile(r"(?<![&>])&(?![&>])")
_SHELL_PROGRAM: Final = "is a shell program of its own: name the script and its arguments, and give the rest as setup"
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
        replicas = sum(count for count, _ in each)
        pod = each[-1][1]
        for path in _differences(each[0][1], pod):
            self.refused.append(f"Master and Worker differ in {path}: all pods of a job are equal")
        bounds = {"min": replicas, "max": replicas, **fields.pop("elastic")}
        if bounds["min"] != bounds["max"]:
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
            "restarts": policy.pop("backoffLimit", elastic.pop("maxRestarts", None)),
            "deadline": policy.pop("activeDeadlineSeconds", None),
            "ttl": policy.pop("ttlSecondsAfterFinished", None),
        }
        if policy.pop("suspend", False) and not fields["queue"]:
            self.notes.append("spec.runPolicy.suspend is left out: flk suspend JOB suspends the job")
        if policy.pop("schedulingPolicy", None):
            fields["gang"] = "auto"
            self.notes.append("spec.runPolicy.schedulingPolicy became gang: auto, all pods or none")
        bounds = [kind for kind in ("min", "max") if f"{kind}Replicas" in elastic]
        fields["elastic"] = {kind: elastic.pop(f"{kind}Replicas") for kind in bounds}
        for name in [key for key in elastic if key.startswith("rdzv") or key == "standalone"]:
            del elastic[name]  # flk's launchers meet by themselves
        if elastic.pop("metrics", None):
            self.notes.append(
                "spec.elasticPolicy.metrics are left out: flk scale JOB changes the number of pods, no autoscaler"
            )
        processes = self.spec.pop("nprocPerNode", elastic.pop("nProcPerNode", None))
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
        metadata = {key: value for key, value in metadata.items() if value}
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
        folder = main.pop("workingDir", None)
        fields: dict[str, Any] = {"image": image, "image_pull_policy": policy}
        env, kept = self._env(f"{where}.env", main.pop("env", None), fields)
        given = self._mapping(f"{where}.resources", main.pop("resources", None))
        amounts = {kind: self._mapping(f"{where}.resources.{kind}", given.get(kind)) for kind in ("limits", "requests")}
        try:
            fields |= _resources(amounts["limits"], amounts["requests"], self.notes)
        except ValueError as error:
            self.refused.append(f"{where}.resources: {error}")
        try:
            folder, command = _command(words, None if folder is None else str(folder))
            env |= self._env(f"{where}.command", command.pop("exported", None), fields)[0]
            fields |= command
        except ValueError as error:
            self.refused.append(f"{where}.command: {error}")
        if folder:
            # Ranks start in a folder of their own, where they may write. There they find the files of this one,
            # also those that the setup adds to it.
            links = f"ln -sf {shlex.quote(folder)}/* ."
            fields["setup"] = f"{fields['setup']} && {links}" if "setup" in fields else links
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


def _resources(limits: Mapping[str, Any], requests: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return the fields for resources. What only limits name is requested too, as in Kubernetes."""
    amounts = {name: str(amount) for name, amount in {**limits, **requests}.items()}
    resources: dict[str, Any] = {}
    for name in ("cpu", "memory", "ephemeral-storage"):
        if name not in amounts:
            continue
        amount = amounts.pop(name)
        resources[name.replace("-", "_")] = amount
        limit = str(limits.get(name, amount))
        if name == "cpu" and name in limits:
            resources["cpu_limit"] = limit
        elif name == "memory" and limit != amount:
            resources["memory_limit"] = limit
        elif name == "ephemeral-storage" and limit != amount:
            raise ValueError(f"{name}: a job has one amount for request and limit (are {amount} and {limit})")
        if name != "cpu" and name not in limits:
            notes.append(f"{name} gets its request as its limit, {amount}")
    if wrong := next((name for name, amount in amounts.items() if not amount.isdecimal()), None):
        raise ValueError(f"{wrong}: must be a number (is {amounts[wrong]!r})")
    if _GPU in amounts:
        resources["gpu"] = int(amounts.pop(_GPU))
    if amounts:
        resources["extended"] = {name: int(amount) for name, amount in amounts.items()}
    return {"resources": resources} if resources else {}


def _command(words: list[str], folder: str | None) -> tuple[str | None, dict[str, Any]]:
    """Return the folder in which a container's command runs, and the fields for it.

    These are ``command``, and where it says so ``processes``, ``setup`` and others; ``exported`` has the variables of
    a shell as a container's ``env`` has them. Raises ValueError, which says why
    it cannot be the command of a job.
    """
    if not words:
        raise ValueError("is that of the image, which flk does not know: write it into the manifest")
    setup, dynamic = dict[str, Any](), frozenset("$")
    if _SHELL.fullmatch(words[0]):
        folder, setup, words = _shell(words, folder)
        dynamic = _DYNAMIC
    fields: dict[str, Any] = {"processes": 1}
    if words[:2] == ["accelerate", "launch"]:
        fields, words = {}, ["-m", "flk_hosts.accelerate_launch", *words[2:]]
    elif _PYTHON.fullmatch(words[0]):
        words = words[1:]
        while words and words[0] in ("-u", "-O", "-B", "-s"):
            words = words[1:]
        if words[:1] == ["-m"] and words[1:2] and words[1] in _LAUNCHERS:
            fields, words = _torchrun(words[2:])
    elif PurePosixPath(words[0]).name == "torchrun":
        fields, words = _torchrun(words[1:])
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
    if changed := next((word for word in words if dynamic & {*word}), None):
        raise ValueError(f"{changed}: a job's arguments are as they are written, and no shell changes them")
    if words[0] != "-m" and not words[0].startswith("/"):
        if folder is None:
            raise ValueError(
                f"{words[0]} is relative to the WORKDIR of the image: add workingDir, or name its whole path"
            )
        words = [str(PurePosixPath(folder) / words[0]), *words[1:]]
    return folder, {"command": words, **fields, **setup}


def _torchrun(words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the fields that torchrun's options become, and the script with its arguments."""
    fields: dict[str, Any] = {}
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
        elif option == "--nproc-per-node" and not _BY_GPUS.fullmatch(value):
            raise ValueError(f"{option}: must be a number (is {value!r})")
        elif option == "--max-restarts":
            fields["restarts"] = int(value) if value.isdecimal() else value
        elif option == "--nnodes" and (sizes := re.fullmatch(r"(\d+):(\d+)", value)) and sizes[1] != sizes[2]:
            fields["elastic"] = {"min": int(sizes[1]), "max": int(sizes[2])}
    return fields, (["-m", *words] if module else words)


def _shell(words: list[str], folder: str | None) -> tuple[str | None, dict[str, Any], list[str]]:
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
    command = command[len(given) :]
    if command[:1] == ["exec"]:
        command.pop(0)
    if not command or _BACKGROUND.search(_QUOTED.sub("", text)):
        raise ValueError(_SHELL_PROGRAM)
    start = folder
    folder, exported = _effects([*before, ["export", *given]], folder)
    fields: dict[str, Any] = {"exported": exported}
    if any(parts[0] not in ("cd", "export", "set") for parts in before):
        setup = text[: commands[-2].end()].strip()
        setup = f"cd {shlex.quote(start)} || exit; {setup}" if start else setup
        fields["setup"] = shlex.join([*words[:-1], setup])
    return folder, fields, command


def _effects(commands: list[list[str]], folder: str | None) -> tuple[str | None, list[dict[str, str]]]:
    """Return the folder and the exported variables after the commands of a shell.

    Raises ValueError for a command that starts ranks, or whose effect on those of the last command a setup lacks.
    """
    exported = []
    for words in commands:
        parts = [*dropwhile(_ASSIGNMENT.match, words)] or [""]
        known = not any(_EXPANDED & {*part} for part in parts)
        if (
            PurePosixPath(parts[0]).name == "torchrun"
            or parts[:2] == ["accelerate", "launch"]
            or {*_LAUNCHERS} & {*parts}
        ):
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
            or re.search(r"\|\| (cd|export|source|\.) ", " ".join(words))
        ):
            raise ValueError(
                f"{' '.join(words)}: ranks do not see what a shell before them does: give it as env or workingDir"
            )
    return folder, exported


def _entered(words: list[str], folder: str | None) -> str | None:
    """Return the folder after a ``cd`` with these words; None if it depends on more than the manifest says."""
    if not words or words[0].startswith("-") or words[1:] not in ([], ["||", "exit"], ["||", "exit", "1"]):
        return None
    if folder is None and not words[0].startswith("/"):  # in the WORKDIR of the image
        return None
    return str(PurePosixPath(folder or "/") / words[0])


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
