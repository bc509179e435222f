"""Translate the command of a container to that of a job: what starts the ranks, and what a shell does before it.

A job starts a Python script or a module. So the options of torchrun become fields of the job, and the commands before
the last one of ``sh -c TEXT`` its ``setup``. A command that a job cannot have raises ValueError, whose text goes on
after the path of the command in the manifest. `flk.manifest.convert` uses this module.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from itertools import dropwhile, takewhile
from pathlib import PurePosixPath
from typing import Any, Final

from flk_runtime.contract.values import dataclass, field, replace

_SHELL: Final = re.compile(r"(?:/bin/|/usr/bin/)?(?:ba|da|z)?sh")
_PYTHON: Final = re.compile(r"(?:\S*/)?python[0-9.]*")
_KUBERNETES_VARIABLE: Final = re.compile(r"\$\$|\$\((\w+)\)")  # Kubernetes replaces it, and $$ by $
_OUTSIDE: Final = re.compile(r"(?:-[^=]*=)?(?:\./)*\.\.(?:/|$)")  # a path that leaves the folder of the command

_OLD_LAUNCHER: Final = "torch.distributed.launch"
_LAUNCHERS: Final = ("torch.distributed.run", _OLD_LAUNCHER)
# Options of torchrun without a value; and those that start another program than a Python script.
_SWITCHES: Final = ("--standalone", "--use-env", "--virtual-local-rank", "--")
_OTHER_PROGRAM: Final = ("--no-python", "--run-path")
# Options of accelerate launch for what flk does: their names and values, each word with a NUL at its end.
_OF_ACCELERATE: Final = re.compile(
    r"(?<![^\0])--(num[-_](?:processes|machines)|machine[-_]rank|main[-_]process[-_](?:ip|port))[=\0]([^\0]*)\0"
)
_BY_GPUS: Final = re.compile(r"gpu|\$[({]?PET_NPROC_PER_NODE[)}]?")  # or as the manifest says otherwise

_CHANGED_BY_SHELL: Final = re.compile(r"[`$|<>;&*?(){}]|^~(?:/|$)")  # in a word, about which it would do something
_IN_QUOTES: Final = {ord(char): 0xE000 + ord(char) for char in " |<>;&*?(){}~"}  # what stands for those in quotes
_AS_WRITTEN: Final = {quoted: plain for plain, quoted in _IN_QUOTES.items()}
_EXPANDED: Final = frozenset("`$*~")  # also in the value of a variable
# A setup has a shell of its own. Its variables do not reach the ranks, nor do other changes of the shell itself.
_SETS_VARIABLES: Final = (
    *("cd", "pushd", "export", "source", ".", "read", "mapfile", "readarray"),
    *("declare", "typeset", "let", "local", "readonly"),
)
_CHANGES_SHELL: Final = (
    *("eval", "exec", "alias", "trap", "ulimit", "umask", "unset"),
    *("{", "if", "for", "while", "until", "case", "function"),
)
_ASSIGNMENT: Final = re.compile(r"\w+=")
# A part of a command. Group 1 is one in single quotes, in which a shell replaces nothing.
_PART: Final = re.compile(r"""('[^']*')|"(?:\\.|[^"\\])*"|(?:\\.|[^'"\\])+""", re.DOTALL)
_VARIABLE: Final = re.compile(r"\\.|\$(\w+)|\$\{(\w+)(?::?-[^}]*)?\}", re.DOTALL)
# What a shell puts in the place of the output of a command, or of a computation.
_SUBSTITUTED: Final = re.compile(r"`[^`]*`|\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)")
_QUOTED: Final = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.|(?<!\S)#[^\n]*""", re.DOTALL)  # or a comment
# Or a file that is written here, whose lines are neither commands nor comments.
_KEPT: Final = re.compile(rf"""<<-?[ ]*(['"]?)(\w+)\1(?!\w).*?\n\t*\2(?!\S)|{_QUOTED.pattern}""", re.DOTALL)
_LEFT_OUT: Final = re.compile(r"^#.*|\\\n")  # by a shell: a comment, and an end of a line after a backslash
_COMMAND: Final = re.compile(rf"""(?:{_KEPT.pattern}|[^&;\n]|(?<!&)&(?!&))+""", re.DOTALL)
# In the background; or a test whose failure leaves out a change of the shell, and none of the commands after it.
_NO_SETUP: Final = re.compile(
    r"(?<![&>])&(?![&>])|(?:^|[;&\n])\s*(?:test|\[\[?)\s[^&;\n]*&&\s*(?:cd|export)\s[^&;\n]*[;\n]"
)
_SHELL_PROGRAM: Final = "is a shell program of its own: name the script and its arguments, and give the rest as setup"


@dataclass(frozen=True)
class Command:
    """The command of a container, or the last one of a shell program, and what the commands before that do for it."""

    words: list[str]
    folder: str  # in which it runs; one in the image's WORKDIR if it is relative
    exported: list[dict[str, str]] = field(default_factory=list)  # variables, as a container's ``env`` has them
    setup: str = ""  # the commands before it; empty if they only set the folder and variables
    fields: dict[str, Any] = field(default_factory=dict)  # of the job: what its options say of ranks and restarts


def command_of_job(command: Command, env: Mapping[str, str], ranks: object) -> Command:
    """Return the command of a job, a script or a module with its arguments, for the command of a container.

    ``env`` are the variables of the container, and ``ranks`` the number of ranks in a pod by the rest of the manifest.
    """
    words = command.words
    if not words:
        raise ValueError("is that of the image, which flk does not know: write it into the manifest")
    words = [
        _KUBERNETES_VARIABLE.sub(lambda found: env.get(found[1], found[0]) if found[1] else "$", word) for word in words
    ]
    command, changing = replace(command, words=words), re.compile(r"\$")
    if _SHELL.fullmatch(words[0]):
        command, changing = _last_of_shell(command, env), _CHANGED_BY_SHELL
    fields, words = _script_of(command.words, ranks)
    if not words or (words[0] != "-m" and words[0].startswith("-")):
        before = f" before {words[0]}, an option that a job cannot give to Python" if words else ""
        raise ValueError(f"has no script and no module{before}")
    if changed := next(filter(changing.search, words), None):
        raise ValueError(
            f"{changed.translate(_AS_WRITTEN)}: a job's arguments are as they are written, and no shell changes them"
        )
    if words[0] != "-m":
        root = command.folder if command.folder.startswith("/") else ""
        words = [str(PurePosixPath(root) / words[0]), *words[1:]]
    if outside := next((word for word in words if _OUTSIDE.match(word)), None):
        raise ValueError(f"{outside.translate(_AS_WRITTEN)}: ranks start in a folder of their own: give the full path")
    return replace(command, words=[word.translate(_AS_WRITTEN) for word in words], fields=fields)


def shell_word(folder: str) -> str:
    """Return the word of a setup command for a folder. The launcher, whose shell runs it, is in the image's WORKDIR."""
    start = "" if folder.startswith("/") else '"$(readlink /proc/$PPID/cwd)"/'
    return (start + shlex.quote(folder)).removesuffix("/.")


# What starts the ranks -----------------------------------------------------------------------------------------------


def _script_of(words: list[str], ranks: object) -> tuple[dict[str, Any], list[str]]:
    """Return the fields that the start of a command becomes, and the script or module with its arguments."""
    if launched := _launched(words, ranks):
        return launched
    if _PYTHON.fullmatch(words[0]):
        return {"processes": 1}, _without_options(words)
    if words[0].startswith("-"):
        raise ValueError(
            "has arguments only, of the program that the image starts: write its command into the manifest"
        )
    if not words[0].endswith(".py"):
        raise ValueError(
            f"starts {words[0].translate(_AS_WRITTEN)}: a job starts a Python script or a module, or by torchrun or "
            "accelerate launch"
        )
    return {"processes": 1}, words


def _without_options(words: list[str]) -> list[str]:
    """Return the words after ``python`` and its options that change nothing for ranks."""
    return [*dropwhile(lambda word: word in ("-u", "-O", "-B", "-s"), words[1:])]


def _launched(words: list[str], ranks: object = None) -> tuple[dict[str, Any], list[str]] | None:
    """Return what `_script_of` does of a command that starts ranks by a launcher; None of any other."""
    module = _without_options(words) if _PYTHON.fullmatch(words[0]) else [PurePosixPath(words[0]).name, *words[1:]]
    if module[:2] in (["accelerate", "launch"], ["-m", "accelerate.commands.launch"]):
        return _accelerate(module[2:])
    if module[:1] == ["torchrun"]:
        return _torchrun(module[1:], ranks)
    if module[:1] == ["-m"] and module[1:2] and module[1] in _LAUNCHERS:
        return _torchrun(module[2:], ranks, passes_rank=module[1] == _OLD_LAUNCHER)
    return None


def _accelerate(words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return what `_script_of` does of the words after ``accelerate launch``, whose options end at the script."""
    script = next((i for i, word in enumerate(words) if word.endswith(".py") or word in ("-m", "--module")), 0)
    options = "".join(f"{word}\0" for word in words[:script])
    given = {name.replace("-", "_"): value for name, value in _OF_ACCELERATE.findall(options)}
    ranks, machines = given.get("num_processes", ""), given.get("num_machines", "1")
    # What no option says, a configuration file in the image may say.
    told = ranks.isdecimal() and machines.isdecimal() and not re.search(r"(?<!\w)--config", options)
    fields = {"processes": int(ranks) // max(1, int(machines))} if told else {}
    kept = _OF_ACCELERATE.sub("", options).split("\0")[:-1]
    return fields, ["-m", "flk_hosts.accelerate_launch", *kept, *words[script:]]


def _torchrun(words: list[str], ranks: object, *, passes_rank: bool = False) -> tuple[dict[str, Any], list[str]]:
    """Return the fields that torchrun's options become, and the script with its arguments.

    ``ranks`` are those of a pod, unless an option says so. ``passes_rank``: without --use-env, the launcher gives the
    script the number of the rank in its pod, too.
    """
    fields: dict[str, Any] = {}
    module = False
    while words and words[0].startswith("-"):
        option, equals, value = words[0].partition("=")
        option = option.replace("_", "-")  # torchrun takes both
        if option in _OTHER_PROGRAM:
            raise ValueError(f"{option} starts another program than a Python script")
        words, passes_rank = words[1:], passes_rank and option != "--use-env"
        if option in ("-m", "--module"):
            module = True
        elif option not in _SWITCHES and not equals:
            value, words = words[0] if words else "", words[1:]
        if option == "--nproc-per-node" and value.isdecimal():
            fields["processes"] = int(value)
        elif option == "--nproc-per-node" and value == "auto":
            fields["processes"] = value
        elif option == "--nproc-per-node" and not _BY_GPUS.fullmatch(value):
            raise ValueError(f"{option}: must be a number (is {value.translate(_AS_WRITTEN)!r})")
        elif option == "--max-restarts":
            fields["restarts"] = int(value) if value.isdecimal() else value.translate(_AS_WRITTEN)
        elif option == "--nnodes" and (sizes := re.fullmatch(r"(\d+):(\d+)", value)) and sizes[1] != sizes[2]:
            fields["elastic"] = {"min": int(sizes[1]), "max": int(sizes[2])}
    if passes_rank and str(fields.get("processes", ranks)) != "1":
        raise ValueError(
            f"{_OLD_LAUNCHER} gives each rank its --local-rank: add --use-env, for a script that needs none"
        )
    local_rank = ["--local-rank=0"] if passes_rank else []
    return fields, [*(["-m"] if module else []), *words[:1], *local_rank, *words[1:]]


# What a shell does before it -----------------------------------------------------------------------------------------


def _last_of_shell(shell: Command, env: Mapping[str, str]) -> Command:
    """Return the last command of ``sh -c TEXT``, which those before it set up. Raises ValueError for other programs."""
    *options, text = shell.words[1:] or [""]
    known_options = all(re.fullmatch(r"-\w+|--login|pipefail", word) for word in options)
    if not options or not known_options or not options[-1].endswith("c"):
        raise ValueError("runs a shell script: name the Python script that it starts, and give the rest as setup")
    text = _KEPT.sub(lambda part: part[0] if part[0][0] in "'<" else _LEFT_OUT.sub("", part[0]), text).strip("; \t\n")
    commands = [found for found in _COMMAND.finditer(text) if found[0].strip()]
    try:
        *before, command = [shlex.split(found[0]) for found in commands]
    except ValueError:  # no command, or a quote without an end
        before, command = [], []
    given = [*takewhile(_ASSIGNMENT.match, command)]
    if command[len(given) :] in ([], ["exec"]) or _NO_SETUP.search(_KEPT.sub("", text)):
        raise ValueError(_SHELL_PROGRAM)
    folder, exported = _effects([*before, ["export", *given]], shell.folder)
    # The assignments before a command do not replace variables in the command itself.
    known = {**env, **{row["name"]: row["value"] for row in exported[: len(exported) - len(given)]}}
    command = shlex.split(_expanded(commands[-1][0], known))[len(given) :]
    if command[:1] == ["exec"]:
        command.pop(0)
    if all(parts[0] in ("cd", "export", "set") for parts in before):
        return Command(command, folder, exported)
    setup = text[: commands[-2].end()].strip()
    if "&&" not in text[commands[-2].end() : commands[-1].start()]:  # the last one runs also after another failed
        setup = f"{text[: commands[-1].start()]} true"
    in_folder = f"(cd {shell_word(shell.folder)} && {shlex.join([*shell.words[:-1], setup])})"
    return Command(command, folder, exported, in_folder)


def _expanded(command: str, known: Mapping[str, str]) -> str:
    """Return a command in which known variables whose values are one word have these values, but in single quotes."""

    def value(found: re.Match[str]) -> str:
        value = known.get(found[1] or found[2], "")
        return value if shlex.quote(value) == value else found[0]

    def text(part: re.Match[str]) -> str:
        expanded = part[0] if part[1] else _VARIABLE.sub(value, part[0])
        return expanded.translate(_IN_QUOTES) if part[0][0] in "'\"" else expanded

    # The blanks in a substitution do not end a word.
    return _SUBSTITUTED.sub(lambda found: found[0].translate(_IN_QUOTES), _PART.sub(text, command))


def _effects(commands: list[list[str]], folder: str) -> tuple[str, list[dict[str, str]]]:
    """Return the folder and the exported variables after the commands of a shell.

    Raises ValueError for a command that starts ranks, or whose effect on those of the last command a setup lacks.
    """
    exported = []
    for words in commands:
        parts = [*dropwhile(_ASSIGNMENT.match, words)] or [""]
        known = not any(_EXPANDED & {*part} for part in parts)
        if {*_LAUNCHERS} & {*parts} or _launched(parts):
            raise ValueError(f"{' '.join(words)}: is a training before the last command: make a job of each")
        if parts[0] in _CHANGES_SHELL:
            raise ValueError(f"{' '.join(words)}: {_SHELL_PROGRAM}")
        if parts[0] == "cd" and known and (entered := _entered(parts[1:], folder)):
            folder = entered
        elif parts[0] == "export" and known and all(map(_ASSIGNMENT.match, parts[1:])):
            exported += [dict(zip(("name", "value"), part.split("=", 1), strict=True)) for part in parts[1:]]
        elif (
            parts[0] in ("", *_SETS_VARIABLES)
            or parts[1:2] == ["activate"]
            or re.search(r"\|\| (cd|export|source|\.) |^printf -v ", " ".join(words))
        ):
            raise ValueError(
                f"{' '.join(words)}: ranks do not see what a shell before them does: give it as env or workingDir"
            )
    return folder, exported


def _entered(words: list[str], folder: str) -> str | None:
    """Return the folder after a ``cd`` with these words; None if it depends on more than the manifest says."""
    if not words or words[0].startswith("-") or words[1:] not in ([], ["||", "exit"], ["||", "exit", "1"]):
        return None
    return str(PurePosixPath(folder) / words[0])
