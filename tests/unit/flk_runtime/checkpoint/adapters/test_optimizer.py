"""The state of an optimizer belongs to the parameters of its names, whatever their order, or is refused."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, StepLR

from flk_runtime.checkpoint import OptimizerState, chunks_of, placed
from flk_runtime.checkpoint.adapters.optimizer import hyperparameters_of, set_hyperparameters
from flk_runtime.checkpoint.state import encode_whole
from flk_runtime.checkpoint.values import decode
from tests.support.saved import read_back, saved


class Net(nn.Module):
    """Layers of one shape, defined in an order."""

    def __init__(self, order: str) -> None:
        super().__init__()
        for name in order:
            self.add_module(name, nn.Linear(2, 2))


Make = Callable[[Net], Optimizer]


def adam(net: Net) -> Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.1)


def in_groups(*names: str, kind: Any = torch.optim.AdamW) -> Make:
    """An optimizer with a group for the layers in each of ``names``, in their order."""

    def make(net: Net) -> Optimizer:
        layers = [[net.get_submodule(name) for name in group] for group in names]
        groups = [[each for layer in group for each in layer.parameters()] for group in layers]
        return kind([{"params": group, "lr": 0.1 * (1 + n)} for n, group in enumerate(groups)], lr=0.1)  # type: ignore[no-any-return]

    return make


def named(net: Net) -> Optimizer:
    return torch.optim.AdamW(net.named_parameters(), lr=0.1)


def trained(make: Make, steps: int = 2) -> tuple[Net, Optimizer]:
    net = Net("abc")
    optimizer = make(net)
    for _ in range(steps):
        for number, each in enumerate(net.parameters()):
            each.grad = torch.full_like(each, 1.0 + number)
        optimizer.step(lambda: 1.0) if isinstance(optimizer, torch.optim.LBFGS) else optimizer.step()
    return net, optimizer


def restored(before: tuple[Net, Optimizer], order: str, make: Make) -> tuple[Net, Optimizer]:
    """A net with its layers in this order, and its optimizer with the state of ``before``."""
    net = Net(order)
    optimizer = make(net)
    state = saved("optimizer", OptimizerState(before[1], {"model": before[0]}))
    adapter = OptimizerState(optimizer, {"model": net})
    adapter.load_state(state)
    return net, optimizer


def moments(net: Net, optimizer: Optimizer) -> dict[str, list[float]]:
    return {name: optimizer.state[each]["exp_avg"].tolist() for name, each in net.named_parameters()}


@pytest.mark.parametrize(
    ("before", "order", "make"),
    [
        (adam, "abc", adam),
        (adam, "cba", adam),
        (adam, "abc", in_groups("bca")),
        (in_groups("ab", "c"), "bca", in_groups("ba", "c")),
        (in_groups("abc", ""), "cab", in_groups("cba", "")),
        (named, "cba", named),
        (named, "cba", adam),
    ],
)
def test_the_parameters_of_a_group_may_have_another_order(before: Make, order: str, make: Make) -> None:
    first = trained(before)
    net, optimizer = restored(first, order, make)
    assert moments(net, optimizer) == moments(*first)
    assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in first[1].param_groups]
    names = {id(each): name for name, each in net.named_parameters()}
    for group in optimizer.param_groups:
        if "param_names" in group:
            assert group["param_names"] == [names[id(each)] for each in group["params"]]


def test_a_function_among_the_hyperparameters_stays_that_of_the_script() -> None:
    def filtering(net: Net) -> Optimizer:
        optimizer = adam(net)
        optimizer.param_groups[0]["decays"] = lambda parameter: parameter.dim() > 1
        return optimizer

    first = trained(filtering)
    first[1].param_groups[0]["lr"] = 0.3
    _, optimizer = restored(first, "abc", filtering)
    (group,) = optimizer.param_groups
    assert group["lr"] == 0.3
    assert [group["decays"](each) for each in group["params"][:2]] == [True, False]


def test_a_rate_that_a_scheduler_has_changed_in_place_is_the_saved_one_again() -> None:
    def with_tensor(net: Net) -> Optimizer:
        return torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.25))

    first, net = trained(with_tensor), Net("abc")
    state = saved("optimizer", OptimizerState(first[1], {"model": first[0]}))
    optimizer = with_tensor(net)
    adapter = OptimizerState(optimizer, {"model": net})
    adapter.load_state(state)
    rates = hyperparameters_of(optimizer)
    for _ in range(2):
        set_hyperparameters(optimizer, rates, only_scheduled=True)
        assert optimizer.param_groups[0]["lr"] == 0.25
        LinearLR(optimizer, 0.5)


def test_moments_have_the_layout_of_their_parameter() -> None:
    models = [nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last) for _ in range(2)]
    optimizers = [torch.optim.AdamW(each.parameters()) for each in models]
    models[0](torch.ones(1, 2, 2, 2)).sum().backward()
    optimizers[0].step()
    state = saved("optimizer", OptimizerState(optimizers[0], {"model": models[0]}))
    OptimizerState(optimizers[1], {"model": models[1]}).load_state(state)
    before, after = (one.state[each.weight]["exp_avg"] for one, each in zip(optimizers, models, strict=True))
    assert (after.stride(), after.tolist()) == (before.stride(), before.tolist())
    assert after.is_contiguous(memory_format=torch.channels_last)
    assert not after.is_contiguous()


def test_moments_get_the_dtype_of_a_parameter_that_has_changed_its_own() -> None:
    net, optimizer = trained(adam)
    state = saved("optimizer", OptimizerState(optimizer, {"model": net}))
    checkpoint: Any = state.checkpoint
    for name, each in net.named_parameters():
        checkpoint.add(chunks_of(("model", name), each.detach()))
    after = Net("abc").bfloat16()
    resumed = adam(after)
    OptimizerState(resumed, {"model": after}).load_state(state)
    assert {resumed.state[each]["exp_avg"].dtype for each in after.parameters()} == {torch.bfloat16}


@pytest.mark.promise("Checkpoints: State of optimizers comes back to its parameter, or is refused")
@pytest.mark.parametrize(
    ("before", "make", "words"),
    [
        (in_groups("a", "bc"), in_groups("bc", "a"), r"'b\.weight' in group 0, and the checkpoint in group 1"),
        (in_groups("a", "bc"), in_groups("ab", "c"), r"'b\.weight' in group 0, and the checkpoint in group 1"),
        (in_groups("a", "bc"), in_groups("abc"), "it has 2 groups of parameters, and the optimizer 1"),
        (in_groups("a", "b"), in_groups("a", "bc"), r"'c\.weight' in group 1, .* no group: .*eters$"),
        (in_groups("a", "bc"), in_groups("a", "b"), r"unexpected state of 'c\.weight': .*later, give it"),
        (in_groups("abc", kind=torch.optim.LBFGS), in_groups("acb", kind=torch.optim.LBFGS), "in another order"),
        (adam, in_groups("abc", kind=torch.optim.SGD), "of another optimizer than SGD: of AdamW"),
        (in_groups("abc", kind=torch.optim.SGD), adam, "of another optimizer than AdamW: of SGD"),
        (adam, in_groups("abc", kind=torch.optim.Adamax), "of another optimizer than Adamax: of AdamW"),
    ],
)
def test_a_state_that_would_go_to_other_parameters_is_refused_by_name(before: Make, make: Make, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        restored(trained(before), "abc", make)


def test_the_state_of_adam_fits_adamw_and_lbfgs_goes_on_in_its_own_order() -> None:
    first = trained(in_groups("abc", kind=torch.optim.Adam))
    assert moments(*restored(first, "abc", adam)) == moments(*first)
    lbfgs = in_groups("abc", kind=torch.optim.LBFGS)
    net, optimizer = restored(trained(lbfgs), "abc", lbfgs)
    assert optimizer.state[net.get_submodule("a").weight]["n_iter"] > 0


def test_a_schedule_does_not_change_the_restored_rates() -> None:
    first = trained(adam)
    first[1].param_groups[0]["lr"] = 0.025
    net = Net("cba")
    optimizer = adam(net)
    adapter = OptimizerState(optimizer, {"model": net})
    state = saved("optimizer", OptimizerState(first[1], {"model": first[0]}))
    adapter.load_state(state)
    rates = hyperparameters_of(optimizer)
    optimizer.param_groups[0].pop("initial_lr", None)
    StepLR(optimizer, 1)
    optimizer.param_groups[0]["lr"] = 9.0
    set_hyperparameters(optimizer, rates, only_scheduled=False)
    assert optimizer.param_groups[0]["lr"] == 0.025


def test_what_ranks_compare_does_not_depend_on_the_order_of_parameters() -> None:
    net, optimizer = trained(adam)
    other = in_groups("cab")(net)
    first, second = (list(OptimizerState(each, {"model": net}).held_alike()) for each in (optimizer, other))
    assert [name for name in first if name.startswith("the parameter")] == second


def test_what_ranks_compare_has_the_tensors_and_numbers_in_other_values_and_complex_ones() -> None:
    layer = nn.Linear(2, 2, dtype=torch.complex64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    past = {"past": deque([torch.ones(2), torch.ones(2, dtype=torch.int64)]), "scale": 0.5, "step": 3}
    optimizer.state[layer.bias] = past
    optimizer.state["all"] = {"mean": torch.ones(2)}  # type: ignore[index]
    held = OptimizerState(optimizer, {"model": layer}).held_alike()
    assert list(held) == [
        "the parameter 'bias'",
        "the parameter 'weight'",
        "'all.mean' of 'all parameters'",
        "'past.0' of 'bias'",
        "'scale.float' of 'bias'",
    ]


def test_ranks_compare_a_lazy_conjugate_by_its_values() -> None:
    layer = nn.Linear(2, 2, dtype=torch.complex64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    values = torch.tensor([1 + 2j, 3 - 4j])
    optimizer.state[layer.bias] = {"last": values.conj(), "part": values.conj().imag}
    held = OptimizerState(optimizer, {"model": layer}).held_alike()
    last, part = held["'last' of 'bias'"], held["'part' of 'bias'"]
    assert (last.is_conj(), part.is_neg()) == (False, False)
    assert (last.tolist(), part.tolist()) == ([1 - 2j, 3 + 4j], [-2.0, 4.0])


def test_a_parameter_that_pruning_has_renamed_has_its_state_under_the_new_name() -> None:
    first = trained(adam)
    adapter = OptimizerState(first[1], {"model": first[0]})
    saved("optimizer", adapter)
    prune.l1_unstructured(first[0].get_submodule("b"), "weight", amount=0.5)
    state = saved("optimizer", adapter)
    net = Net("abc")
    optimizer = adam(net)
    prune.l1_unstructured(net.get_submodule("b"), "weight", amount=0.5)
    OptimizerState(optimizer, {"model": net}).load_state(state)
    assert moments(net, optimizer) == moments(*first)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_parameters_of_a_scripted_module_have_their_names() -> None:
    module = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))  # type: ignore[no-untyped-call]
    adapter = OptimizerState(torch.optim.SGD(module.parameters(), lr=0.1), {"model": module})
    assert [*adapter.names().values()] == [*adapter.names().values()] == ["0.weight", "0.bias"]


def test_a_rate_in_a_tensor_goes_to_the_device_that_it_was_on() -> None:
    """The kernels of a capturable optimizer refuse one that is on the CPU."""
    before = trained(adam)
    before[1].param_groups[0]["lr"] = torch.tensor(0.3)
    state = saved("optimizer", OptimizerState(before[1], {"model": before[0]}))
    optimizer = adam(net := Net("abc"))
    optimizer.param_groups[0]["lr"] = torch.empty((), device="meta")
    OptimizerState(optimizer, {"model": net}).load_state(state)
    assert optimizer.param_groups[0]["lr"].is_meta


@pytest.mark.parametrize("adapter", [lambda optimizer: OptimizerState(optimizer, {}), lambda each: placed(each, [])])
def test_the_state_keeps_its_dtypes_wherever_it_has_tensors(adapter: Any) -> None:
    """torch casts it to the dtype of the parameter, and makes a text the text of a generator."""
    state = {
        "moment": torch.full((2,), 1.1),
        "history": [torch.full((2,), 1.1), torch.tensor([255], dtype=torch.uint8)],
        "blocks": {"codes": torch.tensor(1 << 30), "scale": torch.tensor(1.1)},
        "kind": "a text",
        3: torch.tensor([1.1]),
    }
    optimizers = [torch.optim.SGD([nn.Parameter(torch.ones(2, dtype=torch.bfloat16))], 0.1) for _ in range(2)]
    before, after = optimizers
    before.state[before.param_groups[0]["params"][0]] = state
    if isinstance(saver := adapter(before), OptimizerState):
        adapter(after).load_state(saved("optimizer", saver))
    else:
        adapter(after).load_state_dict(decode(read_back(encode_whole(saver.state_dict(), ("optimizer",))), {}))
    found = dict(after.state[after.param_groups[0]["params"][0]])
    assert found.pop("kind") == state.pop("kind")
    torch.testing.assert_close(found, state, rtol=0, atol=0)
