"""Lines of logs: none lost and none twice over broken streams, and nothing that talks to the terminal."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flk.cli.logs import parse_ranks
from flk.errors import ApiError, UsageError
from flk.jobs.client import JobClient
from flk.jobs.logs import LogLine, LogOptions, LogPosition, dump, follow
from flk.jobs.logs.lines import LineFilter
from flk.jobs.logs.reader import PodReader
from flk.kube.client import ApiClient
from flk.kube.credentials import connect
from flk.terminal import printable


def line(second: int, text: str, fraction: str = ".123") -> bytes:
    return f"2026-01-01T00:00:{second:02}{fraction}Z {text}".encode()


def test_time_stamps_are_taken_off() -> None:
    assert LogPosition().accept(line(1, "hello 2026-01-01T00:00:00Z ")) == b"hello 2026-01-01T00:00:00Z "


def test_words_of_the_kubelet_have_none() -> None:
    assert LogPosition().accept(b"unable to retrieve container logs") == b"unable to retrieve container logs"


@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from("ab"), st.sampled_from(["", ".1", ".25"]))),
    st.integers(0, 30),
)
def test_stream_that_breaks_anywhere_goes_on_where_it_was(lines: list[tuple[int, str, str]], cut: int) -> None:
    log = [line(second, text, fraction) for second, text, fraction in sorted(lines, key=lambda item: item[0])]
    position = LogPosition()
    got = [position.accept(one) for one in log[:cut]]
    since = position.resume()[:19].encode()
    again = [position.accept(one) for one in log if one[:19] >= since]
    fresh = [one for one in got + again if one is not None]
    assert fresh == [one.partition(b" ")[2] for one in log]


def test_equal_lines_of_one_moment_stay_as_many_as_they_are() -> None:
    position = LogPosition()
    assert [position.accept(line(1, "x")) for _ in range(3)] == [b"x"] * 3
    assert position.resume() == "2026-01-01T00:00:00Z"
    assert [position.accept(line(1, "x")) for _ in range(4)] == [None, None, None, b"x"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("tab\tstays", "tab\tstays"),
        ("größer ✓", "größer ✓"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07x", "x"),
        ("\x1b]8;;http://e.com\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b[2J\x1b[Hgone", "gone"),
        ("a\rb\x08c\x00d", "abcd"),
        ("\x9b31mcsi", "31mcsi"),
        ("\u202eevil", "evil"),
        ("\x1bPq#0\x1b\\x", "x"),
    ],
)
def test_control_characters_go(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text())
def test_nothing_that_moves_the_cursor_is_left(text: str) -> None:
    assert not any((c < " " and c != "\t") or "\x7f" <= c <= "\x9f" for c in printable(text))


def test_colours_stay_where_they_are_wanted_and_end_with_the_line() -> None:
    assert printable("\x1b[31mred\x1b[2Jx", colour=True) == "\x1b[31mredx\x1b[0m"


@pytest.mark.parametrize(("text", "chosen"), [("0", {0}), ("0,2", {0, 2}), ("1-3, 7", {1, 2, 3, 7}), (None, set())])
def test_ranks(text: str | None, chosen: set[int]) -> None:
    assert parse_ranks(text) == chosen


@pytest.mark.parametrize("text", ["", "a", "-1", "1-", "0,,1", "3-1", "1.5", "9" * 30])
def test_ranks_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--rank"):
        parse_ranks(text)


# From a cluster


@pytest.fixture
def client(kubeconfig: Any) -> JobClient:
    return JobClient(ApiClient(connect(), sleep=lambda seconds: None))


def add_job(fake: Any, pods: int = 2, phase: str = "Succeeded") -> None:
    spec = {
        "nprocPerNode": "2",
        "pytorchReplicaSpecs": {"Worker": {"replicas": pods, "restartPolicy": "ExitCode"}},
    }
    fake.add("pytorchjobs", {"metadata": {"name": "gpt", "uid": "job"}, "spec": spec})
    for index in range(pods):
        labels = {
            "training.kubeflow.org/job-name": "gpt",
            "training.kubeflow.org/replica-index": str(index),
            "training.kubeflow.org/replica-type": "worker",
        }
        state = {"terminated": {"exitCode": 0, "finishedAt": "2026-01-01T00:01:00Z"}}
        status = {"phase": phase, "containerStatuses": [{"name": "pytorch", "state": state}]}
        meta = {"name": f"gpt-worker-{index}", "labels": labels, "ownerReferences": [{"uid": "job"}]}
        fake.add("pods", {"metadata": meta, "status": status})


def test_dump_is_in_the_order_of_pods(fake: Any, client: JobClient) -> None:
    add_job(fake, 12)
    fake.logs = {f"gpt-worker-{n}": queue_of(f"[rank {2 * n}] hello\n".encode()) for n in range(12)}
    assert [one.text for one in dump(client, "gpt", LogOptions())] == [f"[rank {2 * n}] hello" for n in range(12)]


def queue_of(*chunks: bytes) -> Any:
    from collections import deque

    return deque(chunks)


def test_records_are_hidden_and_untagged_lines_tagged(fake: Any, client: JobClient) -> None:
    add_job(fake, 1)
    text = b'[pod 0] flk-record {"outcome":"running"}\nSegmentation fault\n[rank 1] \x1b[1mx\n'
    fake.logs["gpt-worker-0"] = queue_of(text, text)
    assert [one.text for one in dump(client, "gpt", LogOptions())] == ["[pod 0] Segmentation fault", "[rank 1] x"]
    assert len(list(dump(client, "gpt", LogOptions(raw=True)))) == 3


def test_only_the_pods_of_the_chosen_ranks_are_asked(fake: Any, client: JobClient) -> None:
    add_job(fake, 3)
    fake.logs["gpt-worker-1"] = queue_of(b"[rank 2] two\n[rank 3] three\n[pod 1] told\n")
    assert [one.text for one in dump(client, "gpt", LogOptions(ranks=frozenset({3})))] == ["[rank 3] three"]
    with pytest.raises(UsageError, match="ranks 0 to 5, no rank 6"):
        list(dump(client, "gpt", LogOptions(ranks=frozenset({6}))))


def test_pod_without_a_log_is_told_of(fake: Any, client: JobClient) -> None:
    add_job(fake, 1)
    assert list(dump(client, "gpt", LogOptions())) == [LogLine("gpt-worker-0 has no log", note=True)]


def test_following_an_ended_job_shows_all_once_and_ends(fake: Any, client: JobClient) -> None:
    add_job(fake, 1)
    whole = b"".join(line(second, f"[rank 0] step {second}") + b"\n" for second in range(5))
    fake.logs["gpt-worker-0"] = queue_of(whole)
    assert [one.text for one in follow(client, "gpt", LogOptions())] == [f"[rank 0] step {n}" for n in range(5)]


def test_stream_that_breaks_is_gone_on_with(fake: Any, client: JobClient) -> None:
    add_job(fake, 1)
    whole = b"".join(line(second, f"[rank 0] step {second}") + b"\n" for second in range(5))
    running = fake.objects["/api/v1/namespaces/team/pods"]["gpt-worker-0"]["status"]
    running["phase"] = "Running"
    chunks = Ending(queue_of(whole[:100], whole), running)
    fake.logs["gpt-worker-0"] = chunks
    job = fake.objects["/apis/kubeflow.org/v1/namespaces/team/pytorchjobs"]["gpt"]
    job["status"] = {"conditions": [{"type": "Succeeded", "status": "True"}]}
    assert [one.text for one in follow(client, "gpt", LogOptions())] == [f"[rank 0] step {n}" for n in range(5)]
    asked = [r.query for r in fake.requests if r.path.endswith("/log")]
    assert "sinceTime" not in asked[0]
    assert asked[1]["sinceTime"].startswith("2026-01-01T00:00:0")


class Ending:
    """Log answers, of which the last is the one after the container's end."""

    def __init__(self, chunks: Any, status: dict[str, Any]) -> None:
        self.chunks, self.status = chunks, status

    def __bool__(self) -> bool:
        return bool(self.chunks)

    def popleft(self) -> bytes:
        chunk: bytes = self.chunks.popleft()
        self.status["phase"] = "Succeeded"
        return chunk


PODS_PATH = "/api/v1/namespaces/team/pods"


def test_node_that_does_not_answer_hides_no_other_pod(fake: Any, client: JobClient) -> None:
    add_job(fake, 2)
    fake.logs["gpt-worker-1"] = queue_of(b"[rank 2] hello\n")
    fake.refused[f"{PODS_PATH}/gpt-worker-0/log"] = (500, "dial tcp 10.0.0.1:10250: no route to host")
    first, second = dump(client, "gpt", LogOptions())
    assert first.note
    assert "the log of gpt-worker-0 cannot be read" in first.text
    assert "no route to host" in first.text
    assert second == LogLine("[rank 2] hello")
    fake.refused[f"{PODS_PATH}/gpt-worker-1/log"] = (500, "no route to host")
    with pytest.raises(ApiError, match="no route to host"):
        list(dump(client, "gpt", LogOptions()))


class Closed(threading.Event):
    """An event that remembers the pauses that were asked of it, makes none, and is set after some of them."""

    def __init__(self, pauses: int) -> None:
        super().__init__()
        self.left, self.pauses = pauses, list[float]()

    def wait(self, timeout: float | None = None) -> bool:
        self.pauses.append(timeout or 0)
        if len(self.pauses) == self.left:
            self.set()
        return self.is_set()


def read(fake: Any, client: JobClient, closed: threading.Event) -> tuple[list[str], PodReader]:
    """The lines that a reader of the first pod gives until it ends."""
    lines: list[str] = []
    pod = client.find_pod("gpt-worker-0")
    assert pod is not None
    chosen = LineFilter(client.get_job("gpt"), LogOptions())
    reader = PodReader(client, pod, chosen, lambda some: lines.extend(x.text for x in some), closed, fresh=True)
    reader.join(30)
    assert not reader.running
    return lines, reader


def test_log_without_new_lines_is_requested_with_growing_pauses(fake: Any, client: JobClient) -> None:
    """As of a container in CrashLoopBackOff, whose log ends at once."""
    add_job(fake, 1, "Running")
    fake.written["gpt-worker-0"] = "[rank 0] hello\n"
    closed = Closed(6)
    lines, reader = read(fake, client, closed)
    assert lines == ["[rank 0] hello"]
    assert closed.pauses == [0.2, 0.5, 1.0, 2.0, 5.0, 5.0]
    assert reader.error is None


def test_log_of_a_replaced_pod_is_not_read_from_its_successor(fake: Any, client: JobClient) -> None:
    add_job(fake, 1, "Running")
    old = client.find_pod("gpt-worker-0")
    assert old is not None
    fake.objects[PODS_PATH]["gpt-worker-0"] = {**old, "metadata": {**old["metadata"], "uid": "another"}}
    fake.written["gpt-worker-0"] = "[rank 0] of the new pod\n"
    chosen, lines = LineFilter(client.get_job("gpt"), LogOptions()), list[LogLine]()
    reader = PodReader(client, old, chosen, lines.extend, threading.Event(), fresh=True)
    reader.join(30)
    assert (lines, reader.running) == ([], False)


def test_error_of_any_kind_while_following_is_raised(
    fake: Any, client: JobClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_job(fake, 1)

    def broken(*_: object, **__: object) -> None:
        raise KeyError("metadata")

    monkeypatch.setattr("flk.jobs.logs.stream.derive", broken)
    with pytest.raises(KeyError):
        list(follow(client, "gpt", LogOptions()))


def test_note_about_the_number_of_followed_pods_comes_once(
    fake: Any, client: JobClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flk.jobs.logs.stream.FOLLOWED", 0)
    add_job(fake, 20)
    notes = [line.text for line in follow(client, "gpt", LogOptions()) if line.note]
    assert notes == ["following the logs of 0 pods; choose others with --rank"]
