"""Which of the user's files travel with a job, and the archives they travel in.

In a git checkout: the tracked files below the folder as they are in the work tree, and Python files that git neither
tracks nor ignores. Elsewhere: all files below the folder, except hidden ones and what tools put there. Patterns add to
either. Names that look like keys or passwords only go when they are listed by name. The same files always make the same
archive.
"""

from __future__ import annotations

import fnmatch
import gzip
import hashlib
import io
import os
import subprocess
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

import flk_runtime
from flk.errors import UsageError
from flk.spec.job import Job

SIZE_LIMIT: Final = 8 * 2**20  # bytes of the compressed code: about ten ConfigMaps
RAW_LIMIT: Final = 256 * 2**20  # bytes before compression; beyond it compressing would only cost the user's time
COUNT_LIMIT: Final = 20_000
_SECRET_NAMES: Final = (
    *(".env", ".env.*", ".netrc", ".npmrc", ".pypirc", ".git-credentials", ".htpasswd", "kubeconfig", "*.kubeconfig"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.keystore", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*"),
)
_TOOL_FOLDERS: Final = frozenset({"__pycache__", "node_modules", "site-packages"})
_OWN_FILES: Final = {"flk.yaml", "flk.schema.json"}  # no pod reads them
_WILDCARDS: Final = frozenset("*?[")
_SHOWN: Final = 3  # names in a message
_ENTRY = b"import sys\n\nfrom flk_runtime.__main__ import main\n\nsys.exit(main())\n"


@dataclass(frozen=True)
class Shipment:
    """What travels with a job. Without ``runtime`` nothing does: everything is in the image."""

    runtime: bytes | None = None  # a zip that Python can run
    code: bytes | None = None  # a tar.gz of the user's files
    files: tuple[str, ...] = ()  # their paths below the root
    script: str | None = None  # the script's path below the root; None for a module
    left_out: tuple[str, ...] = ()  # what people may miss, a sentence each

    @property
    def size(self) -> int:
        """Bytes that travel."""
        return len(self.runtime or b"") + len(self.code or b"")

    @property
    def sha256(self) -> str:
        """Hash of the archive of the code, in hex."""
        return hashlib.sha256(self.code or b"").hexdigest()


def collect(job: Job, root: Path) -> Shipment:
    """The files of ``job`` below ``root``, and the runtime. UsageError for a missing script and for too large code."""
    if job.ship is False:
        return Shipment()
    root = root.resolve()
    script = find_script(job, root)
    if script is not None and not script.is_relative_to(root):
        raise UsageError(
            f"the script {job.command[0]} is outside of {root}, whose code is shipped",
            hint=f"run flk in the script's folder: cd {script.parent}",
        )
    listed = _listed(job.ship if isinstance(job.ship, list) else [], root)
    tracked = _git_files(root)
    left_out: list[str] = []
    if tracked is None:
        found = set(_walk(root))
    else:
        found, others = tracked
        others -= _OWN_FILES
        if others:
            left_out.append(f"untracked files that are not Python: {_some(others)} (--ship PATTERN adds them)")
    secrets = {path for path in found if _looks_secret(path)}
    if secrets:
        left_out.append(f"names that look like secrets: {_some(secrets)} (--ship with the whole name adds them)")
    chosen = (found - secrets) | listed
    own = script or find_module(job, root)
    if own is not None:
        chosen.add(own.relative_to(root).as_posix())
    elif job.command[1].partition(".")[0] != "flk_runtime":  # which goes along anyway
        left_out.append(f"the module {job.command[1]}, which is not in {root}, so it should be in the image")
    links = {path for path in chosen if (root / path).is_symlink() and (root / path).is_dir()}
    if links:
        left_out.append(f"links to folders: {_some(links)}")
    files = sorted(path for path in chosen if (root / path).is_file())  # a tracked file may be deleted
    return Shipment(
        runtime=runtime_archive(),
        code=_archive(root, files),
        files=tuple(files),
        script=script.relative_to(root).as_posix() if script else None,
        left_out=tuple(left_out),
    )


def find_script(job: Job, root: Path) -> Path | None:
    """The script's file, or None where the job runs a module. UsageError where it is missing."""
    if job.command[0] == "-m":
        find_module(job, root)
        return None
    # The name stays as it is given where it is a link: what it points to may have another name, or lie elsewhere.
    script = Path(os.path.abspath(root / job.command[0]))
    script = script.parent.resolve() / script.name
    if script.is_dir():
        raise UsageError(f"{job.command[0]} is a folder, not a script", hint="a package runs with -m")
    if not script.is_file():
        raise UsageError(
            f"there is no script {job.command[0]} in {root}",
            hint="for a script that is in the image: --no-ship",
        )
    return script


def find_module(job: Job, root: Path) -> Path | None:
    """The file of the module that the job runs, or None where its package is not below ``root`` but in the image."""
    if job.command[0] != "-m":
        return None
    name = job.command[1]
    top, *inner = name.split(".")
    for folder in (root / top, root / f"{top}.py"):
        if folder.exists():
            break
    else:
        return None
    base = root.joinpath(top, *inner)
    for file in (base.with_name(f"{base.name}.py"), base / "__main__.py"):
        if file.is_file():
            return file
    if base.is_dir():
        raise UsageError(f"the package {name} in {root} has no __main__.py, so it cannot be run with -m")
    raise UsageError(f"there is no module {name} in {root}, though {top} is there")


def runtime_archive() -> bytes:
    """flk_runtime as a zip that Python can run: `python3 flk_runtime.zip -- train.py`."""
    folder = Path(flk_runtime.__file__).parent
    members = {
        f"flk_runtime/{path.relative_to(folder).as_posix()}": path.read_bytes()
        for path in folder.rglob("*.py")
        if "__pycache__" not in path.parts
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted({"__main__.py": _ENTRY, **members}.items()):
            member = zipfile.ZipInfo(name)  # dated 1980, so the same files make the same archive
            member.compress_type = zipfile.ZIP_DEFLATED
            member.external_attr = 0o644 << 16
            archive.writestr(member, data)
    return buffer.getvalue()


def _git_files(root: Path) -> tuple[set[str], set[str]] | None:
    """Files below ``root`` that git tracks or that are new Python files, and other untracked ones; None outside git."""
    if not any((folder / ".git").exists() for folder in (root, *root.parents)):
        return None
    tracked = _git(root, "ls-files", "-z", "--recurse-submodules")
    if not tracked and _ignored(root):
        return None  # a folder that its repository ignores is no part of it: a home full of projects, a build folder
    new = _git(root, "ls-files", "-z", "--others", "--exclude-standard")
    new = {path for path in new if not path.endswith("/") and not _in_tool_folder(root, path)}
    python = {path for path in new if path.endswith(".py")}
    return tracked | python, new - python


def _git(root: Path, *arguments: str) -> set[str]:
    hint = "--no-ship where the code is in the image"
    try:
        result = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, check=False)
    except OSError:
        raise UsageError(f"{root} is in a git checkout, and there is no git to list its files", hint=hint) from None
    if result.returncode:
        said = result.stderr.decode(errors="replace").strip().splitlines()
        raise UsageError(f"git cannot list the files of {root}: {said[0] if said else 'no reason given'}", hint=hint)
    return {os.fsdecode(path) for path in result.stdout.split(b"\0") if path}


def _ignored(root: Path) -> bool:
    return subprocess.run(["git", "-C", str(root), "check-ignore", "-q", "."], capture_output=True).returncode == 0


def _walk(root: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not _of_tools(Path(folder, name))]
        base = os.path.relpath(folder, root)
        for name in files:
            if (not name.startswith(".") or _looks_secret(name)) and not name.endswith((".pyc", ".pyo")):
                yield name if base == "." else PurePosixPath(base, name).as_posix()


def _of_tools(folder: Path) -> bool:
    """Whether a folder holds what tools put there: hidden, a cache, a virtual environment."""
    return folder.name.startswith(".") or folder.name in _TOOL_FOLDERS or (folder / "pyvenv.cfg").exists()


def _in_tool_folder(root: Path, path: str) -> bool:
    return any(_of_tools(root / above) for above in PurePosixPath(path).parents if above.name)


def _listed(patterns: Iterable[str], root: Path) -> set[str]:
    """Files that patterns name. UsageError for a pattern that names none: it is likely misspelt."""
    chosen: set[str] = set()
    for pattern in patterns:
        if not pattern or pattern.startswith("/") or ".." in PurePosixPath(pattern).parts:
            raise UsageError(f"ship: a pattern is a path below the folder, without '..' (is {pattern!r})")
        try:
            matches = sorted(root.glob(pattern.rstrip("/")))
        except (ValueError, NotImplementedError) as error:
            raise UsageError(f"ship: {pattern!r} is no pattern: {error}") from None
        literal = not _WILDCARDS.intersection(PurePosixPath(pattern).name)
        files: set[str] = set()
        for match in matches:
            path = match.relative_to(root).as_posix()
            if match.is_dir():
                files |= {f"{path}/{inner}" for inner in _walk(match) if not _looks_secret(inner)}
            elif literal or not _looks_secret(path):
                files.add(path)
        if not files:
            raise UsageError(f"ship: nothing in {root} matches {pattern!r}")
        chosen |= files
    return chosen


def _looks_secret(path: str) -> bool:
    name = PurePosixPath(path).name
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _SECRET_NAMES)


def _archive(root: Path, files: list[str]) -> bytes:
    try:
        return _packed(root, files)
    except OSError as error:
        raise UsageError(f"cannot read {error.filename}: {(error.strerror or str(error)).lower()}") from None


def _packed(root: Path, files: list[str]) -> bytes:
    sizes = {path: (root / path).stat().st_size for path in files}
    if len(files) > COUNT_LIMIT:
        raise UsageError(
            f"the code is too large to ship: {len(files):,} files, the limit is {COUNT_LIMIT:,}", hint=_too_large(sizes)
        )
    if sum(sizes.values()) > RAW_LIMIT:
        raise UsageError(
            f"the code is too large to ship: {_megabytes(sum(sizes.values()))}, the limit is "
            f"{_megabytes(SIZE_LIMIT)} compressed",
            hint=_too_large(sizes),
        )
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in files:
            data = (root / path).read_bytes()
            member = tarfile.TarInfo(path)
            member.size = len(data)
            member.mode = 0o755 if os.access(root / path, os.X_OK) else 0o644
            archive.addfile(member, io.BytesIO(data))
    code = gzip.compress(buffer.getvalue(), mtime=0)
    if len(code) > SIZE_LIMIT:
        raise UsageError(
            f"the code is too large to ship: {_megabytes(len(code))} compressed, the limit is {_megabytes(SIZE_LIMIT)}",
            hint=_too_large(sizes),
        )
    return code


def _too_large(sizes: dict[str, int]) -> str:
    largest = sorted(sizes, key=lambda path: -sizes[path])[:_SHOWN]
    shown = ", ".join(f"{path} ({_megabytes(sizes[path])})" for path in largest)
    return (
        f"largest: {shown}; put data on a volume (--volume CLAIM:/PATH), run flk in a smaller folder, "
        "or put the code into the image (--no-ship)"
    )


def _megabytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _some(paths: Iterable[str]) -> str:
    names = sorted(paths)
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
