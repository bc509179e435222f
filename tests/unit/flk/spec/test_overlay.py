"""Flags over the job file: all mistakes are told at once; files of variables, and what wins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flk.spec import overlay
from tests.support.commands import Run

TEXT = """\ufeff# settings

LR=3e-4
export NAME='a "b" $C \\n # d'   # a comment
\tQUOTED="a \\"b\\"\\n\\\\ \\$C # d"
PLAIN=a b#c $D   # a comment
EMPTY=
BLANK= # nothing
URL=https://host/a=b?c#d\r
export SHELL_VALUE
COMMENTED                 # from this shell
UNQUOTED=it's "fine"
"""


def test_the_format(tmp_path: Path) -> None:
    path = tmp_path / "a.env"
    path.write_bytes(TEXT.encode())
    here = {"SHELL_VALUE": "from here", "COMMENTED": "too"}
    found = {entry.name: entry for entry in overlay._env_file(str(path), here)}
    assert {name: entry.value for name, entry in found.items()} == {
        "LR": "3e-4",
        "NAME": 'a "b" $C \\n # d',
        "QUOTED": 'a "b"\n\\ $C # d',
        "PLAIN": "a b#c $D",
        "EMPTY": "",
        "BLANK": "",
        "URL": "https://host/a=b?c#d",
        "SHELL_VALUE": "from here",
        "COMMENTED": "too",
        "UNQUOTED": 'it\'s "fine"',
    }
    assert found["NAME"].place == f"{path}:4"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A=1\nB = 2\n", "--env-file: a.env:2 must be NAME=VALUE or NAME, without spaces around the '='"),
        ("=1", "--env-file: a.env:1 must be NAME=VALUE or NAME"),
        ("A=1\n\nA=2\n", "--env-file: a.env:3 sets A, which line 1 has set already"),
        ('A="1\n2"', '--env-file: a.env:1 begins with a " that does not end the value; a value has one line'),
        ("A='1'2", "--env-file: a.env:1 begins with a ' that does not end the value"),
        ("NOT_SET_ANYWHERE", "--env-file: a.env:1 has NOT_SET_ANYWHERE without a value, and it is not set here"),
        ("A=1\nRANK=2", "--env-file: a.env:2: RANK is reserved"),
        ("A=1\n2A=3", "--env-file: a.env:2: must be letters, digits"),
        ("A=\0", "--env-file: a.env:1: must not contain a NUL character"),
    ],
)
def test_a_mistake_names_its_line(run: Run, text: str, message: str) -> None:
    Path("train.py").write_text("")
    Path("a.env").write_text(text)
    code, stdout, stderr = run("render", "train.py", "--env-file", "a.env")
    assert (code, stdout) == (2, "")
    assert stderr.startswith(f"error: {message}")
    assert stderr.count("\n") <= 2


def test_a_file_that_cannot_be_read(run: Run) -> None:
    Path("train.py").write_text("")
    assert run("render", "train.py", "--env-file", "none.env")[2] == (
        "error: --env-file: none.env cannot be read: No such file or directory\n"
    )
    Path("b.env").write_bytes(b"A=\xff")
    assert "b.env cannot be read: it is not text in UTF-8" in run("render", "train.py", "--env-file", "b.env")[2]


def test_flags_win_over_files_and_files_over_the_job_file(run: Run) -> None:
    Path("flk.yaml").write_text("command: train.py\nenv: {A: file, B: file, C: file, D: file}\n")
    Path("train.py").write_text("")
    Path("a.env").write_text("B=first\nC=first\nD=first\nNOT_SET_C\nNOT_SET_D\n")
    Path("b.env").write_text("C=second\nD=second\nNOT_SET_C=second\nMY_TOKEN=t\n")
    flags = ("--env-file", "a.env", "--env-file", "b.env", "--env", "D=flag", "--env", "NOT_SET_D=flag")
    code, stdout, stderr = run("render", *flags, "-o", "json")
    assert code == 0, stderr
    job = json.loads(stdout)["items"][0]
    env = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["env"]
    values = {variable["name"]: variable.get("value") for variable in env}
    assert [values[name] for name in "ABCD"] == ["file", "first", "second", "flag"]
    assert [values[f"NOT_SET_{name}"] for name in "CD"] == ["second", "flag"]
    assert "env.MY_TOKEN looks like a secret" in stderr


def test_all_mistakes_of_a_command_are_told_at_once(run: Run) -> None:
    Path("train.py").write_text("")
    Path("flk.yaml").write_text("command: train.py\nkeep: 0\n")
    code, stdout, stderr = run("submit", "--env", "NOT_SET_HERE", "--replicas", "0", "--queue", "A")
    assert (code, stdout) == (2, "")
    assert stderr.splitlines() == [
        "flk: using flk.yaml",
        "error: --env: NOT_SET_HERE is not set here",
        "hint: give it a value: --env NOT_SET_HERE=VALUE",
        "error: --replicas: must be at least 1 (is 0)",
        "error: flk.yaml: keep: must be at least 1 (is 0)",
        "error: --queue: must be lower-case letters, digits, '-' and '.', and start and end with a letter or digit "
        "(is 'A')",
    ]
    Path("flk.yaml").unlink()
    code, stdout, stderr = run("submit", "nope.py", "--requirements", "none.txt", "--ship", "no*")
    assert (code, stdout) == (2, "")
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert [line.split()[1] for line in errors] == ["there", "requirements:", "ship:"]
