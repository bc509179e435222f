"""An optimizer of parameters that a model does not have any more makes no step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flk_runtime.errors import SetupError
from flk_runtime.parallel import replaced


def test_the_step_of_an_optimizer_of_replaced_parameters_is_refused() -> None:
    old, new = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    stale, fresh = torch.optim.SGD([old, new], lr=0.1), torch.optim.SGD([new], lr=0.1)
    stale.step()
    replaced.mark({"layer.weight": old, "layer.bias": None})
    assert (replaced.name_of(old), replaced.name_of(new)) == ("layer.weight", None)
    with pytest.raises(SetupError, match=r"SGD holds the parameter 'layer\.weight' that parallelize has replaced"):
        stale.step()
    fresh.step()


@pytest.mark.parametrize(
    "use",
    [
        lambda old: old.add_(1),
        lambda old: old.data.add_(1),
        lambda old: old.grad,
        lambda old: setattr(old, "grad", None),
        lambda old: setattr(old, "data", torch.zeros(2)),
        lambda old: old.__setitem__(0, 1.0),
        lambda old: torch._foreach_add_([old], 1.0),
        lambda old: torch.add(torch.ones(2), 1, out=old),
        lambda old: torch.ones(2) * old,
        lambda old: old.requires_grad_(False),
        lambda old: torch.autograd.grad(torch.ones((), requires_grad=True), [old], allow_unused=True),
        lambda old: torch.nn.utils.clip_grad_norm_([old], 1.0),
        lambda old: old.register_hook(print),
        lambda old: old.detach().numpy(),
    ],
)
def test_a_replaced_parameter_cannot_be_used(use: Callable[[torch.Tensor], object]) -> None:
    old = torch.nn.Parameter(torch.ones(2))
    with torch.no_grad():
        use(old)
        replaced.mark({"layer.weight": old})
        with pytest.raises(SetupError, match=r"the parameter 'layer\.weight', which parallelize has replaced"):
            use(old)


def test_what_a_replaced_parameter_is_can_still_be_read() -> None:
    class Own(torch.nn.Parameter):
        pass

    for old in (torch.nn.Parameter(torch.ones(2, 3)), Own(torch.ones(2, 3))):
        kind = type(old)
        replaced.mark({"layer.weight": old})
        assert isinstance(old, kind)
        assert (old.numel(), old.shape, old.size(1), old.dim(), len(old)) == (6, (2, 3), 3, 2, 2)
        assert (old.dtype, old.device.type, old.requires_grad, old.is_leaf) == (torch.float32, "cpu", True, True)
        assert "Parameter" in repr(old)
        assert {old: 1}[old] == 1
