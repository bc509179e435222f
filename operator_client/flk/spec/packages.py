"""Packages that a job has installed before its ranks start: names for pip, and files of requirements."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Final

from flk.errors import UsageError
from flk.spec import names

# A line that reads another file: `-r more.txt`, `--requirement=more.txt`, `-cpins.txt`, `--constraint pins.txt`.
_INCLUDES: Final = re.compile(r"\s*(?:-[rc]\s*|--(?:requirement|constraint)[\s=]\s*)(?P<file>\S+)")
_HASH: Final = "--hash="
_TWO_NAMES: Final = re.compile(r"[A-Za-z0-9][\w.-]*(\[[^]]*\])?\s+[A-Za-z0-9].*")


def package(text: str) -> str:
    """Check a package for pip: a name with versions, an address or a path, not an option."""
    names.text(text)
    if not text.strip() or text != text.strip() or any(character < " " for character in text):
        raise ValueError(f"must be a package for pip, like torchmetrics>=1.4 (is {text!r})")
    if text.startswith("-"):
        raise ValueError(f"must be a package for pip; options like {text!r} go into a file of --requirements")
    if _TWO_NAMES.fullmatch(text):
        raise ValueError(f"must be one package each time (is {text!r})")
    return text


def requirements_path(path: str) -> str:
    """Return the normalised path of a file of requirements: among the code, or an absolute one in the pods."""
    clean = names.folder(path if path.startswith("/") else f"/{path}")
    if clean == "/":
        raise ValueError(f"must be the path of a file (is {path!r})")
    return clean if path.startswith("/") else clean[1:]


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
