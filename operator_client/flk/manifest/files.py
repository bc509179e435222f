"""Which of the user's files travel with a job.

In the user's home: the Python files directly in it. In a git checkout: the tracked files below the folder as they are
in the work tree, and Python files that git neither tracks nor ignores. Elsewhere: all files below the folder, except
hidden files, the folders of tools, and what `flk report` and `flk profile` have written into the folder itself. What
`.flkignore` excludes does not travel. The patterns of `ship` add files to all of these. Files that look like keys or
passwords, and links to files outside of the folder, travel only if `ship` lists them by name.
"""

from __future__ import annotations

import ast
import difflib
import itertools
import os
import posixpath
import re
import stat
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Final, NoReturn

from flk.errors import UsageError
from flk.manifest.git import IGNORE_FILE, ask_git, excluded
from flk.manifest.secret_names import KEY_SIZE, content_is_secret, file_names_secret
from flk.spec.fields import IN_IMAGE
from flk.spec.job import Job
from flk.spec.names import DNS_1035
from flk_runtime.contract import pod_layout
from flk_runtime.contract.values import dataclass

_TOOL_FOLDERS: Final = frozenset({"__pycache__", "node_modules", "site-packages"})
_OWN_FILES: Final = {"flk.yaml", IGNORE_FILE}  # pods do not read them
# What flk report and flk profile write for a job where no other name or folder is given.
_WRITTEN: Final = re.compile(rf"{DNS_1035}(\.report\.html|-rank\d+\.pt\.trace\.json\.gz)")
WALK_LIMIT: Final = 100_000  # files that are looked at outside of git
_WILDCARDS: Final = frozenset("*?[")
_SHOWN: Final = 3  # files in a message
_NO_SCRIPTS: Final = {
    ".yaml": ("a YAML file", "a job file follows -f: -f {name}"),
    ".yml": ("a YAML file", "a job file follows -f: -f {name}"),
    ".ipynb": ("a notebook", "make a script of it: jupyter nbconvert --to script {name}"),
    ".pyc": ("bytecode of one version of Python", "name the .py file that it was made of"),
    ".sh": ("a shell script", "name the Python script that it starts; --setup runs a shell command before that"),
}

# A line that reads another file: `-r more.txt`, `--requirement=more.txt`, `-cpins.txt`, `--constraint pins.txt`.
_INCLUDES: Final = re.compile(r"\s*(?:-[rc]\s*|--(?:requirement|constraint)[\s=]\s*)(?P<file>\S+)")
_HASH: Final = "--hash="


@dataclass(frozen=True)
class Selection:
    """The files that travel with a job, as paths relative to the root."""

    files: tuple[str, ...]
    script: str | None  # None for a module
    left_out: tuple[str, ...]  # files that the user may expect and that do not travel, one sentence for each kind


def select_files(job: Job, root: Path) -> Selection:
    """Return the files of ``job`` below ``root``, which is resolved. Raises UsageError for a missing script."""
    script = find_script(job, root)
    if script is not None and not script.is_relative_to(root):
        raise UsageError(
            f"the script {job.command[0]} is outside of {root}, whose code is shipped",
            hint=f"run flk in the script's folder: cd {script.parent}",
        )
    listed = _shipped_files(job, root).union(_required_files(job, root))
    # Where neither $HOME nor the list of users has the folder, it is "~".
    at_home = (own_home := os.path.expanduser("~")) != "~" and Path(os.path.realpath(own_home)).is_relative_to(root)
    in_git = None if at_home else _git_files(root)
    found, others = in_git or (_found(root, at_home), set[str]())
    written = set[str]() if in_git else {path for path in found if _WRITTEN.fullmatch(path)}
    ignored = excluded(root, found | others)
    found, others, written = found - ignored - written, others - ignored, written - ignored
    repositories = {path for path in others if path.endswith("/")}
    hidden = {path for path in others if path.endswith(".py")}
    secrets = {path for path in found if _looks_secret(root, path)}
    folders = {path for path in found if os.path.islink(root / path) and os.path.isdir(root / path)}
    locked = {path for path in (found | listed) - folders if os.path.isdir(root / path) and _is_locked(root / path)}
    outside = {path for path in found - secrets - folders if _leaves(root, path)}
    chosen = (found - secrets - folders - outside) | listed
    home = {"all but the Python files in it"} if at_home else set()
    own = script or find_module(job, root)
    if own is not None:
        chosen.add(own.relative_to(root).as_posix())
    files = sorted(path for path in chosen if _is_file(root / path))  # a tracked file may be deleted
    shipped = {*files, *(folder.as_posix() for path in listed for folder in PurePosixPath(path).parents)}
    left_out = [
        f"{kind}: {_some(paths - shipped)}{remedy}"
        for kind, paths, remedy in (
            (
                "untracked files that are not Python",
                others - _OWN_FILES - repositories - hidden,
                " (--ship PATTERN adds them)",
            ),
            ("Python files that git ignores", hidden, " (--ship PATTERN adds them)"),
            (
                "repositories that are no submodules",
                {path[:-1] for path in repositories},
                " (--ship NAME adds their files)",
            ),
            ("what flk report and flk profile write", written, " (--ship PATTERN adds it)"),
            ("files that look like secrets", secrets, " (--ship with the whole name adds them)"),
            (f"what is below {root}, which is no folder of code", home, " (--ship NAME adds a part of it)"),
            ("links to folders", folders, " (--ship NAME adds their files)"),
            ("folders that cannot be read", locked, ""),
            (f"links to files outside of {root}", outside, " (--ship with the whole name adds them)"),
        )
        if paths - shipped
    ]
    # The runtime travels with every job.
    if own is None and job.command[1].partition(".")[0] not in pod_layout.RUNTIME_PACKAGES:
        left_out.append(f"the module {job.command[1]}, which is not in {root}, so it should be in the image")
    if script is not None and _leaves(root, script.relative_to(root).as_posix()):
        left_out.append(f"what lies beside {script.resolve()}, to which the script {job.command[0]} links")
    return Selection(
        files=tuple(files),
        script=script.relative_to(root).as_posix() if script else None,
        left_out=tuple(left_out),
    )


def check_files(job: Job, root: Path, *, here: bool = False) -> None:
    """Raise UsageError with all that is wrong with the script of a job and with the files that its options name.

    ``here``: it runs on this machine, where the image is not.
    """
    if job.ship in IN_IMAGE:
        return
    checks: list[Callable[[Job, Path], object]] = [partial(find_script, here=here), _required_files]
    if not here:
        checks.append(_shipped_files)
    mistakes = []
    for check in checks:
        try:
            check(job, root)
        except UsageError as error:
            mistakes.append(error)
    if mistakes:
        raise UsageError.of(mistakes)


def _shipped_files(job: Job, root: Path) -> set[str]:
    return _listed(job.ship if isinstance(job.ship, list) else [], root)


def _required_files(job: Job, root: Path) -> list[str]:
    if job.requirements is None or job.requirements.startswith("/"):
        return []
    files = requirement_files(job.requirements, root)
    refuse_mixed_hashes(job.pip or [], files, lambda file: (root / file).read_text("utf-8"))
    return files


def find_script(job: Job, root: Path, *, here: bool = False) -> Path | None:
    """Return the file of the script, or None if the job runs a module. Raises UsageError if it is missing.

    ``here``: it runs on this machine, so that it cannot be in the image.
    """
    if job.command[0] == "-m":
        find_module(job, root)
        return None
    if not root.is_dir():
        raise UsageError(f"there is no folder {root} with the files of the job")
    # A link keeps its own name: its target may have another name or be in another folder.
    script = Path(os.path.abspath(root / job.command[0]))
    script = Path(os.path.realpath(script.parent), script.name)  # Path.resolve raises where links lead in a circle
    if os.path.isdir(script):
        raise UsageError(f"{job.command[0]} is a folder, not a script", hint="a package runs with -m")
    if not _is_file(script):
        near = difflib.get_close_matches(script.name, [path.name for path in script.parent.glob("*.py")], n=1)
        meant = f"did you mean {os.path.join(os.path.dirname(job.command[0]), near[0])}?" if near else ""
        in_image = "if the script is in the image, use --no-ship"
        otherwise = "name a script by its path from this folder" if here else in_image
        raise UsageError(f"there is no script {job.command[0]} in {root}", hint=meant or otherwise)
    if script.suffix in _NO_SCRIPTS:
        what, hint = _NO_SCRIPTS[script.suffix]
        raise UsageError(f"{job.command[0]} is {what}, not a Python script", hint=hint.format(name=job.command[0]))
    return script


def parsed(source: bytes) -> ast.Module:
    """Parse a file of the user's without Python's warnings about it, which the ranks print. Raises as ``ast.parse``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)


def find_module(job: Job, root: Path) -> Path | None:
    """Return the file of the module that the job runs, or None if its package is not below ``root``."""
    if job.command[0] != "-m":
        return None
    name = job.command[1]
    top, *inner = name.split(".")
    if not any(path.exists() for path in (root / top, root / f"{top}.py")):
        return None
    base = root.joinpath(top, *inner)
    for file in (base.with_name(f"{base.name}.py"), base / "__main__.py"):
        if _is_file(file):
            return file
    if os.path.isdir(base):
        raise UsageError(f"the package {name} in {root} has no __main__.py, so it cannot be run with -m")
    raise UsageError(f"there is no module {name} in {root}, though {top} is there")


def _git_files(root: Path) -> tuple[set[str], set[str]] | None:
    """Return the tracked and the new Python files below ``root``, and what is beside them. None outside of git.

    The latter are new files that are not Python, ignored Python files, and repositories, which end with a slash.
    """
    if not any((folder / ".git").exists() for folder in (root, *root.parents)):
        return None
    tracked = _git(root, "ls-files", "-z", "--recurse-submodules")
    if not tracked and ask_git(root, "check-ignore", "-q", ".").returncode == 0:
        return None  # the repository ignores this folder, so it is not part of it
    new = _git(root, "ls-files", "-z", "--others", "--exclude-standard")
    new = {path for path in new if not _in_tool_folder(root, path)}
    python = {path for path in new if path.endswith(".py")}
    return tracked | python, (new - python) | _ignored_python(root)


def _ignored_python(root: Path) -> set[str]:
    """Return the Python files that git ignores, in a folder that it ignores those directly in it."""
    ignored = _git(root, "ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory")
    files: set[str] = set()
    for path in ignored:
        inner = (root / path).glob("*.py") if path.endswith("/") else [root / path] * path.endswith(".py")
        files.update(file.relative_to(root).as_posix() for file in inner)
    return {path for path in files if not _in_tool_folder(root, path)}


def _git(root: Path, *arguments: str) -> set[str]:
    hint = "--no-ship where the code is in the image"
    try:
        result = ask_git(root, *arguments)
    except OSError:
        raise UsageError(
            f"{root} is in a git checkout, and git is not installed to list its files", hint=hint
        ) from None
    if result.returncode:
        said = result.stderr.decode(errors="replace").strip().splitlines()
        raise UsageError(f"git cannot list the files of {root}: {said[0] if said else 'no reason given'}", hint=hint)
    return {os.fsdecode(path) for path in result.stdout.split(b"\0") if path}


def _found(root: Path, at_home: bool) -> set[str]:
    """Return the files outside of git. Raises UsageError if there are too many to look at."""
    if at_home:
        return {path.name for path in root.glob("*.py") if not path.name.startswith(".")}
    found = set(itertools.islice(_walk(root), WALK_LIMIT + 1))
    if len(found) > WALK_LIMIT:
        raise UsageError(
            f"there are more than {WALK_LIMIT:,} files in {root}, whose code is shipped",
            hint="run flk in a smaller folder, or put the code into the image (--no-ship)",
        )
    return found


def _walk(root: Path) -> Iterator[str]:
    """Yield the files below a folder that is not in git, and the folders in it that are not entered.

    These are links to folders, and folders that the user may not read. Raises UsageError if the folder itself is one.
    """
    for folder, folders, files in os.walk(root, onerror=_raise_unreadable):
        base = Path(folder).relative_to(root)
        for name in files:
            if (not name.startswith(".") or _looks_secret(root, str(base / name))) and not name.endswith(
                (".pyc", ".pyo")
            ):
                yield (base / name).as_posix()
        folders[:] = [name for name in folders if not _of_tools(Path(folder, name))]
        closed = {name for name in folders if os.path.islink(Path(folder, name)) or _is_locked(Path(folder, name))}
        folders[:] = [name for name in folders if name not in closed]
        yield from ((base / name).as_posix() for name in closed)


def _of_tools(folder: Path) -> bool:
    """Whether tools made this folder: it is hidden, a cache or a virtual environment."""
    return folder.name.startswith(".") or folder.name in _TOOL_FOLDERS or os.path.exists(folder / "pyvenv.cfg")


def _is_locked(folder: Path) -> bool:
    """Whether the user may not list a folder, or not open what is in it."""
    return not os.access(folder, os.R_OK | os.X_OK)


def _is_file(path: Path) -> bool:
    """Whether there is a file at a path. Raises UsageError if it is in a folder that the user may not enter."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except PermissionError as error:
        raise unreadable(error) from None
    except OSError:
        return False


def unreadable(error: OSError) -> UsageError:
    """Return the error for a file or a folder of the user that cannot be read."""
    return UsageError(f"cannot read {error.filename}: {(error.strerror or str(error)).lower()}")


def _raise_unreadable(error: OSError) -> NoReturn:
    raise unreadable(error)


def _in_tool_folder(root: Path, path: str) -> bool:
    """Whether a file, or a folder if the path ends with a slash, is in a folder of tools, or is one."""
    return any(_of_tools(root / above) for above in PurePosixPath(f"{path}*").parents if above.name)


def _listed(patterns: Iterable[str], root: Path) -> set[str]:
    """Return the files that match patterns. Raises UsageError for a pattern that matches nothing."""
    chosen: set[str] = set()
    for pattern in patterns:
        if not pattern or pattern.startswith("/") or ".." in PurePosixPath(pattern).parts:
            raise UsageError(f"ship: a pattern is a relative path without '..' (is {pattern!r})")
        try:
            globbed = root.glob(pattern.rstrip("/")) if _WILDCARDS.intersection(pattern) else ()
            matches = sorted(globbed) or [path for path in [root / pattern] if os.path.exists(path)]  # or of this name
        except (ValueError, NotImplementedError, OSError) as error:
            raise UsageError(f"ship: {pattern!r} is not a pattern: {error}") from None
        literal = not _WILDCARDS.intersection(PurePosixPath(pattern).name)
        files: set[str] = set()
        for match in matches:
            path = match.relative_to(root).as_posix()
            if os.path.isdir(match):
                inner = {str(PurePosixPath(path, file)) for file in _walk(match)}  # of the root itself, without "./"
                files |= {file for file in inner if not (_looks_secret(root, file) or _leaves(root, file))}
            elif literal or not (_looks_secret(root, path) or _leaves(root, path)):
                files.add(path)
        if not files:
            others = " but files that look like secrets, or links to files elsewhere" if matches else ""
            hint = "--ship with the whole name of such a file adds it" if matches else ""
            raise UsageError(f"ship: nothing in {root} matches {pattern!r}{others}", hint=hint)
        chosen |= files
    return chosen


def _looks_secret(root: Path, path: str) -> bool:
    """Whether the path of a file, or of the file that it links to, looks like a secret's."""
    file = root / path
    paths = [path, os.path.realpath(file)] if os.path.islink(file) else [path]
    return any(map(file_names_secret, paths)) or (file.suffix != ".py" and _is_key(file))  # a test may have one


def _is_key(file: Path) -> bool:
    try:
        found = file.stat()
        return stat.S_ISREG(found.st_mode) and found.st_size <= KEY_SIZE and content_is_secret(file.read_bytes())
    except OSError:
        return False


def _leaves(root: Path, path: str) -> bool:
    """Whether a path is a link to a file outside of the root."""
    return os.path.islink(root / path) and not Path(os.path.realpath(root / path)).is_relative_to(root)


def _some(paths: Iterable[str]) -> str:
    names = sorted(paths)
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def requirement_files(path: str, root: Path) -> list[str]:
    """Return a file of requirements and those that it includes, as paths relative to ``root``, where they are.

    An absolute path stays one. Raises UsageError for a file that is missing, cannot be read or is outside of ``root``.
    """
    found: dict[str, None] = {}

    def add(name: str, place: str) -> None:
        if name in found:
            return
        file = root / name
        if not path.startswith("/") and not file.resolve().is_relative_to(root.resolve()):
            raise UsageError(f"{place}: {name} is outside of {root}, whose code is shipped")
        try:
            text = file.read_text("utf-8")
        except FileNotFoundError:
            hint = "" if found else "if it is in the image, give its absolute path"
            raise UsageError(f"{place}: there is no file {name} in {root}", hint=hint) from None
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
            raise UsageError(f"{place}: {name} cannot be read: {reason}") from None
        found[name] = None
        for number, included in _includes(text):
            add(posixpath.normpath(PurePosixPath(name).parent / included), f"{name}:{number}")

    add(path, "requirements")
    return [*found]


def _includes(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        match = _INCLUDES.match(line)
        if match and "://" not in match["file"]:
            yield number, match["file"]


def refuse_mixed_hashes(packages: list[str], files: list[str], read: Callable[[str], str]) -> None:
    """Raise UsageError if a file has hashes and packages are named beside it: pip then wants hashes of all."""
    hashed = next((file for file in files if _HASH in read(file)), None)
    if packages and hashed:
        raise UsageError(
            f"pip: {packages[0]} has no hash, and {hashed} has hashes, so pip refuses packages without one",
            hint=f"write it with its hash into {hashed}",
        )
