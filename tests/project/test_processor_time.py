"""The processor time that a test run prints counts what its tests start."""

from __future__ import annotations

import subprocess
import sys

from tests.support.fork_server import start_fork_server
from tests.support.processor_time import of_machine, used

WORK = range(20_000_000)  # whose sum takes a fraction of a second
LEAST = 0.05  # seconds that it takes at least


def test_a_child_counts_when_it_has_ended() -> None:
    before, machine = used(), of_machine()
    subprocess.run([sys.executable, "-S", "-c", f"sum({WORK})"], check=True)
    assert used() - before > LEAST
    assert of_machine() - machine > LEAST


def test_a_process_that_the_fork_server_has_forked_counts() -> None:
    context = start_fork_server()
    before = used()
    process = context.Process(target=sum, args=(WORK,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert used() - before > LEAST


def test_what_the_fork_server_forks_has_the_modules_of_ranks_and_of_commands() -> None:
    check = "import gc, sys; assert {'torch._dynamo', 'flk.cli.submit'} <= sys.modules.keys() and gc.get_freeze_count()"
    process = start_fork_server().Process(target=exec, args=(check,))
    process.start()
    process.join()
    assert process.exitcode == 0
