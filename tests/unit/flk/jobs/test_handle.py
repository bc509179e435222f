"""JobHandle: how a wait ends, the methods that commands have, and what a notebook shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import flk
from flk.kube import Object
from flk.kube.sockets import Executed
from flk.observe.client import JobClient
from tests.support.api_server import JOBS, PODS, FakeApiServer
from tests.support.jobs import JobBuilder
from tests.unit.flk.cli.outputs import jobs

pytestmark = pytest.mark.usefixtures("kubeconfig")


@pytest.mark.parametrize(
    ("which", "error", "said"),
    [
        ("exception on rank 1", flk.JobFailedError, "job gpt failed after .* raised ValueError"),
        ("image missing", flk.JobStuckError, "job gpt is stuck: "),
        ("being deleted", flk.WaitTimeoutError, "job gpt is terminating"),
    ],
)
def test_a_wait_raises_unless_the_job_has_succeeded(
    fake: FakeApiServer, which: str, error: type[Exception], said: str
) -> None:
    jobs.add(fake, which)
    handle = flk.get("gpt")
    timeout = 0.01 if error is flk.WaitTimeoutError else None
    with pytest.raises(error, match=said):
        handle.wait(timeout)
    if error is not flk.WaitTimeoutError:
        assert handle.wait(check=False).phase in ("Failed", "Stuck")


def test_a_command_in_one_text_is_refused(fake: FakeApiServer) -> None:
    jobs.add(fake, "running")
    with pytest.raises(flk.UsageError, match=r"command: must be a list of words \(is 'ls /tmp'\)") as refused:
        flk.get("gpt").exec("ls /tmp")
    assert refused.value.hint == "words of a shell need one: ['sh', '-c', 'COMMAND']"


def test_a_stuck_job_is_not_waited_for_without_time(fake: FakeApiServer) -> None:
    jobs.add(fake, "image missing")
    for check in (True, False):
        with pytest.raises(flk.WaitTimeoutError, match="job gpt is stuck"):
            flk.get("gpt").wait(0, check=check)


def test_a_wait_for_a_job_that_was_deleted(fake: FakeApiServer) -> None:
    jobs.add(fake, "running")
    handle = flk.get("gpt")
    fake.objects[JOBS].clear()
    with pytest.raises(flk.JobDeletedError, match="job gpt is gone: it was deleted"):
        handle.wait()
    assert handle.wait(check=False).was_deleted


def test_a_wait_for_a_job_that_has_succeeded(fake: FakeApiServer, capsys: Any) -> None:
    jobs.add(fake, "succeeded")
    assert flk.get("gpt").wait().phase == "Succeeded"
    assert capsys.readouterr() == ("", "")


def test_a_handle_has_the_commands_of_a_job(
    fake: FakeApiServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    jobs.add(fake, "exception on rank 1")
    handle = flk.get("gpt")
    assert repr(handle) == "JobHandle('gpt', namespace='team')"
    report = handle.why()
    assert report.cause
    assert "raised ValueError" in report.summary
    done = Executed(0, b"3", b"")
    monkeypatch.setattr("flk.observe.client.JobClient.execute", lambda self, pod, command, timeout: done)
    with pytest.raises(flk.ApiError, match=r"pod gpt-worker-2 has ended \(Failed\)"):
        handle.exec(["nproc"], rank=2)
    for pod in fake.objects[PODS].values():
        pod["status"] = JobBuilder().pod(0).pods[0]["status"]
        pod["spec"]["containers"][0]["command"] = ["python3", "-m", "flk_runtime", "train.py"]
    assert handle.exec(["nproc"], rank=2) is done
    commands: list[list[str]] = []

    def execute(client: JobClient, pod: Object, command: list[str], timeout: float) -> Executed:
        commands.append(command)
        return done

    monkeypatch.setattr("flk.observe.client.JobClient.execute", execute)
    handle.exec(["nproc"])
    for pod in fake.objects[PODS].values():
        pod["spec"]["containers"][0]["env"] = [{"name": "FLK_PIP", "value": "timm"}]
    handle.exec(["nproc"])
    beside_packages = 'PATH="$FLK_WORK/.flk/packages/bin:$PATH"; exec "$@"'
    assert commands == [["nproc"], ["/bin/sh", "-c", beside_packages, "sh", "nproc"]]
    with monkeypatch.context() as patch:
        patch.setattr(JobClient, "find_pod", lambda self, name: None)  # it has gone since the job was read
        with pytest.raises(flk.ApiError, match="pod gpt-worker-0 does not exist") as gone:
            handle.exec(["nproc"])
        assert "flk why gpt" in gone.value.hint
    stacks = {"cause": "", "groups": [{"ranks": [0], "lines": ["a"]}, {"ranks": [1, 2], "lines": ["b"]}]}
    done = Executed(0, json.dumps(stacks).encode(), b"")
    with pytest.raises(flk.ApiError, match="no stack of rank 3"):
        handle.stacks(3)
    assert (handle.stacks(1)["groups"], handle.stacks()["groups"]) == (stacks["groups"][1:], stacks["groups"])
    copied: list[Any] = []
    monkeypatch.setattr("flk.jobs.copying.Container.read", lambda self, *words: copied.append((self.pod, *words[:2])))
    monkeypatch.setattr("flk.jobs.copying.Container.write", lambda self, *words: copied.append((self.pod, *words[:2])))
    handle.cp(":/tmp/trace", ".", rank=1)
    handle.cp("words.txt", ":/tmp/")
    assert copied == [("gpt-worker-1", "/tmp/trace", "."), ("gpt-worker-0", Path("words.txt"), "/tmp/")]
    for paths in ((":a", ":b"), ("a", "b")):
        with pytest.raises(flk.UsageError, match="begins with a colon"):
            handle.cp(*paths)


def test_top_is_what_is_measured_of_the_job(fake: FakeApiServer) -> None:
    jobs.add(fake, "running")
    fake.written["gpt-worker-0"] = '[rank 0] {"step": 7, "loss": 2.5}\n'
    (sample,) = flk.get("gpt").top().history
    assert (sample.step, sample.loss) == (7, 2.5)


def test_a_restart_returns_the_handle_of_the_new_job(fake: FakeApiServer) -> None:
    jobs.add(fake, "succeeded")
    fake.objects[PODS].clear()
    old = flk.get("gpt")
    new = old.restart()
    assert new.uid == flk.get("gpt").uid != old.uid
