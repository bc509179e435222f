"""What a Trainer of another class, and callbacks, hold beside the model."""

from __future__ import annotations

import collections
import copy
import enum
import random
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from flk_hosts.attributes import Attributes, stored_by
from flk_runtime.errors import MismatchError


class Mode(enum.Enum):
    FIRST, SECOND = 1, 2


class Package:
    """The trainer of a package, which keeps what it knows of."""

    def __init__(self) -> None:
        self.model, self.steps = nn.Linear(2, 1), 0
        self.state, self.more = 0, {"set": 1}

    @property
    def told(self) -> int:
        def note() -> None:
            self.noted = self.state

        note()
        return self.noted


class Trainer(Package):
    """A trainer of another package that is made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.model)
        self.frozen = [nn.Linear(2, 2)]
        self.same = self.model.weight
        self.calls, self.buffered, self.beta = 0, None, 0.1
        self.metrics: Any = {"train": collections.defaultdict(list)}
        self.latest = collections.deque(["a"], 2)
        self.own, self.draws, self.sums = random.Random(1), numpy.random.default_rng(1), numpy.zeros(2)
        self.mode, self.seen = Mode.FIRST, set[int]()
        self.follows = torch.optim.SGD(self.teacher.parameters(), 0.1, momentum=0.9)
        self.log: Any = None


class Callback:
    def __init__(self) -> None:
        self.begun, self.file, self.count = False, None, 0


def attributes_of(trainer: Trainer, *callbacks: Any) -> Attributes:
    return Attributes(trainer, callbacks, stored_by(Package), [trainer.model])


def train(trainer: Trainer) -> None:
    with torch.no_grad():
        trainer.teacher.weight.data.add_(1)  # which does not count as a change for torch
    trainer.model.weight.data.add_(1)
    trainer.state = trainer.steps = 7
    trainer.calls = 3
    trainer.buffered = [{"ids": torch.arange(3), "text": ("a", None)}]  # type: ignore[assignment]
    trainer.metrics["train"]["loss"].append(numpy.float32(0.5))
    trainer.latest.extend(["b", "c"])
    trainer.own.random(), trainer.draws.random()
    trainer.sums += 1
    trainer.mode = Mode.SECOND
    trainer.seen.add(5)
    trainer.follows.param_groups[0]["lr"] = 0.2


def test_what_has_changed_is_kept_and_comes_back_in_place() -> None:
    trainer, resumed = Trainer(), Trainer()
    kept, again = attributes_of(trainer), attributes_of(resumed)
    kept.look()
    assert (kept.names, kept.changed_modules(), set(kept.modules())) == ([], {}, {"teacher", "frozen.0"})
    train(trainer)
    kept.look()
    changed = {"buffered", "calls", "draws", "follows", "latest", "metrics", "mode", "own", "seen", "sums"}
    assert (set(kept.names), set(kept.changed_modules()), kept.unkept) == (changed, {"teacher"}, {})
    resumed.beta, inside = 0.3, resumed.metrics["train"]
    again.load_state_dict(copy.deepcopy(kept.state_dict()))
    assert resumed.metrics["train"] is inside
    assert inside == {"loss": [0.5]}
    assert inside["more"] == []
    assert (resumed.calls, resumed.beta, resumed.state) == (3, 0.3, 0)
    assert resumed.buffered is not None
    assert resumed.buffered[0]["ids"].tolist() == [0, 1, 2]
    assert resumed.buffered[0]["text"] == ("a", None)
    assert list(resumed.latest) == ["b", "c"]
    assert resumed.latest.maxlen == 2
    assert (resumed.own.random(), resumed.draws.random()) == (trainer.own.random(), trainer.draws.random())
    assert (resumed.sums.tolist(), resumed.mode, resumed.seen) == ([1, 1], Mode.SECOND, {5})
    assert resumed.follows.param_groups[0]["lr"] == 0.2
    assert resumed.same is resumed.model.weight


def test_modules_that_ranks_hold_differently_are_kept_for_each() -> None:
    trainer, resumed = Trainer(), Trainer()
    kept, again = attributes_of(trainer), attributes_of(resumed)
    train(trainer)
    kept.by_rank.add("teacher")
    kept.look()
    again.load_state_dict(copy.deepcopy(kept.state_dict()))
    assert torch.equal(resumed.teacher.weight, trainer.teacher.weight)
    assert again.by_rank == {"teacher"}
    del resumed.teacher
    with pytest.raises(MismatchError, match="the module 'teacher', which the trainer does not hold now"):
        attributes_of(resumed).load_state_dict(kept.state_dict())


def test_what_ranks_hold_alike_is_kept_beside_what_each_holds() -> None:
    """So it is there at another number of ranks."""
    kept, resumed = [], Trainer()
    for rank in range(2):
        trainer = Trainer()
        one = attributes_of(trainer)
        train(trainer)
        trainer.calls = 1 + rank
        one.look()
        kept.append(one)
    assert kept[0].found.keys() == kept[1].found.keys()
    kept[0].alike = {name for name, digest in kept[0].found.items() if digest == kept[1].found[name]}
    assert (kept[0].names, kept[0].state_dict()) == (["calls"], {"values": {"calls": 1}, "modules": {}})
    attributes_of(resumed).load_state_dict(copy.deepcopy(kept[0].alike_state_dict()))
    assert (list(resumed.latest), resumed.calls, resumed.sums.tolist()) == (["b", "c"], 0, [1, 1])


def test_the_model_in_another_module_is_saved_once() -> None:
    trainer = Trainer()
    loss = nn.Module()
    loss.model, loss.classifier = trainer.model, nn.Linear(1, 3)
    trainer.loss = loss  # type: ignore[attr-defined]
    kept = attributes_of(trainer)
    assert kept.shared(loss) == {"model.weight", "model.bias"}
    assert kept.trains_more(torch.optim.SGD(loss.parameters(), 0.1))
    assert not kept.trains_more(torch.optim.SGD(trainer.model.parameters(), 0.1))
    train(trainer)
    assert set(kept.changed_modules()) == {"teacher"}


def test_what_cannot_be_kept_is_named_and_a_callback_that_holds_it_begins_anew() -> None:
    trainer, opens, counts = Trainer(), Callback(), Callback()
    kept = attributes_of(trainer, opens, counts)
    opens.begun, opens.file, opens.count, counts.count = True, SimpleNamespace(), 2, 2  # type: ignore[assignment]
    trainer.log = [SimpleNamespace()]
    trainer.calls = 1
    kept.look()
    assert kept.unkept == {"log": "SimpleNamespace", "Callback.file": "SimpleNamespace"}
    assert kept.names == ["Callback'.count", "calls"]
    resumed, other = Callback(), Callback()
    attributes_of(Trainer(), resumed, other).load_state_dict(kept.state_dict())
    assert (resumed.begun, resumed.count, other.count) == (False, 0, 2)
    with pytest.raises(MismatchError, match="no such callback now"):
        attributes_of(Trainer(), resumed).load_state_dict(kept.state_dict())


def test_data_and_what_holds_itself_are_not_looked_through() -> None:
    trainer = Trainer()
    trainer.log = {"rows": list(range(20_000))}
    trainer.buffered = loop = []  # type: ignore[assignment]
    loop.append(loop)
    attributes = attributes_of(trainer)
    attributes.look()
    assert (attributes.names, attributes.unkept) == ([], {})
    trainer.log = {"rows": list(range(20_001))}
    attributes.look()
    assert attributes.unkept == {"log": "large list"}
