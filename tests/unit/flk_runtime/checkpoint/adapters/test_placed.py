"""An optimizer that is saved whole, by the places of its parameters, is refused where these have another order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flk_runtime.checkpoint import placed
from flk_runtime.checkpoint.adapters.adapt import adapt
from flk_runtime.checkpoint.stateful import Declared, is_replicated, per_rank, replicated
from flk_runtime.errors import MismatchError


def test_the_order_of_the_parameters_is_compared_by_name_or_by_shape() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    loose = nn.Parameter(torch.ones(3))
    first = torch.optim.Adam([*net.parameters(), loose])
    state = placed(first, [net]).state_dict()
    placed(torch.optim.Adam([*net.parameters(), loose]), [net]).load_state_dict(state)
    with pytest.raises(ValueError, match=r"in another order, '1\.weight' of group 0 where '0\.weight' of group 0 was"):
        placed(torch.optim.Adam([*net[1].parameters(), *net[0].parameters(), loose]), [net]).load_state_dict(state)
    with pytest.raises(
        ValueError, match=r"'a parameter of shape \(1,\)' of group 0 where 'a parameter of shape \(3,\)'"
    ):
        placed(torch.optim.Adam([*net.parameters(), nn.Parameter(torch.ones(1))]), [net]).load_state_dict(state)
    with pytest.raises(ValueError, match="of another optimizer than SGD: of Adam"):
        placed(torch.optim.SGD([*net.parameters(), loose]), [net]).load_state_dict(state)
    with pytest.raises(ValueError, match="pass the optimizer as it was passed then"):
        placed(first, [net]).load_state_dict({"param_groups": []})


def test_an_optimizer_that_shards_its_state_is_refused_by_name() -> None:
    class Sharding(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("Optimizer state has not been consolidated")

    with pytest.raises(MismatchError, match=r"cannot save the optimizer Sharding, .*: use a strategy that shards"):
        placed(Sharding([nn.Parameter(torch.ones(1))], 0.1), []).state_dict()


@pytest.mark.parametrize("declare", [per_rank, replicated])
def test_a_declared_optimizer_knows_the_names_in_declared_modules(declare: type[Declared]) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    objects = {
        "optimizer": declare(torch.optim.SGD(net.parameters(), 0.1)),  # type: ignore[call-arg]
        "net": declare(net),  # type: ignore[call-arg]
    }
    adapted = adapt("optimizer", objects["optimizer"], objects)
    assert is_replicated(adapted) == is_replicated(objects["net"])  # type: ignore[arg-type]
    objects["optimizer"] = declare(torch.optim.SGD([*net[1].parameters(), *net[0].parameters()], 0.1))  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"'1\.weight' of group 0 where '0\.weight' of group 0 was"):
        adapt("optimizer", objects["optimizer"], objects).load_state_dict(adapted.state_dict())  # type: ignore[union-attr]
