"""A live view or a shell on a terminal: it draws, takes keys, follows the size, and leaves the terminal as it was."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from tests.support.terminal import on_a_terminal

# flk may be on PYTHONPATH only, in the soak test of other Pythons.
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "TERM": "xterm", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
PROGRAM = """
import threading
from flk.cli.live_screen import LiveScreen
from flk.cli.top import _show
from flk.cli.top_text import Line

def lines(width):
    return [Line(f"a view, {width} columns", "bold"), *(Line(f"row {number}") for number in range(40))]

try:
    _show(lines, threading.Event())
    print("the end")
except KeyboardInterrupt:
    print("interrupted")
"""


def shown(typed: dict[str | re.Pattern[str], str], folder: Path, **variables: str) -> str:
    code, text = on_a_terminal(
        [sys.executable, "-c", PROGRAM], folder, environment=ENVIRONMENT | variables, typed=typed, size=(10, 60)
    )
    assert code == 0, text
    assert text.startswith("\x1b[?1049h\x1b[?25l")
    assert "\x1b[?25h\x1b[?1049l" in text
    return text


def after_the_first_drawing(code: str) -> str:
    """The program, which runs ``code`` when it makes the lines of its second drawing."""
    return PROGRAM.replace(
        "def lines(width):\n",
        """import signal
drawings = []

def lines(width):
    drawings.append(width)
    if len(drawings) == 2:
        happen()
""",
    ).replace("try:\n", f"def happen():\n    {code}\n\ntry:\n", 1)


def test_keys_scroll_and_quit(tmp_path: Path) -> None:
    # A key that is held down may come several times at once.
    text = shown(
        {"a view, 60 columns": "\x1b[B", "row 8": "j\x1b[Bj\x1bOB", "row 12": "\x1b[6~", "row 20": "q"}, tmp_path
    )
    assert "q quit   j/k scroll   and 32 more lines" in text
    assert text.endswith("the end\r\n")


def test_ctrl_c_leaves_too_and_no_colour_is_honoured(tmp_path: Path) -> None:
    text = shown({"a view": "\x03"}, tmp_path, NO_COLOR="1")
    assert "\x1b[1m" not in text
    assert text.endswith("interrupted\r\n")


def test_a_terminated_view_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    command = [sys.executable, "-c", after_the_first_drawing("signal.raise_signal(signal.SIGTERM)")]
    code, text = on_a_terminal(command, tmp_path, environment=ENVIRONMENT, size=(10, 60))
    assert code == 128 + 15
    assert text.endswith("\x1b[?25h\x1b[?1049l")


def test_the_terminal_is_left_while_the_view_is_stopped(tmp_path: Path) -> None:
    program = after_the_first_drawing(
        """real = signal.raise_signal
    signal.raise_signal = lambda number: print(signal.Signals(number).name, flush=True)
    real(signal.SIGTSTP)"""
    )
    code, text = on_a_terminal(
        [sys.executable, "-c", program],
        tmp_path,
        environment=ENVIRONMENT,
        typed={re.compile("SIGSTOP(?s:.)*a view"): "q"},
        size=(10, 60),
    )
    assert code == 0
    before, _, after = text.partition("SIGSTOP")
    assert before.endswith("\x1b[?25h\x1b[?1049l")
    assert after.lstrip().startswith("\x1b[?1049h\x1b[?25l")


# The terminal's settings before and after a program that is terminated while it hands every key to a command.
SHELL = """
stty -a >before
"$0" -c '
import signal, types
from flk.cli.exec import _raw_terminal

with _raw_terminal(types.SimpleNamespace(resize=print)):
    signal.raise_signal(signal.SIGTERM)
'
code=$?
stty -a >after
cmp before after && exit $code
"""


def test_a_terminated_shell_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    code, text = on_a_terminal(["sh", "-c", SHELL, sys.executable], tmp_path, environment=ENVIRONMENT)
    assert code == 128 + 15, text
