"""JSON, tables and lines that fit a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from flk.cli.output import ProgressLine, json_text, pace, table, wrapped
from flk.jobs.state import Phase, State
from flk.observe.progress import Progress
from tests.support.terminal import on_a_terminal
from tests.unit.flk.cli.outputs import jobs


def refuse(word: str) -> None:
    pytest.fail(f"{word} is not in JSON")


def test_what_json_cannot_have_is_a_string() -> None:
    data = {"a": [1.5, float("nan"), (float("inf"), -float("inf"))], "b": {"c": None}}
    expected = {"a": [1.5, "NaN", ["Infinity", "-Infinity"]], "b": {"c": None}}
    assert json.loads(json_text(data), parse_constant=refuse) == expected


def test_where_a_table_is_too_wide_the_last_cell_stands_below_its_row() -> None:
    header, rows = ["POD", "REASON"], [["gpt-0", "OOMKilled: it used more than 16Gi"], ["gpt-1", ""]]
    assert table(header, rows, width=80)[1] == "gpt-0   OOMKilled: it used more than 16Gi"
    assert table(header, rows, width=30) == ["POD", "gpt-0", "  OOMKilled: it used more than 16Gi", "gpt-1"]


def state(**fields: Any) -> State:
    return State("gpt", "team", "uid", Phase.RUNNING, 101, replicas=4, ready=3, **fields)


def test_each_state_replaces_the_line_and_notes_remove_it() -> None:
    master, slave = pty.openpty()
    with open(slave, "w") as terminal:
        line = ProgressLine(terminal)
        line.show(state())
        line.show(state())  # nothing new
        line.clear()
        line.clear()
    written = ""
    with contextlib.suppress(OSError):  # the end, as the terminal is closed; one read may return a part
        while piece := os.read(master, 1000):
            written += piece.decode()
    os.close(master)
    assert written == "\r\x1b[K3/4 pods\r\x1b[K"


def test_a_wait_on_a_terminal_shows_it(fake: Any, kubeconfig: Path, tmp_path: Path) -> None:
    jobs.add(fake, "running")
    code, text = on_a_terminal([sys.executable, "-m", "flk", "wait", "gpt", "--timeout", "1s"], tmp_path)
    assert code == 124
    assert re.search(r"\r\x1b\[K\d/3 pods[^\n]*\r\x1b\[K", text)


def test_lines_are_broken_between_words_and_stay_indented() -> None:
    assert wrapped("  killed at the container's limit", 24) == ["  killed at the", "  container's limit"]
    assert wrapped("short", 24) == wrapped("short", 0) == ["short"]


def test_large_numbers_of_a_pace_are_easy_to_read() -> None:
    found = pace(Progress(0, 1234567, 0.0, 2000000, samples_per_s=1234567.0), finished=True)
    assert found == ["step 1,234,567 of 2,000,000", "1.23M samples/s"]
