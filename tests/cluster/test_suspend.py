"""Jobs that are suspended: by a submission that was killed, and by users."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import flk as api
from flk.jobs.lifecycle import creation
from flk.jobs.submission import prepare
from flk.observe.client import JobClient
from tests.support.commands import WITHOUT_TORCH

SMALL = ["--cpu", "50m", "--restarts", "0", *WITHOUT_TORCH]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a train.py that ends at once."""
    (tmp_path / "train.py").write_text("print('hello')\n")
    return tmp_path


@pytest.mark.promise("Clusters: A request that the API server refuses creates nothing")
def test_submission_that_is_killed_holds_no_node(
    flk: Any, kubectl: Any, kubeconfig: Path, image: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    job = api.Job(name="killed", command=["train.py"], image=image, resources={"cpu": "50m"}, restarts=0)
    submission = prepare(job, folder, JobClient.connect())

    class Killed(BaseException): ...

    def kill(*args: object) -> None:
        raise Killed

    monkeypatch.setattr(creation, "_share", kill)
    with pytest.raises(Killed):
        creation.create_job(submission.client, submission.manifests)
    kubectl("wait", "--for=condition=Suspended", "pytorchjob/killed", "--timeout=60s")
    assert kubectl("get", "pods", "-o", "name") == ""

    again = flk("submit", "train.py", "--name", "killed", "--image", image, *SMALL, cwd=folder)
    assert again.code == 1
    assert "was interrupted: it is suspended and has no pods" in again.stderr
    assert "flk delete killed" in again.stderr
    assert flk("delete", "killed").code == 0
    assert flk("submit", "train.py", "--name", "killed", "--image", image, *SMALL, cwd=folder).code == 0
    assert flk("wait", "killed").code == 0


def uids(kubectl: Any, name: str) -> tuple[str, str]:
    """The UIDs of a job and of its first pod; that of the pod is empty without one."""
    job = kubectl("get", "pytorchjob", name, "-o", "jsonpath={.metadata.uid}")
    return job, kubectl("get", "pods", f"{name}-worker-0", "--ignore-not-found", "-o", "jsonpath={.metadata.uid}")


@pytest.mark.promise("Clusters: flk suspend, resume, restart and delete lose no progress unasked")
def test_suspend_resume_and_restart(flk: Any, kubectl: Any, image: str, folder: Path, eventually: Any) -> None:
    """Each run counts itself in the checkpoint's folder. All but the first have the arguments of --on-restart."""
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "kept"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "10Mi"}}},
    }
    kubectl("create", "-f", "-", stdin=claim)
    (folder / "train.py").write_text(
        "import os, pathlib, sys, time\n"
        "folder = pathlib.Path(os.environ['FLK_CHECKPOINT'])\n"
        "folder.mkdir(exist_ok=True)\n"
        "runs = folder / 'runs'\n"
        "count = len(runs.read_text()) if runs.exists() else 0\n"
        "runs.write_text('x' * (count + 1))\n"
        "print(f'run {count}', *sys.argv[1:], flush=True)\n"
        "time.sleep(1000 if count == 0 else 0)\n"
        "sys.exit(1 if count == 1 else 0)\n"
    )
    args = ["submit", "train.py", "--name", "kept", "--image", image, "--checkpoint", "kept:/kept", *SMALL]
    args += ["--on-restart=--again"]
    submitted = flk(*args, cwd=folder)
    assert submitted.code == 0, submitted.stderr

    def runs(number: int) -> Any:
        line = f"[rank 0] run {number}{' --again' if number else ''}"
        return lambda: line in flk("logs", "kept", "--no-follow").stdout.splitlines()

    eventually("the first run", runs(0))
    job, pod = uids(kubectl, "kept")
    suspended = flk("suspend", "kept")
    assert suspended.code == 0, suspended.stderr
    assert uids(kubectl, "kept") == (job, "")
    assert flk("status", "kept", "-o", "json").code == 0
    assert "Suspended" in flk("list").stdout

    assert flk("resume", "kept").code == 0
    eventually("the second run", runs(1))
    again = uids(kubectl, "kept")
    assert again[0] == job
    assert again[1] != pod
    assert flk("wait", "kept").code == 100
    # The launcher's record ends the wait before the operator has seen it. Until then the job can still be suspended.
    kubectl("wait", "--for=condition=Failed", "pytorchjob/kept", "--timeout=60s")
    failed = flk("restart", "kept")
    assert failed.code == 0, failed.stderr
    waited = flk("wait", "kept")
    assert waited.code == 0, waited.stderr
    assert runs(2)()
    assert uids(kubectl, "kept")[0] != job
