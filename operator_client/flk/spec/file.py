"""Read flk.yaml and other YAML that users write, strictly: where YAML would silently change a value, text stays text.

Plain scalars follow the core schema of YAML 1.2, except that a number with a leading zero is text, because versions of
YAML disagree about it. So `yes`, `1:30`, `1_000` and `010` are text, and an error where a field wants a number.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, Final

import yaml

from flk.errors import UsageError
from flk_runtime.contract import foreign

SIZE_LIMIT: Final = 1_000_000  # bytes; a job file is a page
_VALUE_LIMIT: Final = 50_000  # values, aliases included: a few nested aliases can expand to more than the memory holds
_DEPTH_LIMIT: Final = 100  # nested mappings and lists

_DIGITS: Final = 1000
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the loader of libyaml is many times faster


class _Loader(_Base):  # type: ignore[misc]
    """A YAML loader with the scalars of YAML 1.2 that refuses repeated keys, of which YAML would keep the last."""

    yaml_implicit_resolvers: Final[dict[str, Any]] = {}  # none of YAML 1.1

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        seen = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be text", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is repeated", key.start_mark
                )
            seen.add(key.value)
        super().flatten_mapping(node)
        # What is merged is flattened once more, and has the merged keys beside its own then, which come last.
        node.value = [*{key.value: (key, value) for key, value in node.value}.values()]

    def construct_scalar(self, node: yaml.ScalarNode) -> Any:
        if node.tag == "tag:yaml.org,2002:int" and len(node.value) > _DIGITS:  # Python would not write it
            raise yaml.constructor.ConstructorError(None, None, "a number has too many digits", node.start_mark)
        return super().construct_scalar(node)


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(0|[1-9][0-9]*)?\.[0-9]+([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?(0|[1-9][0-9]*)(\.[0-9]*([eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+)", list("-+0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


class ManifestLoader(_Loader):
    """A loader of manifests, in which kubectl reads a number with a leading zero as octal: ``defaultMode: 0755``."""


ManifestLoader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^0[0-7]+$"), ["0"])


def read(path: str, *, hint: str = "") -> dict[str, Any]:
    """Return the mapping in a YAML file, or on stdin for ``-``. Raises UsageError with the line for anything else.

    ``hint`` is the hint of the error for a file that does not exist.
    """
    return mapping(text(path, hint), source_name(path))


def job_fields(path: str) -> dict[str, Any]:
    """Return the fields that a job file sets. A key without a value sets none. Raises UsageError for a manifest."""
    fields = read(path, hint="`flk init` writes flk.yaml")
    if {"apiVersion", "kind"} <= fields.keys():
        raise UsageError(
            f"{source_name(path)}: is a manifest of a {fields['kind']}, not a job file",
            hint="`flk convert FILE > flk.yaml` makes one of a PyTorchJob",
        )
    return {key: value for key, value in fields.items() if value is not None}


def source_name(path: str) -> str:
    """Return the name of the file at ``path`` in messages."""
    return "stdin" if path == "-" else path


def mapping(text: str, source: str, loader: type[_Loader] = _Loader) -> dict[str, Any]:
    """Return the mapping that YAML text describes, empty for an empty text. ``source`` names the text in errors."""
    try:
        _check_depth(text, source)
        data = yaml.load(text, loader)  # noqa: S506 - a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        problem = error.problem or error.context or "not YAML"
        if "maximum nesting depth" in problem:  # the limit of libyaml, whose scanner reads ahead
            raise UsageError(f"{source}: is nested too deeply") from None
        if isinstance(error, yaml.composer.ComposerError) and "single document" in str(error.context):
            problem = "contains more than one document"
        raise UsageError(f"{place}: {problem}", hint=f"correct {source}: it must be YAML") from None
    except (yaml.YAMLError, *foreign.ERRORS) as error:
        raise UsageError(f"{source}: {' '.join(str(error).split())}", hint="it must be YAML in UTF-8") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UsageError(f"{source}: must be a mapping of keys to values", hint="`flk init` writes an example")
    _check(data, source, "", [0], ())
    return data


def text(path: str, hint: str = "") -> str:
    """Return the text of a file, or of stdin for ``-``. Raises UsageError, also if it is very long or not UTF-8."""
    if not path:
        raise UsageError("the name of a file is empty", hint="give the name of a YAML file, or - for stdin")
    try:
        if path == "-":
            raw = sys.stdin.buffer.read(SIZE_LIMIT + 1)
        else:
            with Path(path).open("rb") as file:
                raw = file.read(SIZE_LIMIT + 1)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(
            f"cannot read {path}: {reason}", hint=hint if isinstance(error, FileNotFoundError) else ""
        ) from None
    if len(raw) > SIZE_LIMIT:
        raise UsageError(f"{path}: is longer than {SIZE_LIMIT:,} bytes")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is not UTF-8 (byte {error.start})") from None


def _check_depth(text: str, source: str) -> None:
    """Raise UsageError for deeply nested text. libyaml would end the process: its constructor is recursive."""
    depth = 0
    for event in yaml.parse(text, _Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > _DEPTH_LIMIT:
                raise UsageError(f"{source}: is nested too deeply")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _check(value: Any, source: str, path: str, count: list[int], above: tuple[int, ...]) -> None:
    """Raise UsageError for a value that JSON cannot express, one that contains itself, and one that is too large."""
    count[0] += 1
    if count[0] > _VALUE_LIMIT:
        raise UsageError(f"{source}: contains more than {_VALUE_LIMIT:,} values")
    if isinstance(value, dict | list):
        if id(value) in above:
            raise UsageError(f"{source}: {path or 'it'} contains itself")
        if len(above) > _DEPTH_LIMIT:  # through aliases
            raise UsageError(f"{source}: is nested too deeply")
        items: Any = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            if isinstance(value, dict) and not isinstance(key, str):
                place = f"{path}.{key}" if path else str(key)
                raise UsageError(f"{source}: {place}: a key must be text (is {key!r})", hint="write it in quotes")
            inner = f"{path}[{key}]" if isinstance(value, list) else (f"{path}.{key}" if path else key)
            _check(item, source, inner, count, (*above, id(value)))
    elif value is not None and not isinstance(value, str | int | float | bool):
        raise UsageError(f"{source}: {path}: is of the type {type(value).__name__}", hint="write it in quotes")
