"""The processor time that a test run prints counts what its tests start."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys

from tests.support.processor_time import of_machine, used

WORK = range(20_000_000)  # whose sum takes a fraction of a second
LEAST = 0.05  # seconds that it takes at least


def test_a_child_counts_when_it_has_ended() -> None:
    before, machine = used(), of_machine()
    subprocess.run([sys.executable, "-S", "-c", f"sum({WORK})"], check=True)
    assert used() - before > LEAST
    assert of_machine() - machine > LEAST


def test_a_process_that_the_fork_server_has_forked_counts() -> None:
    context = multiprocessing.get_context("forkserver")
    context.Process(target=int).start()
    before = used()
    process = context.Process(target=sum, args=(WORK,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert used() - before > LEAST
