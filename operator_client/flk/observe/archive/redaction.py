"""Strip secrets and unused fields of objects before they are archived."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from flk import labels
from flk.kube import Object
from flk.secret_names import file_names_secret, names_secret

REDACTED: Final = "***"
_LEAST: Final = 4  # characters of a value that is hidden wherever it stands: shorter ones are parts of other words
_ASSIGNMENT: Final = re.compile(r"(?P<name>-{0,2}[\w.-]+)=(?P<value>.+)", re.DOTALL)
# The password in an address: scheme://user:password@host.
_IN_ADDRESS: Final = re.compile(r"(?<=://)([^\s/:@]*):([^\s/@]+)@")
# A name before what is assigned to it, as code and settings have it: os.environ["HF_TOKEN"] = "hf_…", token: x.
_NAME_IN_CODE: Final = re.compile(r"""([\w.-]+)["'\])]*[ \t]*(?::|=(?!=))[ \t]*(?=\S)""")
_FILE_OF_DIFF: Final = re.compile(r"diff --git a/.* b/(.+)")
# A copy of the whole manifest, with the variables in it.
_COPIES: Final = ("kubectl.kubernetes.io/last-applied-configuration",)
_NOT_OF_CONTAINERS: Final = ("env", "envFrom", "command", "args", "lifecycle")


def without_password(text: str) -> str:
    """Return a text with ``***`` in place of the passwords in its addresses."""
    return _IN_ADDRESS.sub(rf"\1:{REDACTED}@", text)


def secrets_of(job: Object | None) -> list[str]:
    """Return the values in a job's object that its variables and options name as secrets, the longest first."""
    found = {value for value in _secrets(job or {}) if len(value) >= _LEAST}
    return sorted(found, key=lambda value: (-len(value), value))


def hidden(text: str, secrets: Sequence[str]) -> str:
    """Return a text with ``***`` in place of the secrets and of passwords in addresses."""
    for secret in secrets:
        text = text.replace(secret, REDACTED)
    return without_password(text)


def kept_job(job: Object) -> Object:
    """Return a copy of a job in which values that may be secrets are replaced by ``***``."""
    kept = copy.deepcopy({**job, "metadata": _metadata(job)})
    _redact(kept.get("spec"))
    annotations = kept["metadata"].get("annotations") or {}
    if labels.SPEC in annotations:
        annotations[labels.SPEC] = _redacted_spec(annotations[labels.SPEC])
    return kept


def kept_diff(text: str, secrets: Sequence[str]) -> str:
    """Return a diff of git without the files whose names say that they are secret, and with ``***`` for such values.

    ``secrets``, see `secrets_of`, are hidden wherever they stand.
    """
    text = hidden(text, secrets)
    kept: list[str] = []
    secret = False
    for line in text.splitlines():
        if file := _FILE_OF_DIFF.fullmatch(line):
            secret = file_names_secret(file[1].rpartition("/")[2])
            kept += [line, "(not shown, since its name says that it is secret)"] if secret else [line]
        elif not secret:
            name = next((each for each in _NAME_IN_CODE.finditer(line) if names_secret(each[1])), None)
            kept.append(f"{line[: name.end()]}{REDACTED}" if name else line)
    return "".join(f"{line}\n" for line in kept)


def _redacted_spec(text: str) -> str:
    """Return the annotation with the options of a job without values that may be secrets; empty if it is none."""
    try:
        spec = json.loads(text)
    except ValueError:
        return ""
    _redact(spec)
    return json.dumps(spec, separators=(",", ":"))


def _redact(node: Any) -> None:
    """Replace values that may be secret in the environments and commands anywhere below a node."""
    if isinstance(node, list):
        for item in node:
            _redact(item)
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        if key == "env" and isinstance(value, list):
            for variable in value:
                if "value" in variable:
                    variable["value"] = _kept_value(variable.get("name", ""), variable["value"])
        elif key == "env" and isinstance(value, dict):  # of flk.yaml
            node[key] = {name: _kept_value(name, text) for name, text in value.items()}
        elif key in ("command", "args") and isinstance(value, list):
            node[key] = _without_secrets(value)
        else:
            _redact(value)


def _kept_value(name: object, value: Any) -> Any:
    """Return the value of a variable, hidden if its name says that it is a secret."""
    if names_secret(str(name)):
        return REDACTED
    return without_password(value) if isinstance(value, str) else value


def kept_pod(pod: Object) -> Object:
    """Return a pod without the commands and the environment of its containers."""
    spec = dict(pod.get("spec") or {})
    for kind in ("containers", "initContainers"):
        if kind in spec:
            spec[kind] = [{k: v for k, v in c.items() if k not in _NOT_OF_CONTAINERS} for c in spec[kind]]
    return {"metadata": _metadata(pod), "spec": spec, "status": pod.get("status") or {}}


def kept_event(event: Object) -> Object:
    """Return an event without the metadata that only the API server needs."""
    return {key: value for key, value in event.items() if key != "metadata"} | {
        "metadata": {"name": event.get("metadata", {}).get("name", "")}
    }


def _metadata(item: Object) -> Object:
    meta: Object = {key: value for key, value in item["metadata"].items() if key != "managedFields"}
    if meta.get("annotations"):
        meta["annotations"] = {key: value for key, value in meta["annotations"].items() if key not in _COPIES}
    return meta


def _without_secrets(words: list[Any]) -> list[str]:
    """Replace the values of ``--api-token=x``, ``--api-token x`` and ``API_TOKEN=x`` in a command."""
    kept: list[str] = []
    follows = False
    for word in map(str, words):
        match = _ASSIGNMENT.fullmatch(word)
        if follows and not word.startswith("-"):
            kept.append(REDACTED)
        elif match and names_secret(match["name"]):
            kept.append(f"{match['name']}={REDACTED}")
        else:
            kept.append(without_password(word))
        follows = match is None and word.startswith("-") and names_secret(word)
    return kept


def _secrets(node: Any) -> Iterator[str]:
    if isinstance(node, list):
        for item in node:
            yield from _secrets(item)
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        if key == "env" and isinstance(value, list):
            yield from (str(each.get("value") or "") for each in value if names_secret(str(each.get("name", ""))))
        elif key in ("command", "args") and isinstance(value, list):
            yield from _in_command([str(word) for word in value])
        else:
            yield from _secrets(value)


def _in_command(words: list[str]) -> Iterator[str]:
    """Yield the values of ``--api-token=x``, ``--api-token x`` and ``API_TOKEN=x``."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        assigned = _ASSIGNMENT.fullmatch(word)
        if assigned and names_secret(assigned["name"]):
            yield assigned["value"]
        elif assigned is None and word.startswith("-") and names_secret(word) and not following.startswith("-"):
            yield following
