"""kubectl's templates of JSONPath, as far as people use them: parse one, and apply it to plain data.

A template is text with ``{.path}``, ``{range .path}…{end}`` and ``{"\\n"}`` in it. A path has steps ``.name``, ``.*``,
``..name``, ``['name']``, ``[0]``, ``[0,2]``, ``[1:3]``, ``[*]`` and ``[?(@.path == "text")]``. A dot of a name is
``\\.``. Libraries of JSONPath know neither templates nor that escape: paths would have to be parsed here all the same.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

Values = list[Any]
Step = Callable[[Any], Values]
Part = Callable[[Any], str]  # of a template: its text for some data

_STEP: Final = re.compile(r"(\.\.?)((?:\\.|[^\s.\[\]{}()'\"@$,=<>!|&?:*\\])+|\*)")
_SLICE: Final = re.compile(r"(-?\d+)?:(-?\d+)?(?::(-?\d+))?")
_NAMES: Final = re.compile(r"""'((?:\\.|[^'\\])*)'|"((?:\\.|[^"\\])*)\"""")
_FILTER: Final = re.compile(r"""\?\(\s*(@.*?)\s*(?:(==|!=|<=|>=|<|>)\s*(.+?)\s*)?\)""")
_BRACES: Final = re.compile(r"""\{((?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[^{}"'])*)\}|([^{}]+)""")
_COMPARE: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def parse_template(text: str) -> Part:
    """Return the function that applies a template to data. Raises ValueError for what is not supported."""
    if "{" not in text:
        raise ValueError(f"a template has its paths in braces, as in {{.phase}} (is {text!r})")
    tokens, end = [], 0
    for match in _BRACES.finditer(text):
        if match.start() != end:
            break
        tokens.append(match)
        end = match.end()
    if end != len(text):
        raise ValueError(f"there is no end of {text[end : end + 30]!r}")
    parts, rest = _parts(tokens)
    if rest:
        raise ValueError("{end} without {range …}")
    return parts


def parse_path(text: str) -> Step:
    """Return the function that gives the values at a path: ``.a.b``, ``a.b`` or ``{.a.b}``. Raises ValueError."""
    path = text.strip()
    if path.startswith("{") and path.endswith("}"):
        path = path[1:-1].strip()
    path = path.removeprefix("$").removeprefix("@")
    if path and path[0] not in ".[":
        path = f".{path}"
    steps: list[Step] = []
    while path:
        match = _STEP.match(path)
        if match:
            name, end = match[2].replace("\\", ""), match.end()
            steps.append(_deep(name) if match[1] == ".." else _child(name))
        elif path[0] == "[":
            end = _closing(path) + 1
            steps.append(_bracket(path[1 : end - 1].strip()))
        elif path == ".":
            break
        else:
            raise ValueError(f"{path!r} is no step of a path; .name, ..name, [0], [1:3], [*] and [?(@.a == 1)] are")
        path = path[end:]
    return lambda data: _walk([data], steps)


def _parts(tokens: list[re.Match[str]], *, inside: bool = False) -> tuple[Part, list[re.Match[str]]]:
    """Return what the tokens up to ``{end}`` write, and the tokens after it."""
    parts: list[Part] = []
    while tokens:
        token, tokens = tokens[0], tokens[1:]
        word = token[1].strip() if token[1] is not None else ""
        if token[2] is not None:
            parts.append(_text(token[2]))
        elif word == "end":
            if not inside:
                raise ValueError("{end} without {range …}")
            return _joined(parts), tokens
        elif word.startswith("range ") or word == "range":
            body, tokens = _parts(tokens, inside=True)
            parts.append(_range(parse_path(word[5:]), body))
        elif word[:1] in ("'", '"'):
            parts.append(_text(_unquoted(word)))
        else:
            parts.append(_printed(parse_path(word)))
    if inside:
        raise ValueError("{range …} without {end}")
    return _joined(parts), tokens


def _joined(parts: Sequence[Part]) -> Part:
    return lambda data: "".join(part(data) for part in parts)


def _text(text: str) -> Part:
    return lambda data: text


def _range(path: Step, body: Part) -> Part:
    return lambda data: "".join(body(value) for value in path(data))


def _printed(path: Step) -> Part:
    return lambda data: " ".join(map(text_of, path(data)))


def text_of(value: Any) -> str:
    """Return a value as kubectl prints it: text as it is, nothing for null, JSON for all others."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _walk(values: Values, steps: Sequence[Step]) -> Values:
    for step in steps:
        values = [found for value in values for found in step(value)]
    return values


def _child(name: str) -> Step:
    if name == "*":
        return _all
    return lambda value: [value[name]] if isinstance(value, dict) and name in value else []


def _deep(name: str) -> Step:
    child = _child(name)

    def find(value: Any) -> Iterator[Any]:
        yield from child(value)
        for inner in _all(value):
            yield from find(inner)

    return lambda value: list(find(value))


def _all(value: Any) -> Values:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def _bracket(text: str) -> Step:
    if text == "*":
        return _all
    if text.startswith("?"):
        return _filter(text)
    if slice_of := _SLICE.fullmatch(text):
        first, last, by = (int(part) if part else None for part in slice_of.groups())
        if by is not None and by <= 0:
            raise ValueError(f"[{text}]: the step of a slice must be at least 1")
        return lambda value: value[first:last:by] if isinstance(value, list) else []
    each = [_one_of(part.strip()) for part in split_commas(text)]
    return lambda value: [found for one in each for found in one(value)]


def _one_of(text: str) -> Step:
    if re.fullmatch(r"-?\d+", text):
        number = int(text)
        return lambda value: value[number : number + 1 or None] if isinstance(value, list) else []
    if _NAMES.fullmatch(text):
        return _child(_unquoted(text))
    raise ValueError(f"[{text}] is not supported; [0], [0,2], [1:3], [*], ['name'] and [?(@.a == 1)] are")


def _filter(text: str) -> Step:
    match = _FILTER.fullmatch(text)
    if match is None or "&&" in text or "||" in text or "=~" in text:
        raise ValueError(f"[{text}]: a filter must be ?(@.path) or ?(@.path OP VALUE), OP one of {', '.join(_COMPARE)}")
    left, compare = parse_path(match[1]), _COMPARE.get(match[2] or "")
    if compare is None:
        return lambda value: [item for item in _all(value) if left(item)]
    right = parse_path(match[3]) if match[3].startswith("@") else _constant(match[3])

    def meets(item: Any) -> bool:
        try:
            return any(compare(one, other) for one in left(item) for other in right(item))
        except TypeError:  # text and number have no order
            return False

    return lambda value: [item for item in _all(value) if meets(item)]


def _constant(text: str) -> Step:
    if _NAMES.fullmatch(text):
        value: Any = _unquoted(text)
    else:
        try:
            value = json.loads(text)
        except ValueError:
            raise ValueError(f"{text} is neither a number nor text in quotation marks") from None
    return lambda item: [value]


def _unquoted(text: str) -> str:
    """Return what a text in quotation marks of either kind means."""
    match = _NAMES.fullmatch(text)
    if match is None:
        raise ValueError(f"{text} is not one text in quotation marks")
    escapes = {"n": "\n", "t": "\t", "r": "\r"}
    inner = match[1] if match[1] is not None else match[2]
    return re.sub(r"\\(.)", lambda escape: escapes.get(escape[1], escape[1]), inner)


def _closing(text: str) -> int:
    """Return the position of the bracket that closes the first one."""
    quote, depth = "", 0
    for position, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        else:
            depth += {"[": 1, "]": -1}.get(character, 0)
            if depth == 0:
                return position
    raise ValueError(f"{text!r} has no closing bracket")


def split_commas(text: str) -> list[str]:
    """Return the parts between commas that are neither in quotation marks nor in brackets."""
    parts, quote, depth = [""], "", 0
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        else:
            depth += {"[": 1, "]": -1, "(": 1, ")": -1}.get(character, 0)
        if character == "," and not quote and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts
