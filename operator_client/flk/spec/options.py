"""The table of options: how each field of a job is given by a flag, shown in flk.yaml and passed to the ranks.

A row stands in the annotation of its field (`flk.spec.table`, `flk.spec.parts`), beside type, default and description.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any, Final, get_args

from flk_runtime.contract.values import dataclass
from flk_runtime.contract.variable import Variable


class Form(enum.Enum):
    """The form of a flag's text, which decides where its value goes."""

    TEXT = enum.auto()  # the field's value
    NUMBER = enum.auto()  # the field's value, a whole number
    FILE = enum.auto()  # a YAML file that has the field's value
    LIST = enum.auto()  # one more item of the field
    PAIR = enum.auto()  # KEY=VALUE, an entry of the field
    NUMBERS = enum.auto()  # KEY=VALUE, where a value may be a number
    VARIABLE = enum.auto()  # KEY=VALUE, or KEY of a variable of this shell


_REPEATABLE: Final = (Form.LIST, Form.PAIR, Form.NUMBERS, Form.VARIABLE)


@dataclass(frozen=True)
class Option:
    """How a field is given."""

    metavar: str = ""  # of its flag; empty: it has none
    form: Form = Form.TEXT
    flags: tuple[str, ...] = ()  # names of the flag; empty: the name of the field
    example: str = ""  # value that the flk.yaml of `flk init` shows in a comment
    variable: Variable[Any] | None = None  # the ranks read a value other than None from it
    empty: str = ""  # meaning of an empty value of the chart, if it differs from a field that is left out


@dataclass(frozen=True)
class Row:
    """An option with its field."""

    path: tuple[str, ...]  # of the field in flk.yaml
    description: str
    option: Option
    model: Any  # of the field: a pydantic model

    @property
    def flags(self) -> tuple[str, ...]:
        """The names of the flag, the usual one first."""
        return self.option.flags or (f"--{self.path[-1].replace('_', '-')}",)

    @property
    def name(self) -> str:
        """The name of the flag as a parameter of a function: ``save_every`` for --save-every."""
        return self.flags[0].removeprefix("--").replace("-", "_")

    @property
    def repeatable(self) -> bool:
        """Whether the flag may be given several times."""
        return self.option.form in _REPEATABLE

    @property
    def default(self) -> str:
        """The default of the field as a job file has it, a duration with its units; empty if it has none."""
        name = self.path[-1]
        default = self.model.model_fields[name].default
        if not isinstance(default, str | int) or isinstance(default, bool) or not default:
            return ""
        return str(self.model.model_construct(**{name: default}).model_dump(include={name})[name])

    @property
    def help(self) -> str:
        """The help of the flag, in sentences: the description of the field, and its default."""
        text, _, left_out = self.description.partition("; left out: ")
        default = left_out or self.default
        sentences = [f"{text[:1].upper()}{text[1:]}.", f"Default: {default}." if default else ""]
        return " ".join(filter(None, [*sentences, "Repeatable." if self.repeatable else ""]))


def rows(model: Any, above: tuple[str, ...] = ()) -> Iterator[Row]:
    """Yield the rows of all fields of a pydantic model that have an option, and of the fields below the others."""
    for name, of_field in model.model_fields.items():
        path = (*above, name)
        option = next((item for item in of_field.metadata if isinstance(item, Option)), None)
        if option:
            yield Row(path, of_field.description or "", option, model)
        if not (option and option.metavar):
            for part in (of_field.annotation, *get_args(of_field.annotation)):
                if hasattr(part, "model_fields"):
                    yield from rows(part, path)


GROUPS: Final[dict[str, tuple[str, ...]]] = {
    "Script": (
        *("module", "file", "env", "secret", "pip", "requirements", "setup"),
        *("ship", "no_ship", "preload"),
    ),
    "Size": ("replicas", "processes", "elastic", "spares", "strategy", "verify", "diloco"),
    "Hardware": (
        *("gpu", "cpu", "memory", "shm", "cpu_limit", "memory_limit", "ephemeral_storage", "resource"),
        *("fabric", "image", "image_pull_policy"),
    ),
    "Restarts and limits": (
        *("restarts", "disruptions", "on_restart", "deadline", "hang_timeout", "grace"),
        *("stuck_after", "ttl"),
    ),
    "Checkpoints and metrics": (*("checkpoint", "save_every", "store_every", "keep", "metrics"),),
    "Pods and placement": (
        *("name", "volume", "node_selector", "toleration", "avoid_node", "topology", "target", "gang", "queue"),
        *("queue_priority", "label", "annotation", "service_account", "pull_secret", "priority_class", "patch"),
    ),
}
"""The flags of a job by topic, in the order of the guides and of the help."""
