"""The statuses of all ranks as the leader keeps them."""

from __future__ import annotations

import tracemalloc

from flk_runtime.launcher.hangs import statuses
from flk_runtime.launcher.hangs.phases import PHASES
from flk_runtime.launcher.hangs.status import NEVER, PodStatus, RankStatus
from flk_runtime.launcher.hangs.statuses import Statuses
from flk_runtime.launcher.transport.messages import MESSAGES, Heartbeat

ODD = RankStatus(2**63 - 1, -1, 1e300, 0.1, NEVER, 0.0, 2**63 - 1, 0, "save", 1e-9, 2**40, 0.75)


def test_statuses_are_those_that_were_put() -> None:
    kept = Statuses()
    of_phases = [RankStatus(n, 5, 0.25, 0.5, 1.5, 0.0, 7, 3, phase, 0.3, 900, -1.0) for n, phase in enumerate(PHASES)]
    kept.put(3, of_phases)
    kept.put(1, [ODD])
    assert list(kept) == [*of_phases, ODD]
    assert [pod for pod, _ in kept.by_pod()] == [3] * len(of_phases) + [1]
    assert [type(value) for status in kept for value in status] == [type(value) for value in ODD] * (1 + len(of_phases))
    assert (len(kept), kept.pods, ODD in kept) == (len(of_phases) + 1, 2, True)
    kept.put(3, [ODD._replace(phase="of a later version")])
    assert [each.phase for each in kept] == ["start", "save"]
    kept.clear()
    assert (len(kept), kept.pods, list(kept)) == (0, 0, [])


def test_a_pod_of_eight_ranks_takes_less_than_a_kilobyte() -> None:
    data = MESSAGES.encode(Heartbeat(PodStatus(0, [ODD._replace(rank=rank) for rank in range(8)])))
    kept = Statuses()
    tracemalloc.start()
    try:
        for pod in range(100):
            message = MESSAGES.decode(data)
            assert isinstance(message, Heartbeat)
            assert message.status
            kept.put(pod, message.status.ranks)
        del message
        taken = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    own = taken.filter_traces([tracemalloc.Filter(True, statuses.__file__)])  # threads of other tests allocate too
    assert sum(trace.size for trace in own.traces) <= 100 * 1000
