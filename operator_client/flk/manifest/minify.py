"""Minify the modules of flk_runtime for the archive that a job ships. Lines keep their numbers."""

from __future__ import annotations

import ast
import builtins
import re
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Final, NamedTuple

# Functions of flk_runtime.contract with the position of the argument that only the documentation reads.
_DOCUMENTED: Final = {"Variable": 1, "Setting": 1, "Meaning": 0}
_STRING: Final = (
    r"""(?:\"\"\"(?:[^"\\]|\\.|"(?!""))*\"\"\"|\'\'\'(?:[^'\\]|\\.|'(?!''))*\'\'\')"""
    r"""|(?:"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')"""
)
_COMMENT: Final = re.compile(rf"{_STRING}|(?P<left_out>[ \t]*\#[^\n]*)", re.DOTALL)
# Spaces in a line beside a character that no name, number or string has.
_SPACE: Final = re.compile(rf"""{_STRING}|(?P<left_out>(?<=[^\w"'\n ]) +|(?<=[^\n ]) +(?=[^\w"' ]))""", re.DOTALL)
_PRIVATE_CONSTANT: Final = re.compile(r"_[A-Z][A-Z_0-9]+")
_FIELD: Final = re.compile(rb"\{\{|\{(?P<names>[^{}]*(?:\{[^{}]*\}[^{}]*)*)\}")
_WORD: Final = re.compile(rb"(?<![\w.])[A-Za-z_]\w*")
_BINDING: Final = (
    ast.arg, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.alias, ast.Global, ast.Nonlocal,
    ast.ExceptHandler, ast.MatchAs, ast.MatchStar, ast.MatchMapping,
)  # fmt: skip
_SHORT: Final = [*string.ascii_lowercase]
_SHORT_CONSTANTS: Final = [f"_{letter}" for letter in string.ascii_uppercase]


class _Tree:
    """The syntax tree of a source, walked once: its nodes in their order in the source, and those below each node."""

    def __init__(self, source: str) -> None:
        self.module = ast.parse(source)
        self.nodes: list[ast.AST] = []
        self._places: dict[ast.AST, tuple[int, int]] = {}
        self._walk(self.module)

    def _walk(self, node: ast.AST) -> None:
        begin = len(self.nodes)
        self.nodes.append(node)
        for name in node._fields:
            value = getattr(node, name, None)
            for child in value if isinstance(value, list) else (value,):
                if isinstance(child, ast.AST) and child._fields:  # operators and contexts have none, and are shared
                    self._walk(child)
        self._places[node] = begin, len(self.nodes)

    def walk(self, node: ast.AST) -> list[ast.AST]:
        """Return a node and all nodes below it."""
        return self.nodes[slice(*self._places[node])]


def minified(source: str) -> str:
    """Return the source of a module of flk that does the same on the same lines, in fewer bytes when compressed."""
    return _without(_SPACE, with_short_names(stripped(source)))


def _without(left_out: re.Pattern[str], source: str) -> str:
    return left_out.sub(lambda match: "" if match["left_out"] else match[0], source)


def stripped(source: str) -> str:
    """Return the source of a module of flk without what only its readers need; all lines keep their numbers.

    Comments, annotations, imports and protocols for them, and lists of public names are left out. Docstrings, and texts
    that only the documentation reads, are empty. The fields of classes keep their annotations, which make dataclasses
    and messages.
    """
    source = _without(_COMMENT, source)
    lines = [line.encode() for line in source.split("\n")]  # columns count bytes
    tree = _Tree(source)
    parts = list(_parts_for_readers(tree, lines))
    parts += _imports_for_readers(tree, [node for node, _, _ in parts])
    for node, start, text in sorted(parts, key=lambda part: -part[1]):
        first, last = node.lineno - 1, (node.end_lineno or 0) - 1
        rest = lines[last][node.end_col_offset :]
        lines[first : last + 1] = [lines[first][:start] + text, *[b""] * (last - first)]
        lines[last] += rest
    return b"\n".join(lines).decode()


def _parts_for_readers(tree: _Tree, lines: Sequence[bytes]) -> Iterator[tuple[ast.expr | ast.stmt, int, bytes]]:
    """Yield the nodes that are left out, the columns where they begin, and what takes their place."""
    fields = {field for node in tree.nodes if isinstance(node, ast.ClassDef) for field in node.body}
    names = [node.id for node in tree.nodes if isinstance(node, ast.Name)]
    for node in tree.nodes:
        match node:
            case ast.Expr(ast.Constant(str()) as docstring):
                yield docstring, docstring.col_offset, b'""'
            case ast.Call(ast.Name(name), arguments) if name in _DOCUMENTED:
                meaning = arguments[_DOCUMENTED[name]]
                yield meaning, meaning.col_offset, b'""'
            case ast.If(ast.Name("TYPE_CHECKING")):
                yield node, node.col_offset, b""
            case ast.Assign([ast.Name("__all__")]) if names.count("__all__") == 1:  # this module does not read it
                yield node, node.col_offset, b""
            case ast.ClassDef(name, [ast.Name("Protocol")], decorator_list=[]):  # modules import the name
                yield node, node.col_offset, f"{name}=0".encode()
            case ast.arg(name, ast.expr() as annotation):
                yield annotation, node.col_offset + len(name.encode()), b""
            case ast.AnnAssign(target, annotation, ast.expr()) if node not in fields and _is_on_one_line(annotation):
                yield annotation, target.end_col_offset or 0, b""
            case (
                ast.FunctionDef(returns=ast.expr() as annotation)
                | ast.AsyncFunctionDef(returns=ast.expr() as annotation)
            ) if _is_on_one_line(annotation):
                before = lines[annotation.lineno - 1][: annotation.col_offset]
                yield annotation, len(before[: before.rindex(b"->")].rstrip()), b""


def _imports_for_readers(tree: _Tree, left_out: Sequence[ast.AST]) -> Iterator[tuple[ast.stmt, int, bytes]]:
    """Yield the imports of names that only the parts that are ``left_out`` read, as `_parts_for_readers` does."""
    nodes = {node for part in left_out if not isinstance(part, ast.Assign) for node in tree.walk(part)}
    read = {name for node in tree.nodes if node not in nodes for name in _names(node)}
    unread = {name for node in nodes for name in _names(node)} - read
    for node in tree.module.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            needed = [each for each in node.names if (each.asname or each.name.partition(".")[0]) not in unread]
            if len(needed) < len(node.names):
                node.names = needed
                yield node, 0, ast.unparse(node).encode() if needed else b""


def _names(node: ast.AST) -> Iterator[str]:
    """Yield the name that a node reads; of a list of public names, which other modules may import, all names."""
    match node:
        case ast.Name(name):
            yield name
        case ast.Assign([ast.Name("__all__")], ast.List(values)):
            yield from (ast.literal_eval(value) for value in values)


def _is_on_one_line(node: ast.expr) -> bool:
    return node.lineno == node.end_lineno


def with_short_names(source: str) -> str:
    """Return the source of a module with short names for local variables and for the module's private constants.

    Parameters, which callers may name, keep theirs.
    """
    lines = [line.encode() for line in source.split("\n")]  # columns count bytes
    tree = _Tree(source)
    functions = list(_outermost_functions(tree.module))
    constants = {
        name
        for node in tree.module.body
        for name in _assigned(ast.iter_child_nodes(node))
        if _PRIVATE_CONSTANT.fullmatch(name)
    }
    within = {node for function in functions for node in tree.walk(function)}
    of_module = {name for node in tree.nodes if node not in within for name in _names_in(node)}
    of_module |= vars(builtins).keys()
    short = list(_renamed(tree, tree.module, lines, constants, _SHORT_CONSTANTS))
    for function in functions:
        nodes = tree.walk(function)
        of_classes = {name for node in nodes if isinstance(node, ast.ClassDef) for name in _assigned(tree.walk(node))}
        if "locals" not in {node.id for node in nodes if isinstance(node, ast.Name)}:
            local = _assigned(nodes) - of_module - of_classes
            short += _renamed(tree, function, lines, local, [name for name in _SHORT if name not in of_module])
    for new, place in sorted(short, key=lambda each: -each[1].begin):
        line = lines[place.line]
        lines[place.line] = line[: place.begin] + new.encode() + line[place.end :]
    return b"\n".join(lines).decode()


class _Place(NamedTuple):
    """Where a name stands: the number of its line, from 0, and its columns, in bytes."""

    line: int
    begin: int
    end: int
    name: str


def _renamed(
    tree: _Tree, scope: ast.AST, lines: Sequence[bytes], wanted: Set[str], free: Sequence[str]
) -> Iterator[tuple[str, _Place]]:
    """Yield where names of ``wanted`` that can have one of ``free`` stand in a scope, with the new name."""
    nodes = tree.walk(scope)
    strings = [node for node in nodes if isinstance(node, ast.JoinedStr)]
    formatted = {each for string in strings for each in tree.walk(string) if each is not string}
    places, kept = [], set()
    for node in nodes:
        if isinstance(node, ast.JoinedStr) and node not in formatted:
            found = list(_places_in_string(node, lines))
            count = Counter(place.name for place in found)
            count.subtract(each.id for each in tree.walk(node) if isinstance(each, ast.Name))
            kept |= {name for name in count if count[name]}
            places += found
        elif not isinstance(node, ast.Name):
            kept.update(_names_in(node))
        elif node not in formatted:
            places.append(_Place(node.lineno - 1, node.col_offset, node.end_col_offset or 0, node.id))
    taken = kept | {place.name for place in places}
    old = [place.name for place in sorted(places) if place.name in wanted - kept and len(place.name) > 1]
    new = dict(zip(dict.fromkeys(old), (name for name in free if name not in taken), strict=False))
    return ((new[place.name], place) for place in places if place.name in new)


def _places_in_string(node: ast.JoinedStr, lines: Sequence[bytes]) -> Iterator[_Place]:
    """Yield the words in the fields of an f-string, of which ast does not say where they stand before Python 3.12."""
    last = (node.end_lineno or 0) - 1
    for number in range(node.lineno - 1, last + 1):
        begin = node.col_offset if number == node.lineno - 1 else 0
        end = node.end_col_offset or 0 if number == last else len(lines[number])
        for field in _FIELD.finditer(lines[number], begin, end):
            for word in _WORD.finditer(lines[number], *field.span("names")):
                yield _Place(number, *word.span(), word[0].decode())


def _outermost_functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the functions below a node that are in no other function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        else:
            yield from _outermost_functions(child)


def _assigned(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names among nodes that are assigned to."""
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _names_in(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node reads or binds itself."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, _BINDING):
        for _, value in ast.iter_fields(node):
            for name in value if isinstance(value, list) else [value]:
                if isinstance(name, str):
                    yield name.partition(".")[0]  # of an import
