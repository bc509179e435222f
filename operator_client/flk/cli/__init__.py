"""The command line: a static registry of subcommands, and how one is found, imported and called.

`flk --help` and a misspelt command import no subcommand. A subcommand is a function of its name (``list_`` for list) in
a module with its kin. Typer turns the function's parameters into options, and its docstring is the help. It returns
None or an exit code, or raises a FlkError. Only `flk.__main__` imports this package.
"""

from __future__ import annotations

import difflib
import itertools
import os
import re
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, Final

import typer
import typer.core
import typer.main

from flk.cli.global_options import takes_global_options, with_global_options
from flk.cli.help import Command, rows
from flk.errors import UsageError
from flk.user.commands import program_name
from flk_runtime.contract import VERSION, ExitCode

# Each command with its module, its help and the section of `flk --help` in which it stands.
COMMANDS: Final = {
    "submit": ("flk.cli.submit", "Train in a cluster", "Start"),
    "run": ("flk.cli.submit", "Train on this machine, in the environment of the pods", "Start"),
    "init": ("flk.cli.submit", "Write a commented flk.yaml to start from", "Start"),
    "render": ("flk.cli.submit", "Print the manifests of a job", "Start"),
    "convert": ("flk.cli.submit", "Turn a PyTorchJob of any origin into a job file", "Start"),
    "status": ("flk.cli.status", "Show the status of a job, and why it ended", "See"),
    "logs": ("flk.cli.logs", "Show what every rank prints", "See"),
    "list": ("flk.cli.list", "List jobs", "See"),
    "why": ("flk.cli.why", "Say why a job does not run, or why it ended", "See"),
    "wait": ("flk.cli.wait", "Wait until a job ends, and exit with its exit code", "See"),
    "top": ("flk.cli.top", "Watch a job live: steps, throughput, ranks, pods", "See"),
    "report": ("flk.cli.report", "Write an HTML file about a job", "See"),
    "stacks": ("flk.cli.profile", "Show what every rank of a running job is doing", "Debug"),
    "profile": ("flk.cli.profile", "Profile some steps of ranks of a running job", "Debug"),
    "exec": ("flk.cli.exec", "Run a command in the container of a rank", "Debug"),
    "cp": ("flk.cli.exec", "Copy files from the pod of a rank to this machine", "Debug"),
    "port-forward": ("flk.cli.port_forward", "Forward ports of this machine to the pod of a rank", "Debug"),
    "doctor": ("flk.cli.doctor", "Find what would prevent jobs from running", "Debug"),
    "explain": ("flk.cli.why", "Print what a cause means and what to do about it", "Debug"),
    "scale": ("flk.cli.change", "Change the number of pods of an elastic job", "Change"),
    "suspend": ("flk.cli.change", "End the pods of a job and keep the job", "Change"),
    "resume": ("flk.cli.change", "Start a suspended job again", "Change"),
    "restart": ("flk.cli.change", "Run a job again from its last checkpoint", "Change"),
    "delete": ("flk.cli.delete", "Delete jobs with their pods and ConfigMaps", "Change"),
    "plan": ("flk.cli.plan", "Predict memory and speed of each strategy for a script", "Plan"),
    "bench": ("flk.cli.bench", "Measure each strategy with a script, in a cluster or here", "Plan"),
}
# Words of other tools, and what does the same here.
_SYNONYMS: Final = {
    "stop": "flk suspend JOB ends its pods and keeps the job, flk delete JOB deletes it",
    "cancel": "flk delete JOB deletes a job, flk suspend JOB keeps it without pods",
    "kill": "flk delete JOB deletes a job, flk suspend JOB keeps it without pods",
    "ps": "flk list lists jobs",
    "get": "flk list lists jobs, flk status JOB shows one",
    "describe": "flk status JOB shows a job, flk why JOB says why it does not run",
    "apply": "flk submit creates a job from a script or from flk.yaml",
    "create": "flk submit creates a job from a script or from flk.yaml",
    "version": "flk --version prints it",
    "help": "flk --help lists the commands, flk COMMAND --help explains one",
}
# What follows `--` in a command, and how it is written.
_AFTER_DASHES: Final = {
    **dict.fromkeys(("run", "submit", "render"), ("options of the script itself", "train.py --")),
    "exec": ("the command and its options", "JOB -- COMMAND"),
}
_FUNCTIONS: Final = {"list": "list_", "exec": "exec_", "port-forward": "port_forward"}  # where names differ
_WIDTH: Final = 120  # columns of a help, on a terminal that has so many
_CLICK_ERROR: Final = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


class Registry(typer.core.TyperGroup):
    """A Typer group whose commands are imported when they are called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return load(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in COMMANDS:
            hint = _SYNONYMS.get(args[0]) or _suggestion(args[0], [*COMMANDS], "flk --help")
            raise UsageError(
                f"there is no command {args[0]!r}", hint=re.sub(r"\bflk (?=-|[a-z])", f"{program_name()} ", hint)
            )
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands in sections, then the options."""
        for section, names in itertools.groupby(COMMANDS, lambda name: COMMANDS[name][2]):
            with formatter.section(section):
                formatter.write_dl([(name, COMMANDS[name][1]) for name in names], col_max=16)
        options = [param for param in self.get_params(ctx) if not getattr(param, "hidden", False)]
        with formatter.section("Options, also after a command that uses a cluster"):
            formatter.write_dl(rows(options), col_max=32)


def load(name: str) -> Any:
    """Import the command of that name and return it as a Typer command."""
    function = getattr(import_module(COMMANDS[name][0]), _FUNCTIONS.get(name, name))
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(name=name, cls=Command, help=function.__doc__ or COMMANDS[name][1])(with_global_options(function))
    return typer.main.get_command(app)


def application() -> Any:
    """Return the whole command line as one Typer command."""
    app = typer.Typer(
        name="flk",
        cls=Registry,
        help="Train PyTorch on Kubernetes: submit a script as a job, follow it, and see why it ended.",
        epilog="A first job: `flk run --replicas 2` here, `flk submit --replicas 4` in a cluster.",
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_root)
    return typer.main.get_command(app)


def call(words: Sequence[str]) -> int:
    """Run one command line and return its exit code. Raises UsageError for mistakes that Typer finds, too."""
    command = application()
    name = program_name()
    if os.environ.get("_FLK_COMPLETE"):
        command.main(args=[*words], prog_name="flk")  # a shell requests completions: Typer prints them and exits
    try:
        with command.make_context(name, [*words], max_content_width=_WIDTH) as context:
            result = command.invoke(context)
    except typer.Exit as end:
        return int(end.exit_code)
    except typer.Abort:
        return int(ExitCode.INTERRUPTED)
    except OSError as error:
        if "--install-completion" not in words or isinstance(error, BrokenPipeError):
            raise
        said = (error.strerror or str(error)).lower()
        hint = "--show-completion prints what your shell has to read"
        where = f" to {error.filename}" if error.filename else ""
        raise UsageError(f"the completion cannot be written{where}: {said}", hint=hint) from None
    except Exception as error:
        if isinstance(error, _CLICK_ERROR):
            raise _translated(error, next((f"{name} {word}" for word in words if word in COMMANDS), name)) from None
        raise
    return result if isinstance(result, int) else int(ExitCode.DONE)


@takes_global_options
def _root(
    typer_context: typer.Context,
    version: Annotated[bool, typer.Option("--version", "-V", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(f"flk {VERSION}")
        raise typer.Exit
    if typer_context.invoked_subcommand is None:
        print(typer_context.get_help())


def _translated(error: Any, path: str) -> UsageError:
    """Return Typer's usage error in the command ``path`` as a UsageError with a hint."""
    context = getattr(error, "ctx", None)
    help_command = f"{path} --help"
    option = getattr(error, "option_name", None)
    if option is not None and context is not None and context.parent is None and " " in path.removeprefix("kubectl "):
        return UsageError(
            f"{path.rpartition(' ')[0]} itself has no option {option}",
            hint=f"options of a command follow it: {path} {option} …",
        )
    if option is not None and hasattr(error, "possibilities"):
        known = [name for p in context.command.get_params(context) for name in p.opts] if context else []
        hint = _suggestion(option, known, help_command)
        if example := _AFTER_DASHES.get(path.split()[-1]):
            hint += f"; {example[0]} follow `--`: {path} {example[1]} {option} …"
        return UsageError(f"{path} has no option {option}", hint=hint)
    message = " ".join(error.format_message().split()).rstrip(".")
    extra = re.fullmatch(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", message)
    if extra:
        message = f"{path} takes no further argument: {extra[1]}"
    number = r"Invalid value for '([^']+)': '?(.*?)'? is not (?:a valid int range|in the range x>=(\d+))"
    invalid = re.fullmatch(number, message)
    if invalid:
        need = f"at least {invalid[3]}" if invalid[3] else "a whole number"
        return UsageError(
            f"{invalid[1]}: must be {need} (is {invalid[2]})", hint=f"{help_command} shows how it is used"
        )
    return UsageError(message[:1].lower() + message[1:], hint=f"{help_command} shows how it is used")


def _suggestion(word: str, known: list[str], help_command: str) -> str:
    long = [name for name in known if re.fullmatch("-[a-z]", word) and name.startswith(f"-{word}")]
    near = long if len(long) == 1 else difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    return f"did you mean {near[0]}? {help_command} lists them" if near else f"{help_command} lists what there is"
