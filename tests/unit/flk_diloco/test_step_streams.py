"""Tests of flk_diloco.step_streams, with streams that note what they wait for."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.optim import optimizer as of_torch

from flk_diloco.step_streams import StepStreams
from flk_runtime.system import device


class Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        return f"the work on {self.name}"


class Gpu:
    """A GPU with a current stream, which may be capturing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.streams = {name: Stream(name, self.log) for name in ("main", "side", "other")}
        self.current, self.captures = "main", False
        self.weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
        self.optimizers = [torch.optim.SGD([each], lr=0.1) for each in self.weights]
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: self.streams[self.current])
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.captures)
        monkeypatch.setattr(device, "synchronize", lambda: self.log.append("the host waits"))

    def step(self, stream: str, *, captures: bool = False, of: int = 0) -> None:
        self.current, self.captures = stream, captures
        self.optimizers[of].step()
        self.current, self.captures = "main", False

    def work(self, streams: StepStreams) -> list[str]:
        """What waited for what since the last call, up to the end of work on the stream main."""
        with streams.between_steps():
            self.log.append("work")
        found = self.log[:]
        self.log.clear()
        return found


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def test_work_and_steps_on_other_streams_wait_for_each_other_and_not_the_host(gpu: Gpu) -> None:
    streams = StepStreams(gpu.weights[:1])
    gpu.step("side")
    assert gpu.work(streams) == ["main waits for side", "work"]
    gpu.step("other")
    assert gpu.work(streams) == ["other waits for the work on main", "main waits for other", "work"]


def test_the_host_waits_where_no_step_is_noted(gpu: Gpu) -> None:
    streams = StepStreams(gpu.weights[:1])
    by_hand = ["the host waits", "work", "the host waits"]
    assert gpu.work(streams) == by_hand
    gpu.step("side")
    assert gpu.work(streams) != by_hand
    assert gpu.work(streams) == by_hand
    gpu.step("side", of=1)  # of another model
    gpu.log.clear()
    assert gpu.work(streams) == by_hand
    gpu.step("side", captures=True)  # its replays call no hooks
    gpu.log.clear()
    gpu.step("side")
    assert gpu.work(streams)[-3:] == by_hand


def test_the_hooks_go_with_their_object(gpu: Gpu) -> None:
    hooks: list[Any] = [of_torch._global_optimizer_pre_hooks, of_torch._global_optimizer_post_hooks]
    before = [len(each) for each in hooks]
    streams = StepStreams(gpu.weights[:1])
    assert [len(each) for each in hooks] == [each + 1 for each in before]
    del streams
    gc.collect()
    assert [len(each) for each in hooks] == before
