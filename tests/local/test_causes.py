"""The cause of a failed attempt: the rank that failed first is named, however it ended and whoever reported first."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from flk_runtime.contract import ExitCode, pod_env
from tests.support.pods import END, Pods
from tests.support.processes import alive


def test_an_exception_counts_before_a_pod_that_is_lost_afterwards(forked_pods: Callable[..., Pods]) -> None:
    """The launcher of pod 1 is killed while it ends its ranks, and a new one takes its place."""
    script = """
        import os, pathlib, signal, time
        import torch, torch.distributed as dist

        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], dist.get_rank()
        if attempt == "0":
            signal.signal(signal.SIGTERM, lambda *_: pathlib.Path("ending").touch() if rank == 1 else os._exit(143))
            pathlib.Path(f"pid.0.{rank}").write_text(str(os.getpid()))
            while rank == 0 and not pathlib.Path("pid.0.1").exists():
                time.sleep(0.001)
            if rank == 0:
                raise ValueError("bad sample")
            while True:
                time.sleep(0.01)
    """
    job = forked_pods(2, 1, script=script, FLK_RESTARTS="5")  # a slow machine may need more than one
    job.start("train.py")
    rank = job.pid(0, 1)
    job.until((job.folder / "ending").exists, "rank 1 is told to end")
    job.running[1].kill()
    job.running[1].wait()
    job.until(lambda: not alive(rank), "the rank ends with its launcher")
    job.start("train.py", only=1)
    assert job.wait() == [0, 0], job.logs_of_all()
    first = job.record().attempts[0].failure
    assert first is not None
    assert (first.kind, first.type, first.rank) == ("exception", "ValueError", 0)


def test_a_rank_that_saves_on_sigterm_has_the_whole_grace_period(forked_pods: Callable[..., Pods]) -> None:
    """Also when the attempt has ended for the other pods, whose launchers end their ranks at once."""
    script = """
        import os, pathlib, signal, sys, time
        import torch, torch.distributed as dist

        def save(*_):
            time.sleep(2.5)
            pathlib.Path("saved").touch()
            os._exit(0)

        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
            signal.signal(signal.SIGTERM, save)
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        pathlib.Path(f"pid.{attempt}.{dist.get_rank()}").write_text(str(os.getpid()))
        while attempt == "0":
            time.sleep(0.01)
    """
    job = forked_pods(2, 1, script=script, FLK_RESTARTS="1", FLK_GRACE="60")
    job.start("train.py")
    job.pid(0, 1)
    job.running[1].terminate()
    assert job.running[1].wait(END) == ExitCode.PREEMPTED
    assert (job.folder / "saved").exists(), job.logs_of_all()
    job.start("train.py", only=1)
    assert job.wait() == [0, 0], job.logs_of_all()


class Proxy:
    """Forwards TCP connections to a port until `cut` closes them."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Close all connections that are open now; new ones are accepted."""
        for end in self._open:
            with contextlib.suppress(OSError):  # a thread has closed it
                end.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def close(self) -> None:
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()
                continue
            self._open += [client, server]
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    @staticmethod
    def _forward(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                sink.sendall(data)
        except OSError:
            pass
        finally:
            sink.close()
            source.close()


@pytest.fixture
def proxy() -> Iterator[Callable[[int], Proxy]]:
    made: list[Proxy] = []

    def make(target: int) -> Proxy:
        made.append(Proxy(target))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.promise("Recovery: Cuts, slow links and lost nodes end at most the attempt")
def test_a_pod_that_loses_its_connection_ends_the_attempt_for_all(
    forked_pods: Callable[..., Pods], proxy: Callable[[int], Proxy]
) -> None:
    """Its ranks have ended with the connection, so the others cannot go on without it."""
    job = forked_pods(2, 1, FLK_RESTARTS="1", HOLD="1")
    endpoint = job.variables[pod_env.RDZV_ENDPOINT]
    between = proxy(int(endpoint.rpartition(":")[2]))
    job.start("train.py", "2", only=0)
    job.variables[pod_env.RDZV_ENDPOINT] = f"127.0.0.1:{between.port}"
    job.start("train.py", "2", only=1)
    job.pid(0, 0), job.pid(0, 1)
    between.cut()
    assert job.wait() == [0, 0], job.logs_of_all()
    attempts = job.record().attempts
    assert [attempt.number for attempt in attempts] == [0, 1]
    assert attempts[0].failure is not None
    assert (attempts[0].failure.kind, attempts[0].failure.pod) == ("lost", 1), attempts[0].failure
    assert "lost the connection to pod 0" in attempts[0].failure.summary
