"""Lines of logs: none lost and none twice over broken streams, and nothing that talks to the terminal."""

from __future__ import annotations

import copy
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flk.cli.logs import parse_ranks
from flk.errors import ApiError, ForbiddenError, JobNotFoundError, UsageError
from flk.jobs.answer import last_answer
from flk.jobs.logs import LogLine, LogOptions, LogPosition, dump, follow
from flk.jobs.logs.lines import LineFilter
from flk.jobs.logs.reader import AT_ONCE, PodLog, PodReader
from flk.observe.client import JobClient
from flk.observe.observation import Observation
from flk.observe.view import JobView
from flk.user.terminal import printable
from flk_runtime.contract.log_format import RECORD_MARKER, TELEMETRY_MARKER
from tests.support.api_server import JOBS, PODS
from tests.support.jobs import NOW, JobBuilder, record


def line(second: int, text: str, fraction: str = ".123") -> bytes:
    return f"2026-01-01T00:00:{second:02}{fraction}Z {text}".encode()


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from("ab"), st.sampled_from(["", ".1", ".25"]))),
    st.integers(0, 30),
)
def test_stream_that_breaks_anywhere_goes_on_where_it_was(lines: list[tuple[int, str, str]], cut: int) -> None:
    log = [line(second, text, fraction) for second, text, fraction in sorted(lines, key=lambda item: item[0])]
    position = LogPosition()
    got = [one for one in log[:cut] if position.accept(one)]
    since = position.resume()[:19].encode()
    again = [one for one in log if one[:19] >= since and position.accept(one)]
    assert got + again == log


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["", ".1", ".25"])), max_size=8),
    st.integers(0, 8),
    st.integers(1, 8),
)
def test_lines_that_tail_left_out_do_not_come_after_a_resumption(
    lines: list[tuple[int, str]], tail: int, cut: int
) -> None:
    stamps = sorted(lines, key=lambda item: item[0])
    log = [line(second, f"line {number}", fraction) for number, (second, fraction) in enumerate(stamps)]
    shown = log[len(log) - min(tail, len(log)) :]
    position = LogPosition(cut=True)
    got = [one for one in shown[:cut] if position.accept(one)]
    since = position.resume()[:19].encode()
    again = [one for one in log if one[:19] >= since and position.accept(one)] if got else shown
    assert got + again == shown


def test_a_first_line_that_does_not_come_again_stops_nothing() -> None:
    position = LogPosition(cut=True)
    assert position.accept(line(1, "rotated away"))
    position.resume()
    assert [position.accept(line(second, "x")) for second in (1, 2, 2)] == [False, True, True]


def test_equal_lines_of_one_moment_stay_as_many_as_they_are() -> None:
    position = LogPosition()
    assert [position.accept(line(1, "x")) for _ in range(3)] == [True] * 3
    assert position.resume() == "2026-01-01T00:00:00Z"
    assert [position.accept(line(1, "x")) for _ in range(4)] == [False, False, False, True]


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


def add_job(fake: Any, pods: int = 2, phase: str = "Succeeded") -> None:
    """Add a job of another tool, whose containers have ended."""
    job = JobBuilder(pods, processes=2).all("ended", 0)
    job.job["metadata"]["labels"] = {}
    for pod in job.pods.values():
        pod["status"]["phase"] = phase
    job.add_to(fake)


def test_dump_is_in_the_order_of_pods(fake: Any, client: JobClient) -> None:
    add_job(fake, 12)
    fake.logs = {f"gpt-worker-{n}": queue_of(f"[rank {2 * n}] hello\n".encode()) for n in range(12)}
    assert [one.text for one in dump(client, "gpt", LogOptions())] == [f"[rank {2 * n}] hello" for n in range(12)]


def queue_of(*chunks: bytes) -> Any:
    return deque(chunks)


def test_records_are_hidden_and_untagged_lines_tagged(fake: Any, client: JobClient) -> None:
    add_job(fake, 1)
    text = b'[pod 0] flk-record {"outcome":"running"}\nSegmentation fault\n[rank 1] \x1b[1mx\n'
    fake.logs["gpt-worker-0"] = queue_of(text, text)
    assert [one.text for one in dump(client, "gpt", LogOptions())] == ["[pod 0] Segmentation fault", "[rank 1] x"]


def test_only_the_pods_of_the_chosen_ranks_are_asked(fake: Any, client: JobClient) -> None:
    add_job(fake, 3)
    fake.logs["gpt-worker-1"] = queue_of(b"[rank 2] two\n[rank 3] three\n[pod 1] told\n")
    assert [one.text for one in dump(client, "gpt", LogOptions(ranks=frozenset({3})))] == ["[rank 3] three"]
    with pytest.raises(UsageError, match="ranks 0 to 5, no rank 6"):
        list(dump(client, "gpt", LogOptions(ranks=frozenset({6}))))


def test_following_an_ended_job_shows_all_once_and_ends(fake: Any, client: JobClient) -> None:
    add_job(fake, 1)
    whole = b"".join(line(second, f"[rank 0] step {second}") + b"\n" for second in range(5))
    fake.logs["gpt-worker-0"] = queue_of(whole)
    assert [one.text for one in follow(client, "gpt", LogOptions())] == [f"[rank 0] step {n}" for n in range(5)]


def test_stream_that_breaks_is_gone_on_with(fake: Any, client: JobClient) -> None:
    add_job(fake, 1)
    whole = b"".join(line(second, f"[rank 0] step {second}") + b"\n" for second in range(5))
    running = fake.objects[PODS]["gpt-worker-0"]["status"]
    running["phase"] = "Running"
    chunks = Ending(queue_of(whole[:100], whole), running)
    fake.logs["gpt-worker-0"] = chunks
    job = fake.objects[JOBS]["gpt"]
    job["status"] = {"conditions": [{"type": "Succeeded", "status": "True"}]}
    assert [one.text for one in follow(client, "gpt", LogOptions())] == [f"[rank 0] step {n}" for n in range(5)]
    asked = [r.query for r in fake.requests if r.path.endswith("/log")]
    assert "sinceTime" not in asked[0]
    assert asked[1]["sinceTime"].startswith("2026-01-01T00:00:0")


class SlowLog:
    """The log of a failed job's pod: each request brings its next line after 20 s. After the last one the pod ends."""

    def __init__(self, fake: Any, lines: Iterable[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
        job = JobBuilder(1, processes=2).condition("Failed").pod(0)
        job.job["metadata"]["labels"] = {}  # of another tool: flk looks for no record in its log
        job.job["status"]["conditions"][-1]["lastTransitionTime"] = "2026-01-01T00:00:30Z"
        job.add_to(fake)
        self.lines, self.seconds, self.pod = iter(lines), 0, fake.objects[PODS]["gpt-worker-0"]
        monkeypatch.setattr("flk.jobs.logs.stream.time", SimpleNamespace(monotonic=lambda: self.seconds))
        fake.logs["gpt-worker-0"] = self

    def popleft(self) -> bytes:
        self.seconds += 20
        text = next(self.lines, b"")
        if not text:
            self.pod["status"]["phase"] = "Failed"
        return text


@pytest.mark.promise("Causes: No line of a log is lost")
def test_long_logs_of_a_failed_job_come_to_their_end(
    fake: Any, client: JobClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flk.jobs.logs.reader._BACKOFFS", (0.5,))  # longer than the stream waits for a line
    SlowLog(fake, [line(second, f"[rank 0] {second}") + b"\n" for second in range(5)], monkeypatch)
    assert [one.text for one in follow(client, "gpt", LogOptions())] == [f"[rank 0] {n}" for n in range(5)]


def test_pods_that_run_on_after_their_job_has_failed_are_named(
    fake: Any, client: JobClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.date = "Thu, 01 Jan 2026 00:01:40 GMT"
    later = (f"2026-01-01T00:02:00.{number:06}Z [rank 0] after\n".encode() for number in itertools.count())
    SlowLog(fake, itertools.chain([line(20, "[rank 0] before") + b"\n"], later), monkeypatch)
    first, *_, last = follow(client, "gpt", LogOptions())
    assert first.text == "[rank 0] before"
    assert last == LogLine(
        "gpt-worker-0 may print more, or its log cannot be read: in 30s no line came from before the job's end. "
        "flk logs gpt -n team --no-follow shows what there is",
        note=True,
    )


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


def test_node_that_does_not_answer_hides_no_other_pod(fake: Any, client: JobClient) -> None:
    add_job(fake, 2)
    fake.logs["gpt-worker-1"] = queue_of(b"[rank 2] hello\n")
    fake.refused[f"{PODS}/gpt-worker-0/log"] = (500, "dial tcp 10.0.0.1:10250: no route to host")
    line, note = dump(client, "gpt", LogOptions())
    assert line.text == "[rank 2] hello"
    assert note.note
    assert "gpt-worker-0 has a log that cannot be read" in note.text
    assert "no route to host" in note.text
    fake.refused[f"{PODS}/gpt-worker-1/log"] = (500, "no route to host")
    with pytest.raises(ApiError, match="no route to host"):
        list(dump(client, "gpt", LogOptions()))


class Closed(threading.Event):
    """An event that remembers the pauses that were asked of it, makes none, and is set after some of them.

    ``meanwhile`` is called with the number of each pause.
    """

    def __init__(self, pauses: int, meanwhile: Callable[[int], None] = lambda pause: None) -> None:
        super().__init__()
        self.left, self.meanwhile, self.pauses = pauses, meanwhile, list[float]()

    def wait(self, timeout: float | None = None) -> bool:
        self.pauses.append(timeout or 0)
        self.meanwhile(len(self.pauses))
        if len(self.pauses) == self.left:
            self.set()
        return self.is_set()


def read(client: JobClient, pod: Any, closed: threading.Event, **options: Any) -> tuple[list[str], PodLog]:
    """The lines that a reader of a pod gives until it ends."""
    lines: list[str] = []
    chosen = LineFilter.of(JobView(Observation(client.get_job("gpt"))), LogOptions(**options))
    log = PodLog(client, pod, chosen, lambda some: lines.extend(x.text for x in some), closed, fresh=True)
    PodReader(log, closed).join(30)
    return lines, log


def test_log_without_new_lines_is_requested_with_growing_pauses(fake: Any, client: JobClient) -> None:
    """As of a container in CrashLoopBackOff, whose log ends at once."""
    add_job(fake, 1, "Running")
    fake.written["gpt-worker-0"] = "[rank 0] hello\n"
    closed = Closed(6)
    lines, log = read(client, client.get_pod("gpt-worker-0", "gpt"), closed)
    assert lines == ["[rank 0] hello"]
    assert closed.pauses == [0.2, 0.5, 1.0, 2.0, 5.0, 5.0]
    assert (log.error, log.complete) == (None, False)


@pytest.mark.parametrize("expired", [False, True])
def test_credentials_that_are_refused_for_long_end_the_reading(
    fake: Any, client: JobClient, secure: None, monkeypatch: pytest.MonkeyPatch, expired: bool
) -> None:
    """An API server that has just started refuses them for a while."""
    add_job(fake, 1, "Running")
    pod = client.get_pod("gpt-worker-0", "gpt")
    for path in (f"{PODS}/gpt-worker-0", f"{PODS}/gpt-worker-0/log"):
        fake.refused[path] = (401, "")
    if expired:
        monkeypatch.setattr("flk.jobs.logs.reader.STARTING", 0.0)
    _, log = read(client, pod, Closed(3))
    assert log.complete == expired
    assert ("does not accept the credentials" in str(log.error)) == expired


@pytest.mark.parametrize("status", [401, 403, 404])
@pytest.mark.parametrize("lasts", [False, True])
def test_what_a_starting_api_server_refuses_is_asked_again_for_a_while(
    fake: Any, client: JobClient, monkeypatch: pytest.MonkeyPatch, status: int, lasts: bool
) -> None:
    add_job(fake, 1, "Running")
    log = f"{PODS}/gpt-worker-0/log"
    paths = [log] if status == 404 else [log, f"{PODS}/gpt-worker-0"]
    first, second = line(1, "[rank 0] one") + b"\n", line(2, "[rank 0] two") + b"\n"
    fake.logs["gpt-worker-0"] = queue_of(first, first + second)

    def restart(pause: int) -> None:
        if pause == 1:
            fake.refused |= dict.fromkeys(paths, (status, 'User "anna" cannot get resource "pods"'))
        if pause == 3:
            fake.refused.clear()

    if lasts:
        monkeypatch.setattr("flk.jobs.logs.reader.STARTING", 0.0)
    lines, read_log = read(client, client.get_pod("gpt-worker-0", "gpt"), Closed(4, restart))
    assert lines == ["[rank 0] one"] + ["[rank 0] two"] * (not lasts)
    assert read_log.complete == lasts
    assert getattr(read_log.error, "status", None) == (status if lasts and status != 404 else None)


@pytest.mark.parametrize("path", ["", "/log"])
def test_a_user_who_may_not_read_logs_is_told_at_once(fake: Any, client: JobClient, path: str) -> None:
    add_job(fake, 1, "Running")
    pod, closed = client.get_pod("gpt-worker-0", "gpt"), Closed(9)
    fake.refused[f"{PODS}/gpt-worker-0{path}"] = (403, 'User "anna" cannot get resource "pods"')
    _, log = read(client, pod, closed)
    assert isinstance(log.error, ForbiddenError)
    assert closed.pauses == []


@pytest.mark.parametrize("gone", ["", "pod", "log"])
def test_a_last_line_without_an_end_comes_whole_and_once(fake: Any, client: JobClient, gone: str) -> None:
    add_job(fake, 1, "Running")
    pod, first = client.get_pod("gpt-worker-0", "gpt"), line(1, "[rank 0] one") + b"\n"
    running = first + line(2, "[rank 0] last") + b" words" * bool(gone)
    fake.logs["gpt-worker-0"] = queue_of(running, running, first + line(2, "[rank 0] last words"))

    def end(pause: int) -> None:
        if pause == 2 and gone == "pod":
            del fake.objects[PODS]["gpt-worker-0"]
        elif pause == 2:
            if gone:
                fake.refused[f"{PODS}/gpt-worker-0/log"] = (400, "the container has no log any more")
            fake.objects[PODS]["gpt-worker-0"]["status"]["phase"] = "Failed"

    lines, log = read(client, pod, Closed(9, end))
    assert lines == ["[rank 0] one", "[rank 0] last words"]
    assert log.complete


def test_dump_has_a_last_line_without_an_end(fake: Any, client: JobClient) -> None:
    add_job(fake, 1)
    fake.written["gpt-worker-0"] = "[rank 0] hello\n[rank 0] last words"
    assert [one.message for one in dump(client, "gpt", LogOptions())] == ["hello", "last words"]


@pytest.mark.parametrize(
    ("options", "since"),
    [
        ({"tail": 0}, "2026-01-01T00:01:40Z"),
        ({"since": 60}, "2026-01-01T00:00:40Z"),
        ({"since": 60, "tail": 5}, "2026-01-01T00:00:40Z"),
        ({"since": 60, "tail": 0}, "2026-01-01T00:01:40Z"),
        ({"tail": 5}, None),
        ({}, None),
    ],
)
def test_lines_of_a_gap_after_which_a_quiet_log_is_requested_again_are_not_left_out(
    fake: Any, client: JobClient, options: dict[str, int], since: str | None
) -> None:
    add_job(fake, 1, "Running")
    fake.date = "Thu, 01 Jan 2026 00:01:40 GMT"
    fake.logs["gpt-worker-0"] = queue_of(b"", b"", b"2026-01-01T00:05:00.5Z [rank 0] at last\n")

    def pass_time(pause: int) -> None:
        fake.date = f"Thu, 01 Jan 2026 00:0{pause + 1}:40 GMT"

    lines, _ = read(client, client.get_pod("gpt-worker-0", "gpt"), Closed(3, pass_time), **options)
    assert lines == ["[rank 0] at last"]
    _, *later = (request.query for request in fake.requests if request.path.endswith("/log"))
    assert [query.get("sinceTime") for query in later] == [since, since]
    assert not any(name in query for query in later for name in ("tailLines", "sinceSeconds"))


def test_the_first_request_of_a_log_that_fails_leaves_out_no_line_of_the_time_since(
    fake: Any, client: JobClient
) -> None:
    add_job(fake, 1, "Running")
    fake.date = "Thu, 01 Jan 2026 00:01:40 GMT"
    fake.refused[f"{PODS}/gpt-worker-0/log"] = (500, "no route to host")
    fake.logs["gpt-worker-0"] = queue_of(b"2026-01-01T00:01:50.5Z [rank 0] hello\n")
    closed = Closed(2, lambda pause: fake.refused.clear())
    assert read(client, client.get_pod("gpt-worker-0", "gpt"), closed, tail=0)[0] == ["[rank 0] hello"]
    assert fake.requests[-1].query["sinceTime"] == "2026-01-01T00:01:40Z"


def test_log_of_a_replaced_pod_is_not_read_from_its_successor(fake: Any, client: JobClient) -> None:
    add_job(fake, 1, "Running")
    old = client.get_pod("gpt-worker-0", "gpt")
    assert old is not None
    fake.objects[PODS]["gpt-worker-0"] = {**old, "metadata": {**old["metadata"], "uid": "another"}}
    fake.written["gpt-worker-0"] = "[rank 0] of the new pod\n"
    lines, log = read(client, old, threading.Event())
    assert (lines, log.complete) == ([], True)


def test_error_of_any_kind_while_following_is_raised(
    fake: Any, client: JobClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_job(fake, 1)

    def broken(*_: object, **__: object) -> None:
        raise KeyError("metadata")

    monkeypatch.setattr("flk.jobs.logs.stream.derive", broken)
    with pytest.raises(KeyError):
        list(follow(client, "gpt", LogOptions()))


@pytest.mark.promise("Causes: No line of a log is lost")
def test_pods_beyond_the_connections_are_polled_and_lose_nothing(
    fake: Any, client: JobClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flk.jobs.logs.stream.FOLLOWED", 5)
    started: list[str] = []
    polled = threading.Event()
    start, run = threading.Thread.start, PodReader.run

    def note(thread: threading.Thread) -> None:
        started.append(thread.name)
        if len([name for name in started if name.startswith("flk-poll")]) == AT_ONCE:
            polled.set()
        start(thread)

    def hold(reader: PodReader) -> None:
        """A log that was read to its end would give its connection to a pod that is polled else."""
        assert polled.wait(60)
        run(reader)

    monkeypatch.setattr(threading.Thread, "start", note)
    monkeypatch.setattr(PodReader, "run", hold)
    add_job(fake, 60)
    for number in range(60):
        fake.written[f"gpt-worker-{number}"] = "".join(f"[rank {2 * number}] {step}\n" for step in range(20))
    found = list(follow(client, "gpt", LogOptions()))
    for number in range(60):
        of_rank = [line.message for line in found if line.rank == 2 * number]
        assert of_rank == [str(step) for step in range(20)]
    assert len([name for name in started if name.startswith("flk-poll")]) == AT_ONCE
    (told,) = [line.text for line in found if line.note]
    assert told == "following the logs of 5 pods; lines of other pods come every 20 s. --rank and --pod choose pods"


def test_a_job_that_another_cluster_runs_says_where_its_logs_are(fake: Any, client: JobClient) -> None:
    job = JobBuilder().condition("Running")
    job.job["metadata"]["labels"] = {}
    job.job["spec"]["runPolicy"]["managedBy"] = "kueue.x-k8s.io/multikueue"
    job.add_to(fake)
    said = follow(client, "gpt", LogOptions())
    line = next(said)
    said.close()
    assert line.note
    assert "job gpt is running: SentToAnotherCluster: Kueue (MultiKueue) has another cluster run" in line.text


def test_lines_know_their_rank_pod_time_and_attempt(fake: Any, client: JobClient) -> None:
    add_job(fake, 1)
    fake.written["gpt-worker-0"] = "[pod 0] flk-attempt 1\n[rank 1] a\n[pod 0] flk-attempt 2\n[rank 0] b\nc\n"
    for read_logs in (dump, follow):
        lines = [one.to_dict() for one in read_logs(client, "gpt", LogOptions())]
        assert [(one["rank"], one["attempt"], one["message"]) for one in lines] == [
            (1, 1, "a"),
            (0, 2, "b"),
            (None, 2, "c"),
        ]
        assert {(one["pod"], one["time"]) for one in lines} == {("gpt-worker-0", "2026-01-01T00:00:10.5Z")}


def test_an_attempt_is_marked_where_the_first_launcher_does_not_say_it(fake: Any, client: JobClient) -> None:
    add_job(fake, 2)
    log = "[pod 1] flk-attempt 1\n[rank 2] a\n[pod 1] flk-attempt 2\n[rank 2] a\n"
    fake.written |= {"gpt-worker-0": "[pod 0] flk-attempt 1\n[pod 0] attempt 1: 4 ranks\n", "gpt-worker-1": log}
    shown = [one.text for one in dump(client, "gpt", LogOptions(ranks=frozenset({2})))]
    assert shown == ["[rank 2] a", "[pod 1] attempt 2", "[rank 2] a"]
    everything = [one.text for one in dump(client, "gpt", LogOptions())]
    assert everything == ["[pod 0] attempt 1: 4 ranks", "[rank 2] a", "[rank 2] a"]


def test_pods_choose_lines(fake: Any, client: JobClient) -> None:
    add_job(fake, 3)
    for number in range(3):
        fake.written[f"gpt-worker-{number}"] = f"[rank {2 * number}] loss 1\n"
    options = LogOptions(pods=frozenset({"0", "gpt-worker-2"}))
    assert [one.text for one in dump(client, "gpt", options)] == ["[rank 0] loss 1", "[rank 4] loss 1"]
    for wrong in ("3", "gpt-worker-3", "-1", "x"):
        with pytest.raises(UsageError, match="--pod: job gpt has pods gpt-worker-0 to gpt-worker-2"):
            list(dump(client, "gpt", LogOptions(pods=frozenset({wrong}))))


def smaller(job: dict[str, Any], pods: int) -> dict[str, Any]:
    """A job after `flk scale` has changed its number of pods."""
    changed = copy.deepcopy(job)
    changed["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] = pods
    return changed


@pytest.mark.parametrize("options", [{"pods": frozenset({"3"})}, {"ranks": frozenset({6, 7})}])
def test_a_chosen_pod_stays_chosen_when_its_job_is_scaled_down(
    fake: Any, client: JobClient, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    builder = JobBuilder(4, processes=2).all("pod")
    builder.job["metadata"]["labels"] = {}
    builder.add_to(fake)
    fake.written["gpt-worker-3"] = "[rank 6] hello\n"
    job, pods = client.get_job("gpt"), client.list_pods("gpt")

    def observations(*_: object) -> Iterator[Observation]:
        yield Observation(job, pods, NOW)
        while not any(request.path.endswith("/log") for request in fake.requests):
            time.sleep(0.01)
        del fake.objects[PODS]["gpt-worker-3"]
        ended = [{**pod, "status": {**pod["status"], "phase": "Succeeded"}} for pod in pods[:2]]
        done = {"conditions": [{"type": "Succeeded", "status": "True"}]}
        yield Observation({**smaller(job, 2), "status": done}, ended, NOW)

    monkeypatch.setattr("flk.jobs.logs.stream.follow_job", observations)
    assert [one.text for one in follow(client, "gpt", LogOptions(**options))] == ["[rank 6] hello"]


def test_a_pod_that_was_not_chosen_is_not_when_its_job_is_scaled_down(fake: Any, client: JobClient) -> None:
    add_job(fake, 5)
    job, options = client.get_job("gpt"), LogOptions(pods=frozenset({"3"}))
    before = LineFilter.of(JobView(Observation(job)), options)
    after = LineFilter.of(JobView(Observation(smaller(job, 3))), options, before)
    assert [after.wants(pod) for pod in client.list_pods("gpt")] == [False, False, False, True, False]
    with pytest.raises(UsageError, match="--pod: job gpt has pods gpt-worker-0 to gpt-worker-2"):
        LineFilter.of(JobView(Observation(smaller(job, 3))), options)


def test_pods_without_a_log_are_one_note(fake: Any, client: JobClient) -> None:
    add_job(fake, 40)
    fake.written["gpt-worker-3"] = "[rank 6] hello\n"
    lines = list(dump(client, "gpt", LogOptions()))
    assert [one.text for one in lines] == ["[rank 6] hello", "gpt-worker-0 and 38 other pods have no log"]


def test_job_whose_pods_have_no_node_is_said(fake: Any, client: JobClient) -> None:
    JobBuilder(1).pod(0, "Pending", {}, node="").add_to(fake)
    fake.written["gpt-worker-0"] = ""  # as the API server answers for such a pod
    (line,) = dump(client, "gpt", LogOptions())
    assert line.note
    assert line.text.startswith("there is no line yet: job gpt is ")


def test_job_that_flk_did_not_make(fake: Any, client: JobClient) -> None:
    add_job(fake, 2)
    fake.written |= {"gpt-worker-0": "epoch 1\n", "gpt-worker-1": "epoch 1\n"}
    assert [one.text for one in dump(client, "gpt", LogOptions())] == ["[pod 0] epoch 1", "[pod 1] epoch 1"]
    assert [one.text for one in dump(client, "gpt", LogOptions(fold=True))] == ["[pods 0-1] epoch 1"]


@pytest.mark.parametrize("read", [dump, follow])
@pytest.mark.parametrize(("options", "count"), [({}, 3), ({"tail": 1}, 1), ({"tail": 2}, 2), ({"tail": 0}, 0)])
def test_a_record_is_no_line_of_the_tail(
    fake: Any, client: JobClient, read: Any, options: dict[str, int], count: int
) -> None:
    add_job(fake, 1)
    told = f"[pod 0] {RECORD_MARKER}{record(None).to_json()}\n"
    fake.written["gpt-worker-0"] = "".join(f"[rank 0] {number}\n" for number in range(3)) + told
    assert [one.message for one in read(client, "gpt", LogOptions(**options))] == ["0", "1", "2"][3 - count :]


# What is kept


@pytest.mark.promise("Causes: A job that is gone is still known")
def test_lines_of_pods_that_are_gone_come_from_this_machine(fake: Any, client: JobClient) -> None:
    add_job(fake, 3)
    for number in range(3):
        fake.written[f"gpt-worker-{number}"] = f"[rank {2 * number}] hello\n[rank {2 * number}] bye\n"
    assert len(list(follow(client, "gpt", LogOptions()))) == 6
    del fake.objects[PODS]["gpt-worker-1"]
    shown = [one.text for one in dump(client, "gpt", LogOptions(tail=1))]
    assert shown.pop(2).startswith("gpt-worker-1 is gone; these are its last lines, as of ")
    assert shown == ["[rank 0] bye", "[rank 4] bye", "[rank 2] bye"]
    fake.delete_all()
    shown = [one.text for one in dump(client, "gpt", LogOptions(ranks=frozenset({2})))]
    assert "job gpt is gone; these are its last lines, as of " in shown[0]
    assert shown[1:] == ["[rank 2] hello", "[rank 2] bye"]
    with pytest.raises(JobNotFoundError):
        list(dump(client, "other", LogOptions()))


def test_a_secret_across_the_end_of_a_long_line_is_not_kept(fake: Any, client: JobClient) -> None:
    add_job(fake, 1)
    for role in fake.objects[JOBS]["gpt"]["spec"]["pytorchReplicaSpecs"].values():
        role["template"]["spec"]["containers"][0]["env"] = [{"name": "HF_TOKEN", "value": "hunter2-canary"}]
    marks = "".join(f"[pod 0] {TELEMETRY_MARKER}{number}\n" for number in range(300))
    fake.written["gpt-worker-0"] = f"[rank 0] {'x' * 980} hunter2-canary and more\n{marks}"
    list(follow(client, "gpt", LogOptions()))
    fake.delete_all()
    last = last_answer(client, "gpt")
    assert last
    ((_, kept),) = last.lines["gpt-worker-0"]
    assert kept.startswith("[rank 0] xxx")
    assert "hunter" not in kept


@pytest.mark.parametrize(
    ("options", "option"),
    [(LogOptions(container="sidecar"), "--container")],
)
def test_options_that_no_kept_line_answers_are_refused(
    fake: Any, client: JobClient, options: LogOptions, option: str
) -> None:
    add_job(fake, 2)
    fake.written = {f"gpt-worker-{number}": f"[rank {2 * number}] hello\n" for number in range(2)}
    list(follow(client, "gpt", LogOptions()))
    del fake.objects[PODS]["gpt-worker-1"]
    fake.objects[PODS]["gpt-worker-0"]["spec"]["containers"].append({"name": "sidecar"})
    fake.written["gpt-worker-0"] = "[rank 0] from the other container\n"
    shown = [one.text for one in dump(client, "gpt", options)]
    assert "[rank 2] hello" not in shown
    assert shown[-1] == f"gpt-worker-1 is gone; {option}: flk has kept lines of the ranks only"
    shown = [one.text for one in dump(client, "gpt", LogOptions(container="pytorch"))]
    assert shown[-1] == "[rank 2] hello"
    fake.delete_all()
    with pytest.raises(UsageError, match=f"^{option}: job gpt is gone, and flk has kept lines of its ranks only"):
        list(dump(client, "gpt", options))
    assert [one.text for one in dump(client, "gpt", LogOptions(container="pytorch"))][1:2] == ["[rank 0] hello"]


@pytest.mark.parametrize("read", [follow, dump])
def test_kept_lines_have_their_times(fake: Any, client: JobClient, monkeypatch: pytest.MonkeyPatch, read: Any) -> None:
    add_job(fake, 1)
    fake.written["gpt-worker-0"] = "[rank 0] hello\n"
    list(read(client, "gpt", LogOptions()))
    fake.delete_all()
    (_, found) = dump(client, "gpt", LogOptions())
    assert (found.time, found.text) == ("2026-01-01T00:00:10.5Z", "[rank 0] hello")
    for now, count in ((NOW - 30, 1), (NOW, 0)):
        monkeypatch.setattr("flk.observe.client.JobClient.now", lambda _, now=now: now)
        assert len(list(dump(client, "gpt", LogOptions(since=25)))) == 1 + count
