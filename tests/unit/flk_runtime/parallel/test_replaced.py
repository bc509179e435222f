"""An optimizer of parameters that a model does not have any more makes no step."""

from __future__ import annotations

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
