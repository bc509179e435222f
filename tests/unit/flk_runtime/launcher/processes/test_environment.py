"""Environment variables that the launcher sets before it imports torch, and those of each rank."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from flk_runtime.contract import pod_env, user_env
from flk_runtime.launcher.processes import ranks as environment
from flk_runtime.launcher.processes.ranks import prepare_environment, rank_environment
from flk_runtime.launcher.settings import Limits, Settings
from flk_runtime.launcher.transport.messages import AttemptStarted
from flk_runtime.system import host


def prepared(settings: Settings, **environ: str) -> dict[str, str]:
    prepare_environment(settings, environ)
    return environ


@pytest.mark.parametrize(
    ("cpus", "processes", "threads"), [(8, 1, "8"), (8, 2, "4"), (8, 3, "2"), (2, 8, "1"), (0, 2, "6")]
)
def test_the_cpus_are_divided_among_the_ranks_as_threads(
    monkeypatch: pytest.MonkeyPatch, cpus: int, processes: int, threads: str
) -> None:
    monkeypatch.setattr(host, "cpu_count", lambda: 12)  # used without a CPU request
    settings = Settings(("train.py",), cpus=cpus, processes=processes)
    assert prepared(settings)["OMP_NUM_THREADS"] == threads


def test_gloo_and_nccl_use_the_interface_of_the_pods_address() -> None:
    environ = prepared(Settings(("train.py",), pod_ip="127.0.0.1"))
    assert environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert environ["NCCL_SOCKET_IFNAME"] == "=lo"  # without "=" NCCL takes every interface that begins with lo


@pytest.mark.parametrize("address", ["", "192.0.2.1", "2001:db8::1"])  # no address, and two that no interface has
def test_without_an_interface_gloo_and_nccl_keep_their_defaults(address: str) -> None:
    environ = prepared(Settings(("train.py",), pod_ip=address))
    assert not {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & environ.keys()


def test_variables_of_the_user_are_kept() -> None:
    own = {
        "OMP_NUM_THREADS": "3",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "PYTHONUNBUFFERED": "",
        "GLOO_SOCKET_IFNAME": "eth7",
        "NCCL_SOCKET_IFNAME": "^lo",
        "PYTHONPATH": "/mine",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
    }
    assert prepared(Settings(("train.py",), cpus=8, pod_ip="127.0.0.1"), **own) == own


@pytest.mark.parametrize(
    ("version", "size"), [("2.6.0+cu124", "2000"), ("2.10.0a0+nv25.12", "2000"), ("2.11.0", None), ("3.0.0", None)]
)
def test_an_older_torch_is_told_to_record_collectives(
    monkeypatch: pytest.MonkeyPatch, version: str, size: str | None
) -> None:
    monkeypatch.setattr(environment.metadata, "version", lambda name: version)
    assert prepared(Settings(("train.py",))).get("TORCH_NCCL_TRACE_BUFFER_SIZE") == size


def test_a_rank_gets_the_variables_of_torchrun_and_of_flks_library(tmp_path: Path) -> None:
    settings = Settings(("train.py",), job="gpt", pod=2, pods=3, processes=4, limits=Limits(restarts=5))
    attempt = AttemptStarted(number=1, master_address="10.0.0.1", master_port=4711, history=[], order="1,0,2")
    folder = tmp_path / "attempt_1" / "3"
    assert rank_environment(settings, attempt, 3, str(tmp_path)) == {
        "RANK": "11",
        "WORLD_SIZE": "12",
        "LOCAL_RANK": "3",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_NAME": "default",
        "ROLE_RANK": "11",
        "ROLE_WORLD_SIZE": "12",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "4711",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "5",
        "TORCHELASTIC_RUN_ID": "gpt",
        "TORCHELASTIC_ERROR_FILE": str(folder / "error.json"),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        pod_env.PROGRESS: str(folder / "progress"),
        pod_env.OBSERVER: str(folder / "observer"),
        pod_env.CHOICE: str(tmp_path / "strategy"),
        user_env.HEARTBEAT: str(folder / "heartbeat"),
        user_env.ATTEMPT: "1",
        user_env.FULL_WORLD_SIZE: "12",
    }
    assert folder.is_dir()


def test_temporary_files_go_to_the_working_folder_where_the_image_is_read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise FileNotFoundError("No usable temporary directory found in ['/tmp', '/var/tmp', '/usr/tmp', '/']")

    monkeypatch.setattr(tempfile, "tempdir", None)
    assert "TMPDIR" not in prepared(Settings(("train.py",), work="/flk/work"))
    monkeypatch.setattr(tempfile, "gettempdir", fail)
    assert prepared(Settings(("train.py",), work="/flk/work"))["TMPDIR"] == tempfile.tempdir == "/flk/work"


def test_a_user_without_a_name_has_one_for_getpass(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(("train.py",))
    assert "LOGNAME" not in prepared(settings)  # who has a name keeps it

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(environment.pwd, "getpwuid", unknown)
    assert [prepared(settings).get(name) for name in ("USER", "LOGNAME")] == ["flk", "flk"]
    assert [prepared(settings, USER="anna").get(name) for name in ("USER", "LOGNAME")] == ["anna", "anna"]


def test_relative_entries_of_pythonpath_are_folders_of_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher starts in the folder of its image, often ``/``, where Python makes ``//src`` of ``src``."""
    monkeypatch.chdir("/")
    monkeypatch.setattr(environment.sys, "path", ["", "//src", "/image/packages"])
    environ = {"PYTHONPATH": f"src{os.pathsep}/image/packages"}
    environment.resolve_python_path(str(tmp_path), environ)
    assert environment.sys.path == ["", str(tmp_path / "src"), "/image/packages"]
    assert environ["PYTHONPATH"] == f"{tmp_path}/src{os.pathsep}/image/packages"
    monkeypatch.chdir(tmp_path)  # as flk run starts it
    monkeypatch.setattr(environment.sys, "path", [f"{tmp_path}/src"])
    environment.resolve_python_path(str(tmp_path), environ)
    assert environment.sys.path == [f"{tmp_path}/src"]
