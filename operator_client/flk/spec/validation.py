"""Convert a pydantic ValidationError to a UsageError: a line for each mistake, with the field's path."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from flk.errors import UsageError

_WRONG_TYPES: Final = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "string_type": "must be text",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be a mapping of keys to values",
    "mapping_type": "must be a mapping of keys to values",
    "model_type": "must be a mapping of keys to values",
    "model_attributes_type": "must be a mapping of keys to values",
}
_OF_FIELD: Final = re.compile(r"([a-z_]+(?:[.\[][^: ]*)?): ")  # how the message of a check of several fields begins
_SHOWN_LENGTH: Final = 80  # characters of a wrong value in a message


class Mistakes(ValueError):
    """What is wrong with several fields together: lines, each of which begins with its field."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


def check_all(lines: Iterator[str]) -> None:
    """Raise Mistakes if there are any lines."""
    if mistakes := [*lines]:
        raise Mistakes(mistakes)


def usage_error(
    error: ValidationError, model: type[BaseModel], *, where: Mapping[str, str], source: str = ""
) -> UsageError:
    """Return all mistakes as one UsageError. ``where`` maps the paths of fields to the flags that set them."""
    mistakes = [
        _mistake(detail, path, text, model, where, source)
        for detail in _one_of_each_field(error.errors(include_url=False))
        for path, text in _lines(detail)
    ]
    return UsageError.of(mistakes)


def _one_of_each_field(details: Sequence[Any]) -> Iterator[Any]:
    """Yield one detail for each field.

    Each member of a union reports an error. The one with the longest path is about the form that the user wrote. A key
    that is unknown is probably the one that is missing beside it.
    """
    unknown = {detail["loc"][:-1] for detail in details if detail["type"] == "extra_forbidden"}
    paths = [_path(detail["loc"]) for detail in details]
    for number, (detail, path) in enumerate(zip(details, paths, strict=True)):
        inner = any(other.startswith((f"{path}.", f"{path}[")) for other in paths)
        explained = detail["type"] == "missing" and detail["loc"][:-1] in unknown
        if not inner and not explained and path not in paths[:number]:
            yield detail


def _lines(detail: Any) -> Iterator[tuple[str, str]]:
    """Yield the path of a field and what is wrong with it; a check of several fields may have several."""
    path = _path(detail["loc"])
    cause = (detail.get("ctx") or {}).get("error")
    for text in cause.lines if isinstance(cause, Mistakes) else [_text(detail)]:
        begin = _OF_FIELD.match(text) if cause else None
        if begin:
            yield f"{path}.{begin[1]}".lstrip("."), text[begin.end() :]
        else:
            yield path, text


def _mistake(
    detail: Any, path: str, text: str, model: type[BaseModel], where: Mapping[str, str], source: str
) -> UsageError:
    settings = [set_path for set_path in where if path == set_path or path.startswith((f"{set_path}.", f"{set_path}["))]
    place = where[max(settings, key=len)] if settings else ": ".join(part for part in (source, path) if part)
    if not settings or detail["type"] == "extra_forbidden":
        return UsageError(f"{place}: {text}", hint=_hint(detail, path, model, with_path=not settings))
    return UsageError(f"{place}: {text}")  # other hints are about YAML


def _path(loc: tuple[int | str, ...]) -> str:
    text = ""
    for part in loc:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part == "[key]" or part in ("bool", "str") or part.startswith(("list[", "function-")):
            continue  # pydantic's names for the members of a union and the keys of a mapping
        else:
            text += f".{part}" if text else part
    return text


def _text(detail: Any) -> str:
    kind, context = detail["type"], detail.get("ctx") or {}
    if kind == "extra_forbidden":
        return "unknown key"
    if kind == "missing":
        return "is missing"
    if kind == "value_error":
        return str(context["error"])
    if kind == "greater_than_equal":
        return f"must be at least {context['ge']} (is {_shown(detail['input'])})"
    if kind == "less_than_equal":
        return f"must be at most {context['le']} (is {_shown(detail['input'])})"
    if kind == "string_type" and isinstance(detail["input"], int | float) and not isinstance(detail["input"], bool):
        return f"must be text (is the number {detail['input']})"
    if kind in _WRONG_TYPES:
        return f"{_WRONG_TYPES[kind]} (is {_shown(detail['input'])})"
    message = str(detail["msg"])
    return f"{message[:1].lower()}{message[1:]} (is {_shown(detail['input'])})"


def _shown(value: Any) -> str:
    text = repr(value)
    text = {"True": "true", "False": "false", "None": "empty"}.get(text, text)  # as YAML says it
    return text if len(text) <= _SHOWN_LENGTH else text[:_SHOWN_LENGTH] + "…"


def _hint(detail: Any, path: str, model: type[BaseModel], *, with_path: bool) -> str:
    if detail["type"] == "extra_forbidden":
        schema = model.model_json_schema()
        known = list(_fields(schema, schema))
        above, _, meant = path.rpartition(".")
        if not with_path:  # the flag says in which field it is
            keys = [field.rpartition(".")[2] for field in known if field.rpartition(".")[0] == above]
            close = difflib.get_close_matches(meant, keys, n=1)
            return f"did you mean {close[0]}?" if close else f"known keys: {', '.join(keys)}"
        near = [field for field in known if field.rpartition(".")[2] == meant]
        near += difflib.get_close_matches(path, known, n=1)
        near += [f for f in known if difflib.get_close_matches(meant, [f.rpartition(".")[2]], n=1)]
        return f"did you mean {near[0]}?" if near else f"known keys: {', '.join(schema['properties'])}"
    value = detail["input"]
    if detail["type"] == "string_type" and isinstance(value, int | float):
        # Not the value itself: YAML may have changed it, 1.10 to 1.1 for instance.
        return "put the value in quotes"
    return ""


def _fields(schema: Any, node: Any, prefix: str = "") -> Iterator[str]:
    """Yield the paths of all fields below a node of a JSON schema."""
    for name, field in node.get("properties", {}).items():
        yield prefix + name
        for option in (field, *field.get("anyOf", []), *field.get("allOf", [])):
            target = option.get("$ref") or (option.get("items") or {}).get("$ref", "")
            if target:
                yield from _fields(schema, schema["$defs"][target.rpartition("/")[2]], f"{prefix}{name}.")
