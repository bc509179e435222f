"""`flk stacks` where it cannot show any: nothing runs, no right to start programs in pods, a wrong format."""

from __future__ import annotations

import pytest

from flk.cli.stacks import launcher_command, stacks
from flk.errors import ApiError, ForbiddenError, JobNotFoundError, UsageError
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


def test_an_unknown_format(fake: FakeApiServer) -> None:
    with pytest.raises(UsageError, match="--output: must be text or json"):
        stacks("gpt", output="yaml")


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
