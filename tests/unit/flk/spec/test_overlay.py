"""Flags over the job file: all mistakes are told at once."""

from __future__ import annotations

from pathlib import Path

from tests.support.commands import Run


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
