"""The end of a process whose last checkpoints are still being written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flk_runtime.contract import pod_env

SCRIPT = """
import errno, multiprocessing, os, sys
from flk_runtime.training import ending

class Manager:
    def __init__(self, name, error=None):
        self.name, self.error = name, error

    def finish_write(self):
        print("finished", self.name)

    def wait(self, at_end):
        assert at_end
        print("waited for", self.name)
        if self.error:
            raise self.error

def train():
    ending.complete_at_the_end(Manager("a", {error}))
    ending.complete_at_the_end(Manager("b"))

{run}
"""
HERE = "train()"
FORK = """
train()
sys.stdout.flush()
if os.fork() == 0:
    sys.exit()  # its parent waits for its own writes
os.wait()
"""
CHILD = """
process = multiprocessing.get_context("fork").Process(target=train)
process.start()
process.join()
sys.exit(process.exitcode)
"""


@pytest.mark.parametrize("run", [HERE, CHILD, FORK], ids=["process", "process of multiprocessing", "parent"])
@pytest.mark.parametrize(
    ("error", "code"), [("OSError(errno.ENOSPC, 'No space left on device')", 1), ("None", 0)], ids=["failed", "written"]
)
def test_a_last_checkpoint_that_cannot_be_written_is_the_failure_of_its_process(
    tmp_path: Path, run: str, error: str, code: int
) -> None:
    report = tmp_path / "report"
    with report.open("w") as file:
        ended = subprocess.run(
            [sys.executable, "-c", SCRIPT.format(run=run, error=error)],
            env=os.environ | {pod_env.REPORT_FD: str(file.fileno())},
            pass_fds=[file.fileno()],
            capture_output=True,
            text=True,
        )
    assert ended.returncode == code, ended.stderr
    assert ended.stdout.splitlines() == ["waited for a", "waited for b"]
    assert ("No space left on device" in ended.stderr) == bool(code)
    messages = [json.loads(line)["message"] for line in report.read_text().splitlines()]
    assert ["No space left on device" in message for message in messages] == [True] * bool(code)


def test_after_an_exit_code_of_a_failure_only_writes_that_go_on_are_awaited() -> None:
    run = (
        "from flk_runtime.shared import failure_report\nfailure_report.exits_with_failure = True\ntrain()\nsys.exit(3)"
    )
    command = [sys.executable, "-c", SCRIPT.format(run=run, error=None)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout.splitlines()) == (3, ["finished a", "finished b"])
