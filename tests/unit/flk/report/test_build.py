"""What a report says of jobs in odd states: each section has data or says why there is none."""

from __future__ import annotations

from dataclasses import replace

from flk.health import diagnose
from flk.jobs.state import derive
from flk.observe.observation import Observation
from flk.observe.view import JobView
from flk.report.build import MOMENTS, PODS, build
from flk.report.model import Excerpt, Report
from flk_runtime.contract.record import ArchivedRecord
from flk_runtime.contract.telemetry import Save, Telemetry
from tests.support.jobs import NOW, JobBuilder
from tests.support.reports import job, record


def built(view: JobView, **parts: object) -> Report:
    given: dict[str, object] = {"telemetry": None, "excerpts": [], **parts}
    return build(view, derive(view), **given)  # type: ignore[arg-type]


def test_state_and_cause_are_those_of_status_and_why() -> None:
    made = job()
    report = built(made.view())
    assert report.state == made.state()
    assert report.answer == diagnose(made.view())
    assert report.explanation.startswith(f"{report.answer.cause.code}: ") if report.answer.cause else False


def test_what_was_submitted() -> None:
    sent = built(job().view()).submitted
    assert sent.command == "train.py --lr 3e-4"
    assert sent.commit.endswith("-dirty")
    assert sent.options["resources.gpu"] == "8"
    assert sent.variables["SEED"] == "7"


def test_a_job_of_another_tool_says_so() -> None:
    made = JobBuilder()
    made.job["metadata"]["labels"] = {}
    made.container["command"] = ["torchrun", "train.py"]
    report = built(made.all("pod").view())
    assert report.submitted.command == "torchrun train.py"
    assert "another tool" in report.missing["submitted"]
    assert "another tool" in report.missing["attempts"]
    assert set(report.missing) == {"submitted", "attempts", "saves", "goodput", "history", "ranks", "usage", "logs"}


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


def test_checkpoints_are_among_what_happened() -> None:
    saves = [Save(NOW - 2400, 1, 1400, False), Save(NOW - 2300, 1, 1400, True)]
    moments = built(job().view(), telemetry=Telemetry(NOW, saves=saves)).moments
    texts = [each.text for each in moments if each.what in ("save", "hang")]
    assert texts[:2] == [
        "the checkpoint of step 1,400 is saved in memory",
        "the checkpoint of step 1,400 is saved in storage",
    ]
    assert texts[2].startswith("a hang is found in attempt 2")


def test_pods_and_moments_of_a_large_job_are_bounded_and_failed_pods_come_first() -> None:
    made = job(1000)
    made.all("pod").ended(999, 1)
    for number in range(2 * MOMENTS):
        made.event("BackOff", f"again {number}", "Pod", "gpt-worker-1")
    report = built(made.view())
    assert len(report.pods) == PODS
    assert report.pods[0].index == 999
    assert len(report.moments) == MOMENTS


def test_lines_lose_control_characters_and_keep_other_letters() -> None:
    report = built(job().view(), excerpts=[Excerpt("log", ["\x1b[31mÄrger 日本語 🚀\x1b[0m\x07"])])
    assert report.excerpts[0].lines == ["Ärger 日本語 🚀"]


def test_the_data_has_its_schema_and_nothing_that_json_lacks() -> None:
    import json

    data = json.loads(json.dumps(built(job().view()).to_dict()))
    assert data["schema"] == "flk.dev/report/v1"
    assert data["answer"]["schema"] == "flk.dev/why/v1"
    assert data["state"]["phase"] == "Failed"


def test_a_broken_annotation_is_no_option() -> None:
    made = job(**{"flk.dev/spec": "{broken"})
    assert built(made.view()).submitted.options == {}
    assert replace(built(made.view()).submitted, command="").file == ""


def test_a_job_that_has_not_started_says_so() -> None:
    report = built(JobBuilder().all("pod", "Pending", node="").view())
    assert {report.missing[each] for each in ("attempts", "goodput", "history", "ranks", "usage")} == {
        "no pod of the job has started yet"
    }
