"""`flk profile` and `flk stacks`."""

from __future__ import annotations

import gzip
import json
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from flk.cli.profile import profile, profile_text, stacks
from flk.errors import ApiError, ForbiddenError, JobNotFoundError, UsageError
from flk.jobs.copying import Container, Copied
from flk.jobs.profiling import summarize
from flk.kube import Object
from flk.kube.sockets import Executed
from flk.observe.client import JobClient
from flk.observe.pods import launcher_command
from tests.support.api_server import FakeApiServer, failure
from tests.support.jobs import JobBuilder
from tests.unit.flk.jobs.test_profiling import ON_CPU, STEPS

pytestmark = pytest.mark.usefixtures("kubeconfig")

ANSWER = {
    "files": ["/tmp/flk-1/p.json.gz"],
    "steps": 2,
    "first_step": 41,
    "step_seconds_before": 1e-4,
    "pause_seconds": 0.25,
}


class Cluster:
    """A job whose containers give this answer to each program, and this content for each file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answer: dict[str, Any] = ANSWER
        self.commands: list[list[str]] = []
        monkeypatch.setattr(JobClient, "execute", lambda client, pod, command, timeout: self.execute(command))
        monkeypatch.setattr(Container, "read", lambda container, path, target, note: self.read(target))

    def execute(self, command: list[str]) -> Executed:
        self.commands.append(command)
        return Executed(0, json.dumps(self.answer).encode(), b"")

    def read(self, target: str) -> Copied:
        Path(target).write_bytes(gzip.compress(json.dumps({"traceEvents": [*STEPS, *ON_CPU]}).encode()))
        return Copied(1, 10, target)


@pytest.fixture
def cluster(fake: FakeApiServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cluster:
    monkeypatch.chdir(tmp_path)
    builder = JobBuilder(2, 2)
    builder.container["command"] = ["python3", "-u", "-m", "flk_runtime", "--", "train.py"]
    builder.all("pod").add_to(fake)
    return Cluster(monkeypatch)


def test_a_trace_comes_here_with_a_summary_and_leaves_the_pod(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profile("gpt", rank="3", steps=2) is None
    printed = capsys.readouterr()
    assert printed.out == (
        "rank 3 in gpt-worker-1: 2 steps (41 to 42), 150 us a step, the longest 200 us\n"
        "  33% communication, 7% waiting for data, 60% outside of operators\n"
        "  overhead of the profiler: +50% a step against 100 us before, 250 ms to begin and end\n"
        "\n"
        "CPU OPERATOR                                    CALLS/STEP   SELF TIME/STEP   SHARE\n"
        "aten::linear                                    1            30 us            20.0%\n"
        "aten::addmm                                     0.5          15 us            10.0%\n"
        "enumerate(DataLoader)#_SingleProcess.__next__   0.5          10 us            6.7%\n"
        "aten::copy_                                     0.5          5 us             3.3%\n"
    )
    assert "gpt-rank3.json.gz: open it in ui.perfetto.dev" in printed.err
    assert (tmp_path / "gpt-rank3.json.gz").exists()
    assert cluster.commands[0][:2] == ["python3", "-c"]
    assert len(" ".join(cluster.commands[0])) < 8000  # the address of the request has a limit at some proxies
    assert cluster.commands[1:] == [["rm", "-f", "/tmp/flk-1/p.json.gz"]]


def test_all_ranks_as_json(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    profile("gpt", rank="all", steps=2, output="json")
    data = json.loads(capsys.readouterr().out)
    assert [(each["rank"], each["summary"]["steps"]) for each in data["ranks"]] == [(0, 2), (1, 2), (2, 2), (3, 2)]


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        ({"error": "absent"}, ApiError, "rank 0 does not run in gpt-worker-0 now"),
        ({"error": "ended"}, ApiError, "rank 0 ended before the profile was whole"),
        ({"error": "silent"}, ApiError, "rank 0 does not answer: native code holds"),
        ({"error": "no CUDA"}, UsageError, "--memory: rank 0 has no CUDA GPU"),
        ({"error": "failed", "detail": "OSError: full"}, ApiError, "the training goes on: OSError: full"),
        (
            {"error": "no steps", "made": 7, "measured": 0, "seconds": 60},
            ApiError,
            "rank 0 made no step that flk sees in 60 seconds; it is at step 7",
        ),
        (
            {"error": "no steps", "made": 9, "measured": 2, "seconds": 60},
            ApiError,
            "rank 0 made 2 of the steps and then none in 60 seconds; it is at step 9",
        ),
    ],
)
def test_why_there_is_no_profile(cluster: Cluster, answer: dict[str, Any], kind: type[Exception], message: str) -> None:
    cluster.answer = answer
    with pytest.raises(kind, match=message):
        profile("gpt")


def test_an_interrupted_profile_does_not_keep_the_process(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    asking: list[threading.Thread] = []

    def execute(client: JobClient, pod: Object, command: list[str], timeout: float) -> Executed:
        asking.append(threading.current_thread())
        main, before = threading.main_thread().ident or 0, None
        # A signal that comes just before the main thread blocks does not wake it: Python looks for signals before.
        while (frame := sys._current_frames()[main]) is not before:
            before = frame
            ended.wait(0.05)
        signal.pthread_kill(main, signal.SIGINT)
        ended.wait()
        raise ApiError("the test is over")

    monkeypatch.setattr(JobClient, "execute", execute)
    try:
        with pytest.raises(KeyboardInterrupt, match="ranks that were asked finish their profiles"):
            profile("gpt")
        assert [each.daemon for each in asking] == [True]  # the interpreter waits for the others at its end
    finally:
        ended.set()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": "4"}, "job gpt has no rank 4; it has ranks 0 to 3"),
        ({"rank": "x"}, "--rank: must be ranks"),
        ({"rank": "0,"}, "--rank: must be ranks"),
        ({"to": Path("nowhere")}, "--to: there is no folder nowhere"),
    ],
)
def test_a_wrong_option(cluster: Cluster, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        profile("gpt", **options)
    assert cluster.commands == []


def test_jobs_that_cannot_be_profiled(fake: FakeApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JobNotFoundError):
        profile("bert")
    JobBuilder(1, name="done").ended(0, 0).add_to(fake)
    with pytest.raises(ApiError, match="rank 0 does not run: pod done-worker-0 is succeeded"):
        profile("done")
    JobBuilder(1, name="foreign").pod(0).add_to(fake)
    with pytest.raises(UsageError, match="foreign does not run with flk's launcher"):
        profile("foreign")


def test_the_text_of_a_gpu() -> None:
    kernels = [{**each, "cat": "kernel"} for each in ON_CPU if each["ph"] == "X"]
    summary = summarize([*STEPS, *ON_CPU, *kernels])
    assert summary is not None
    text = profile_text(0, "gpt-worker-0", ANSWER | {"step_seconds_before": 0.0}, summary)
    assert "GPU 70% busy" in text
    assert "overhead of the profiler: 250 ms to begin and end" in text
    assert "GPU OPERATOR" in text
    text = profile_text(0, "gpt-worker-0", ANSWER | {"step_seconds_before": 1.0}, summary)
    assert "steps are no longer than the 1 s before, 250 ms to begin and end" in text


@pytest.mark.parametrize("path", ["a.", "a.//../../.ssh/authorized_keys", "/tmp/flk-1/run.sh", "", 5])
def test_a_pod_does_not_choose_where_a_file_lies(cluster: Cluster, path: object, tmp_path: Path) -> None:
    cluster.answer = {**ANSWER, "files": [path]}
    with pytest.raises(ApiError, match="which is no profile"):
        profile("gpt", rank="3", steps=2)
    assert list(tmp_path.rglob("gpt-*")) == []


def test_no_right_to_start_a_program_in_a_pod(fake: FakeApiServer) -> None:
    builder = JobBuilder(1)
    builder.container["command"] = ["python3", "-u", "-m", "flk_runtime", "--", "train.py"]
    builder.all("pod").add_to(fake)
    fake.faults.extend([None, None])
    fake.fail(403, failure(403, 'pods "gpt-worker-0" is forbidden: User "ada" cannot create resource "pods/exec"'))
    with pytest.raises(ForbiddenError, match=r"no permission to create pods/exec in namespace team \(as ada\)"):
        stacks("gpt")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["/bin/sh", "-c", "exec", "flk", "python3", "-u", "/flk/ship/flk_runtime.zip", "--", "t.py"], slice(4, 7)),
        (["/usr/bin/python3.11", "-m", "flk_runtime", "t.py"], slice(3)),
        (["torchrun", "t.py"], slice(0)),
    ],
)
def test_the_command_of_the_launcher(command: list[str], words: slice) -> None:
    pod = {"spec": {"containers": [{"name": "pytorch", "command": command}]}}
    assert launcher_command(pod) == command[words]
