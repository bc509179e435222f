"""`flk stacks` where it cannot show any: nothing runs, no right to start programs in pods."""

from __future__ import annotations

import pytest

from flk.cli.stacks import stacks
from flk.errors import ApiError, ForbiddenError, JobNotFoundError, UsageError
from flk.kube import Object
from flk.kube.sockets import Executed
from flk.observe.client import JobClient
from flk.observe.pods import launcher_command
from tests.support.api_server import FakeApiServer, failure
from tests.support.jobs import JobBuilder

pytestmark = pytest.mark.usefixtures("kubeconfig")


def test_a_job_that_does_not_exist(fake: FakeApiServer) -> None:
    with pytest.raises(JobNotFoundError):
        stacks("gpt")


def test_a_job_without_a_running_pod(fake: FakeApiServer) -> None:
    JobBuilder(1).ended(0, 0).add_to(fake)
    with pytest.raises(ApiError, match="no pod of gpt runs"):
        stacks("gpt")


def test_no_right_to_start_a_program_in_a_pod(fake: FakeApiServer) -> None:
    builder = JobBuilder(1)
    builder.container["command"] = ["python3", "-u", "-m", "flk_runtime", "--", "train.py"]
    builder.all("pod").add_to(fake)
    fake.faults.extend([None, None])
    fake.fail(403, failure(403, 'pods "gpt-worker-0" is forbidden: User "ada" cannot create resource "pods/exec"'))
    with pytest.raises(ForbiddenError, match=r"no permission to create pods/exec in namespace team \(as ada\)"):
        stacks("gpt")


DUMP = b"""process 7
Thread 7 (idle): "MainThread"
    process 12
    train (train.py:3)

"""


def test_without_a_launcher_processes_are_shown_by_pod(
    fake: FakeApiServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    JobBuilder(2).all("pod").add_to(fake)
    commands: list[str] = []

    def execute(client: JobClient, pod: Object, command: list[str], timeout: float) -> Executed:
        commands.append(" ".join(command))
        return Executed(0, DUMP + b"process 8\n  run (torchrun.py:9)\n", b"")

    monkeypatch.setattr(JobClient, "execute", execute)
    stacks("gpt")
    assert capsys.readouterr().out == (
        "process 7 in gpt-worker-0, process 7 in gpt-worker-1\n"
        'Thread 7 (idle): "MainThread"\n    process 12\n    train (train.py:3)\n\n'
        "process 8 in gpt-worker-0, process 8 in gpt-worker-1\n  run (torchrun.py:9)\n\n"
    )
    assert not [command for command in commands if "environ" in command]  # it holds secrets
    with pytest.raises(UsageError, match="--rank: gpt does not run with flk's launcher"):
        stacks("gpt", rank=0)


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
