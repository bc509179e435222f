"""The end of a process whose last checkpoints are still being written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("ends of processes")  # all tests look at one run

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


FAILED = "OSError(errno.ENOSPC, 'No space left on device')"
EXIT = "from flk_runtime.shared import failure_report\nfailure_report.exits_with_failure = True\ntrain()\nsys.exit(3)"
CASES = {
    f"{outcome} {name}": SCRIPT.format(run=run, error=error)
    for outcome, error in {"failed": FAILED, "written": "None"}.items()
    for name, run in {"process": HERE, "process of multiprocessing": CHILD, "parent": FORK}.items()
} | {"exit code": SCRIPT.format(run=EXIT, error="None")}
# Forks a process for each script, which ends as Python does: the import of torch takes seconds.
ALL = """
import json, os, sys
import flk_runtime.training.ending
cases = json.loads(sys.argv[1])
for name, script in cases.items():
    if os.fork() == 0:
        for number, stream in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(f"{name}.{stream}", os.O_WRONLY | os.O_CREAT), number)
        report = os.open(f"{name}.report", os.O_WRONLY | os.O_CREAT)
        os.set_inheritable(report, True)
        os.environ["FLK_REPORT_FD"] = f"{report}:{os.fstat(report).st_ino}"
        exec(script, {"__name__": "__main__"})
        break
    open(f"{name}.code", "w").write(str(os.waitstatus_to_exitcode(os.wait()[1])))
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with exit code, output and report of each case."""
    folder = tmp_path_factory.mktemp("ended")
    subprocess.run([sys.executable, "-c", ALL, json.dumps(CASES)], cwd=folder, check=True)
    return folder


@pytest.mark.parametrize("process", ["process", "process of multiprocessing", "parent"])
@pytest.mark.parametrize(("outcome", "code"), [("failed", 1), ("written", 0)])
def test_a_last_checkpoint_that_cannot_be_written_is_the_failure_of_its_process(
    ended: Path, process: str, outcome: str, code: int
) -> None:
    case = f"{outcome} {process}"
    stderr = (ended / f"{case}.stderr").read_text()
    assert (ended / f"{case}.code").read_text() == str(code), stderr
    assert (ended / f"{case}.stdout").read_text().splitlines() == ["waited for a", "waited for b"]
    assert ("No space left on device" in stderr) == bool(code)
    messages = [json.loads(line)["message"] for line in (ended / f"{case}.report").read_text().splitlines()]
    assert ["No space left on device" in message for message in messages] == [True] * bool(code)


def test_after_an_exit_code_of_a_failure_only_writes_that_go_on_are_awaited(ended: Path) -> None:
    assert (ended / "exit code.code").read_text() == "3"
    assert (ended / "exit code.stdout").read_text().splitlines() == ["finished a", "finished b"]
