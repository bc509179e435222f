"""What is archived of jobs: whole, bounded, private, and without secrets."""

from __future__ import annotations

import copy
import gzip
import json
import os
import re
import signal
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flk import labels
from flk.__main__ import main
from flk.health import diagnose
from flk.jobs.archive_writer import ArchiveWriter
from flk.jobs.state import Phase, deleted, derive
from flk.jobs.wait import wait_until_finished
from flk.observe.archive import LocalArchive, find
from flk.observe.archive.format import from_json, to_json
from flk.observe.archive.redaction import kept_diff, kept_job, kept_pod, secrets_of
from flk.observe.client import JobClient
from flk.observe.model import Finding
from flk.observe.observation import Observation, StateChange
from flk.observe.progress import Progress
from flk.observe.reader import view_job
from flk.observe.view import JobView
from flk.units import timestamp
from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.contract.record import ArchivedRecord, Attempt, JobRecord
from tests.support import recorded
from tests.support.api_server import EVENTS, JOBS, PODS, FakeApiServer
from tests.support.cause_cases import Case
from tests.support.causes import CASES
from tests.support.jobs import MADE
from tests.unit.flk.cli.outputs import jobs

CANARY = "hunter2-canary"
GONE = Observation(None, gone=1.0)


def job(name: str = "gpt", uid: str = "uid-1", version: int = 1, replicas: int = 1) -> dict[str, Any]:
    spec = {"pytorchReplicaSpecs": {"Worker": {"replicas": replicas}}}
    return {"metadata": {"name": name, "uid": uid, "resourceVersion": str(version)}, "spec": spec}


def pod(index: int = 0, version: int = 1) -> dict[str, Any]:
    meta = {"name": f"gpt-worker-{index}", "uid": f"pod-{index}", "resourceVersion": str(version)}
    return {"metadata": meta, "spec": {"nodeName": "node-a"}, "status": {"phase": "Running"}}


def kept_of(client: JobClient, uid: str = "") -> Observation:
    """What is kept of the job gpt."""
    kept = find(client, "gpt", uid)
    assert kept is not None
    return kept


def test_what_a_wait_has_seen_stays_when_the_job_is_gone(fake: FakeApiServer, client: JobClient) -> None:
    jobs.add(fake, "exception on rank 1")
    state = wait_until_finished(client, "gpt")
    fake.delete_all()
    kept = kept_of(client)
    assert kept.uid == state.uid
    assert sorted(p["metadata"]["name"] for p in kept.pods) == ["gpt-worker-0", "gpt-worker-1", "gpt-worker-2"]
    assert kept.logs["gpt-worker-1"] == ["[rank 1] step 10 loss 2.31", "[rank 1] step 20 loss 2.07"]
    assert [change.phase for change in kept.states] == ["Failed"]
    assert "expected 512 features" in kept.states[0].message
    assert find(client, "other") is None


def test_states_events_records_and_replaced_pods(client: JobClient) -> None:
    writer = ArchiveWriter(client)
    event = {"metadata": {"name": "e", "uid": "e", "resourceVersion": "1"}, "reason": "FailedMount", "message": "m"}
    record = JobRecord("running", 0)
    writer.observe(Observation(job(), [pod()], events=[event], record=record))
    writer.observe(Observation(job(), [], replaced_pods={"gpt-worker-0": pod()}, events=[event]))
    writer.observe(GONE)
    writer.close()
    kept = kept_of(client)
    assert kept.record == record
    assert [e["reason"] for e in kept.events] == ["FailedMount"]
    assert list(kept.replaced_pods) == ["gpt-worker-0"]
    assert kept.pods[0]["status"] == {"phase": "Running"}
    assert kept.gone is not None


def test_a_second_command_adds_to_what_the_first_has_kept(client: JobClient) -> None:
    for number in (1, 2):
        writer = ArchiveWriter(client)
        writer.observe(Observation(job(version=number), [pod(number, number)]))
        writer.add_line(f"gpt-worker-{number}", "[rank 0] x")
        writer.close()
    kept = kept_of(client)
    assert len(kept.pods) == 2
    assert kept.logs == {"gpt-worker-1": ["[rank 0] x"], "gpt-worker-2": ["[rank 0] x"]}


def test_jobs_of_one_name_are_told_apart_by_their_uids(client: JobClient) -> None:
    for uid, modified in (("old", 1), ("new", 2)):
        store = LocalArchive(client)
        store.write(Observation(job(uid=uid)))
        os.utime(store.folder / f"gpt@{uid}.json.gz", (modified, modified))
    assert (kept_of(client).uid, kept_of(client, "old").uid) == ("new", "old")
    assert find(client, "gpt", "another") is None


def test_only_the_user_may_read_it(client: JobClient, state_folder: Path) -> None:
    LocalArchive(client).write(Observation(job()))
    (path,) = state_folder.glob("*/*/*")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) & 0o077 == 0


DAMAGED = {"empty": b"", "junk": b"junk", "a list": gzip.compress(b"[]"), "another object": gzip.compress(b'{"job":1}')}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_counts_as_none(client: JobClient, content: bytes) -> None:
    store = LocalArchive(client)
    store.write(Observation(job(uid="good")))
    os.utime(next(store.folder.iterdir()), (1, 1))
    (store.folder / "gpt@bad.json.gz").write_bytes(content)
    assert kept_of(client).uid == "good"


def test_old_files_are_deleted(client: JobClient) -> None:
    store = LocalArchive(client)
    for number in range(5):
        store.write(Observation(job(f"job-{number}")))
        os.utime(store.folder / f"job-{number}@uid-1.json.gz", (number + 1, number + 1))
    store.prune(files=2, age=1e12)
    assert sorted(path.name[:5] for path in store.folder.iterdir()) == ["job-3", "job-4"]
    store.prune(size=1, age=1e12)
    assert list(store.folder.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_told_once(client: JobClient, state_folder: Path) -> None:
    state_folder.parent.mkdir(parents=True)
    state_folder.write_text("a file, not a folder")
    notes: list[str] = []
    writer = ArchiveWriter(client, notes.append)
    for version in (1, 2):
        writer.observe(Observation(job(version=version), []))
    writer.close()
    assert len(notes) == 1
    assert "nothing can be kept of this job" in notes[0]


def test_lines_are_bounded_in_number_and_length(client: JobClient) -> None:
    writer = ArchiveWriter(client)
    writer.observe(Observation(job(replicas=4096), []))
    for number in range(100):
        writer.add_line("gpt-worker-0", f"{number} " + "x" * 5000)
    writer.close()
    kept = kept_of(client)
    assert [line.split()[0] for line in kept.logs["gpt-worker-0"]] == ["95", "96", "97", "98", "99"]
    assert max(map(len, kept.logs["gpt-worker-0"])) == 1000


def test_no_secret_is_kept() -> None:
    container = {
        "name": "pytorch",
        "env": [
            {"name": "WANDB_API_KEY", "value": CANARY},
            {"name": "LR", "value": "0.1"},
            {"name": "MLFLOW_TRACKING_URI", "value": f"https://me:{CANARY}@mlflow.example"},
        ],
        "command": ["python", "train.py", f"--hf-token={CANARY}", "--password", CANARY, f"DB_PASSWORD={CANARY}"],
        "args": ["--api-key", CANARY, "--lr=0.1", f"--cache=redis://:{CANARY}@cache.example"],
    }
    whole = job()
    whole["metadata"]["annotations"] = {"flk.dev/spec": CANARY, "flk.dev/owner": "ada"}
    whole["metadata"]["managedFields"] = [CANARY]
    template = {"spec": {"containers": [container], "initContainers": [container]}}
    whole["spec"]["pytorchReplicaSpecs"]["Worker"]["template"] = template
    kept = json.dumps([kept_job(whole), kept_pod({**pod(), "spec": {"containers": [container]}})])
    assert CANARY not in kept
    assert "--lr=0.1" in kept
    assert '"0.1"' in kept
    assert "https://me:***@mlflow.example" in kept
    assert "ada" in kept
    assert CANARY in json.dumps(whole)  # the object itself stays as it is


def test_no_secret_of_the_options_is_kept() -> None:
    spec: dict[str, Any] = {
        "pip": [f"git+https://{CANARY}@host/x", "timm"],
        "setup": f"HF_TOKEN={CANARY} ./get.sh --lr 0.1",
        "on_restart": f"--api-token='{CANARY}'",
        "mounts": [{"address": f"https://me:{CANARY}@host/x"}],
    }
    env = [{"name": "FLK_SETUP", "value": spec["setup"]}, {"name": "FLK_ON_RESTART", "value": spec["on_restart"]}]
    env.append({"name": "FLK_PIP", "value": spec["pip"][0]})
    whole = job()
    whole["metadata"]["annotations"] = {"flk.dev/spec": json.dumps(spec)}
    template = {"spec": {"containers": [{"name": "pytorch", "env": env}]}}
    whole["spec"]["pytorchReplicaSpecs"]["Worker"]["template"] = template
    kept = json.dumps(kept_job(whole))
    assert CANARY not in kept
    assert kept.count("HF_TOKEN=*** ./get.sh --lr 0.1") == 2
    assert kept.count("git+https://***@host/x") == 2
    assert "timm" in kept


def test_no_secret_that_a_script_prints_is_kept(client: JobClient) -> None:
    told = f"the token {CANARY} is not valid"
    seen = job()
    container = {"name": "pytorch", "env": [{"name": "HF_TOKEN", "value": CANARY}]}
    seen["spec"]["pytorchReplicaSpecs"]["Worker"]["template"] = {"spec": {"containers": [container]}}
    failure = Failure(Kind.EXCEPTION, 0, 0, message=told, traceback=told)
    record = JobRecord("failed", 100, failure=failure, attempts=[Attempt(0, 1.0, 2.0, failure)])
    event = {"metadata": {"name": "e", "uid": "e", "resourceVersion": "1"}, "reason": "Failed", "message": told}
    ended = {**pod(), "status": {"containerStatuses": [{"state": {"terminated": {"message": told}}}]}}
    state = replace(jobs.running().state(), message=told, cause=Finding("Failed", told, ""))
    writer = ArchiveWriter(client)
    writer.observe(Observation(seen, [ended], events=[event], record=record), state)
    writer.observe(Observation(seen, [], replaced_pods={"gpt-worker-0": ended}))
    writer.add_line("gpt-worker-0", told)
    writer.set_lines("gpt-worker-1", [("", told)])
    writer.close()
    kept = kept_of(client)
    assert CANARY not in to_json(kept)
    assert to_json(kept).count("the token *** is not valid") == 11


DIFF = f"""diff --git a/train.py b/train.py
-lr = 0.1
+lr = 0.2
+    os.environ["HF_TOKEN"] = "{CANARY}"
+login(user="ada", token="{CANARY}")
+  api_key: {CANARY}
+"password": "{CANARY}",
+data = "https://me:{CANARY}@data.example"
+if token == end:
+print("another-canary")
+print("canary-of-a-command")
diff --git a/conf/.env b/conf/.env
+X={CANARY}
diff --git a/model.py b/model.py
+tokens = 3
"""


def test_no_secret_of_a_diff_is_kept() -> None:
    variables = {"WANDB_API_KEY": "another-canary", "EMPTY_TOKEN": "", "LR": "0.1"}
    env = [{"name": name, "value": value} for name, value in variables.items()]
    kept = kept_diff(DIFF, secrets_of({"env": env, "command": ["train.py", "--api-token", "canary-of-a-command"]}))
    assert CANARY not in kept
    assert kept.count('+print("***")\n') == 2
    for line in (
        "-lr = 0.1",
        '+    os.environ["HF_TOKEN"] = ***',
        '+data = "https://me:***@data.example"',
        "+tokens = 3",
    ):
        assert line in kept.splitlines()
    assert "+if token == end:" in kept
    assert "diff --git a/conf/.env b/conf/.env\n(not shown, since its name says that it is secret)\ndiff" in kept


@pytest.mark.parametrize("word", ["a", "a.", "token ", '"', "-", "="])
def test_a_long_line_of_a_diff_takes_linear_time(word: str) -> None:
    """64 kB took minutes: each character began another search to the end of the line."""
    signal.alarm(60)
    kept_diff("+" + word * (400_000 // len(word)), [])
    signal.alarm(0)


@pytest.mark.parametrize(
    "spec", ["[" * 100_000, "[1]", '{"env": [5], "command": 5}', '{"env": 5, "setup": 5}', "x", "1e999"]
)
def test_any_text_may_stand_where_the_options_are(spec: str) -> None:
    item = job()
    item["metadata"]["annotations"] = {"flk.dev/spec": spec}
    assert kept_job(item)["metadata"]["name"] == "gpt"
    assert secrets_of(item) == []


def test_the_diff_of_a_submission_stays_when_others_look_at_the_job(client: JobClient) -> None:
    for version, diff in ((1, "+2\n"), (2, "")):
        writer = ArchiveWriter(client)
        writer.observe(Observation(job(version=version), [], diff=diff))
        writer.close()
    kept = kept_of(client)
    assert kept.diff == "+2\n"


def test_alternating_states_are_bounded(client: JobClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flk.jobs.archive_writer.MAX_STATES", 10)
    writer = ArchiveWriter(client)
    for number in range(100):
        state = jobs.running().state() if number % 2 else jobs.restarting().state()
        writer.observe(Observation(job(), []), state)
        writer.observe(Observation(job(), []), state)
    writer.close()
    kept = kept_of(client)
    assert len(kept.states) == 10
    assert len({change.phase for change in kept.states}) == 2


def test_it_survives_a_round_trip() -> None:
    states = [StateChange(1.0, "Failed")]
    record = JobRecord("failed", 100)
    seen = Observation(
        job(),
        [pod()],
        2.0,
        events=[],
        record=record,
        logs={"p": ["l"]},
        progress=[Progress(0, 20, 1.0)],
        states=states,
        seen_by="flk status",
        diff="+2\n",
    )
    assert from_json(to_json(seen)) == seen


@pytest.mark.parametrize("which", ["exception on rank 1", "out of memory", "evicted", "exception after three attempts"])
@pytest.mark.parametrize("gone", ["pods", "job"])
def test_status_and_why_say_the_same_when_pods_or_job_are_gone(
    fake: FakeApiServer,
    kubeconfig: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    which: str,
    gone: str,
) -> None:
    monkeypatch.setattr("flk.jobs.wait.follow.FAILURE_DELAY", 0.0)
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
    for command in ("status", "why", "report", "top"):
        assert main([command, "gpt", "-o", "json"]) == 0
    assert main(["list", "-o", "yaml"]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("ExceptionRaised") >= 3
    assert CANARY not in printed.out + printed.err


def test_status_of_a_job_that_was_deleted_while_it_ran(
    fake: FakeApiServer, kubeconfig: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs.add(fake, "running")
    assert main(["wait", "gpt", "--timeout", "0"]) == 101
    fake.delete_all()
    capsys.readouterr()
    assert main(["status", "gpt"]) == 103
    printed = capsys.readouterr()
    assert "gpt   Deleted" in printed.out
    assert "job gpt is gone; this is what flk wait kept of it on this machine" in printed.err
    assert main(["status", "other"]) == 102


@pytest.mark.parametrize(
    ("command", "last"),
    [
        (["submit", "train.py", "--name", "gpt"], "flk submit, which saw it last (Ns ago)\n    the job was created"),
        (["status", "gpt"], "flk status, which saw it last (Ns ago)\n    Running at step 20"),
        (["why", "gpt"], "flk why, which saw it last (Ns ago)\n    Running at step 20"),
    ],
)
def test_a_job_that_one_command_has_seen_is_known_when_somebody_has_deleted_it(
    fake: FakeApiServer,
    kubeconfig: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    command: list[str],
    last: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    if command[0] == "submit":
        monkeypatch.setattr(JobClient, "now", lambda client: timestamp("2026-01-01T00:00:01Z"))  # it was just created
    else:
        jobs.add(fake, "running")
        fake.written["gpt-worker-0"] = jobs.log_of(0, jobs.RECORDS["running"]) + '[rank 0] {"step": 20, "loss": 2.0}\n'
    assert main(command) == 0
    fake.delete_all()
    capsys.readouterr()
    assert main(["why", "gpt"]) == 103
    printed = capsys.readouterr().out
    assert printed.startswith("Deleted: the job was deleted before it had ended\n")
    assert last in re.sub(r"\d+s ago", "Ns ago", printed)
    assert [main([again, "gpt"]) for again in ("status", "logs", "wait")] == [103] * 3
    capsys.readouterr()
    assert main(["logs", "gpt", "--no-follow"]) == 103
    stderr = capsys.readouterr().err
    assert f"flk {command[0]} saw it last" in stderr or "these are its last lines" in stderr
    assert "error: job gpt is gone: it was deleted\nhint: flk why gpt" in stderr
    assert main(["status", "gpt"]) == 103
    assert "running" not in capsys.readouterr().out.casefold().replace("deleted", "")  # neither job nor attempt nor pod
    assert main(["why", "other"]) == 102


def test_a_wait_for_a_job_that_had_failed_before_it_was_deleted_ends_with_its_code(
    fake: FakeApiServer, kubeconfig: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs.add(fake, "exception on rank 1")
    assert main(["status", "gpt"]) == 0
    fake.delete_all()
    assert [main([command, "gpt"]) for command in ("status", "why", "wait", "logs")] == [0, 0, 100, 100]
    assert "expected 512 features" in capsys.readouterr().err


def cause_code(view: JobView) -> str:
    """The code of the cause that `flk why` gives."""
    cause = diagnose(view).cause
    return cause.code if cause else ""


def followed(client: JobClient, *views: JobView) -> None:
    """Keep what flk keeps of a job that it saw like this, one after the other, until the job was deleted."""
    writer = ArchiveWriter(client)
    for view in views:
        writer.observe(view.seen, derive(view))
    writer.observe(GONE, deleted(derive(views[-1])))
    writer.close()


def test_a_job_that_was_suspended_and_is_gone_was_deleted(fake: FakeApiServer, client: JobClient) -> None:
    followed(client, recorded.load(recorded.FOLDER / "suspended.json"))
    answer = diagnose(view_job(client, "suspended"))
    assert answer.cause
    assert answer.cause.code == "Deleted"
    assert "Suspended" in answer.cause.evidence[-1].text  # as it was seen last


@pytest.mark.parametrize("case", [case for case in CASES if case.name != "suspended"], ids=lambda case: case.name)
def test_every_cause_is_the_same_when_the_job_is_gone(fake: FakeApiServer, client: JobClient, case: Case) -> None:
    view = recorded.load(recorded.FOLDER / f"{case.name}.json")
    followed(client, view)
    answer = diagnose(view_job(client, case.name))
    assert answer.cause == diagnose(view).cause
    assert answer.place == "on this machine"
    assert answer.seen == pytest.approx(client.now(), abs=60)


def test_a_cause_that_has_gone_away_is_not_kept(fake: FakeApiServer, client: JobClient) -> None:
    runs = jobs.new().all("pod").condition("Running")
    followed(client, jobs.unschedulable().view(), runs.view())
    assert cause_code(view_job(client, "gpt")) == "Deleted"


def test_a_failed_job_whose_pods_go_keeps_its_cause(fake: FakeApiServer, client: JobClient) -> None:
    view = recorded.load(recorded.FOLDER / "import-error.json")
    followed(client, view, JobView(Observation(view.job, [], view.now)))
    assert diagnose(view_job(client, "import-error")).cause == diagnose(view).cause


def test_a_job_that_was_deleted_while_it_ran_has_not_failed(fake: FakeApiServer, client: JobClient) -> None:
    """Its pods were stopped, and a program without flk's launcher may end with any exit code then."""
    job = jobs.new().all("pod").condition("Running")
    job.job["spec"]["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] = "Never"
    before = copy.deepcopy(job).view()
    job.all("ended", 1)
    for item in (job.job, *job.pods.values()):
        item["metadata"] = {**item["metadata"], "deletionTimestamp": MADE}
    followed(client, before, job.view())
    view = view_job(client, "gpt")
    assert derive(view).phase == Phase.DELETED
    assert cause_code(view) == "Deleted"


def keep_in_cluster(fake: FakeApiServer, view: JobView, record: JobRecord, time: float) -> None:
    """Keep the record of a job as its launchers do."""
    entry = ArchivedRecord("gpt", view.job["metadata"]["uid"], 3, 1, time, time, record)
    meta = {"name": "records", "labels": {labels.RECORDS: "true"}}
    fake.add("configmaps", {"metadata": meta, "data": {entry.key: entry.to_json()}})


def test_a_cause_ends_with_the_attempts_that_launchers_have_recorded_since(
    fake: FakeApiServer, client: JobClient
) -> None:
    view = jobs.unschedulable().view()
    followed(client, view)
    failure = Failure(Kind.EXCEPTION, 0, 0, type="ValueError", message="no label")
    record = JobRecord("failed", 100, failure=failure, attempts=[Attempt(0, 1e9, 1e9 + 60, failure)])
    keep_in_cluster(fake, view, record, client.now() + 60)
    assert cause_code(view_job(client, "gpt")) == "ExceptionRaised"


def test_a_job_that_only_its_launchers_have_told_of_was_seen_by_its_operator(
    fake: FakeApiServer, client: JobClient
) -> None:
    """`flk submit` saw it before it had pods, its launchers kept a record, and then somebody deleted it."""
    view = jobs.created().view()
    writer = ArchiveWriter(client)
    writer.observe(view.seen, derive(view))
    writer.close()
    record = JobRecord("running", 0, attempts=[Attempt(0, 1e9, None, None)])
    keep_in_cluster(fake, view, record, client.now() + 60)
    assert cause_code(view_job(client, "gpt")) == "Deleted"


def test_list_and_logs_keep_what_they_see(fake: FakeApiServer, client: JobClient, capsys: Any) -> None:
    jobs.add(fake, "running")
    foreign = jobs.running("foreign")
    foreign.job["metadata"]["labels"] = {}
    foreign.add_to(fake)
    assert main(["list", "-A"]) == 0
    kept = kept_of(client)
    assert (len(kept.pods), [change.phase for change in kept.states], kept.logs) == (3, ["Running"], {})
    assert kept.seen_by == "flk list"
    assert LocalArchive(client).find("foreign") is None
    assert main(["logs", "gpt", "--no-follow", "--tail", "1"]) == 0
    assert main(["logs", "gpt", "--no-follow"]) == 0
    kept = kept_of(client)
    assert kept.logs["gpt-worker-1"] == ["[rank 1] step 10 loss 2.31", "[rank 1] step 20 loss 2.07"]
    assert all("FLK" not in line for lines in kept.logs.values() for line in lines)
    fake.objects[JOBS].clear()
    assert main(["status", "gpt"]) == 103
    assert "this is what flk logs kept of it" in capsys.readouterr().err


def test_a_list_does_not_forget_the_cause_that_only_logs_tell(fake: FakeApiServer, client: JobClient) -> None:
    jobs.add(fake, "running")
    seen = Observation(fake.objects[JOBS]["gpt"])
    cause = jobs.image_missing().state().cause
    state = derive(JobView(seen))
    writer = ArchiveWriter(client)
    writer.observe(seen, replace(state, phase=Phase.RUNNING, cause=cause, reason="Hang"))
    writer.close()
    assert main(["list"]) == 0
    kept = kept_of(client)
    assert kept.cause
    assert [change.reason for change in kept.states] == ["Hang"]
