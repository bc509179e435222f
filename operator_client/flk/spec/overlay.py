"""The job that flags, job file and environment together describe: flags win over the file, the file over $FLK_IMAGE.

Here values are only put in their places. The model checks the result once, and its errors name the flag or the field.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from flk.errors import UsageError
from flk.spec import file
from flk.spec.fields import split_command
from flk.spec.job import Job, validated
from flk.spec.options import Form, Row, rows

JOB_FILE: Final = "flk.yaml"
IMAGE_VARIABLE: Final = "FLK_IMAGE"
EXAMPLE: Final = Path(__file__).parents[1] / "bundled_gpt"
_NO_SCRIPT: Final = re.compile(r"__\w+__\.py|setup\.py|conftest\.py|test_\w*\.py|\w*_test\.py")
_SHOWN: Final = 5  # scripts in a message
EXAMPLE_SCRIPT: Final = "train.py"
_DECIMAL: Final = re.compile(r"[0-9]*\.[0-9]+|[0-9]*\.?[0-9]+[eE][-+]?[0-9]{1,3}", re.ASCII)  # 0.5, .5, 1e-3


@dataclass
class Overlay:
    """The fields of a job file with flags laid over them; ``where`` maps a field's path to the flag that set it."""

    fields: dict[str, Any]
    where: dict[str, str] = field(default_factory=dict)
    mistakes: list[UsageError] = field(default_factory=list)

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep a UsageError in ``mistakes``: others may come, and are told with it."""
        try:
            yield
        except UsageError as error:
            self.mistakes.append(error)

    def set(self, path: Sequence[str], value: Any, flag: str) -> None:
        """Replace one value. None keeps the value of the file."""
        if value is None:
            return
        self.where[".".join(path)] = flag
        *parents, last = path
        node = self.fields
        for key in parents:
            inner = node.get(key)
            node[key] = inner = {} if inner is None else inner
            if not isinstance(inner, dict):
                return  # the model reports what is wrong with the file
            node = inner
        node[last] = value

    def append(self, path: Sequence[str], values: Sequence[str] | None, flag: str) -> None:
        """Append to a list."""
        if not values:
            return
        node: Any = self.fields
        for key in path:
            node = node.get(key) if isinstance(node, dict) else None
        if node is not None and not isinstance(node, list):
            return  # the model reports what is wrong with the file
        before = node or []
        self.set(path, [*before, *values], flag)
        name = ".".join(path)
        del self.where[name]
        self.where |= {f"{name}[{i}]": flag for i in range(len(before), len(before) + len(values))}


def load_job(
    flags: Mapping[str, Any], environment: Mapping[str, str], notify: Callable[[str], None]
) -> tuple[Job, Path]:
    """Return the job that ``flags``, the job file and ``environment`` describe, and the folder that contains its code.

    ``flags`` maps the names of flags (``save_every`` for --save-every, ``words`` for the positional arguments) to their
    text, or None. ``notify`` is called with a sentence about a choice that flk has made itself. Raises UsageError.
    """
    source = flags["file"]
    if source is None and Path(JOB_FILE).is_file():
        source = JOB_FILE
        notify(f"using {JOB_FILE}")
    overlay = lay_over(file.job_fields(source) if source is not None else {}, flags, environment)
    written = overlay.fields.get("command")
    place = file.source_name(source or "")
    with overlay.keeping():
        if source and written is None and not flags["words"] and flags["module"] is None:
            # A misspelled key is told first.
            validated({**overlay.fields, "command": EXAMPLE_SCRIPT}, where=overlay.where, source=place)
        command, root = _command(list(flags["words"] or []), flags["module"], written, source, notify)
        if command != written:
            overlay.set(["command"], command, "-m" if flags["module"] else "SCRIPT")
        job = validated(overlay.fields, where=overlay.where, source=place)
    if overlay.mistakes:
        raise UsageError.of(overlay.mistakes)
    return job, root


def lay_over(fields: dict[str, Any], flags: Mapping[str, Any], environment: Mapping[str, str]) -> Overlay:
    """Lay all flags, except the command's, over the fields of a job file. What is malformed is in ``mistakes``."""
    overlay = Overlay(fields)
    if fields.get("image") is None:
        overlay.set(["image"], environment.get(IMAGE_VARIABLE) or None, f"${IMAGE_VARIABLE}")
    if flags["no_ship"] and flags["ship"]:
        overlay.mistakes.append(UsageError("--ship and --no-ship exclude each other"))
    if flags["no_ship"]:
        overlay.set(["ship"], False, "--no-ship")
    elif flags["ship"] and not isinstance(fields.get("ship", []), list):
        del fields["ship"]
    for row in rows(Job):
        if row.option.metavar and flags[row.name] is not None:
            with overlay.keeping():
                _lay_option(overlay, row, flags[row.name], environment)
    return overlay


def _lay_option(overlay: Overlay, row: Row, given: Any, environment: Mapping[str, str]) -> None:
    """Lay the text of one flag over the fields, or its texts if it is repeatable."""
    flag, form = " or ".join(row.flags), row.option.form
    if form is Form.LIST:
        overlay.append(row.path, given, flag)
    elif form is Form.VARIABLE:
        for name, value in _variables(given, environment):
            overlay.set([*row.path, name], value, flag)
    elif form is Form.PAIR:
        for name, value in _pairs(given, flag, row.option.metavar):
            overlay.set([*row.path, name], value, flag)
    elif form is Form.NUMBERS:
        for name, value in _pairs(given, flag, row.option.metavar):
            # Text that is no number stays, so that the model reports what is wrong with it.
            number = float(value) if _DECIMAL.fullmatch(value) else _number(value)
            overlay.set([*row.path, name], number, f"{flag} {name}")
    elif form is Form.FILE:
        overlay.set(row.path, file.read(given), f"{flag} {given}")
    else:
        overlay.set(row.path, _number(given) if form is Form.NUMBER else given, flag)


def _command(
    words: list[str], module: str | None, written: Any, source: str | None, notify: Callable[[str], None]
) -> tuple[Any, Path]:
    """Return the command and the folder that contains its code: from the flags, else the job file, else what is here.

    That is the only script of this folder; where there is none, the example trains.
    """
    try:
        here = Path.cwd()
    except FileNotFoundError:
        raise UsageError("this folder is deleted", hint="change to the folder of the code") from None
    only_arguments = written is not None and words[:1] == ["--"]
    if "--" in words:
        words.remove("--")
    if module is not None:
        return ["-m", module, *words], here
    # A word that begins with a dash can only have followed `--`, as can arguments of the job file's command.
    if words and not only_arguments and not words[0].startswith("-"):
        return words, here
    if source is None:
        scripts = sorted(path.name for path in here.glob("*.py") if not _NO_SCRIPT.fullmatch(path.name))
        if len(scripts) > 1:
            shown = ", ".join(scripts[:_SHOWN]) + (", …" if len(scripts) > _SHOWN else "")
            raise UsageError(
                f"no script is named, and this folder has {len(scripts)}: {shown}", hint="name one of them"
            )
        if scripts:
            notify(f"using {scripts[0]}, the only script in this folder")
            return [scripts[0], *words], here
        notify(
            "this folder has neither a script nor flk.yaml, so the bundled example trains: a character-level GPT "
            "(`flk init` writes a job file)"
        )
        return [EXAMPLE_SCRIPT, *words], EXAMPLE
    if written is None:
        raise UsageError(
            f"{source} has no command, and no script is named",
            hint="write `command: train.py` into it, or name a script",
        )
    return ([*_split(written), *words] if words else written), here


def _split(written: Any) -> list[Any]:
    try:
        value = split_command(written)
    except ValueError:
        return [written]  # the model reports what is wrong with it
    return value if isinstance(value, list) else [value]


def _number(text: str | None) -> int | str | None:
    """Convert a whole number. Return other text unchanged, so that the model reports what is wrong with it."""
    return int(text) if text is not None and re.fullmatch(r"[-+]?(0|[1-9][0-9]{0,17})", text, re.ASCII) else text


def _variables(texts: Sequence[str], environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for text in texts:
        if "=" in text or not text:
            yield from _pairs([text], "--env", "K=V or K")
        elif text in environment:
            yield text, environment[text]
        else:
            raise UsageError(f"--env: {text} is not set here", hint=f"give it a value: --env {text}=VALUE")


def _pairs(texts: Sequence[str], flag: str, form: str) -> Iterator[tuple[str, str]]:
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"{flag}: must be {form} (is {text!r})")
        yield name, value
