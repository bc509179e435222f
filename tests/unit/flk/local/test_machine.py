"""What this machine gives to launchers: GPUs, a Python with torch, and variables."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from flk.errors import UsageError
from flk.local import run
from flk.local.machine import count_gpus, interpreter, launcher_variables, on_cpus, shares
from flk.spec.job import Job, validated
from flk.spec.parts import HUB_MODULE
from flk_runtime.contract import pod_env
from flk_runtime.contract.pod_layout import VISIBLE_GPUS


def job(replicas: int, gpu: int = 0, processes: int | None = None) -> Job:
    return validated({"command": "a.py", "replicas": replicas, "processes": processes, "resources": {"gpu": gpu}})


@pytest.mark.parametrize("gpus", [0, 4, 8])
@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        (None, ["0,1", "2,3"]),
        ("", None),
        ("4,5,6,7", ["4,5", "6,7"]),
        ("GPU-a,GPU-b,GPU-c,GPU-d", ["GPU-a,GPU-b", "GPU-c,GPU-d"]),
    ],
)
def test_each_replica_has_the_gpus_that_it_asks_for(visible: str | None, devices: list[str] | None, gpus: int) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert shares(job(2, gpu=2), gpus, environ) == devices


def test_too_few_gpus_are_an_error() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert shares(job(1, gpu=2), 8, environ) == ["2,3"]
    with pytest.raises(UsageError) as caught:
        shares(job(2, gpu=2), 8, environ)
    assert str(caught.value) == "the job needs 4 GPUs (2 pods with 2 each), and CUDA_VISIBLE_DEVICES=2,3 names 2"
    with pytest.raises(UsageError) as caught:
        shares(job(1, gpu=2), 1, {})
    assert str(caught.value) == "the job needs 2 GPUs (1 pod with 2 each), and this machine has 1"


@pytest.mark.parametrize(
    ("replicas", "processes", "gpus", "shown", "devices"),
    [
        (1, 1, 1, {}, ["0"]),
        (2, 2, 4, {}, ["0,1", "2,3"]),
        (4, 1, 1, {}, ["", "", "", ""]),
        (1, 2, 1, {}, [""]),
        (4, 1, 0, {}, None),
        # The GPUs that the user shows are shared out too.
        (4, 1, 8, {"CUDA_VISIBLE_DEVICES": ""}, None),
        (4, 1, 8, {"CUDA_VISIBLE_DEVICES": "0"}, None),
        (4, 1, 8, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, ["4", "5", "6", "7"]),
        (4, 1, 8, {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, None),
    ],
)
def test_a_job_that_asks_for_none_has_one_for_each_rank_or_none(
    replicas: int, processes: int, gpus: int, shown: dict[str, str], devices: list[str] | None
) -> None:
    assert shares(job(replicas, processes=processes), gpus, shown) == devices


def test_gpus_are_counted_by_their_device_files(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm", "nvidia-caps", "null"):
        (tmp_path / name).touch()
    assert count_gpus(tmp_path) == 2
    assert count_gpus(tmp_path / "none") == 0


@pytest.mark.parametrize(("here", "seen"), [(2, "2 0,1"), (0, "None 0,1")])
def test_the_launchers_know_of_gpus_where_there_are_any(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, here: int, seen: str
) -> None:
    """A job that asks for GPUs is also tried on machines without one."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "${FLK_GPUS:-None} $CUDA_VISIBLE_DEVICES" > seen\n')
    python.chmod(0o755)
    monkeypatch.setattr(run, "interpreter", lambda: (str(python), ""))
    monkeypatch.setattr(run, "count_gpus", lambda: here)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    job = validated({"name": "a", "command": "a.py", "replicas": 1, "resources": {"gpu": 2}})
    assert run.LocalRun(job, tmp_path).run() == 0
    assert (tmp_path / "seen").read_text().strip() == seen


@pytest.mark.parametrize(
    ("replicas", "gpu", "here", "visible", "said"),
    [
        (1, 1, 0, None, "the job asks for GPUs, and /dev has none of NVIDIA's"),
        (1, 1, 0, "0", ""),  # the user knows of one
        (1, 1, 0, "", ""),  # the user wants none
        (1, 1, 1, None, ""),
        (1, 0, 0, None, ""),
        (2, 0, 1, None, "the pods of the job have more ranks than this machine has GPUs"),
    ],
)
def test_ranks_that_train_on_the_cpu_are_said(
    replicas: int, gpu: int, here: int, visible: str | None, said: str
) -> None:
    environ = {} if visible is None else {VISIBLE_GPUS: visible}
    wanted = job(replicas, gpu=gpu)
    text = on_cpus(wanted, here, shares(wanted, here, environ), environ)
    assert text.startswith(said)
    assert bool(text) == bool(said)


@pytest.mark.parametrize("has_torch", [True, False])
def test_the_python_on_the_path_is_used_if_it_has_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_torch: bool
) -> None:
    python = tmp_path / "python3"
    python.write_text(f"#!/bin/sh\nexit {0 if has_torch else 1}\n")
    python.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # flk is installed without torch
    if has_torch:
        assert interpreter()[0] == str(python)
        return
    with pytest.raises(UsageError) as caught:
        interpreter()
    assert str(caught.value) == f"no Python with torch: neither flk's own nor {python} has it"
    assert f"{sys.executable} -m pip install torch, or pipx inject flk torch" in caught.value.hint


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, "/client"), ("", "/client"), ("/mine", "/client:/mine"), (":/mine", "/client::/mine")],
)
def test_the_runtime_of_the_client_precedes_the_users_module_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, expected: str
) -> None:
    """An entry without a name stays: it is the current folder."""
    job = validated({"command": "train.py", "name": "gpt"})
    if given is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", given)
    assert launcher_variables(job, tmp_path, tmp_path, (sys.executable, "/client"), 1)["PYTHONPATH"] == expected


@pytest.mark.parametrize(
    ("diloco", "hub"), [(None, "127.0.0.1:20100"), ({"hub": "hub.example:29500"}, "hub.example:29500")]
)
def test_workers_of_diloco_meet_at_the_hub_of_this_job_or_of_another(
    tmp_path: Path, diloco: dict[str, str] | None, hub: str
) -> None:
    job = validated({"command": "train.py", "name": "gpt", "strategy": "diloco", "replicas": 2, "diloco": diloco or {}})
    values = launcher_variables(job, tmp_path, tmp_path, (sys.executable, ""), 20_100)
    assert values[pod_env.SERVICE_ADDRESS] == hub
    assert values.get(pod_env.SERVICE) == (None if diloco else HUB_MODULE)
