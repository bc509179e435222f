"""How ranks of a pod have ended, by what the kernel counts, and the processes that they leave."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import selectors
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flk_runtime.contract import pod_env
from flk_runtime.contract.failure import Kind
from flk_runtime.launcher.processes.ranks import RankProcess, Ranks
from flk_runtime.launcher.settings import Settings
from flk_runtime.launcher.transport.messages import AttemptStarted
from flk_runtime.shared.progress import ProgressPage
from flk_runtime.system import host

NOTHING: Any = None
NOTHING_WRITTEN: Any = SimpleNamespace(write_stdout=lambda data: None, write_stderr=lambda data: None, is_full=False)


def make_ranks() -> Ranks:
    server: Any = SimpleNamespace(pid=0)
    return Ranks(Settings(("train.py",), processes=0), server, NOTHING, NOTHING, "", lambda lines: None)


def test_each_kill_at_the_memory_limit_is_the_end_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    kills = 3  # in former attempts
    monkeypatch.setattr(host, "oom_kills", lambda: kills)
    ranks = make_ranks()

    def kind(number: int, code: int) -> Kind:
        ended: Any = SimpleNamespace(
            rank=number, pipes=SimpleNamespace(stderr_tail=""), progress=SimpleNamespace(step=7), terminated=False
        )
        process: RankProcess = ended
        return ranks.failure_of_exit(process, code).kind

    ranks.start(AttemptStarted(1, "", 0, [], "0"), {})
    assert kind(0, -signal.SIGKILL) is Kind.KILLED
    kills += 2  # two ranks at once
    assert kind(1, 1) is Kind.EXIT
    assert kind(2, -signal.SIGKILL) is Kind.OOM
    assert kind(3, -signal.SIGKILL) is Kind.OOM
    assert kind(4, -signal.SIGKILL) is Kind.KILLED
    kills += 1  # a process that a rank has started
    ranks.start(AttemptStarted(2, "", 0, [], "0"), {})
    assert kind(0, -signal.SIGKILL) is Kind.KILLED


def test_processes_that_ran_before_the_ranks_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The setup command has left them, or the image's entrypoint: the launcher of a pod is process 1."""
    of_setup, of_rank = 7, 31
    running, killed = {of_setup}, []
    monkeypatch.setattr(host, "children", lambda: set(running))
    monkeypatch.setattr(host, "_kill", killed.append)
    ranks = make_ranks()
    assert ranks.orphans_have_ended()
    running.add(of_rank)
    assert not ranks.orphans_have_ended()
    assert killed == [of_rank]
    running.remove(of_rank)
    assert ranks.orphans_have_ended()


@pytest.mark.parametrize("place", ["a file", "the fork server"])
def test_a_rank_that_cannot_be_started_leaves_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def fail(*arguments: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    if place == "a file":
        monkeypatch.setattr(ProgressPage, "create", fail)
    server: Any = SimpleNamespace(pid=0, launch=fail)
    selector = selectors.DefaultSelector()
    settings = Settings(("train.py",))
    ranks = Ranks(settings, server, selector, NOTHING_WRITTEN, str(tmp_path), lambda lines: None)
    gc.collect()
    before = opened(tmp_path)
    with pytest.raises(OSError, match="Too many open files"):
        ranks.start(AttemptStarted(1, "", 0, [], "0"), {})
    gc.collect()  # the traceback holds the rank's page
    assert opened(tmp_path) == before
    assert (len(ranks), len(selector.get_map())) == (0, 0)


def opened(folder: Path) -> list[str]:
    """The pipes of this process, and its files in a folder. Threads of other tests may open and close connections."""
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sorted(link for link in links if link.startswith(("pipe:", str(folder))))


def test_processes_that_sigkill_does_not_end_are_given_up_until_the_next_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, left = 1000.0, True
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(host, "kill_adopted", lambda keep, *, spare_trackers: left)
    ranks = make_ranks()
    assert not ranks.orphans_have_ended()
    now = 1004.9
    assert not ranks.orphans_have_ended()
    assert ranks.next_kill is not None
    assert ranks.next_kill < 1005
    now = 1005.0
    assert ranks.orphans_have_ended()
    assert ranks.next_kill is None, "the loop does not look for them any more"
    now = 1007.0
    assert ranks.orphans_have_ended(), "a launcher that waits for others does not wait for them again"
    ranks.start(AttemptStarted(1, "", 0, [], "0"), {})
    assert not ranks.orphans_have_ended(), "the next attempt's ranks may have left others"
    left = False
    assert ranks.orphans_have_ended()
    assert ranks.next_kill is None


def test_the_files_of_the_ranks_of_an_attempt_are_removed_when_the_next_one_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server: Any = SimpleNamespace(pid=0, launch=lambda *arguments: 1 << 30)
    selector = selectors.DefaultSelector()
    ranks = Ranks(Settings(("train.py",)), server, selector, NOTHING_WRITTEN, str(tmp_path), lambda lines: None)
    (tmp_path / "kept").touch()
    for number in (0, 1, 1):  # where the leader is lost, attempts may be counted anew
        ranks.start(AttemptStarted(number, "", 0, [0], "0"), {})
        observer = Path(next(iter(ranks)).environment[pod_env.OBSERVER])
        assert not observer.exists()
        observer.touch()
        ranks.remove(1 << 30)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attempt_1", "kept"]
