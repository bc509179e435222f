"""The code that each benchmark measures, and whether it has changed since a result was taken, as git says.

Comments and docstrings of Python are no code here. A table of results names the commit that it was measured on.
`marked` says behind it whether the code is the same; `run_all.py --mark PAGE` and `--write PAGE` do so for a page, and
a test compares those of `benchmarks/results.md`.
"""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path
from typing import Final

CHANGED: Final = "The code that it measures has changed since."
UNKNOWN: Final = "The code that it measures is in no commit of this history."

_LAUNCHER: Final = ("runtime/flk_runtime/launcher", "runtime/flk_runtime/wire")
_RUN: Final = ("runtime/flk_runtime/training", "runtime/flk_runtime/system/mfu.py", "runtime/flk_runtime/distributed")
_CHECKPOINT: Final = (
    "runtime/flk_runtime/checkpoint",
    "runtime/flk_runtime/distributed",
    "runtime/flk_runtime/shared/shard_file.py",
    "runtime/flk_runtime/system/bits.py",
)
_TRAINING: Final = (
    *_LAUNCHER,
    *_RUN,
    *_CHECKPOINT,
    "runtime/flk_runtime/data",
    "runtime/flk_runtime/parallel",
)
_SUBMIT: Final = tuple(f"operator_client/flk/{part}" for part in ("cli", "jobs", "kube", "manifest", "spec", "targets"))
_WATCH: Final = tuple(f"operator_client/flk/{part}" for part in ("cli", "health", "jobs", "kube", "observe"))

# By benchmark, the folders and files where what it measures is spent. Its own script counts too, and the modules of
# benchmarks that this imports.
CODE: Final[dict[str, tuple[str, ...]]] = {
    "cli": ("operator_client/flk",),
    "start": _LAUNCHER,
    "recovery": _LAUNCHER,
    "recovery_loops": ("runtime/flk_hosts", *_LAUNCHER, *_RUN, *_CHECKPOINT),
    "failures": ("benchmarks/failing_loop.py", *_TRAINING),
    "diagnosis": ("benchmarks/faulty.py", "runtime/flk_runtime/contract", "tests/support/failure_kinds.py", *_TRAINING),
    "false_alarms": ("benchmarks/faulty.py", "runtime/flk_runtime/contract", *_TRAINING),
    "slow_ranks": (*_LAUNCHER, "runtime/flk_runtime/shared/observer.py"),
    "pod_recovery": (*_LAUNCHER, "operator_client/flk/manifest", "operator_client/flk/targets"),
    "elastic": (*_LAUNCHER, *_RUN, *_CHECKPOINT),
    "rendezvous": (
        "runtime/flk_runtime/launcher/coordinator",
        "runtime/flk_runtime/launcher/transport",
        "runtime/flk_runtime/wire",
    ),
    "overhead": (*_TRAINING, "examples/gpt"),
    "loop": (*_RUN, "runtime/flk_runtime/data", "runtime/flk_runtime/parallel"),
    "hosted": ("runtime/flk_hosts", *_LAUNCHER, *_RUN, *_CHECKPOINT),
    "streams": ("runtime/flk_runtime/data",),
    "curves": (*_RUN, "runtime/flk_sinks"),
    "telemetry": (*_RUN, "runtime/flk_sinks", "runtime/flk_runtime/launcher/telemetry"),
    "checkpoint": (*_CHECKPOINT, "runtime/flk_runtime/training/entry/script.py"),
    "memory": (*_TRAINING, "examples/gpt"),
    "parallel": (*_RUN, *_CHECKPOINT, "runtime/flk_runtime/parallel"),
    "plan": (
        "benchmarks/llama.py",
        "benchmarks/small_models.py",
        "operator_client/flk/local/bench.py",
        "operator_client/flk/local/plan.py",
        "runtime/flk_plan/bench",
        "runtime/flk_plan",
    ),
    "scale": ("runtime/flk_runtime/distributed", "runtime/flk_runtime/parallel", "runtime/flk_runtime/training"),
    "submit": (*_SUBMIT, *_LAUNCHER),
    "large_jobs": _WATCH,
    "many_jobs": _WATCH,
    "slow_link": ("benchmarks/torchft_gpt.py", "examples/gpt", "runtime/flk_diloco"),
    "diloco_loss": ("examples/gpt", "runtime/flk_diloco"),
    "gpu": ("benchmarks/gpu_ranks.py", *_TRAINING, "runtime/flk_plan"),
}

_IMPORT: Final = re.compile(r"^(?:import|from) (\w+)", re.MULTILINE)
TABLE: Final = re.compile(
    rf"(?ms)^(### (?P<name>\w+)\n\nMeasured on commit (?P<commit>[^,\s]+),[^\n]*?)(?: (?:{CHANGED}|{UNKNOWN}))?$"
)


class HistoryError(Exception):
    """The history of this checkout cannot be asked; the text says why."""


def marked(page: str, root: Path) -> str:
    """The text of a page whose tables of results say what `changes` says of them. Raises HistoryError as that does."""

    def with_mark(table: re.Match[str]) -> str:
        return " ".join(filter(None, (table[1], changes(table["name"], table["commit"], root))))

    return TABLE.sub(with_mark, page)


def changes(name: str, commit: str, root: Path) -> str:
    """CHANGED if the code of a benchmark differs from a commit's, UNKNOWN if the commit does not say it, or nothing.

    ``commit`` is as `measure.environment` writes it: with "-modified" behind it, the code was in no commit. Raises
    HistoryError without git, and in a checkout without the whole history, whose answers would not be those of another.
    """
    if _git(root, "rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        raise HistoryError("this is no git checkout with its whole history")
    if commit.endswith("-modified") or _git(root, "merge-base", "--is-ancestor", commit, "HEAD").returncode:
        return UNKNOWN
    differ = _git(root, "diff", "--name-only", "-z", commit, "--", *_scripts(name, root), *CODE[name]).stdout
    return CHANGED if any(_has_changed(root / path, commit) for path in differ.split("\0") if path) else ""


def _has_changed(path: Path, commit: str) -> bool:
    """Whether the code of a file that differs from a commit's is another one, or there in one of the two only."""
    before = _git(path.parent, "show", f"{commit}:./{path.name}") if path.parent.is_dir() else None
    if path.suffix != ".py" or not path.exists() or before is None or before.returncode:
        return True
    return _code(before.stdout) != _code(path.read_text())


def _code(text: str) -> str:
    """The code of a Python module without comments, docstrings and layout."""
    module = ast.parse(text)
    for node in ast.walk(module):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            del node.body[: ast.get_docstring(node) is not None]
    return ast.dump(module)


def _scripts(name: str, root: Path) -> list[str]:
    """The script of a benchmark, and the modules of benchmarks that it imports itself or through another one."""
    found = [f"benchmarks/{name}.py"]
    for path in found:  # which grows meanwhile
        names = (f"benchmarks/{module}.py" for module in _IMPORT.findall((root / path).read_text()))
        found += [each for each in dict.fromkeys(names) if each not in found and (root / each).exists()]
    return found


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    except FileNotFoundError:
        raise HistoryError("git is not installed") from None
