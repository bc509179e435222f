"""The code blocks of the documentation's pages, with the directives that say how each block is checked.

A directive is an HTML comment on the line before a block, so readers of the rendered page do not see it:

    <!-- run: local -->     a console block; its commands run on this machine
    <!-- run: cluster -->   a console block; its commands run against the cluster of context kind-flk
    <!-- file: NAME -->     a block that is written to NAME before the commands of the page run

A Python block without a directive is part of the page's script, which `tests/local/test_documentation.py` runs on two
ranks. A hidden block, `<!-- python` … `-->`, belongs to that script too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
GENERATED: Final = ROOT / "docs" / "reference"
_BLOCK: Final = re.compile(
    r"(?:^<!-- (?P<key>\w+): (?P<value>.*?) -->\n)?^```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```$"
    r"|^<!-- python\n(?P<hidden>.*?)^-->$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One fenced code block of a page."""

    page: Path
    language: str  # what follows the opening fence: console, python, yaml, …
    text: str
    start: int  # offset of ``text`` in the page
    key: str = ""  # of its directive: run, file, or empty
    value: str = ""

    @property
    def line(self) -> int:
        """Number of the block's first line in its page, from 1."""
        return self.page.read_text().count("\n", 0, self.start) + 1


@dataclass(frozen=True)
class Command:
    """A command of a console block and the output that the page shows for it."""

    text: str  # continuation lines included, without the prompt
    output: str


def all_pages() -> list[Path]:
    """Every Markdown page of the repository, in a fixed order."""
    folders = ("docs", "examples", "charts")
    return sorted([*ROOT.glob("*.md"), *(page for folder in folders for page in ROOT.glob(f"{folder}/**/*.md"))])


def blocks(page: Path) -> list[Block]:
    """The code blocks of ``page``, hidden ones included, from top to bottom."""
    found = []
    for match in _BLOCK.finditer(page.read_text()):
        if match["hidden"] is not None:
            found.append(Block(page, "python", match["hidden"], match.start("hidden")))
        else:
            key, value = match["key"] or "", match["value"] or ""
            found.append(Block(page, match["language"], match["text"], match.start("text"), key, value))
    return found


def commands(block: Block) -> list[Command]:
    """The commands of a console block. A line that begins with ``$`` is a command; a backslash continues it."""
    found: list[Command] = []
    lines = iter(block.text.splitlines())
    for line in lines:
        if line.startswith("$ "):
            text = line[2:]
            while text.endswith("\\"):
                text += "\n" + next(lines)
            found.append(Command(text, ""))
        elif found:
            found[-1] = Command(found[-1].text, found[-1].output + line + "\n")
        else:
            raise ValueError(
                f"{block.page.name}:{block.line}: a console block begins with a command, not with {line!r}"
            )
    return found


def python_script(page: Path) -> str:
    """The Python blocks of ``page`` as one script; empty where it has none."""
    return "\n".join(block.text for block in blocks(page) if block.language == "python" and not block.key)


def flk_commands(page: Path) -> Iterator[str]:
    """Every flk command line in the shell and console blocks of ``page``, without its comment."""
    for block in blocks(page):
        if block.language == "console":
            lines = [command.text for command in commands(block)]
        elif block.language == "sh":
            lines = block.text.replace("\\\n", " ").splitlines()
        else:
            continue
        for line in lines:
            line = line.replace("\\\n", " ").strip()
            if line.startswith("flk "):
                yield re.split(r"\s(?:#|\||&&|;|>|2>)", line)[0].strip()
