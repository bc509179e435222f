"""Jobs that are suspended: by a submission that was killed, and by users."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import flk as api
from flk.jobs import creation
from flk.jobs.client import JobClient
from flk.jobs.submission import prepare

SMALL = ["--cpu", "50m", "--restarts", "0"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a train.py that ends at once."""
    (tmp_path / "train.py").write_text("print('hello')\n")
    return tmp_path


def test_submission_that_is_killed_holds_no_node(
    flk: Any, kubectl: Any, kubeconfig: Path, image: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    job = api.Job(name="killed", command=["train.py"], image=image, resources={"cpu": "50m"}, restarts=0)
    submission = prepare(job, folder, JobClient.connect())

    class Killed(BaseException): ...

    def kill(job: object) -> list[Any]:
        raise Killed

    with pytest.raises(Killed):
        creation.create_job(submission.client, submission.manifests, kill)
    kubectl("wait", "--for=condition=Suspended", "pytorchjob/killed", "--timeout=60s")
    assert kubectl("get", "pods", "-o", "name") == ""

    again = flk("submit", "train.py", "--name", "killed", "--image", image, *SMALL, cwd=folder)
    assert again.code == 1
    assert "was interrupted: it is suspended and has no pods" in again.stderr
    assert "flk delete killed" in again.stderr
    assert flk("delete", "killed").code == 0
    assert flk("submit", "train.py", "--name", "killed", "--image", image, *SMALL, cwd=folder).code == 0
    assert flk("wait", "killed").code == 0
