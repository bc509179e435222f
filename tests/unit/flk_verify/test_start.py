"""What ranks do with the results of the processes that make the first steps."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from flk_runtime.contract import user_env
from flk_runtime.discovery import RankInfo
from flk_runtime.distributed import process_group
from flk_runtime.errors import SetupError
from flk_verify import start

LINE = {"line": "verified: 2 steps"}


class Ended:
    """A process that has ended."""

    def __init__(self, code: int) -> None:
        self._code = code

    def poll(self) -> int:
        return self._code


class Trials:
    """The processes of a verification, without processes."""

    def __init__(self) -> None:
        self.started: list[dict[str, str]] = []
        self.codes = {"rank": 0, "whole": 0}
        self.result: dict[str, str] = LINE

    @contextlib.contextmanager
    def start(self, request: dict[str, Any], variables: dict[str, str]) -> Iterator[Ended]:
        self.started.append(dict(variables))
        folder = Path(request["folder"])
        Path(folder, request["role"]).write_text("Traceback …\nHTTPError: 503\n")
        Path(folder, "result.json").write_text(json.dumps(self.result))
        yield Ended(self.codes[request["role"]])

    def verify(self) -> None:
        start.verify("full_shard", RankInfo(), 60.0)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Trials:
    trials, store = Trials(), dist.HashStore()
    monkeypatch.setattr(start, "_started", trials.start)
    monkeypatch.setattr(process_group, "store", lambda: store)
    monkeypatch.setenv(user_env.VERIFY, "2")
    return trials


def test_what_is_verified_is_printed(trials: Trials, capsys: pytest.CaptureFixture[str]) -> None:
    trials.verify()
    assert capsys.readouterr().out == "flk: verified: 2 steps\n"
    assert len({variables["MASTER_PORT"] for variables in trials.started}) == 2
    assert [variables["NVIDIA_TF32_OVERRIDE"] for variables in trials.started] == ["0", "0"]


@pytest.mark.parametrize(("role", "name"), [("rank", "rank 0"), ("whole", "the whole model in one process")])
def test_a_failure_of_the_script_leaves_the_training_unverified_with_a_line(
    trials: Trials, capsys: pytest.CaptureFixture[str], role: str, name: str
) -> None:
    trials.codes[role], trials.result = 1, {"failed": "the script fails"}
    trials.verify()
    assert f"flk: not verified: {name} failed: HTTPError: 503; the training begins" in capsys.readouterr().out


def test_all_ranks_tell_the_first_failure(trials: Trials, capsys: pytest.CaptureFixture[str]) -> None:
    process_group.store().set(start._FAILED, "rank 3 failed: ValueError: bad sample")
    trials.codes["rank"] = 1
    trials.verify()
    assert "not verified: rank 3 failed: ValueError: bad sample;" in capsys.readouterr().out


def test_a_failure_of_this_rank_ends_the_wait_of_the_others(trials: Trials) -> None:
    trials.codes["rank"] = 1
    trials.verify()
    assert process_group.store().check([start._FAILED])


def test_what_cannot_be_compared_is_refused_by_name(trials: Trials) -> None:
    trials.result = {"refused": "other data"}
    with pytest.raises(SetupError, match="could not be compared: other data"):
        trials.verify()
