"""Watches: changes that arrive together are handed on together, and the first lists at once."""

from __future__ import annotations

import queue
from typing import Any, cast

import pytest

from flk.kube import ApiClient, Changed, Listed, list_and_watch
from flk.kube.resources import RequestTarget, Resource
from flk.observe import follower as watches
from flk.observe.client import JobClient, JobRef
from flk.observe.follower import Follower, JobCache, Watched, Watches
from flk.targets import DEFAULT

PODS = RequestTarget(Resource("", "v1", "pods"), "team")
OF_JOBS, OF_PODS = Watched(DEFAULT), Watched(DEFAULT, are_pods=True)


class Queue:
    """Changes that have arrived, and the seconds for which each call of `get` would have waited for one."""

    def __init__(self) -> None:
        self.changes: list[Any] = []
        self.waits: list[float] = []

    def put(self, change: Any) -> None:
        self.changes.append(change)

    def get(self, timeout: float) -> Any:
        self.waits.append(timeout)
        if not self.changes:
            raise queue.Empty
        return self.changes.pop(0)


@pytest.fixture
def arrived(monkeypatch: pytest.MonkeyPatch) -> Queue:
    """The changes that the watches see. Their threads watch nothing."""
    found = Queue()
    monkeypatch.setattr(queue, "SimpleQueue", lambda: found)
    monkeypatch.setattr(watches, list_and_watch.__name__, lambda *_, **__: ())
    return found


def test_nothing_is_waited_for_after_the_last_first_list(arrived: Queue) -> None:
    watched = Watches(cast(ApiClient, None))
    for each in (OF_JOBS, OF_PODS):
        watched.start(each, PODS, {})
    taken: list[Watched] = []
    arrived.put((OF_JOBS, Listed([])))
    watched.apply(1.0, lambda source, _: taken.append(source))
    assert arrived.waits == [1.0, watches._SETTLE]  # the pods may come any moment
    assert not watched.are_listed
    arrived.put((OF_PODS, Listed([])))
    watched.apply(1.0, lambda source, _: taken.append(source))
    assert arrived.waits[2:] == [1.0]
    assert watched.are_listed
    assert taken == [OF_JOBS, OF_PODS]


def test_changes_that_follow_are_collected(arrived: Queue) -> None:
    watched = Watches(cast(ApiClient, None))
    watched.start(OF_PODS, PODS, {})
    arrived.put((OF_PODS, Listed([])))
    watched.apply(1.0, lambda *_: None)
    taken: list[str] = []
    for number in range(3):
        arrived.put((OF_PODS, Changed({"number": number})))
    watched.apply(1.0, lambda _, change: taken.append(change.item["number"]))
    assert taken == [0, 1, 2]
    assert arrived.waits[1:] == [1.0, *[watches._SETTLE] * 3]


def test_the_first_lists_are_awaited_without_haste_when_the_time_is_over(arrived: Queue, client: JobClient) -> None:
    with Follower(client, [JobRef("gpt", DEFAULT, "job-1")]) as follower:
        for each in (OF_JOBS, OF_PODS):
            arrived.put((each, Listed([])))
        (seen,) = next(follower.updates(until=0.0)).values()
    assert seen.gone is not None
    assert arrived.waits[0] == 1.0


def test_a_pod_keeps_the_time_of_its_deletion_when_the_kubelet_writes_another_one(client: JobClient) -> None:
    """It tells that the grace period has ended the container, and not the kernel at the memory limit."""
    cache = JobCache(client, "gpt", None, DEFAULT)
    for uid, time, is_gone in (("a", "00:00:35", False), ("a", "00:01:00", True), ("b", "00:01:00", False)):
        cache.take_pods(
            Changed(
                {"metadata": {"name": "gpt-worker-0", "uid": uid, "deletionTimestamp": f"2026-01-01T{time}Z"}}, is_gone
            )
        )
    pods = [*cache.observed().replaced_pods.values(), *cache.observed().pods]
    assert [pod["metadata"]["deletionTimestamp"][11:-1] for pod in pods] == ["00:00:35", "00:01:00"]
