"""The help of commands: sections with aligned columns, and for a job first the options that most people need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import typer.core

from flk.spec.options import GROUPS

# The options of a job in the short help of the commands that take one.
_SUBMIT: Final = (
    *("replicas", "gpu", "cpu", "memory", "image", "pip", "env", "secret", "volume", "checkpoint"),
    *("strategy", "restarts", "name", "queue"),
)
_RUN: Final = ("replicas", "processes", "gpu", "pip", "env", "checkpoint", "save_every", "strategy", "restarts", "name")
_PLAN: Final = ("module", "replicas", "processes", "gpu", "fabric", "pip", "requirements")
SHOWN: Final[dict[str, tuple[str, ...]]] = {
    "submit": _SUBMIT,
    "render": _SUBMIT,
    "run": _RUN,
    "plan": _PLAN,
    "bench": ("replicas", "processes", "gpu", "cpu", "memory", "image", "pip", "env", "volume", "fabric"),
}
_IN_FULL_HELP: Final = ("context", "timeout", "output")  # of commands that take a job: the short help leaves them out
# Options of a job that change nothing on this machine, where they are accepted all the same.
_ELSEWHERE: Final = frozenset(
    {
        *("ship", "no_ship", "memory", "shm", "cpu_limit", "memory_limit", "ephemeral_storage", "resource"),
        *("image", "image_pull_policy", "stuck_after", "ttl", *GROUPS["Pods and placement"]),
    }
) - {"name"}
_OF_JOB: Final = frozenset(name for names in GROUPS.values() for name in names)
_LOCAL: Final = frozenset(_OF_JOB - _ELSEWHERE)
_COUNT: Final[dict[str, frozenset[str]]] = {"run": _LOCAL, "plan": frozenset({*_PLAN, "file"})}  # else all
_EXAMPLES: Final[dict[str, tuple[str, ...]]] = {
    "submit": (
        "flk submit train.py --replicas 4 --gpu 8 --image team/train:1.0 --follow",
        "flk submit train.py --checkpoint my-pvc:/checkpoints -- --lr 3e-4",
    ),
    "run": ("flk run train.py --replicas 2", "flk run train.py --checkpoint runs:/checkpoints -- --lr 3e-4"),
}


class Command(typer.core.TyperCommand):
    """A command whose help shows its arguments and options in sections, without the marks of their types."""

    every = False  # whether the help shows all options of a job

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the first `--` among the words of a job's command: what follows it is for the script."""
        if self.name in SHOWN and "--" in args:
            args.insert(args.index("--"), "--")
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the sections. A job's options are in topics with --help-all; else the most needed come first."""
        name = str(self.name)
        takes_job = name in SHOWN
        params = [param for param in self.get_params(ctx) if not getattr(param, "hidden", False)]
        arguments = [param for param in params if param.param_type_name == "argument"]
        options = {param.name: param for param in params if param.param_type_name == "option"}
        _section(formatter, "Arguments", arguments)
        own = [option for key, option in options.items() if not takes_job or key not in _OF_JOB]
        count = _COUNT.get(name, _OF_JOB)
        if takes_job and self.every:
            for topic, keys in GROUPS.items():
                _section(formatter, topic, [options[key] for key in keys if key in count])
            _section(formatter, f"flk {name}", own)
        else:
            shown = [option for option in own if not takes_job or option.name not in _IN_FULL_HELP]
            _section(formatter, "Options", [*(options[key] for key in SHOWN.get(name, ())), *shown])
        for number, example in enumerate(_EXAMPLES.get(name, ())):
            formatter.write(("" if number else "\nExamples:\n") + f"  {example}\n")
        if name == "run" and self.every:
            formatter.write("\nThe other options of flk submit are accepted, and change nothing on this machine.\n")


def show_all(context: typer.Context, _: Any, value: bool) -> None:
    """Print the help with all options, and end: the callback of --help-all."""
    if value:
        command: Any = context.command
        command.every = True
        print(context.get_help())
        raise typer.Exit


def signature(option: Any) -> str:
    """Return the names of an option with the word for its value, or the word of an argument."""
    metavar = str(option.metavar or str(option.name).upper())
    if option.param_type_name == "argument":
        return metavar
    long = [name for name in option.opts if name.startswith("--")]
    short = [name for name in option.opts if name not in long]
    names = [*short, *long[:1], *option.secondary_opts]  # a second long name is for those who know it
    return ", ".join(names) + ("" if option.is_flag else f" {metavar}")


def rows(options: Iterable[Any]) -> list[tuple[str, str]]:
    """Return the rows of a section: what is written, and its meaning with the default, if it has one to tell."""
    return [(signature(option), (option.help or "") + _default(option)) for option in options]


def _default(option: Any) -> str:
    value = option.default
    tells = isinstance(value, str | int) and not isinstance(value, bool) and value not in ("", 0)
    return f" Default: {value}." if tells and "efault" not in (option.help or "") else ""


def _section(formatter: Any, title: str, options: Sequence[Any]) -> None:
    if options:
        with formatter.section(title):
            formatter.write_dl(rows(options), col_max=32)
