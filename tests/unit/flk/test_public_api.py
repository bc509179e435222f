"""The names of ``import flk``: what they are, and that importing flk alone imports nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flk
from flk.errors import FlkError
from flk.spec.labels import RECORDS
from flk_runtime.contract.record import ArchivedRecord
from tests.support.jobs import NOW, record


def test_every_public_name_can_be_imported() -> None:
    assert all(getattr(flk, name) is not None for name in flk.__all__)
    assert dir(flk) == sorted([*flk.__all__, "list"])  # which `from flk import *` leaves to Python
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        flk.nothing  # noqa: B018


def test_every_error_is_public() -> None:
    def below(error: type[FlkError]) -> set[str]:
        return {error.__name__}.union(*map(below, error.__subclasses__()))

    assert below(FlkError) <= set(flk.__all__)


def test_importing_flk_imports_no_library() -> None:
    code = (
        "import sys; before = set(sys.modules); import flk\n"
        "print(*sorted({m.partition('.')[0] for m in set(sys.modules) - before} - sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["flk", "flk_runtime"]


def test_render_needs_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere/config")
    (tmp_path / "train.py").touch()
    job, *rest = flk.render(flk.Job(command=["train.py"], name="gpt"), tmp_path, namespace="team")
    assert (job["kind"], job["metadata"]["name"], job["metadata"]["namespace"]) == ("PyTorchJob", "gpt", "team")
    assert {manifest["kind"] for manifest in rest} == {"ConfigMap"}


def test_submit_get_list_and_delete(fake: Any, kubeconfig: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    handle = flk.submit(flk.Job(command=["train.py"], name="gpt", replicas=2), tmp_path)
    assert (handle.name, handle.namespace) == ("gpt", "team")
    assert flk.get("gpt").uid == handle.uid
    (state,) = flk.list()
    assert (state.name, state.replicas, state.uid) == ("gpt", 2, handle.uid)
    handle.delete()
    with pytest.raises(flk.JobNotFoundError):
        flk.get("gpt")


def test_a_folder_that_is_not_there_is_refused(fake: Any, kubeconfig: Path, tmp_path: Path) -> None:
    with pytest.raises(flk.UsageError, match=f"there is no folder {tmp_path}/absent with the files of the job"):
        flk.submit(flk.Job(command=["train.py"]), tmp_path / "absent")


def test_a_submission_that_is_interrupted_after_the_job_exists_says_so(
    fake: Any, kubeconfig: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object, **named: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "train.py").touch()
    monkeypatch.setattr("flk.jobs.submission.keep", interrupt)
    with pytest.raises(KeyboardInterrupt, match="the job gpt exists and goes on: flk status gpt"):
        flk.submit(flk.Job(command=["train.py"], name="gpt"), tmp_path)
    assert flk.get("gpt").name == "gpt"


def test_wait_that_takes_too_long(fake: Any, kubeconfig: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    fake.date = "Thu, 01 Jan 2026 00:00:02 GMT"  # two seconds after the creation: not stuck yet
    handle = flk.submit(flk.Job(command=["train.py"], name="gpt"), tmp_path)
    with pytest.raises(flk.WaitTimeoutError, match="job gpt is pending"):
        handle.wait(timeout=0)


def test_a_handle_is_about_its_own_job_and_no_other_of_the_name(fake: Any, kubeconfig: Path, tmp_path: Path) -> None:
    """Somebody has deleted the job, and another one has its name."""
    (tmp_path / "train.py").touch()
    handle = flk.submit(flk.Job(command=["train.py"], name="gpt"), tmp_path)
    handle.delete()
    other = flk.submit(flk.Job(command=["train.py"], name="gpt"), tmp_path)
    kept = ArchivedRecord("gpt", str(other.uid), 1, 1, NOW, NOW, record(None))
    fake.add(
        "configmaps", {"metadata": {"name": "records", "labels": {RECORDS: "true"}}, "data": {"a": kept.to_json()}}
    )
    fake.requests.clear()
    assert handle.status().phase == "Deleted"
    calls: list[Callable[[], object]] = [
        handle.suspend,
        handle.resume,
        handle.delete,
    ]
    for call in calls:
        with pytest.raises(flk.JobNotFoundError):
            call()
    assert handle.why().as_of is not None  # and not of the job that is there
    for last in (handle.wait, lambda: list(handle.logs(follow=False)), lambda: list(handle.logs())):
        with pytest.raises(flk.JobDeletedError):
            last()
    assert {request.method for request in fake.requests} == {"GET"}
    assert other.status().uid == other.uid != handle.uid
