"""The report: what is read of a job, what is built of it, and that it holds no secrets."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from flk.errors import JobNotFoundError
from flk.health import diagnose
from flk.jobs.state import derive
from flk.observe.client import JobClient
from flk.observe.observation import Observation
from flk.observe.redaction import masked, secrets_of
from flk.observe.view import JobView
from flk.report.build import MOMENTS, PODS, build, collect
from flk.report.model import Excerpt, Report
from flk.report.page import page_of
from flk.spec import labels
from flk_runtime.contract.record import ArchivedRecord
from tests.support.jobs import NOW, JobBuilder
from tests.support.reports import job, record, telemetry


def built(view: JobView, **parts: object) -> Report:
    given: dict[str, object] = {"telemetry": None, "excerpts": [], **parts}
    return build(view, derive(view), **given)  # type: ignore[arg-type]


def test_state_and_cause_are_those_of_status_and_why() -> None:
    made = job()
    report = built(made.view())
    assert report.state == made.state()
    assert report.answer == diagnose(made.view())
    assert report.explanation.startswith(f"{report.answer.cause.code}: ") if report.answer.cause else False


def test_a_job_of_another_tool_says_so() -> None:
    made = JobBuilder()
    made.job["metadata"]["labels"] = {}
    made.container["command"] = ["torchrun", "train.py"]
    report = built(made.all("pod").view())
    assert report.submitted.command == "torchrun train.py"
    assert "another tool" in report.missing["submitted"]
    assert "another tool" in report.missing["attempts"]
    assert set(report.missing) == {"submitted", "attempts", "goodput", "history", "ranks", "usage", "logs"}


def test_a_job_of_which_only_the_record_is_left() -> None:
    entry = ArchivedRecord("gpt", "uid", 4, 8, NOW - 6900, NOW, record(), 1990, 3.1, ["[rank 0] hello"])
    report = built(JobView(Observation(None, time=NOW, record=entry.record, entry=entry, gone=NOW)))
    assert report.name == "gpt"
    assert len(report.state.attempts) == 3
    assert "only the launchers' record is left" in report.missing["submitted"]


def test_the_order_of_what_happened() -> None:
    made = job()
    made.event("Evicted", "low on memory", "Pod", "gpt-worker-2", "2025-12-31T22:46:00Z", count=3)
    moments = built(made.view()).moments
    assert moments == sorted(moments, key=lambda each: each.time)
    texts = [each.text for each in moments]
    assert texts[0] == "created by mona@lab"
    assert "attempt 2 starts at step 740, from memory" in texts
    assert "Pod gpt-worker-2: Evicted: low on memory (x3)" in texts
    assert "a hang is found in attempt 2 (limit 500s, learned from the steps of the job)" in texts
    assert any(text.startswith("attempt 2 failed: ") and "all_reduce 812" in text for text in texts)


def test_pods_and_moments_of_a_large_job_are_bounded_and_failed_pods_come_first() -> None:
    made = job(1000)
    made.all("pod").ended(999, 1)
    for number in range(2 * MOMENTS):
        made.event("BackOff", f"again {number}", "Pod", "gpt-worker-1")
    report = built(made.view())
    assert len(report.pods) == PODS
    assert report.pods[0].index == 999
    assert len(report.moments) == MOMENTS


def test_a_broken_annotation_is_no_option() -> None:
    made = job(**{"flk.dev/spec": "{broken"})
    assert built(made.view()).submitted.options == {}
    assert replace(built(made.view()).submitted, command="").file == ""


def test_a_job_that_has_not_started_says_so() -> None:
    report = built(JobBuilder().all("pod", "Pending", node="").view())
    assert {report.missing[each] for each in ("attempts", "goodput", "history", "ranks", "usage")} == {
        "no pod of the job has started yet"
    }


@pytest.fixture
def client(kubeconfig: object) -> JobClient:
    return JobClient.connect("fake")


def add(fake: Any) -> None:
    made = job(2, 1)
    made.container["env"].append({"name": "HF_TOKEN", "value": "canary-7f3b"})
    made.add_to(fake)
    lines = [f'[rank 0] {{"step": {step}, "loss": 2.5}}' for step in range(1, 4)]
    lines += ["[rank 0] logged in with canary-7f3b", "[rank 0] Traceback (most recent call last):",
              '[rank 0]   File "train.py", line 3', "[rank 0] ValueError: no ünïcode"]  # fmt: skip
    fake.written["gpt-worker-0"] = "".join(f"{line}\n" for line in lines)


def test_a_job_in_the_cluster(fake: Any, client: JobClient) -> None:
    add(fake)
    report = collect(client, "gpt")
    assert report.telemetry
    assert [each.step for each in report.telemetry.history] == [1, 2, 3]
    (excerpt,) = report.excerpts
    assert excerpt.title == "The last lines of pod gpt-worker-0"
    assert {"[rank 0] logged in with ***", "[rank 0] ValueError: no ünïcode"} <= set(excerpt.lines)


def test_the_options_and_the_commit_of_a_submission(fake: Any, client: JobClient) -> None:
    add(fake)
    report = collect(client, "gpt")
    assert report.submitted.options["resources.gpu"] == "8"
    assert report.submitted.commit.endswith("-dirty")


def test_a_deleted_job_without_a_record_in_the_cluster(fake: Any, client: JobClient) -> None:
    add(fake)
    collect(client, "gpt")
    fake.delete_all()
    with pytest.raises(JobNotFoundError, match="its launchers have kept no record in the cluster"):
        collect(client, "gpt")


CANARY = "canary-7f3b"
PLACES = {
    "variable": lambda made: made.container["env"].append({"name": "WANDB_API_KEY", "value": CANARY}),
    "s3": lambda made: made.container["env"].append({"name": "AWS_SECRET_ACCESS_KEY", "value": CANARY}),
    "option": lambda made: made.container.update(command=["python", "train.py", "--hub-token", CANARY]),
    "assigned": lambda made: made.container.update(args=["train.py", f"--api-key={CANARY}"]),
    "address": lambda made: made.container["env"].append({"name": "TRACKING", "value": f"https://me:{CANARY}@host/x"}),
    "spec": lambda made: made.job["metadata"]["annotations"].update(
        {labels.SPEC: json.dumps({"command": ["t.py", "--token", CANARY], "env": {"HF_TOKEN": CANARY}})}
    ),
    "applied": lambda made: made.job["metadata"]["annotations"].update(
        {"kubectl.kubernetes.io/last-applied-configuration": CANARY}
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_secret_is_nowhere_in_the_report(place: str) -> None:
    made = job()
    PLACES[place](made)
    told = [f"https://me:{CANARY}@host/x"] if place in ("address", "applied") else [f"key is {CANARY}"]
    if place == "spec":  # the container has what the options say
        PLACES["variable"](made)
    report = build(made.view(), made.state(), telemetry=telemetry(), excerpts=[Excerpt("log", told)])
    assert CANARY in report.excerpts[0].lines[0]
    clean = masked(report, secrets_of(made.job))
    assert CANARY not in repr(clean)
    assert CANARY not in page_of(clean, None)


def test_other_values_stay() -> None:
    made = job()
    made.container["env"].append({"name": "AUTHOR", "value": "mona"})
    report = build(made.view(), made.state(), telemetry=None, excerpts=[])
    clean = masked(report, secrets_of(made.job))
    assert clean == report
    assert clean.submitted.variables["AUTHOR"] == "mona"
