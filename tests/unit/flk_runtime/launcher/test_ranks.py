"""How ranks of a pod have ended, by what the kernel counts."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from flk_runtime.contract.failure import Kind
from flk_runtime.launcher.ranks import RankProcess, Ranks
from flk_runtime.launcher.settings import Settings
from flk_runtime.launcher.transport import AttemptStarted
from flk_runtime.system import host


def test_each_kill_at_the_memory_limit_is_the_end_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    kills = 3  # in former attempts
    monkeypatch.setattr(host, "oom_kills", lambda: kills)
    nothing: Any = None
    ranks = Ranks(Settings(("train.py",), processes=0), nothing, nothing, nothing, "", lambda lines: None, nothing)

    def kind(number: int, code: int) -> Kind:
        ended: Any = SimpleNamespace(
            rank=number, pipes=SimpleNamespace(stderr_tail=""), progress=SimpleNamespace(step=7), terminated=False
        )
        process: RankProcess = ended
        return ranks.failure_of_exit(process, code).kind

    ranks.start(AttemptStarted(1, "", 0, []), {})
    assert kind(0, -signal.SIGKILL) is Kind.KILLED
    kills += 2  # two ranks at once
    assert kind(1, 1) is Kind.EXIT
    assert kind(2, -signal.SIGKILL) is Kind.OOM
    assert kind(3, -signal.SIGKILL) is Kind.OOM
    assert kind(4, -signal.SIGKILL) is Kind.KILLED
    kills += 1  # a process that a rank has started
    ranks.start(AttemptStarted(2, "", 0, []), {})
    assert kind(0, -signal.SIGKILL) is Kind.KILLED
