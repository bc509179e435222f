"""Which training of a process the extension for verification gets."""

from __future__ import annotations

import pytest

import flk_verify.start
from flk_runtime.contract import user_env
from flk_runtime.discovery import RankInfo
from flk_runtime.training import extensions
from flk_runtime.training.process import current


def test_the_first_training_of_a_process_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    verified = []
    monkeypatch.setattr(flk_verify.start, "verify", lambda *given: verified.append(given))
    monkeypatch.setenv(user_env.VERIFY, "2")
    extensions.verify("ddp", RankInfo(), 1.0)
    monkeypatch.setattr(current, "training", object())
    extensions.verify("ddp", RankInfo(), 1.0)
    assert verified == [("ddp", RankInfo(), 1.0)]
