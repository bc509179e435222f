"""When a process must not be forked to become a rank, and how the launcher and the fork server talk."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest

from flk_runtime.launcher.processes import forkserver


def _add_thread(process: Path, number: int, name: str = "python") -> Path:
    task = process / "task" / str(number)
    task.mkdir(parents=True)
    (task / "comm").write_text(f"{name}\n")
    return task


@pytest.fixture
def process(tmp_path: Path) -> Path:
    """A folder like /proc/self, of a process with one thread and one open file."""
    _add_thread(tmp_path, 1)
    (tmp_path / "fd").mkdir()
    (tmp_path / "fd" / "0").symlink_to("/dev/null")
    return tmp_path


def test_a_process_with_one_thread_and_no_gpu_may_be_forked(process: Path) -> None:
    assert forkserver.why_unsafe(process) is None


def test_threads_that_end_before_a_fork_do_not_count(process: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = _add_thread(process, 2)
    monkeypatch.setattr(os, "waitpid", lambda pid, options: shutil.rmtree(pool))
    monkeypatch.setattr(os, "fork", lambda: 1234)
    assert forkserver.why_unsafe(process) is None


@pytest.mark.parametrize(
    ("more", "said"), [(1, "1 extra thread makes a fork unsafe"), (3, "3 extra threads make a fork unsafe")]
)
def test_threads_that_outlive_a_fork_count(
    process: Path, monkeypatch: pytest.MonkeyPatch, more: int, said: str
) -> None:
    for number in range(more):
        _add_thread(process, number + 2)
    monkeypatch.setattr(os, "waitpid", lambda pid, options: None)
    monkeypatch.setattr(os, "fork", lambda: 1234)
    assert forkserver.why_unsafe(process) == said


def test_a_thread_that_its_library_prepares_for_forks_does_not_count(process: Path) -> None:
    _add_thread(process, 2, "jemalloc_bg_thd")
    assert forkserver.why_unsafe(process) is None


def test_the_default_is_this_process() -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        assert "extra thread" in str(forkserver.why_unsafe())
    finally:
        ended.set()
        thread.join()


def test_an_open_cuda_driver_makes_a_fork_unsafe(process: Path) -> None:
    (process / "fd" / "5").symlink_to("/dev/nvidiactl")
    assert forkserver.why_unsafe(process) is None  # NVML opens it too, and does not make a fork unsafe
    (process / "fd" / "6").symlink_to("/dev/nvidia-uvm")
    assert forkserver.why_unsafe(process) == "CUDA is initialized already"


def test_initialized_cuda_in_torch_makes_a_fork_unsafe(process: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(is_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert forkserver.why_unsafe(process) == "CUDA is initialized already"


def test_a_rank_leads_a_process_group_when_its_start_is_known(tmp_path: Path) -> None:
    """A signal to the group that follows at once reaches the rank."""
    (tmp_path / "train.py").write_text("import time\ntime.sleep(600)\n")
    server = forkserver.ForkServer.start(fork=False)
    read, write = os.pipe()
    try:
        for _ in range(20):
            pid = server.launch(["train.py"], {}, str(tmp_path), write, write, write)
            assert os.getpgid(pid) == pid
            os.killpg(pid, signal.SIGKILL)
            assert server.ended() == forkserver.Exited(pid, signal.SIGKILL)
    finally:
        server.connection.close()
        os.waitpid(server.pid, 0)
        os.close(read), os.close(write)


@pytest.mark.parametrize(
    ("number", "descriptors", "why"),
    [
        (errno.EAGAIN, 3, r"Resource temporarily unavailable, as at a limit of processes"),
        (errno.ENOMEM, 3, r"Cannot allocate memory$"),
        (0, 2, r"Too many open files$"),  # the kernel gives a process no more descriptors than it may have
    ],
)
def test_where_no_process_can_be_made_the_server_says_so_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, number: int, descriptors: int, why: str
) -> None:
    """At a limit of processes, and the ranks that run go on."""

    def fork() -> int:
        raise OSError(number, os.strerror(number))

    ours, theirs = Pipe()
    with ours, theirs:
        asked, server = forkserver.ForkServer(ours, 1), forkserver._Server(theirs, fork=True)
        monkeypatch.setattr(os, "fork", fork)
        with forkserver._socket_of(ours) as end:
            socket.send_fds(end, [b"\0"], [0] * descriptors)
        ours.send({})
        server._serve()
        with pytest.raises(OSError, match=f"no process can be made: {why}"):
            asked.launch(["train.py"], {}, ".", 0, 0, 0)
        server._opened.close()


def test_descriptors_that_cannot_be_sent_leave_no_request() -> None:
    ours, theirs = Pipe()
    with ours, theirs:
        with pytest.raises(OSError, match="Bad file descriptor"):
            forkserver.ForkServer(ours, 1).launch(["train.py"], {}, ".", 0, 0, 1 << 20)
        assert not theirs.poll()


def test_an_exception_in_the_server_does_not_go_on_in_the_frames_of_the_launcher() -> None:
    script = """
        from flk_runtime.launcher.processes import forkserver

        def fail(server):
            raise OSError("broken")

        forkserver._Server.run = fail
        try:
            forkserver.ForkServer.start(fork=True).ended()
        except forkserver.ServerDiedError as error:
            print(error, flush=True)
        except OSError:
            print("in the launcher", flush=True)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (
        0,
        "the fork server has ended with an exception, which is a bug in flk: it is in the log of this pod\n",
    )
    assert done.stderr.endswith("OSError: broken\n")


def test_a_server_that_is_killed_is_told_with_its_signal(tmp_path: Path) -> None:
    server = forkserver.ForkServer.start(fork=False)
    os.kill(server.pid, signal.SIGKILL)
    with server.connection, pytest.raises(forkserver.ServerDiedError, match=r"^the fork server was killed by SIGKILL$"):
        server.ended()
