"""Hide the secrets of a job in what flk keeps and shows of it."""

from __future__ import annotations

import copy
import dataclasses
import enum
import json
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar, cast

from flk.kube import Object
from flk.spec import labels
from flk_runtime.contract import foreign, pod_env
from flk_runtime.contract.secrets import (
    REDACTED,
    hidden,
    hidden_in_shell_command,
    in_command,
    names_secret,
    secrets_in,
    without_password,
)

T = TypeVar("T")

# A copy of the whole manifest, with the variables in it.
_COPIES: Final = ("kubectl.kubernetes.io/last-applied-configuration",)
# The variables of the options that are commands.
_SHELL_COMMANDS: Final = {"setup": pod_env.SETUP, "on_restart": pod_env.ON_RESTART}


def secrets_of(job: Object | None) -> list[str]:
    """Return the values in a job's object that its variables and options name as secrets, the longest first."""
    found = {secret for part in _parts(job or {}) for secret in secrets_in(*part)}
    return sorted(found, key=lambda value: (-len(value), value))


def masked(value: T, secrets: list[str]) -> T:
    """Return data, dataclasses among it, with ``***`` in place of the secrets and of passwords in addresses."""
    found: Any = value
    if isinstance(found, str) and not isinstance(found, enum.Enum):
        found = hidden(found, secrets)
    elif isinstance(found, dict):
        found = {key: masked(item, secrets) for key, item in found.items()}
    elif isinstance(found, list):
        found = [masked(item, secrets) for item in found]
    elif dataclasses.is_dataclass(found) and not isinstance(found, type):
        fields = {field.name: getattr(found, field.name) for field in dataclasses.fields(found) if field.init}
        found = dataclasses.replace(found, **{name: masked(item, secrets) for name, item in fields.items()})
    return cast(T, found)


def kept_job(job: Object) -> Object:
    """Return a copy of a job in which values that may be secrets are replaced by ``***``."""
    kept = copy.deepcopy({**job, "metadata": _metadata(job)})
    _redact(kept.get("spec"))
    annotations = labels.annotations_of(kept)
    if labels.SPEC in annotations:
        annotations[labels.SPEC] = _redacted_spec(annotations[labels.SPEC])
    return kept


def _redacted_spec(text: str) -> str:
    """Return the annotation with the options of a job without values that may be secrets; empty if it is none."""
    try:
        spec = foreign.parse_object(text)
    except foreign.ForeignError:
        return ""
    _redact(spec)
    return json.dumps(masked(spec, []), separators=(",", ":"))


def _redact(node: Any) -> None:
    """Replace values that may be secret in the environments and commands anywhere below a node."""
    if isinstance(node, list):
        for item in node:
            _redact(item)
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        if key in ("env", "httpHeaders") and isinstance(value, list):
            for variable in value:
                if isinstance(variable, dict) and "value" in variable:
                    variable["value"] = _kept_value(variable.get("name", ""), variable["value"])
        elif key == "env" and isinstance(value, dict):  # of flk.yaml
            node[key] = {name: _kept_value(name, text) for name, text in value.items()}
        elif key in ("command", "args") and isinstance(value, list):
            node[key] = _hidden_in_command([str(word) for word in value])
        elif key in _SHELL_COMMANDS and isinstance(value, str):  # of flk.yaml
            node[key] = hidden_in_shell_command(value)
        else:
            _redact(value)


def _hidden_in_command(words: Sequence[str]) -> list[str]:
    """Return the words of a command with ``***`` in place of its secrets, and of a script that has one."""
    return [
        f"{word.removesuffix(secret)}{REDACTED}" if secret else hidden_in_shell_command(word)
        for word, secret in in_command(words)
    ]


def _kept_value(name: object, value: Any) -> Any:
    """Return the value of a variable, hidden if its name says that it is a secret."""
    if names_secret(str(name)):
        return REDACTED
    if not isinstance(value, str):
        return value
    return hidden_in_shell_command(value) if name in _SHELL_COMMANDS.values() else without_password(value)


def _metadata(item: Object) -> Object:
    meta: Object = {key: value for key, value in item["metadata"].items() if key != "managedFields"}
    if meta.get("annotations"):
        meta["annotations"] = {key: value for key, value in meta["annotations"].items() if key not in _COPIES}
    return meta


def _parts(node: Any) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Yield the variables, and the words of the command, of each environment and command anywhere below a node."""
    if isinstance(node, list):
        for item in node:
            yield from _parts(item)
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        if key in ("env", "httpHeaders") and isinstance(value, list):
            told = [each for each in value if isinstance(each, dict)]
            yield {str(each.get("name", "")): str(each.get("value") or "") for each in told}, []
        elif key in ("command", "args") and isinstance(value, list):
            yield {}, [str(word) for word in value]
        else:
            yield from _parts(value)
