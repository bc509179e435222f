"""Blocks that compute their activations again, and that are compiled."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from flk_runtime.errors import SetupError
from flk_runtime.parallel.computation import check_recomputed, recompute_activations


class Block(nn.Module):
    """Counts its forward passes."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        type(self).calls += 1
        out: torch.Tensor = self.linear(x).tanh() * scale
        return out


def make(recompute: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    for block in model if recompute else ():
        recompute_activations(block)
    return model


def train(model: nn.Module) -> list[torch.Tensor]:
    Block.calls = 0
    model(torch.ones(2, 4)).sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_the_forward_pass_runs_again_and_gradients_stay() -> None:
    expected = train(make(recompute=False))
    assert Block.calls == 2
    found = train(make(recompute=True))
    assert Block.calls == 4
    assert len(found) == 4
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


def test_nothing_is_computed_again_without_gradients() -> None:
    model = make(recompute=True)
    Block.calls = 0
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert Block.calls == 2


def test_classes_and_names_stay() -> None:
    model = make(recompute=True)
    assert [type(block) for block in model] == [Block, Block]
    assert model.state_dict().keys() == make(recompute=False).state_dict().keys()
    assert torch.equal(model[0](torch.ones(2, 4), scale=2.0), 2 * model[0](torch.ones(2, 4)))


def test_copies_recompute_by_themselves() -> None:
    model = make(recompute=True)
    expected = train(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin.zero_grad()
        found = train(twin)
        assert Block.calls == 4
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
        twin[0].linear.weight.data.zero_()
        assert not torch.equal(twin(torch.ones(2, 4)), model(torch.ones(2, 4)))


def test_a_forward_of_its_own_is_refused() -> None:
    block = Block()
    block.forward = lambda x: x  # type: ignore[assignment,method-assign]
    with pytest.raises(SetupError, match="a Block has a forward attribute of its own"):
        recompute_activations(block)


class Counting(nn.Module):
    """Changes buffers in each way: statistics without a version, in place, by another tensor, and a shared one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("bank", torch.zeros(0, 4))
        self.register_buffer("state", None)
        self.register_buffer("mask", torch.ones(300, 300))  # large, and stays
        self.norm.register_buffer("calls", self.calls)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        before = x if self.state is None else x + self.state
        x = self.norm(self.linear(before).tanh() * float(self.norm.calls) * self.mask[0, 0])
        self.bank = torch.cat([self.bank, x.detach()[:1]])
        self.state = x.detach().clone()
        return x.square() * self.bank.sum()


def counted(recompute: bool, backend: str | None = None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(0)
    model = Counting() if backend is None else nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    if recompute:
        recompute_activations(model)
    if backend:
        model.compile(backend=backend)
    for step in range(2):
        x = torch.randn(3, 4)
        loss = model(x).sum()
        if backend is None:
            loss = loss + 2 * model(x + 1).sum()  # as a discriminator, which is called twice before one backward pass
            loss.backward(retain_graph=step == 0)
        if step == 0 or backend:
            loss.backward()
    return [each.grad for each in model.parameters() if each.grad is not None], list(model.buffers())


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_buffers_are_changed_once_and_recomputed_as_they_were(backend: str | None) -> None:
    torch._dynamo.reset()
    gradients, buffers = counted(recompute=False, backend=backend)
    found, changed = counted(recompute=True, backend=backend)
    assert (len(found), len(changed)) == (len(gradients), len(buffers))
    for one, other in zip([*gradients, *buffers], [*found, *changed], strict=True):
        torch.testing.assert_close(other, one)


def test_statistics_that_a_recomputation_would_change_twice_are_refused() -> None:
    block = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for given in ("eager", {"backend": "eager", "fullgraph": True}):
        with pytest.raises(SetupError, match=r"statistics of a BatchNorm1d twice .* compile='aot_eager'"):
            check_recomputed([block], given)
    check_recomputed([block], "aot_eager")
    check_recomputed([block], True)
