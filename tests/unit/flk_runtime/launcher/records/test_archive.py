"""The record that launchers keep in the cluster, and what flk says of a job that nothing else is left of."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from flk.jobs.answer import look
from flk.jobs.state import Phase
from flk.observe.client import JobClient
from flk.spec import labels
from flk_runtime.contract import ExitCode
from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.contract.record import ArchivedRecord, Attempt, JobRecord
from flk_runtime.contract.status import RankStatus
from flk_runtime.launcher.coordinator.policy import decide
from flk_runtime.launcher.records.archive import ConfigMap, RecordArchive
from flk_runtime.launcher.records.history import former_attempts
from flk_runtime.launcher.settings import Limits, Settings
from tests.support.api_server import FakeApiServer
from tests.support.certificates import make_certificate

FAILURE = Failure(Kind.EXCEPTION, 0, 0, "gpt-worker-0", type="ValueError", message="no label", traceback="Traceback")
FAILED = JobRecord("failed", 100, failure=FAILURE, attempts=[Attempt(0, 1e9, 1e9 + 60, FAILURE)])
RUNNING = JobRecord("running", 0, attempts=[Attempt(0, 1e9)])
PREEMPTED = replace(RUNNING, outcome="preempted")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An HTTPS server with one ConfigMap, which a pod finds as it finds the API server."""
    import ssl

    certificate = make_certificate(tmp_path, "127.0.0.1", alternative="IP:127.0.0.1")
    certificate.path.rename(tmp_path / "ca.crt")  # as the ServiceAccount's volume names it
    (tmp_path / "token").write_text("secret-token\n")
    (tmp_path / "namespace").write_text("team")

    class Handler(BaseHTTPRequestHandler):
        data: ClassVar[dict[str, str]] = {}
        refused = 0
        limit = 1 << 20  # characters of all entries
        cut = 0  # bytes that an answer lacks at its end
        seen: ClassVar[list[tuple[str, str, str]]] = []

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.seen.append((self.command, self.path, str(self.headers["Authorization"])))
            refused = self.refused
            if self.command == "PATCH" and not refused:
                patched = {**self.data, **json.loads(body)["data"]}
                kept = {name: text for name, text in patched.items() if text is not None}
                refused = 422 if sum(map(len, kept.values())) > self.limit else 0
            if self.command == "PATCH" and not refused:
                self.data.clear()
                self.data.update(kept)
            answer = json.dumps({"data": self.data}).encode()
            self.send_response(refused or 200)
            self.send_header("Content-Length", str(len(answer) + self.cut))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_PATCH = answer

        def log_message(self, *_: object) -> None: ...

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "ca.crt", certificate.key)
    made.socket = context.wrap_socket(made.socket, server_side=True)
    threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(made.server_address[1]))
    yield Handler
    made.shutdown()
    made.server_close()


@pytest.fixture
def keeper(server: Any, tmp_path: Path) -> Callable[..., tuple[RecordArchive, list[str]]]:
    def make(lines: Sequence[str] = ()) -> tuple[RecordArchive, list[str]]:
        log: list[str] = []
        settings = Settings(("train.py",), job="gpt", job_uid="uid-1", pods=2, processes=4, records="records")
        place = ConfigMap("records", str(tmp_path))
        made = RecordArchive(
            settings,
            place,
            lambda number: list(lines[-number:]),
            log.append,
            telemetry=lambda: "packed",
        )
        return made, log

    return make


def write(archive: RecordArchive, record: JobRecord) -> None:
    archive.put_record(record)
    archive.flush(8.0)


def test_a_record_is_written_with_progress_and_last_lines(server: Any, keeper: Any, tmp_path: Path) -> None:
    kept, log = keeper([*(f"[rank 0] step {number}" for number in range(100)), '[pod 0] flk-record {"outcome":"x"}'])
    kept.put_record(RUNNING)
    kept.put_progress(RankStatus(0, 0, 120, step_seconds=0.25), RUNNING)
    write(kept, FAILED)
    entry = ArchivedRecord.from_json(server.data["gpt.uid-1"])
    assert entry is not None
    assert entry.record == FAILED
    assert (entry.step, entry.step_seconds, entry.pods, entry.processes) == (120, 0.25, 2, 4)
    assert entry.telemetry == "packed"
    assert entry.lines == [f"[rank 0] step {number}" for number in range(70, 100)]
    assert log == []
    assert {(path.partition("?")[0], token) for _, path, token in server.seen} == {
        ("/api/v1/namespaces/team/configmaps/records", "Bearer secret-token")
    }


@pytest.mark.parametrize("refused", [0, 503], ids=["after a write", "after a write that failed"])
def test_the_last_record_is_written_at_once(server: Any, keeper: Any, refused: int) -> None:
    server.refused = refused
    kept, _ = keeper()
    write(kept, RUNNING)
    server.refused = 0
    write(kept, FAILED)
    entry = ArchivedRecord.from_json(server.data["gpt.uid-1"])
    assert entry is not None
    assert entry.record == FAILED


def test_the_start_of_the_job_outlives_its_only_pod(server: Any, keeper: Any) -> None:
    first = ArchivedRecord("gpt", "uid-1", 1, 4, 1000.0, 1090.0, replace(RUNNING, outcome="preempted"))
    server.data["gpt.uid-1"] = first.to_json()
    kept, _ = keeper()
    assert kept.read() is not None
    write(kept, RUNNING)
    entry = ArchivedRecord.from_json(server.data["gpt.uid-1"])
    assert entry is not None
    assert kept.created == entry.created == 1000.0


@pytest.mark.promise("Recovery: Launchers that all die go on with the attempts of the job")
@pytest.mark.parametrize("step", [7, -1])
def test_the_attempts_of_launchers_that_were_killed_are_read(
    server: Any, keeper: Any, tmp_path: Path, step: int
) -> None:
    """After the kernel has killed the only container of a job, nobody else knows that an attempt ran."""
    kept, log = keeper()
    kept.put_record(RUNNING)
    kept.put_progress(RankStatus(0, 0, step), RUNNING)
    kept.put_record(replace(RUNNING, attempts=[replace(RUNNING.attempts[0], restored=5)]))
    kept.flush(8.0)
    entry = keeper()[0].read()
    assert entry is not None
    (attempt,) = former_attempts(entry, "gpt-worker-0", 0.0)
    assert attempt.failure is not None
    assert attempt.failure.kind is Kind.CONTAINER_KILLED
    assert attempt.failure.summary == "gpt-worker-0 was killed, at the memory limit of its container or from outside"
    assert (attempt.number, attempt.ended, attempt.step) == (0, entry.updated, 7 if step == 7 else 5)
    assert log == []


@pytest.mark.parametrize(
    ("record", "start"),
    [
        (FAILED, 5.0),
        (JobRecord("running", 0), 5.0),
        (PREEMPTED, 6.0),  # `flk suspend`, and `flk resume` later: the budgets are whole again
        (PREEMPTED, 0.0),  # nobody knows who has started it
    ],
)
def test_a_job_that_has_ended_or_was_started_again_begins_anew(record: JobRecord, start: float) -> None:
    entry = ArchivedRecord("gpt", "uid-1", 2, 4, 0.0, 0.0, record, start=5.0 if start else 0.0)
    assert former_attempts(entry, "gpt-worker-0", start) == []


@pytest.mark.parametrize("failure", [None, Failure(Kind.PREEMPTED, 1, attempt=3)])
def test_a_job_whose_pods_were_all_deleted_goes_on_with_its_attempts(failure: Failure | None) -> None:
    record = replace(PREEMPTED, failure=failure, attempts=[Attempt(3, 10.0, restarts=2, disruptions=4)])
    entry = ArchivedRecord("gpt", "uid-1", 2, 4, 0.0, 20.0, record, step=7, start=5.0)
    (attempt,) = former_attempts(entry, "gpt-worker-0", 5.0)
    assert attempt.failure
    assert (attempt.failure.kind, attempt.failure.attempt) == (Kind.PREEMPTED, 3)
    assert (attempt.number, attempt.ended, attempt.step) == (3, 20.0, 7)
    decision = decide([attempt], Limits(restarts=3))
    assert (decision.restart, decision.restarts, decision.disruptions) == (True, 2, 5)


def test_no_attempts_are_read_of_another_job_or_without_an_answer(server: Any, keeper: Any) -> None:
    other = ArchivedRecord("gpt", "uid-0", 2, 4, 0.0, 0.0, RUNNING)
    server.data[other.key] = other.to_json()
    kept, log = keeper()
    assert kept.read() is None
    server.data["gpt.uid-1"] = other.to_json()
    assert kept.read() is None
    server.data["gpt.uid-1"] = replace(other, uid="uid-1").to_json()
    assert kept.read() is not None
    server.refused = 403
    assert kept.read() is None
    assert log == []


@pytest.mark.parametrize("text", ["[" * 100_000, '{"job":1}', "9" * 5_000], ids=["nested", "other", "digits"])
def test_a_record_that_cannot_be_read_is_said_and_ignored(server: Any, keeper: Any, text: str) -> None:
    server.data["gpt.uid-1"] = text
    kept, log = keeper()
    assert kept.read() is None
    assert log == ["ignored the record of the job in ConfigMap records: it is damaged"]
    write(kept, RUNNING)
    assert keeper()[0].read() is not None


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"updated":NaN}', "9" * 5_000, "", '{"record":' * 5_000], ids=lambda text: text[:9]
)
def test_an_entry_of_another_job_that_cannot_be_read_stops_nobody(server: Any, keeper: Any, text: str) -> None:
    """They are read to find the oldest, which makes room."""
    newer = ArchivedRecord("newer", "u", 1, 1, 0.0, 1.0, RUNNING)
    server.data |= {newer.key: newer.to_json(), "other.u": text.ljust(3_000)}
    server.limit = sum(map(len, server.data.values()))
    kept, log = keeper()
    write(kept, RUNNING)
    write(kept, FAILED)
    entry = ArchivedRecord.from_json(server.data["gpt.uid-1"])
    assert entry
    assert entry.record == FAILED
    assert newer.key in server.data
    assert log == []


def test_an_answer_that_is_cut_off_is_no_answer(server: Any, keeper: Any) -> None:
    server.cut = 1
    kept, log = keeper()
    assert kept.read() is None
    write(kept, RUNNING)
    (line,) = log
    assert line.startswith("the record of the job is not kept in ConfigMap records: IncompleteRead(")


def test_the_oldest_records_make_room(server: Any, keeper: Any) -> None:
    server.limit = 3_000
    for number in range(6):
        old = ArchivedRecord(f"old-{number}", "u", 1, 1, 0.0, float(number), RUNNING, lines=["x" * 300])
        server.data[old.key] = old.to_json()
    kept, _ = keeper()
    write(kept, RUNNING)
    assert "gpt.uid-1" in server.data
    assert sum(map(len, server.data.values())) <= 3_000
    assert "old-5.u" in server.data
    assert "old-0.u" not in server.data


def test_a_job_runs_on_without_the_right_to_write(server: Any, keeper: Any) -> None:
    server.refused = 403
    kept, log = keeper()
    write(kept, FAILED)
    assert log == ["the record of the job is not kept in ConfigMap records: HTTP Error 403: Forbidden"]


def test_entries_of_others_are_none() -> None:
    assert ArchivedRecord.from_json("") is None
    assert ArchivedRecord.from_json('{"job": "x"}') is None
    entry = ArchivedRecord("gpt", "", 1, 1, 0.0, 1.0, FAILED)
    assert ArchivedRecord.from_json(entry.to_json()) == entry
    assert len(ArchivedRecord("gpt", "", 1, 1, 0.0, 1.0, _large()).to_json()) < 12_000


def _large() -> JobRecord:
    long = Failure(Kind.EXCEPTION, 0, 0, type="E", message="m" * 9000, traceback="t" * 90_000, stderr="s" * 90_000)
    return JobRecord("failed", 100, failure=long, attempts=[Attempt(number, 1.0, 2.0, long) for number in range(100)])


def keep(fake: FakeApiServer, record: JobRecord) -> None:
    """Put the record of a job of two pods into the namespace, as the chart's ConfigMap holds it."""
    entry = ArchivedRecord("gpt", "uid-1", 2, 1, 1e9, 1e9 + 60, record, step=120, lines=["[rank 0] step 120"])
    meta = {"name": "site-flk-records", "labels": {labels.RECORDS: "true"}}
    fake.add("configmaps", {"metadata": meta, "data": {"broken": "{", entry.key: entry.to_json()}})


def test_a_job_that_failed_is_known_by_its_record_alone(fake: FakeApiServer, kubeconfig: Path, run: Any) -> None:
    keep(fake, FAILED)
    notes: list[str] = []
    last = look(JobClient.connect(), "gpt", notes.append)
    assert notes[0].startswith("job gpt is gone; this is the last answer about it, as of ")
    answer, state = last.report, last.state
    assert answer.cause is not None
    assert (answer.cause.code, answer.cause.exit_code) == ("ExceptionRaised", ExitCode.TRAINING)
    assert "raised ValueError: no label" in answer.summary
    assert (state.phase, state.code, state.replicas) == (Phase.FAILED, ExitCode.TRAINING, 2)
    code, lines, _ = run("logs", "gpt")
    assert (code, lines) == (ExitCode.TRAINING, "[rank 0] step 120\n")
