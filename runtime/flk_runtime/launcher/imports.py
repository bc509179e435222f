"""What a script imports before it does anything else, for the fork server: it imports that once for later attempts.

Only modules of packages that are installed count, in the order in which the script imports them: code of the user's own
may do anything when it is imported. A statement that would leave something behind which a fork must not have, or that
reads what differs between ranks, is left to each rank, and so is all that follows.
"""

from __future__ import annotations

import ast
import contextlib
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

_INSTALLED = ("/site-packages/", "/dist-packages/")
_OWN = "flk_runtime"
_HARMLESS = tuple(f"/dev/{each}" for each in ("null", "zero", "full", "random", "urandom", "tty", "pts/", "shm/"))
_IS_MAIN = "__name__ == '__main__'"
_SETTING = ("os.environ[", "os.environ.setdefault(")  # begins a statement that sets a variable


def leading(command: Sequence[str], folder: Path) -> list[str]:
    """The statements with which a script or module (``-m``, name) begins, up to the first that is more than an import.

    A definition is passed over. The statements of the function that the script calls first, such as main(), belong to
    them, also behind a test of ``__name__``. A variable that is set to a constant, as in ``os.environ["A"] = "b"``,
    counts as an import. Empty if this process has imported all of it already, but for modules of Python itself.
    """
    found = _main(command, folder)
    if found is None:
        return []
    path, own, package = found
    try:
        with warnings.catch_warnings():  # the ranks print them, with the name of the file
            warnings.simplefilter("ignore")
            body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return []
    statements, heavy = ([f"import {package}"], True) if package else ([], False)
    for node in _in_order(body, {}):
        names = _names(node, package)
        if names is None or not all(_is_installed(name, own) for name in names):
            break
        heavy |= any(name not in sys.modules and not _is_of_python(name) for name in names)
        text = ast.unparse(node)
        if names or text.startswith(_SETTING):
            statements.append(text)
    return statements if heavy else []


def execute(
    statements: Sequence[str],
    command: Sequence[str],
    folder: str,
    of_rank: Mapping[str, str],
    unsafe: Callable[[], str | None],
) -> tuple[int, str]:
    """Execute `leading` statements here. Returns how many are safe to have in a fork, and why the next one is not.

    If not all are, this process has executed one more than the safe ones. ``of_rank`` are variables of a rank,
    ``unsafe`` says why this process must not be forked.
    """
    os.chdir(folder)
    found = _main(command, Path(folder))
    own, package = (str(found[1]), found[2]) if found else (folder, "")
    sys.argv[:] = command
    sys.path.insert(0, own)
    before = set(sys.modules)
    names = {"__name__": "__main__", "__package__": package or None}
    try:
        for number, statement in enumerate(statements):
            with _reads(of_rank) as read:
                handlers, files, raised = _handlers(), _files(), ""
                try:
                    exec(statement, names)  # noqa: S102 - it is an import of the user's script
                except BaseException as error:
                    raised = f"raises {type(error).__name__}: {error}"
            opened = next((each for each in sorted(_files() - files) if _is_device(each)), "")
            shadowing = next((each for each in set(sys.modules) - before if _is_below(each, own)), "")
            why = (
                (read and f"reads {min(read)}, which differs between ranks or attempts")
                or raised
                or (opened and f"opens {opened}")
                or (_has_children() and "starts a process")
                or (_handlers() != handlers and "handles signals")
                or (shadowing and f"imports {shadowing} of the script's folder")
                or unsafe()
            )
            if why:
                return number, f"`{statement}`: {why}"
    finally:
        sys.path.remove(own)
    return len(statements), ""


def _main(command: Sequence[str], folder: Path) -> tuple[Path, Path, str] | None:
    """The file of a script or module, the folder that Python puts first on its path, and the package of a module.

    None for a module that is not found, or whose packages would have to be imported and are the user's own.
    """
    if command[0] != "-m":
        path = folder / command[0]
        return path, path.resolve().parent, ""
    *packages, last = command[1].split(".")
    if packages and not _is_installed(packages[0], folder):
        return None
    places: Sequence[str] | None = None
    spec: ModuleSpec | None = None
    parts = [*packages, last]
    for number in range(len(parts)):
        name = ".".join(parts[: number + 1])
        spec = PathFinder.find_spec(name, places if number else [str(folder), *sys.path])
        if spec is None:
            return None
        places = spec.submodule_search_locations
    if places is not None:  # a package runs its __main__
        packages, spec = parts, PathFinder.find_spec(f"{command[1]}.__main__", places)
    if not (spec and spec.origin and spec.origin.endswith(".py")):
        return None
    return Path(spec.origin), folder, ".".join(packages)


def _in_order(body: Sequence[ast.stmt], functions: Mapping[str, ast.FunctionDef]) -> Iterator[ast.stmt]:
    """The statements of ``body`` as they are executed, but no definitions. ``functions`` were defined before.

    The statements of a function that is called stand in the place of the call.
    """
    known = dict(functions)
    for node in body:
        match node:
            case ast.FunctionDef(name=name):
                known[name] = node
            case ast.AsyncFunctionDef() | ast.ClassDef():
                pass
            case ast.If(test=test, body=inner) if ast.unparse(test) == _IS_MAIN:
                yield from _in_order(inner, known)
            case ast.Expr(value=ast.Call() as call) if function := _called(call, known):
                yield from _in_order(function.body, {name: each for name, each in known.items() if each != function})
            case _:
                yield node


def _called(call: ast.Call, functions: Mapping[str, ast.FunctionDef]) -> ast.FunctionDef | None:
    """The function that ``call`` executes first, as in ``main()`` and ``sys.exit(main())``; None if it is not known."""
    match call:
        case ast.Call(func=ast.Name(id=name)) if name in functions and not functions[name].decorator_list:
            values = [*call.args, *(each.value for each in call.keywords)]
            has_calls = any(isinstance(each, ast.Call) for value in values for each in ast.walk(value))
            return None if has_calls else functions[name]
        case ast.Call(func=ast.Attribute(attr="exit"), args=[ast.Call() as inner]):
            return _called(inner, functions)
    return None


def _names(node: ast.stmt, package: str) -> list[str] | None:
    """The modules that a statement imports; None for a statement that does something else."""
    match node:
        case ast.Import(names=names):
            return [each.name for each in names]
        case ast.ImportFrom(module="__future__"):
            return []
        case ast.ImportFrom(module=module, level=level):
            return [package if level else str(module)]
        case ast.Expr(value=ast.Constant()):
            return []
        case ast.Assign(value=ast.Constant()) | ast.Expr(value=ast.Call(args=[ast.Constant(), ast.Constant()])):
            return [] if ast.unparse(node).startswith(_SETTING) else None
    return None


def _is_of_python(name: str) -> bool:
    return name.partition(".")[0] in sys.stdlib_module_names


def _is_in_packages(file: str) -> bool:
    """Whether a file is of an installed package."""
    return any(each in file for each in _INSTALLED)


def _is_installed(name: str, own: Path) -> bool:
    """Whether a module is of an installed package, of flk or of Python, and not beside the script, in ``own``."""
    root = name.partition(".")[0]
    beside = PathFinder.find_spec(root, [str(own)])
    if beside and beside.origin:
        return _is_in_packages(beside.origin)
    if root == _OWN or _is_of_python(root):
        return True
    with contextlib.suppress(ImportError, ValueError):
        spec = find_spec(root)
        return bool(spec and spec.origin and _is_in_packages(spec.origin))
    return False


@contextlib.contextmanager
def _reads(of_rank: Mapping[str, str]) -> Iterator[set[str]]:
    """The variables of a rank that are read meanwhile and have another value here."""
    kind, read = type(os.environ), set[str]()
    get = kind.__getitem__

    def noting(environ: os._Environ[str], name: str) -> str:
        if name in of_rank and environ is os.environ:
            try:
                if get(environ, name) == of_rank[name]:
                    return of_rank[name]
            except KeyError:
                pass
            read.add(name)
        return get(environ, name)

    kind.__getitem__ = noting  # type: ignore[method-assign]
    try:
        yield read
    finally:
        kind.__getitem__ = get  # type: ignore[method-assign]


def _handlers() -> list[object]:
    return [signal.getsignal(each) for each in sorted(signal.valid_signals())]


def _files() -> set[str]:
    """What this process has open, by their names in /proc."""
    found = set()
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{each}"))
    return found


def _is_device(file: str) -> bool:
    return file.startswith("socket:") or (file.startswith("/dev/") and not file.startswith(_HARMLESS))


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _is_below(module: str, folder: str) -> bool:
    """Whether a module is of a file of the user, in this folder."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return file.startswith(folder.rstrip("/") + "/") and not _is_in_packages(file) and not module.startswith(_OWN)
