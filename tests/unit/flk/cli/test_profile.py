"""`flk profile` and `flk stacks`."""

from __future__ import annotations

import json
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from flk.cli.profile import profile, stacks
from flk.errors import ApiError, ForbiddenError, JobNotFoundError, UsageError
from flk.jobs.copying import Container
from flk.kube import Object
from flk.kube.sockets import Executed
from flk.observe.client import JobClient
from flk.observe.pods import launcher_command
from tests.support.api_server import FakeApiServer, failure
from tests.support.jobs import JobBuilder

pytestmark = pytest.mark.usefixtures("kubeconfig")

ANSWER = {"files": ["/tmp/flk-1/p.json.gz"]}


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

    def read(self, target: str) -> str:
        Path(target).write_bytes(b"a trace")
        return target


@pytest.fixture
def cluster(fake: FakeApiServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cluster:
    monkeypatch.chdir(tmp_path)
    builder = JobBuilder(2, 2)
    builder.container["command"] = ["python3", "-u", "-m", "flk_runtime", "--", "train.py"]
    builder.all("pod").add_to(fake)
    return Cluster(monkeypatch)


def test_traces_of_all_ranks_come_here_and_leave_the_pods(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profile("gpt", rank="all", steps=2) is None
    assert capsys.readouterr().out.splitlines() == [
        f"gpt-rank{rank}.pt.trace.json.gz: open it in ui.perfetto.dev, or with tensorboard --logdir"
        for rank in range(4)
    ]
    assert (tmp_path / "gpt-rank3.pt.trace.json.gz").exists()
    asked = [command for command in cluster.commands if command[:2] == ["python3", "-c"]]
    assert len(asked) == 4
    assert len(" ".join(asked[0])) < 8000  # the address of the request has a limit at some proxies
    assert cluster.commands.count(["rm", "-f", "/tmp/flk-1/p.json.gz"]) == 4


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"error": "absent"}, "rank 0 does not run in gpt-worker-0 now"),
        ({"error": "ended"}, "rank 0 ended before the profile was whole"),
        ({"error": "silent"}, "rank 0 does not answer: native code holds"),
        ({"error": "failed", "detail": "OSError: full"}, "the training goes on: OSError: full"),
        (
            {"error": "no steps", "made": 7, "measured": 0, "seconds": 60},
            "rank 0 made no step that flk sees in 60 seconds; it is at step 7",
        ),
        (
            {"error": "no steps", "made": 9, "measured": 2, "seconds": 60},
            "rank 0 made 2 of the steps and then none in 60 seconds; it is at step 9",
        ),
    ],
)
def test_why_there_is_no_profile(cluster: Cluster, answer: dict[str, Any], message: str) -> None:
    cluster.answer = answer
    with pytest.raises(ApiError, match=message):
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
    with pytest.raises(UsageError, match="foreign does not run with flk's launcher") as told:
        profile("foreign")
    assert told.value.hint == "submit the script with flk"


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
