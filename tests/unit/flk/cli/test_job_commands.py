"""Commands on jobs against a fake API server: their options, what they request, their output and their exit codes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import flk
from flk.cli.top_text import TopData, job_lines
from flk.errors import ForbiddenError
from flk_runtime.contract import ExitCode
from tests.support.api_server import BATCH, JOBS, FakeApiServer
from tests.support.commands import Run
from tests.support.jobs import NOW, JobBuilder
from tests.unit.flk.cli.outputs import jobs

# Names


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "pod/a", "A", "pytorchjob.kubeflow.org/"])
@pytest.mark.parametrize("command", ["status", "logs", "wait", "delete"])
def test_a_name_that_no_job_has_is_refused_before_a_request(fake: Any, run: Run, command: str, name: str) -> None:
    JobBuilder().add_to(fake)
    code, stdout, stderr = run(command, name)
    assert (code, stdout) == (2, "")
    assert stderr.startswith("error: JOB: must be ")
    assert fake.requests == []


@pytest.mark.parametrize("name", ["gpt", "pytorchjob.kubeflow.org/gpt", "pytorchjob/gpt"])
def test_a_name_may_be_written_as_kubectl_prints_it(fake: Any, run: Run, name: str) -> None:
    JobBuilder().add_to(fake)
    assert run("delete", "--no-wait", name)[:2] == (0, "gpt\n")
    assert fake.asked("DELETE") == [f"{JOBS}/gpt"]


def add_both(fake: Any) -> None:
    """Two jobs of one name: a PyTorchJob that runs, and a Job of flk that has failed."""
    fake.objects[BATCH] = {}
    JobBuilder().all("pod").condition("Running").add_to(fake)
    pod = {"spec": {"containers": [{"name": "pytorch", "image": "img"}]}}
    failed = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "it failed"}
    meta = {"name": "gpt", "namespace": "team", "uid": "uid-of-the-job", "labels": {"flk.dev/job": "gpt"}}
    spec = {"completions": 1, "parallelism": 1, "template": pod}
    fake.add("jobs", {"metadata": meta, "spec": spec, "status": {"conditions": [failed]}})


@pytest.mark.parametrize(
    "command",
    [
        "status JOB",
        "why JOB",
        "wait JOB",
        "logs --no-follow JOB",
        "logs JOB",
        "suspend JOB",
        "resume JOB",
        "stacks JOB",
        "exec JOB",
        "restart --timeout 0s JOB",
        "cp JOB:/tmp/trace .",
        "cp JOB:/tmp/a . --rank 1",
        "port-forward JOB 8080",
        "profile JOB",
        "top JOB",
        "scale JOB 2",
    ],
)
def test_the_kind_before_a_name_chooses_among_jobs_of_the_name(fake: Any, run: Run, command: str) -> None:
    add_both(fake)
    run(*command.replace("JOB", "job.batch/gpt").split())
    asked = {request.path for request in fake.requests}
    assert f"{BATCH}/gpt" in asked
    assert f"{JOBS}/gpt" not in asked


def test_the_kind_before_a_name_means_the_same_in_python(fake: Any, kubeconfig: Path) -> None:
    add_both(fake)
    handle = flk.get("job.batch/gpt")
    assert (handle.name, handle.uid) == ("gpt", "uid-of-the-job")
    assert {request.path for request in fake.requests} == {"/apis", f"{BATCH}/gpt"}
    assert (handle.status().uid, handle.status().phase) == ("uid-of-the-job", "Failed")
    assert flk.get("pytorchjob.kubeflow.org/gpt").uid == flk.get("gpt").uid == "uid-gpt"
    fake.objects[BATCH].clear()
    with pytest.raises(flk.JobNotFoundError, match=r"there is no job job\.batch/gpt in namespace team"):
        flk.get("job/gpt")
    fake.requests.clear()
    for name in ("pod/gpt", "job.batch/", "GPT"):
        with pytest.raises(flk.UsageError, match="JOB: must be "):
            flk.get(name)
    assert fake.requests == []


def test_both_of_one_name_are_chosen(fake: Any, run: Run) -> None:
    add_both(fake)
    assert run("delete", "--all", "--no-wait")[:2] == (0, "gpt\ngpt\n")
    assert sorted(fake.asked("DELETE")) == [f"{BATCH}/gpt", f"{JOBS}/gpt"]


# submit


def test_submit_and_follow_a_job_that_fails(fake: Any, run: Run) -> None:
    Path("train.py").touch()
    failure = JobBuilder(1).ended(0, 7, "no data\n")

    def fail(item: dict[str, Any]) -> None:
        if item["kind"] == "PyTorchJob":
            pod = failure.pods[0]
            pod["metadata"]["ownerReferences"][0]["uid"] = item["metadata"]["uid"]
            fake.add("pods", pod)
            item["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}

    fake.created = fail
    fake.written["gpt-worker-0"] = "[rank 0] no data\n"
    code, stdout, stderr = run("submit", "train.py", "--name", "gpt", "--follow")
    assert code == ExitCode.TRAINING
    assert stdout == "gpt\n[rank 0] no data\n"
    assert "error: job gpt failed" in stderr
    assert "rank 0 in gpt-worker-0 ended with exit code 7: no data" in stderr
    assert "hint: flk status gpt -n team shows more; flk logs gpt -n team --rank 0 shows what was printed" in stderr


@pytest.fixture
def beside(fake: FakeApiServer, run: Run, tmp_path: Path) -> None:
    """A PyTorchJob gpt that runs beside the Job gpt of `flk submit --target job`, whose only pod fails."""
    (tmp_path / "train.py").touch()
    JobBuilder(1).all("pod").condition("Running").add_to(fake)
    fake.objects |= {BATCH: {}, "/api/v1/namespaces/team/services": {}}
    fake.written = {"gpt-worker-0": "[rank 0] of the PyTorchJob\n", "gpt-0-x": "[rank 0] of the Job\n"}

    def fail(item: dict[str, Any]) -> None:
        if item["kind"] == "Job":
            item["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
            labels = {"flk.dev/job": "gpt", "batch.kubernetes.io/job-completion-index": "0"}
            pod = JobBuilder(1).ended(0, 7, "no data\n").pods[0]
            pod["metadata"] |= {"name": "gpt-0-x", "uid": "pod-of-the-job", "labels": labels}
            owner = {"kind": "Job", "name": "gpt", "uid": item["metadata"]["uid"], "controller": True}
            pod["metadata"]["ownerReferences"] = [owner]
            fake.add("pods", pod)

    fake.created = fail


SUBMIT_BESIDE = ("submit", "train.py", "--name", "gpt", "--target", "job")


def test_submit_follows_the_job_that_it_has_created(run: Run, beside: None) -> None:
    code, stdout, stderr = run(*SUBMIT_BESIDE, "--follow")
    assert (code, stdout) == (ExitCode.TRAINING, "gpt\n[rank 0] of the Job\n")
    for verb in ("logs", "status", "wait"):
        assert f"  flk {verb} job.batch/gpt -n team" in stderr
    assert "hint: flk status job.batch/gpt -n team shows more; flk logs job.batch/gpt -n team" in stderr


def test_a_submission_that_fails_deletes_its_own_job(fake: FakeApiServer, run: Run, beside: None) -> None:
    def refuse(item: dict[str, Any]) -> None:
        fake.refused["/api/v1/namespaces/team/services"] = (403, "no")

    fake.created = refuse
    code, _, stderr = run(*SUBMIT_BESIDE)
    assert (code, fake.asked("DELETE")) == (ExitCode.ERROR, [f"{BATCH}/gpt"])
    assert "the job gpt was deleted again" in stderr


# logs


@pytest.fixture
def with_log(fake: Any) -> Any:
    """A job of one pod that has ended, with a log of three lines."""
    JobBuilder(1).ended(0, 0).condition("Succeeded").add_to(fake)
    fake.written["gpt-worker-0"] = "[rank 0] one\n[rank 0] \x1b[31mtwo\x1b[0m\n[rank 0] three\n"
    return fake


def test_logs_hide_control_characters(with_log: Any, run: Run) -> None:
    assert "\x1b[31mtwo" not in run("logs", "gpt", "--no-follow")[1]


# status, list


def test_status_wide_shows_all_pods(fake: Any, run: Run) -> None:
    JobBuilder(40).all("pod").add_to(fake)
    assert "and 39 more pods" in run("status", "gpt")[1]
    assert "gpt-worker-39" in run("status", "gpt", "-o", "wide")[1]


def test_status_and_top_show_failed_pods_first_where_not_all_are_shown(fake: Any, run: Run) -> None:
    job = JobBuilder(60)
    for index in range(60):
        job.pod(index, "Pending", {"waiting": {"reason": "ContainerCreating"}})
    job.ended(50, 1).add_to(fake)
    assert "gpt-worker-50" in run("status", "gpt")[1].splitlines()[-33]
    lines = job_lines(TopData(job.state(), NOW), 120)
    assert any(line.text.startswith("gpt-worker-50") for line in lines)
    assert not any("POD" in line.text for line in job_lines(TopData(replace(job.state(), pods=[]), NOW), 120))


def test_status_does_not_print_control_characters(fake: Any, run: Run) -> None:
    evil = JobBuilder(1).ended(0, 7, "\x1b]0;title\x07bad\n").condition("Failed")
    evil.add_to(fake)
    assert "\x1b" not in run("status", "gpt")[1]
    code, _, stderr = run("wait", "gpt")
    assert code == ExitCode.TRAINING
    assert "bad" in stderr
    assert "\x1b" not in stderr


def test_list_reads_the_events_of_all_pods_that_do_not_start_at_once(fake: Any, run: Run) -> None:
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "back-off"}}
    for number in range(5):
        JobBuilder(name=f"waits-{number}").all("pod", "Pending", waiting).add_to(fake)
    assert run("list", "-o", "name")[0] == 0
    asked = [request.query["fieldSelector"] for request in fake.requests if request.path.endswith("/events")]
    assert len(asked) == len({*asked}) == 2  # about the jobs, and about pods
    assert not [path for path in fake.asked("GET") if "nodes" in path]


def test_list_shows_a_job_as_stuck_whose_pods_no_node_could_hold(fake: Any, run: Run) -> None:
    nodes = [{"metadata": {"name": "node-a"}, "status": {"allocatable": {"nvidia.com/gpu": "8", "pods": "9"}}}]
    fake.documents["/api/v1/nodes"] = {"kind": "NodeList", "items": nodes, "metadata": {"resourceVersion": "1"}}
    for name, gpus in (("large", "16"), ("small", "4")):
        job = jobs.unschedulable(name)
        job.container["resources"] = {"limits": {"nvidia.com/gpu": gpus}}
        job.add_to(fake)
    jobs.running("other").add_to(fake)
    assert ["large", "Stuck"] in [line.split()[:2] for line in run("list")[1].splitlines()]
    assert fake.asked("GET").count("/api/v1/nodes") == 1
    fake.refused["/api/v1/nodes"] = (403, 'nodes is forbidden: User "ada" cannot list resource "nodes"')
    assert [line.split()[:2] for line in run("list")[1].splitlines()[1:]] == [
        ["large", "Pending"],
        ["other", "Running"],
        ["small", "Pending"],
    ]


# wait, delete


def test_a_name_that_is_nearly_right_is_answered_with_the_job_that_was_meant(fake: Any, run: Run) -> None:
    JobBuilder(1, name="gpt-large").all("pod").add_to(fake)
    for command in ("status", "logs", "suspend"):
        code, _, stderr = run(command, "gpt-lrage")
        assert code == ExitCode.NOT_FOUND
        assert "hint: did you mean gpt-large? flk list -n team lists" in stderr


@pytest.mark.parametrize("command", [["status", "pod"], ["delete", "pods", "gpt-worker-1"]])
def test_a_word_that_kubectl_takes_before_a_name_is_explained(fake: Any, run: Run, command: list[str]) -> None:
    JobBuilder(1, name="pool").all("pod").add_to(fake)  # is no name that was meant
    code, _, stderr = run(*command)
    assert code == ExitCode.NOT_FOUND
    assert "hint: flk's commands take the names of jobs alone, and kubectl is for pods; flk list -n team" in stderr


def test_delete_tells_of_each_job_that_it_could_not_delete(fake: Any, run: Run) -> None:
    for name in ("a", "b", "c"):
        JobBuilder(1, name=name).all("pod").add_to(fake)
    said = (403, 'User "eve" cannot get resource "pytorchjobs"')
    fake.refused = {f"{JOBS}/a": said, f"{JOBS}/c": said}
    code, stdout, stderr = run("delete", "a", "b", "c", "--timeout", "0")
    assert (code, stdout) == (1, "")
    for name in ("a", "c"):
        assert f"error: job {name}: no permission to get" in stderr
    assert stderr.count("hint: ask the cluster's administrator") == 1
    assert "error: job b is being deleted and not gone yet: 1 pod left" in stderr


@pytest.mark.parametrize("command", ["delete", "suspend"])
@pytest.mark.parametrize("names", [["a"], ["a", "b"]])
def test_an_error_of_the_watch_does_not_hide_what_was_done(
    fake: Any, run: Run, monkeypatch: pytest.MonkeyPatch, command: str, names: list[str]
) -> None:
    for name in names:
        JobBuilder(1, name=name).all("pod").add_to(fake)

    def broken(*_: object, **__: object) -> Any:
        raise ForbiddenError("no permission to watch pods", hint="ask the cluster's administrator")
        yield

    monkeypatch.setattr("flk.observe.follower.list_and_watch", broken)
    code, _, stderr = run(command, *names)
    begun = {"delete": "is being deleted and not gone yet", "suspend": "is suspended, and its pods have not ended yet"}
    assert code == 1
    for name in names:
        assert f"error: job {name} {begun[command]}: no permission to watch pods" in stderr
    assert stderr.count("hint: ask") == 1


def test_hints_name_the_context_that_was_given_and_the_plugin(
    fake: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/kubectl-flk"])
    assert run("status", "gpt", "--context", "fake")[::2] == (
        ExitCode.NOT_FOUND,
        "error: there is no job gpt in namespace team\n"
        "hint: kubectl flk list -n team --context fake lists those that exist\n",
    )
    assert run("statsu")[2].endswith("hint: did you mean status? kubectl flk --help lists them\n")
