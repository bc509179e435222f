"""Kinds of failures in real processes: rank, cause and exit code are right in every launcher's termination message.

Each kind runs with two launchers of two ranks. A failure that a restart cannot cure must end the job at once. The soak
runs the kinds that are not in OFTEN.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import replace

import pytest

from flk_runtime.contract.failure import Failure
from tests.support.collection import for_the_soak, often
from tests.support.failure_kinds import HEAD, KINDS, LOOP, Kind
from tests.support.pods import Pods

OFTEN = (
    *("segfault", "uncaught exception in C++", "exit code", "early success", "cause that is reported second"),
    *("exception from a broken connection", "exception in a DataLoader worker", "sizes that differ between ranks"),
)


def check(kind: Kind, failure: Failure | None) -> None:
    assert failure is not None
    assert failure.rank in kind.ranks
    assert failure.pod_name == f"test-worker-{failure.rank // 2}"
    assert (failure.kind, failure.exit_code, failure.signal) == (kind.kind, kind.exit_code, kind.signal)
    assert kind.type in ("", failure.type)
    assert kind.count in (-1, failure.count)
    assert kind.words in failure.summary
    assert len(failure.summary) < 1000


@pytest.mark.promise("Recovery: The rank that failed first is named, in every pod")
@pytest.mark.parametrize(
    "kind", [kind if kind.name in OFTEN else for_the_soak(kind) for kind in KINDS], ids=lambda kind: kind.name
)
def test_rank_cause_and_exit_code_are_right(forked_pods: Callable[..., Pods], kind: Kind) -> None:
    """In one attempt. A kind that is final although a restart is left has one."""
    restarts = int(kind.attempts == 1)
    kind = replace(kind, attempts=1)
    job = forked_pods(2, 2, script=kind.script, FLK_RESTARTS=str(restarts), **kind.settings)
    job.start("train.py")
    assert job.wait() == [kind.code] * 2, job.logs_of_all()
    for index in range(2):
        record = job.record(index)
        assert len(record.attempts) == kind.attempts, job.logs_of_all()
        for attempt in record.attempts:
            check(kind, attempt.failure)
        check(kind, record.failure)
        assert record.failure is not None
        assert kind.stderr in record.failure.stderr
        assert "flk_runtime/launcher" not in record.failure.details


NOT_FAILURES = {
    "exception in a thread": "threading.Thread(target=int, args=('x',), daemon=True).start()",
    "exception in an exit handler": "atexit.register(int, 'x')",
    "exception in a destructor": "class Bad:\n    def __del__(self): int('x')\nbad = Bad()\ndel bad",
    "exception in a process that a rank has forked": "if os.fork() == 0: int('x')\nos.wait()",
    "sys.exit in a process that a rank has forked": "if os.fork() == 0: sys.exit('no data')\nos.wait()",
    "warning on stderr": "print('RuntimeError: not raised', file=sys.stderr)",
}


@pytest.mark.promise("Recovery: The rank that failed first is named, in every pod")
@pytest.mark.parametrize("script", often((0, 3), NOT_FAILURES.values()), ids=NOT_FAILURES)
def test_what_python_does_not_count_as_a_failure_is_none(forked_pods: Callable[..., Pods], script: str) -> None:
    job = forked_pods(2, 2, script=HEAD + LOOP + textwrap.dedent(script) + "\ntrain(-1, steps=3)\n")
    job.start("train.py")
    assert job.wait() == [0, 0], job.logs_of_all()
    assert job.record().outcome == "succeeded"
