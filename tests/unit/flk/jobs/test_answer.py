"""The last answer about a job: kept as it was given, private, bounded, without secrets, and of named jobs only."""

from __future__ import annotations

import gzip
import json
import math
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flk.__main__ import main
from flk.jobs import answer
from flk.jobs.answer import Answer, answer_of, keep, last_answer
from flk.jobs.state import Phase
from flk.observe.client import JobClient
from flk.observe.progress import Progress
from flk.observe.view import JobView
from flk.spec import labels
from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.contract.record import ArchivedRecord, Attempt, JobRecord
from tests.support import recorded
from tests.support.api_server import EVENTS, JOBS, PODS, FakeApiServer
from tests.support.cause_cases import Case
from tests.support.causes import CASES
from tests.unit.flk.cli.outputs import jobs

CANARY = "hunter2-canary"


def say(client: JobClient, view: JobView, time: float = 0.0, lines: dict[str, Any] | None = None) -> Answer:
    """Keep the answer about a job that was seen like this."""
    said = replace(answer_of(view), time=time or client.now())
    keep(client, said, lines)
    return said


def test_a_wait_keeps_state_report_and_last_lines(fake: FakeApiServer, client: JobClient) -> None:
    jobs.add(fake, "exception on rank 1")
    assert main(["wait", "gpt"]) == 100
    fake.delete_all()
    last = last_answer(client, "gpt")
    assert last is not None
    assert last.state.phase == Phase.FAILED
    assert "expected 512 features" in last.state.message
    assert last.report.cause
    assert last.report.cause.code == "ExceptionRaised"
    texts = [text for _, text in last.lines["gpt-worker-1"]]
    assert texts == ["[rank 1] step 10 loss 2.31", "[rank 1] step 20 loss 2.07"]
    assert last.pods == ["gpt-worker-0", "gpt-worker-1", "gpt-worker-2"]
    assert last_answer(client, "other") is None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_answer_is_read_as_it_was_given(fake: FakeApiServer, client: JobClient, case: Case) -> None:
    said = say(client, recorded.load(recorded.FOLDER / f"{case.name}.json"))
    last = last_answer(client, case.name)
    assert last is not None
    assert said.view is not None
    if not said.state.finished:
        said = answer_of(JobView(replace(said.view.seen, gone=said.time)))
        assert said.state.phase == Phase.DELETED
    told, given = last.report, said.report
    assert (told.summary, told.cause and told.cause.code) == (given.summary, given.cause and given.cause.code)
    assert (last.state.phase, last.state.failure) == (said.state.phase, said.state.failure)


@pytest.mark.parametrize(("which", "remedy"), [("queued", "submit it again"), ("image missing", "the image")])
def test_the_cause_of_a_job_that_was_deleted_is_told_with_its_deletion(
    fake: FakeApiServer, kubeconfig: Path, capsys: pytest.CaptureFixture[str], which: str, remedy: str
) -> None:
    jobs.add(fake, which)
    assert main(["why", "gpt", "-o", "json"]) == 0
    before = json.loads(capsys.readouterr().out)
    fake.delete_all()
    assert main(["why", "gpt", "-o", "json"]) == 103
    after = json.loads(capsys.readouterr().out)
    assert (after["code"], after["summary"]) == (before["code"], before["summary"])
    assert (after["others"][0]["code"], after["others"][0]["text"]) == (
        "Deleted",
        "the job was deleted before it had ended",
    )
    assert remedy in after["cause"]["remedy"]
    assert main(["why", "gpt"]) == 103
    told = " ".join(capsys.readouterr().out.split())
    assert "the job was deleted before it had ended" in told
    assert "flk wait" not in told
    assert "resolve by itself" not in told


@pytest.mark.parametrize("command", ["submit", "status", "why", "wait", "logs"])
def test_a_job_that_a_command_has_named_is_known_when_somebody_has_deleted_it(
    fake: FakeApiServer, kubeconfig: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    words = {"submit": ["train.py", "--name", "gpt"], "wait": ["gpt", "--timeout", "0"], "logs": ["gpt", "--no-follow"]}
    if command != "submit":
        jobs.add(fake, "running")
    assert main([command, *words.get(command, ["gpt"])]) in (0, 101)
    fake.delete_all()
    capsys.readouterr()
    assert [main([again, "gpt"]) for again in ("status", "why", "logs", "wait")] == [103] * 4
    printed = capsys.readouterr()
    assert "job gpt is gone; this is the last answer about it, as of " in printed.err
    assert "gpt   Deleted" in printed.out
    assert [main([again, "other"]) for again in ("status", "why", "logs", "wait")] == [102] * 4


def test_lists_and_selectors_keep_nothing(fake: FakeApiServer, kubeconfig: Path, state_folder: Path) -> None:
    jobs.add(fake, "running")
    fake.objects[JOBS]["gpt"]["metadata"].setdefault("labels", {})["team"] = "nlp"
    assert main(["list", "-A"]) == 0
    assert main(["status", "-l", "team=nlp"]) == 0
    assert main(["wait", "-l", "team=nlp", "--timeout", "0"]) == 101
    assert main(["logs", "-l", "team=nlp", "--no-follow"]) == 0
    assert list(state_folder.glob("*/*/*")) == []
    assert main(["status", "gpt"]) == 0  # from now on the user knows it
    (path,) = state_folder.glob("*/*/*")
    os.utime(path, (1, 1))
    assert main(["status", "-l", "team=nlp"]) == 0
    assert path.stat().st_mtime > 1


def test_it_can_be_turned_off(
    fake: FakeApiServer, kubeconfig: Path, state_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs.add(fake, "running")
    monkeypatch.setenv("FLK_ARCHIVE", "off")
    assert main(["status", "gpt"]) == 0
    assert not state_folder.exists()
    fake.delete_all()
    assert main(["status", "gpt"]) == 102


@pytest.mark.parametrize("which", ["exception on rank 1", "evicted"])
@pytest.mark.parametrize("gone", ["pods", "job"])
def test_status_and_why_say_the_same_when_pods_or_job_are_gone(
    fake: FakeApiServer,
    kubeconfig: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    which: str,
    gone: str,
) -> None:
    monkeypatch.setattr("flk.jobs.wait.FAILURE_DELAY", 0.0)
    jobs.add(fake, which)
    assert main(["wait", "gpt"]) > 0
    fake.objects[EVENTS].clear()
    capsys.readouterr()

    def said() -> tuple[Any, Any]:
        answers = []
        for command in ("why", "status"):
            assert main([command, "gpt", "-o", "json"]) == 0
            answers.append(json.loads(capsys.readouterr().out))
        why, status = answers
        return why["cause"]["code"], (status["phase"], status["message"], len(status["attempts"]))

    before = said()
    fake.objects[PODS].clear()
    fake.written.clear()
    if gone == "job":
        fake.objects[JOBS].clear()
    assert said() == before


def test_no_command_about_a_job_prints_a_secret_of_its_object(
    fake: FakeApiServer, kubeconfig: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs.add(fake, "exception on rank 1")
    made = fake.objects[JOBS]["gpt"]
    for role in made["spec"]["pytorchReplicaSpecs"].values():
        for container in role["template"]["spec"]["containers"]:
            container["env"] = [{"name": "HF_TOKEN", "value": CANARY}]
            container["args"] = ["train.py", "--api-key", CANARY]
    for command in ("status", "why"):
        assert main([command, "gpt", "-o", "json"]) == 0
    assert main(["list", "-o", "json"]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("ExceptionRaised") >= 2
    assert CANARY not in printed.out + printed.err


def test_no_secret_of_a_job_is_kept(fake: FakeApiServer, client: JobClient, state_folder: Path) -> None:
    failing = jobs.running()
    told = f"the token {CANARY} is not valid"
    view = failing.view()
    for role in view.job["spec"]["pytorchReplicaSpecs"].values():
        role["template"]["spec"]["containers"][0]["env"] = [{"name": "HF_TOKEN", "value": CANARY}]
    failure = Failure(Kind.EXCEPTION, 0, 0, message=told, traceback=told)
    record = JobRecord("failed", 100, failure=failure, attempts=[Attempt(0, 1.0, 2.0, failure)])
    seen = JobView(view.seen.__class__(view.job, view.seen.pods, view.now, record=record))
    say(client, seen, lines={"gpt-worker-0": [("", told)]})
    (path,) = state_folder.glob("*/*/*")
    kept = gzip.decompress(path.read_bytes()).decode()
    assert CANARY not in kept
    assert kept.count("the token *** is not valid") > 3


def test_only_the_user_may_read_it(client: JobClient, state_folder: Path) -> None:
    say(client, jobs.running().view())
    (path,) = state_folder.glob("*/*/*")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) & 0o077 == 0


DAMAGED = {"empty": b"", "junk": b"junk", "a list": gzip.compress(b"[]"), "another object": gzip.compress(b'{"job":1}')}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_counts_as_none(
    fake: FakeApiServer, client: JobClient, state_folder: Path, content: bytes
) -> None:
    said = say(client, jobs.running().view())
    (path,) = state_folder.glob("*/*/*")
    os.utime(path, (1, 1))
    path.with_name("gpt@bad.json.gz").write_bytes(content)
    last = last_answer(client, "gpt")
    assert last
    assert last.state.uid == said.state.uid


def test_lines_and_files_are_bounded(fake: FakeApiServer, client: JobClient, state_folder: Path) -> None:
    say(client, jobs.running().view(), lines={"gpt-worker-0": [("", f"{n} " + "x" * 5000) for n in range(300)]})
    last = last_answer(client, "gpt")
    assert last
    kept = [text for _, text in last.lines["gpt-worker-0"]]
    assert (len(kept), max(map(len, kept)), kept[-1][:3]) == (200, 1000, "299")
    assert answer.lines_of_a_pod(4096) == 5
    (path,) = state_folder.glob("*/*/*")
    for number in range(4):
        old = path.with_name(f"old-{number}@u.json.gz")
        old.write_bytes(b"")
        os.utime(old, (number + 1, number + 1))
    answer.prune(files=3, age=1e12)
    assert len(list(path.parent.iterdir())) == 3
    answer.prune(age=3600)
    assert list(path.parent.iterdir()) == [path]


def test_lines_of_earlier_pods_stay_while_there_is_room(
    client: JobClient, state_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer, "EARLIER_PODS", 0)
    view = jobs.running().view()
    for pods in ("a", "b", "c"), ("b",), ("d",):
        say(client, view, lines={pod: [("", "one"), ("", "two")] for pod in pods})
    last = last_answer(client, "gpt")
    assert last
    assert list(last.lines) == ["c", "b", "d"]
    (path,) = state_folder.glob("*/*/*")
    monkeypatch.setattr(answer, "MAX_READ", 10)
    before = path.read_bytes()
    say(client, view, 7.0)
    assert path.read_bytes() == before


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_an_answer_with_a_loss_that_is_no_number_is_read_again(client: JobClient, loss: float) -> None:
    view = jobs.running().view()
    progress = [Progress(0, 20, 100.0, loss=loss)]
    say(client, JobView(replace(view.seen, progress=progress)))
    last = last_answer(client, "gpt")
    assert last
    assert [each.loss for each in last.state.progress] == [None]


@pytest.mark.parametrize("words", [["gpt"], ["-l", labels.JOB]])
@pytest.mark.parametrize("place", ["file", "x" * 300])  # a name of this length cannot even be looked for
def test_a_folder_that_cannot_be_written_disturbs_nothing(
    fake: FakeApiServer, kubeconfig: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, words: list[str]
) -> None:
    jobs.add(fake, "running")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / place / "state"))
    (tmp_path / "file").write_text("a file, not a folder")
    assert main(["status", *words]) == 0


def test_the_newer_of_the_answer_and_the_launchers_record_counts(fake: FakeApiServer, client: JobClient) -> None:
    view = jobs.unschedulable().view()
    said = say(client, view)
    failure = Failure(Kind.EXCEPTION, 0, 0, type="ValueError", message="no label")
    record = JobRecord("failed", 100, failure=failure, attempts=[Attempt(0, 1e9, 1e9 + 60, failure)])
    for seconds, uid, code in (
        (-60, view.uid, said.state.cause and said.state.cause.code),
        (60, view.uid, "ExceptionRaised"),
        (90, "that of another job of the name", "ExceptionRaised"),
    ):
        time = client.now() + seconds
        entry = ArchivedRecord("gpt", uid, 3, 1, time, time, record if uid == view.uid else JobRecord("running", 0))
        meta = {"name": f"records{seconds}", "labels": {labels.RECORDS: "true"}}
        fake.add("configmaps", {"metadata": meta, "data": {entry.key: entry.to_json()}})
        last = last_answer(client, "gpt", view.uid)
        assert last
        assert last.report.cause
        assert last.report.cause.code == code
