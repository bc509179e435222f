"""When a process must not be forked to become a rank, and which modules are imported before the fork."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flk_runtime.launcher import forkserver


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


def test_preload_skips_modules_that_are_not_installed_except_torch(monkeypatch: pytest.MonkeyPatch) -> None:
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
        ("import torch", "auto", False, True),
        ("import flk_runtime", "", False, False),
    ],
)
def test_preload_imports_what_the_script_and_the_strategy_need(
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
    assert (set(forkserver.PRELOAD_FOR_LIBRARY) <= set(asked)) == ("flk_runtime" in script)


def test_preload_imports_torch_alone_for_ranks_that_make_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(forkserver.importlib, "import_module", asked.append)
    forkserver.preload(None, "full_shard", makes_steps=False)
    assert tuple(asked) == forkserver.PRELOAD


def test_a_rank_leads_a_process_group_when_its_start_is_known(tmp_path: Path) -> None:
    """A signal to the group that follows at once reaches the rank."""
    server = forkserver.ForkServer.start(fork=False)
    read, write = os.pipe()
    try:
        for _ in range(20):
            pid = server.launch(["missing.py"], {}, str(tmp_path), write, write, write)
            assert os.getpgid(pid) == pid
            os.killpg(pid, signal.SIGKILL)
            assert server.ended() == forkserver.Exited(pid, signal.SIGKILL)
    finally:
        server.socket.close()
        os.waitpid(server.pid, 0)
        os.close(read), os.close(write)


def test_what_a_script_imports_is_left_to_ranks_where_it_cannot_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        monkeypatch.setattr(forkserver.imports, "leading", lambda *_: ["import heavy"])
        monkeypatch.setattr(forkserver.host, "free_memory", lambda: 1 << 20)
        server = forkserver.ForkServer(ours, 1, forks=True)
        server.prepare(["train.py"], {}, ".")
        assert server.unprepared == "1 MiB of memory are free, and less than 1024 are not enough"

        def fails(*_: object) -> list[str]:
            raise AttributeError("no finder")

        monkeypatch.setattr(forkserver.imports, "leading", fails)
        server.prepare(["train.py"], {}, ".")
        assert server.unprepared == "AttributeError: no finder"
        spawning = forkserver.ForkServer(ours, 1, forks=False)
        spawning.prepare(["train.py"], {}, ".")
        assert spawning.unprepared == ""
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):  # nothing was asked
            theirs.recv(1)


def test_requests_that_arrive_together_are_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    taken: list[Any] = []
    read, write = os.pipe()
    with ours, theirs, open(read, "rb"), open(write, "wb"):
        server = forkserver._Server(theirs, fork=True)
        monkeypatch.setattr(server, "_prepare", lambda: taken.append(("prepare", server._request["folder"])))
        monkeypatch.setattr(server, "_launch", lambda request: taken.append((request["folder"], len(server._fds))))
        prepare, launch = (
            json.dumps(each).encode() + b"\n" for each in ({"statements": [], "folder": "a"}, {"folder": "b"})
        )
        forkserver._send(ours, prepare, [])
        forkserver._send(ours, launch[:5], [write, write, write])
        server._serve()
        assert taken == [("prepare", "a")], "the end of the other request has not arrived"
        ours.sendall(launch[5:])
        server._serve()
        assert taken == [("prepare", "a"), ("b", 3)]
        for fd in server._fds:
            os.close(fd)
        server._opened.close()


def test_where_no_process_can_be_made_the_server_says_so_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a limit of processes, and the ranks that run go on."""
    why = "no process can be made: Resource temporarily unavailable, as at a limit of processes"

    def fork() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    ours, theirs = socket.socketpair()
    with ours, theirs:
        asked, server = forkserver.ForkServer(ours, 1, forks=True), forkserver._Server(theirs, fork=True)
        monkeypatch.setattr(os, "fork", fork)
        server._prepare()
        assert asked.ended() is None
        assert asked.unprepared.startswith(why)
        server._launch({})
        with pytest.raises(OSError, match=why):
            asked.launch(["train.py"], {}, ".", 0, 0, 0)
        server._opened.close()


def test_an_exception_in_the_server_does_not_go_on_in_the_frames_of_the_launcher() -> None:
    script = """
        from flk_runtime.launcher import forkserver

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


def test_the_end_of_the_server_that_has_imported_what_the_script_does_is_told_as_it_was(tmp_path: Path) -> None:
    script = """
        import os, pathlib, signal
        from flk_runtime.launcher import forkserver

        pathlib.Path("train.py").write_text("import yaml, signal\\nsignal.pause()\\n")
        server = forkserver.ForkServer.start(fork=True)
        server.prepare(["train.py"], dict(os.environ), ".")
        assert (server.ended(), server.unprepared) == (None, "")
        rank = server.launch(["train.py"], {}, ".", 1, 2, os.open(os.devnull, os.O_WRONLY))
        parent = int(pathlib.Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
        assert parent != server.pid
        os.kill(parent, signal.SIGKILL)
        try:
            server.ended()
        except forkserver.ServerDiedError as error:
            print(error, flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "the fork server was killed by SIGKILL\n"), done.stderr


@pytest.mark.parametrize(
    ("status", "answer", "why"),
    [
        (signal.SIGKILL, {"safe": 1, "why": ""}, "the process that tried `import heavy` was killed"),
        (0, {"safe": 0, "why": "1 extra thread makes a fork unsafe"}, "1 extra thread makes a fork unsafe"),
    ],
)
def test_the_end_of_a_server_that_has_just_answered_is_no_end_of_a_rank(
    monkeypatch: pytest.MonkeyPatch, status: int, answer: dict[str, Any], why: str
) -> None:
    ours, theirs = socket.socketpair()
    other, end = socket.socketpair()
    with ours, theirs, end:
        asked, server = forkserver.ForkServer(ours, 1, forks=True), forkserver._Server(theirs, fork=True)
        server._request = {"statements": ["import heavy"]}
        ended = [(77, status), (0, 0)]
        monkeypatch.setattr(socket, "socketpair", lambda: (other, end.dup()))
        monkeypatch.setattr(os, "fork", lambda: 77)
        monkeypatch.setattr(os, "waitpid", lambda *_: ended.pop(0))
        server._prepare()
        end.sendall(json.dumps(answer).encode() + b"\n")
        server._reap()
        server._pass_on(other)
        assert asked.ended() is None
        assert asked.unprepared == why
        server._opened.close()
        assert ours.recv(1) == b"", "nothing else was told"


def test_the_end_of_the_server_that_starts_the_ranks_is_found_after_a_request_that_it_has_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = socket.socketpair()
    other, end = socket.socketpair()
    statuses: list[int] = []

    def end_as(status: int) -> None:
        statuses.append(status)
        raise SystemExit

    with ours, theirs:
        server = forkserver._Server(theirs, fork=True)
        server._other, server._other_pid, server._prepared = other, 77, True
        server._launch({})
        end.close()
        server._launch({})
        monkeypatch.setattr(os, "waitpid", lambda *_: (77, signal.SIGKILL))
        monkeypatch.setattr(forkserver, "_end_as", end_as)
        with pytest.raises(SystemExit):
            server._pass_on(other)
        assert statuses == [signal.SIGKILL]
        server._opened.close()
    other.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_ends_by_the_signal_that_has_ended_the_other_even_where_it_ignores_it(number: int) -> None:
    script = f"""
        import signal
        from flk_runtime.launcher import forkserver

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        forkserver._end_as({number:d})
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(script)]).returncode == -number
