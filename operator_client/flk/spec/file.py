"""Reading flk.yaml and other YAML that users write, strictly: what YAML would silently change is an error here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import yaml

from flk.errors import UsageError

SIZE_LIMIT: Final = 1_000_000  # bytes; a job file is a page
_NODE_LIMIT: Final = 50_000  # values, with aliases followed: a few nested ones make more than any memory holds


class _Loader(yaml.SafeLoader):
    """YAML without repeated keys: of two values for one key, YAML would take the last without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be text", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is here twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read(path: str) -> dict[str, Any]:
    """The mapping in a YAML file, or on stdin for ``-``. UsageError for anything else, with the place in the file."""
    return mapping(_text(path), source_name(path))


def job_fields(path: str) -> dict[str, Any]:
    """The fields that a job file sets. A key whose values are all commented out has none and sets nothing."""
    return {key: value for key, value in read(path).items() if value is not None}


def source_name(path: str) -> str:
    """What messages call the file at ``path``."""
    return "stdin" if path == "-" else path


def mapping(text: str, source: str) -> dict[str, Any]:
    """The mapping that YAML text holds; an empty text holds an empty one."""
    try:
        data = yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        problem = error.problem or error.context or "not YAML"
        if isinstance(error, yaml.composer.ComposerError) and "single document" in str(error.context):
            problem = "holds more than one document"
        raise UsageError(f"{place}: {problem}", hint=f"correct {source}: it should be YAML") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"{source}: {' '.join(str(error).split())}", hint="it should be YAML in UTF-8") from None
    except RecursionError:
        raise UsageError(f"{source}: is nested too deeply") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UsageError(f"{source}: must be a mapping of keys to values", hint="`flk init` writes an example")
    _check(data, source, "", [0], ())
    return data


def _text(path: str) -> str:
    try:
        if path == "-":
            raw = sys.stdin.buffer.read(SIZE_LIMIT + 1)
        else:
            with Path(path).open("rb") as file:
                raw = file.read(SIZE_LIMIT + 1)
    except OSError as error:
        hint = "`flk init` writes one" if isinstance(error, FileNotFoundError) else ""
        raise UsageError(f"cannot read {path}: {(error.strerror or str(error)).lower()}", hint=hint) from None
    if len(raw) > SIZE_LIMIT:
        raise UsageError(f"{path}: is longer than {SIZE_LIMIT:,} bytes")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is not UTF-8 (byte {error.start})") from None


def _check(value: Any, source: str, path: str, count: list[int], above: tuple[int, ...]) -> None:
    """UsageError unless the value is what JSON can say too: text keys, no dates, no cycles, of a bounded size."""
    count[0] += 1
    if count[0] > _NODE_LIMIT:
        raise UsageError(f"{source}: holds more than {_NODE_LIMIT:,} values")
    if isinstance(value, dict | list):
        if id(value) in above:
            raise UsageError(f"{source}: {path or 'it'} contains itself")
        if len(above) > 100:
            raise UsageError(f"{source}: is nested too deeply")
        items: Any = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            if isinstance(value, dict) and not isinstance(key, str):
                place = f"{path}.{key}" if path else str(key)
                raise UsageError(f"{source}: {place}: a key must be text (is {key!r})", hint="write it in quotes")
            inner = f"{path}[{key}]" if isinstance(value, list) else (f"{path}.{key}" if path else key)
            _check(item, source, inner, count, (*above, id(value)))
    elif value is not None and not isinstance(value, str | int | float | bool):
        kind = "a date" if hasattr(value, "year") else f"of the kind {type(value).__name__}"
        raise UsageError(f"{source}: {path}: is {kind} to YAML", hint="write it in quotes if it is text")
