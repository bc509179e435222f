"""Watching: no change is lost and none is told twice, whatever a watch does."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from typing import Any

import pytest

from flk.errors import ApiError, JobNotFoundError, NoConfigError, UnreachableError
from flk.kube.resources import RequestTarget
from flk.kube.watch import Changed, Listed, list_and_watch
from flk.observe import resources
from flk.observe.client import JobClient, JobRef
from flk.observe.follower import follow_job
from tests.support.api_server import JOBS, PODS, Fault


def event(kind: str, name: str = "p", version: int = 200, uid: str = "1", **more: Any) -> bytes:
    meta = {"name": name, "resourceVersion": str(version), "uid": uid}
    return json.dumps({"type": kind, "object": {"metadata": meta, **more}}).encode() + b"\n"


def gone() -> bytes:
    return (
        json.dumps({"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired"}}).encode() + b"\n"
    )


def changes(client: JobClient, **how: Any) -> Iterator[Listed | Changed]:
    return list_and_watch(client.api, RequestTarget(resources.PODS, "team"), {}, sleep=lambda seconds: None, **how)


def told(found: Iterator[Listed | Changed], count: int) -> list[str]:
    """The first changes in short: a list by its names, an object by its version."""
    short = []
    for change in itertools.islice(found, count):
        if isinstance(change, Listed):
            short.append("+".join(["list", *(item["metadata"]["name"] for item in change.items)]))
        else:
            short.append(("-" if change.deleted else "") + change.item["metadata"]["resourceVersion"])
    return short


def versions(fake: Any) -> list[str | None]:
    """Where each watch began; None is a list."""
    return [request.query.get("resourceVersion") for request in fake.requests]


def test_list_then_changes_from_its_version(fake: Any, client: JobClient) -> None:
    fake.add("pods", {"metadata": {"name": "a"}})
    fake.watches[PODS].append([event("ADDED", "b", 201), event("MODIFIED", "b", 202), event("DELETED", "b", 203)])
    assert told(changes(client), 4) == ["list+a", "201", "202", "-203"]
    assert versions(fake) == [None, "101"]


def test_goes_on_after_the_server_ends_a_watch(fake: Any, client: JobClient) -> None:
    fake.watches[PODS].extend([[event("ADDED", version=201)], [], [event("MODIFIED", version=202)]])
    assert told(changes(client), 3) == ["list", "201", "202"]
    assert versions(fake) == [None, "100", "201", "201"]


def test_bookmarks_move_the_place_and_are_not_told(fake: Any, client: JobClient) -> None:
    fake.watches[PODS].extend([[event("BOOKMARK", version=300)], [event("ADDED", version=301)]])
    assert told(changes(client), 2) == ["list", "301"]
    assert versions(fake)[-1] == "300"


def test_version_that_is_gone_leads_to_a_new_list(fake: Any, client: JobClient) -> None:
    fake.add("pods", {"metadata": {"name": "a"}})
    fake.watches[PODS].extend([[gone(), event("ADDED", version=1)], [event("ADDED", version=202)]])
    assert told(changes(client), 3) == ["list+a", "list+a", "202"]


@pytest.mark.parametrize(
    "cut", [event("MODIFIED", version=202)[:-9], b"{\n", b"\xff\xfe\n", b"[]\n", b'{"type": "ADDED"}\n']
)
def test_what_cannot_be_read_is_asked_for_again(fake: Any, client: JobClient, cut: bytes) -> None:
    fake.watches[PODS].extend([[event("ADDED", version=201), cut], [event("MODIFIED", version=202)]])
    assert told(changes(client), 3) == ["list", "201", "202"]
    assert versions(fake)[-1] == "201"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"<html>proxy</html>\n", "the watch of pods gets what is no event: '<html>proxy</html>'"),
        (b'{"type": "ERROR", "object": {"code": 500, "message": "etcd is gone"}}\n', "the watch of pods fails: etcd"),
    ],
)
def test_a_watch_that_only_gets_what_cannot_be_read_ends(fake: Any, client: JobClient, line: bytes, said: str) -> None:
    times = itertools.count(step=20.0)
    fake.watches[PODS].extend([[line]] * 40)
    with pytest.raises(ApiError, match=said):
        told(changes(client, clock=lambda: next(times)), 2)


def test_a_closed_watch_ends_at_a_bookmark(fake: Any, client: JobClient) -> None:
    answers = iter([False, True])
    fake.watches[PODS].append([event("BOOKMARK", version=201), event("ADDED", version=202)])
    assert told(changes(client, closed=lambda: next(answers)), 9) == ["list"]


def test_a_follower_that_ends_leaves_no_threads(fake: Any, client: JobClient) -> None:
    fake.add("pytorchjobs", job())
    others = threading.enumerate()
    with closing(follow_job(client, "gpt")) as observations:
        next(observations)
        named = [each for each in threading.enumerate() if each.name.startswith("flk-watch-")]
        threads = [each for each in named if each not in others]
        assert len(threads) == 2
    fake.ended.set()  # it ends the watches, which the client begins again
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("status", "seen"), [(0, ["list", "list", "201"]), (429, ["list", "201"]), (503, ["list", "201"])]
)
def test_outage_is_waited_out(fake: Any, client: JobClient, status: int, seen: list[str]) -> None:
    fake.faults.append(None)
    fake.fail(status, times=8)
    fake.watches[PODS].append([event("ADDED", version=201)])
    assert told(changes(client), len(seen)) == seen


@pytest.mark.parametrize("status", [0, 503])
def test_an_outage_before_the_first_list_is_waited_out_where_the_server_has_answered(
    fake: Any, client: JobClient, status: int
) -> None:
    """As the outage that follows a submission at once."""
    client.api.call("list", RequestTarget(resources.PODS, "team"))
    fake.fail(status, times=12)  # more than one request tries
    fake.watches[PODS].append([event("ADDED", version=201)])
    assert told(changes(client), 2) == ["list", "201"]
    fake.fail(status, times=12)
    with pytest.raises(ApiError):  # whose time is over
        next(changes(client.with_deadline(1e-9)))


def test_outage_is_timed_from_its_first_failure(fake: Any, client: JobClient) -> None:
    """However long the watch before has lived."""
    now = [0.0]
    fake.watches[PODS].append([event("ADDED", version=201)])
    found = changes(client, clock=lambda: now[0])
    assert told(found, 2) == ["list", "201"]
    now[0] += 3600
    fake.fail(0)
    fake.watches[PODS].append([event("ADDED", version=202)])
    assert told(found, 1) == ["202"]
    now[0] += 3600
    fake.fail(0)
    fake.watches[PODS].append([event("ADDED", version=203)])
    assert told(found, 1) == ["203"]


def test_outage_that_lasts_is_raised(fake: Any, client: JobClient) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += 60

    fake.faults.append(None)
    fake.fail(0, times=99)
    found = list_and_watch(client.api, RequestTarget(resources.PODS, "team"), {}, sleep=sleep, clock=lambda: now[0])
    with pytest.raises(UnreachableError):
        told(found, 2)
    assert 300 < now[0] <= 420


def test_first_failure_is_raised_at_once(fake: Any, client: JobClient) -> None:
    fake.close()
    with pytest.raises(UnreachableError):
        next(changes(client))


def test_credentials_plugin_that_fails_for_a_while_is_waited_out(
    fake: Any, client: JobClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.watches[PODS].append([event("ADDED", version=201)])
    found = changes(client)
    assert told(found, 1) == ["list"]
    headers, failures = client.api.access.headers, [NoConfigError("the plugin failed")] * 3

    def failing() -> Any:
        if failures:
            raise failures.pop()
        return headers()

    monkeypatch.setattr(client.api.access, "headers", failing)
    assert told(found, 1) == ["201"]


@pytest.mark.parametrize(("times", "seen"), [(1, ["list", "201"]), (3, ["list", "list", "201"])])
def test_stalled_watch_is_begun_again_and_then_a_list_tells(
    fake: Any, client: JobClient, times: int, seen: list[str]
) -> None:
    fake.faults.append(None)
    fake.fail(hang=True, times=times)
    fake.watches[PODS].append([event("ADDED", version=201)])
    assert told(changes(client, idle=0.3), len(seen)) == seen


@pytest.mark.parametrize(
    ("status", "seen"), [(401, ["list", "201"]), (403, ["list", "list", "201"]), (404, ["list", "201"])]
)
def test_what_a_starting_server_refuses_is_asked_again_for_a_while(
    fake: Any, client: JobClient, status: int, seen: list[str]
) -> None:
    fake.faults.append(None)
    fake.fail(503, times=8)
    fake.fail(status, times=2)
    fake.watches[PODS].append([event("ADDED", version=201)])
    assert told(changes(client, clock=itertools.count(step=5.0).__next__), len(seen)) == seen
    times = itertools.count(step=20.0)
    fake.faults.append(None)
    fake.fail(status, times=20)
    with pytest.raises(ApiError) as caught:
        told(changes(client, clock=lambda: next(times)), 2)
    assert caught.value.status == status
    assert next(times) == 60


@pytest.mark.parametrize("body", [b"", b"<html>proxy</html>"])
def test_who_may_not_watch_is_told_of_lists(fake: Any, client: JobClient, body: bytes) -> None:
    times = itertools.count(step=20.0)
    fake.faults.extend([None, Fault(403, body)] * 4)
    assert told(changes(client, clock=lambda: next(times)), 5) == ["list"] * 5


# The follower


def job(uid: str = "job-1") -> dict[str, Any]:
    return {"metadata": {"name": "gpt", "uid": uid}}


def pod(uid: str, owner: str = "job-1") -> dict[str, Any]:
    labels = {"training.kubeflow.org/job-name": "gpt"}
    owners = [{"uid": owner, "controller": True}]
    return {"metadata": {"name": "gpt-worker-0", "uid": uid, "labels": labels, "ownerReferences": owners}}


def test_job_that_is_not_there(fake: Any, client: JobClient) -> None:
    with pytest.raises(JobNotFoundError):
        next(follow_job(client, "gpt"))


def test_pods_of_an_earlier_job_of_that_name_are_not_its_own(fake: Any, client: JobClient) -> None:
    fake.add("pytorchjobs", job())
    fake.add("pods", pod("pod-1", owner="job-0"))
    assert next(follow_job(client, "gpt")).pods == []


def test_deletion_is_seen(fake: Any, client: JobClient) -> None:
    fake.add("pytorchjobs", job())
    fake.watches[JOBS].append([event("DELETED", "gpt", 201, "job-1")])
    last = next(seen for seen in islice(follow_job(client, "gpt"), 20) if seen.gone is not None)
    assert not last.name_reused


def test_another_job_under_the_name_is_a_deletion(fake: Any, client: JobClient) -> None:
    fake.add("pytorchjobs", job("job-2"))
    own = client.for_job(JobRef("gpt", uid="job-1"))
    last = next(seen for seen in islice(follow_job(own, "gpt"), 20) if seen.gone is not None)
    assert last.name_reused


def test_pod_that_was_made_anew_leaves_a_trace(fake: Any, client: JobClient) -> None:
    fake.add("pytorchjobs", job())
    fake.add("pods", pod("pod-1"))
    ended = json.loads(event("DELETED", "gpt-worker-0", 201, "pod-1", status={"phase": "Failed"}))
    new = json.loads(event("ADDED", "gpt-worker-0", 202, "pod-2"))
    for change in (ended, new):
        change["object"]["metadata"] = {**pod("")["metadata"], **change["object"]["metadata"]}
    fake.watches[PODS].append([json.dumps(change).encode() + b"\n" for change in (ended, new)])
    some = islice(follow_job(client, "gpt"), 20)
    found = (seen for seen in some if [p["metadata"]["uid"] for p in seen.pods] == ["pod-2"])
    seen = next(found)
    assert seen.replaced_pods["gpt-worker-0"]["metadata"]["uid"] == "pod-1"
    assert seen.replaced_pods["gpt-worker-0"]["status"] == {"phase": "Failed"}


def test_changes_without_a_pause_do_not_keep_updates_from_coming(
    fake: Any, client: JobClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.add("pytorchjobs", job())
    ended = threading.Event()

    def endless(api: Any, target: RequestTarget, query: Any, **_: object) -> Iterator[Listed | Changed]:
        yield Listed([job()] if target.resource.plural == "pytorchjobs" else [])
        while target.resource == resources.PODS and not ended.wait(0.001):
            yield Changed(pod("pod-1"))

    monkeypatch.setattr("flk.observe.follower.list_and_watch", endless)
    updates = follow_job(client, "gpt")
    assert [next(updates).job is not None for _ in range(2)] == [True, True]
    ended.set()


def test_error_of_any_kind_in_a_watch_is_raised(fake: Any, client: JobClient, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.add("pytorchjobs", job())

    def broken(*_: object, **__: object) -> Iterator[Listed | Changed]:
        raise KeyError("metadata")
        yield

    monkeypatch.setattr("flk.observe.follower.list_and_watch", broken)
    with pytest.raises(KeyError):
        next(follow_job(client, "gpt"))
