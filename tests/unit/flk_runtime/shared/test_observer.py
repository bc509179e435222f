"""The observer of a rank: what it tells of torch's flight recorders, and what does not end it."""

from __future__ import annotations

import errno
import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flk_runtime.shared import observer
from flk_runtime.shared.observer import Collectives, Pending
from flk_runtime.shared.progress import ProgressPage

Recorders = Callable[..., None]


def entry(name: str, number: int, **fields: Any) -> dict[str, Any]:
    """A collective of the default group that has not ended."""
    return {
        "process_group": ["0", "default_pg"],
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "profiling_name": name,
        "input_sizes": [[10]],
        "state": "scheduled",
        "retired": False,
        "time_created_ns": number,
    } | fields


def status(enqueued: int, started: int, completed: int) -> dict[str, dict[str, str]]:
    """The status of the groups of a recorder, in the strings of torch."""
    numbers = {"enqueued": enqueued, "started": started, "completed": completed}
    return {"0": {f"last_{name}_collective": str(number) for name, number in numbers.items()}}


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> Recorders:
    """Replaces torch's recorders: each has the trace that is given for the function which tells it."""

    def replace(**traces: dict[str, Any]) -> None:
        def told(trace: dict[str, Any]) -> Callable[[bool, bool], bytes]:
            return lambda entries, active: json.dumps(trace).encode()

        c10d = SimpleNamespace(**{f"_dump_{name}_trace_json": told(trace) for name, trace in traces.items()})
        monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", c10d)  # type: ignore[arg-type]

    return replace


GLOO = {"pg_status": status(7, -1, 7), "entries": [entry("gloo:broadcast", 7, retired=True, time_created_ns=1)]}
NCCL = {
    "pg_status": status(3, -1, 2),
    "entries": [
        entry("nccl:all_reduce", 2, state="completed", retired=True),
        entry("nccl:all_reduce", 3),
        entry("nccl:recv 0<-1", 3, is_p2p=True, p2p_seq_id=4, state="started", time_created_ns=9),
    ],
}
REDUCE = Pending("nccl:0", 3, "all_reduce", "[[10]]")
RECEIVE = Pending("nccl:0 (p2p)", 4, "recv 0<-1", "[[10]]")


@pytest.mark.parametrize(
    ("traces", "groups", "pending"),
    [
        ({"fr": GLOO, "nccl": NCCL}, {"gloo:0": 7, "nccl:0": 3}, [REDUCE, RECEIVE]),
        ({"nccl": NCCL}, {"nccl:0": 3}, [REDUCE, RECEIVE]),
        ({"fr": GLOO}, {"gloo:0": 7}, []),
        ({}, {}, []),
        ({"fr": NCCL, "nccl": NCCL}, {"nccl:0": 3}, [REDUCE, RECEIVE]),
        ({"fr": {}, "nccl": {}}, {}, []),
    ],
    ids=["both", "a torch before 2.8", "a build for the CPU", "no recorder", "one recorder by two names", "no group"],
)
def test_collectives_of_all_recorders_are_told(
    recorders: Recorders, traces: dict[str, Any], groups: dict[str, int], pending: list[Pending]
) -> None:
    recorders(**traces)
    assert observer.collectives() == Collectives(groups, tuple(pending))


def test_before_torch_is_imported_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._C._distributed_c10d", raising=False)
    assert observer.collectives() == Collectives({}, ())


def test_a_rank_that_waits_in_nccl_is_seen_to_wait(recorders: Recorders) -> None:
    """Gloo beside it, by which the ranks agree on small things, has nothing to do."""
    page = ProgressPage.private()
    recorders(fr=GLOO, nccl={"pg_status": status(2, -1, 2)})
    before = observer._sample(page, {})
    assert not page.pending
    recorders(fr=GLOO, nccl=NCCL)
    before = observer._sample(page, before)
    assert page.pending
    began = page.collective_time
    observer._sample(page, before)
    assert page.pending
    assert page.collective_time == began


@pytest.mark.parametrize(
    ("traces", "samples", "pending"),
    [
        ({"fr": GLOO, "nccl": NCCL}, 0, 0),
        ({"fr": GLOO, "nccl": {"pg_status": status(9, 3, 3)}}, 1, 0),
        ({"fr": GLOO, "nccl": {"pg_status": status(9, 4, 3)}}, 1, 1),
        ({"fr": {"pg_status": status(8, -1, 7)}}, 1, 1),
        ({"fr": GLOO}, 1, 0),
    ],
    ids=["NCCL does not tell", "queued", "begun on the device", "gloo begins at once", "gloo has ended"],
)
def test_a_collective_that_only_waits_in_nccls_queue_is_no_time_in_communication(
    recorders: Recorders, traces: dict[str, Any], samples: int, pending: int
) -> None:
    page = ProgressPage.private()
    recorders(**traces)
    observer._sample(page, {})
    assert (page.samples, page.pending_samples, page.untold) == (samples, pending, not samples)


class Listener:
    """A listener whose calls of accept raise these errors, one after the other."""

    def __init__(self, *errors: OSError) -> None:
        self.errors = list(errors)

    def settimeout(self, seconds: float) -> None:
        pass

    def accept(self) -> None:
        raise self.errors.pop(0)


def test_it_observes_until_the_script_closes_its_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    trace: dict[str, Any] = {"pg_status": {"0": {}}}  # without the numbers of collectives
    monkeypatch.setattr(observer, "_traces", lambda *, entries: {"gloo": trace})
    numbers = {"last_enqueued_collective": 2, "last_completed_collective": 1}
    page = ProgressPage.private()

    class Tells(Listener):
        def settimeout(self, seconds: float) -> None:
            if len(self.errors) == 2:
                trace["pg_status"] = {"0": numbers}

    full, gone, closed = OSError(errno.EMFILE, ""), OSError(errno.ECONNABORTED, ""), OSError(errno.EBADF, "")
    listener: Any = Tells(TimeoutError(), full, gone, TimeoutError(), closed)
    observer._serve(listener, page)
    assert listener.errors == []
    assert (page.samples > 0, page.pending) == (True, 1)


def test_the_folder_of_a_socket_may_have_a_long_path(tmp_path: Path) -> None:
    """TMPDIR may be long, and the path of a Unix socket has at most 107 bytes."""
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as connection:
        for end in (listener.bind, connection.connect):
            with observer.short_path(f"{folder}/0.socket") as short:
                end(short)
            listener.listen()
