"""When ranks may be forked from the process that has imported torch."""

from __future__ import annotations

import gc
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from flk_runtime.launcher import forkserver


@pytest.fixture
def process(tmp_path: Path) -> Path:
    """A /proc/self of one thread and one open file."""
    (tmp_path / "task" / "1").mkdir(parents=True)
    (tmp_path / "fd").mkdir()
    (tmp_path / "fd" / "0").symlink_to("/dev/null")
    return tmp_path


def test_one_thread_and_no_gpu_may_be_forked(process: Path) -> None:
    assert forkserver.why_unsafe(process) is None


def test_libraries_that_end_their_threads_before_a_fork_do_not_matter(
    process: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = process / "task" / "2"
    pool.mkdir()
    monkeypatch.setattr(os, "waitpid", lambda pid, options: pool.rmdir())
    monkeypatch.setattr(os, "fork", lambda: 1234)
    assert forkserver.why_unsafe(process) is None


@pytest.mark.parametrize(
    ("more", "said"), [(1, "1 extra thread makes a fork unsafe"), (3, "3 extra threads make a fork unsafe")]
)
def test_threads_that_outlive_a_fork_are_counted(
    process: Path, monkeypatch: pytest.MonkeyPatch, more: int, said: str
) -> None:
    for number in range(more):
        (process / "task" / str(number + 2)).mkdir()
    monkeypatch.setattr(os, "waitpid", lambda pid, options: None)
    monkeypatch.setattr(os, "fork", lambda: 1234)
    assert forkserver.why_unsafe(process) == said


def test_this_process_is_looked_at_by_default() -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        assert "extra thread" in str(forkserver.why_unsafe())
    finally:
        ended.set()
        thread.join()


def test_a_cuda_driver_in_use_forbids_it(process: Path) -> None:
    (process / "fd" / "5").symlink_to("/dev/nvidiactl")
    assert forkserver.why_unsafe(process) is None  # NVML opens that as well, and may be forked
    (process / "fd" / "6").symlink_to("/dev/nvidia-uvm")
    assert forkserver.why_unsafe(process) == "CUDA is initialized already"


def test_what_torch_says_of_cuda_counts(process: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(is_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert forkserver.why_unsafe(process) == "CUDA is initialized already"


def test_preloading_misses_what_a_rank_would_miss_and_leaves_the_collector_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def import_module(name: str) -> None:
        asked.append(name)
        assert not gc.isenabled()
        if name in missing:
            raise ImportError(name)

    monkeypatch.setattr(forkserver.importlib, "import_module", import_module)
    missing = ["numpy"]
    forkserver.preload(None)
    assert tuple(asked) == forkserver.PRELOAD + forkserver.PRELOAD_FOR_OPTIMIZERS
    missing = ["torch"]
    with pytest.raises(ImportError):
        forkserver.preload(None)
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("script", "strategy", "optimizers", "sharding"),
    [
        ("import torch", "", False, False),
        ("torch.optim.SGD(…)", "ddp", True, False),
        ("init(strategy='full_shard')", "", False, True),
        ("torch.optim.SGD(…)", "hybrid_shard", True, True),
        ("import torch", "no_shard", False, False),
    ],
)
def test_only_what_a_job_needs_is_imported_before_its_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, strategy: str, optimizers: bool, sharding: bool
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(forkserver.importlib, "import_module", asked.append)
    path = tmp_path / "train.py"
    path.write_text(script)
    forkserver.preload(path, strategy)
    assert set(forkserver.PRELOAD) <= set(asked)
    assert (set(forkserver.PRELOAD_FOR_OPTIMIZERS) <= set(asked)) == optimizers
    assert (set(forkserver.PRELOAD_FOR_SHARDING) <= set(asked)) == sharding
