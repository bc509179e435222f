"""A model on the meta device is initialized by what the script names, and refused where it names nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from flk_runtime.errors import SetupError
from flk_runtime.parallel import ParallelOptions, parallelize
from flk_runtime.parallel.initialize import place


def start(model: nn.Module, init: str | None = "reset_parameters") -> None:
    options = ParallelOptions(init=init)
    parallelize(model, [], "none", options, device=torch.device("cpu"), world_size=1, local_world_size=1)


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def test_a_buffer_that_modules_share_stays_shared_where_it_is_moved() -> None:
    modules = [nn.Module(), nn.Module()]
    shared = torch.ones(2)
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for module in modules:
        module.register_buffer("shared", shared)
        place([module], torch.device("meta"), moved, broadcast=False)
    assert modules[0].shared is modules[1].shared
    assert modules[0].shared is not shared


def test_without_an_initializer_it_is_refused() -> None:
    with pytest.raises(SetupError, match=r"'weight' of the model is on the meta device, .*: pass init="):
        start(on_meta(lambda: nn.Linear(2, 2)), init=None)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Embedding(5, 4), nn.TransformerEncoderLayer(4, 2, 8), nn.BatchNorm1d(4)),
        lambda: nn.Transformer(8, 2, 1, 1, 8, batch_first=True),
        lambda: nn.LSTM(3, 3, 2, bidirectional=True, proj_size=2),
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.PReLU(), nn.GroupNorm(2, 4)),
        lambda: nn.Sequential(nn.Bilinear(2, 3, 4), nn.EmbeddingBag(5, 3, padding_idx=1), nn.RMSNorm(3)),
        lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=6, add_bias_kv=True),
        lambda: nn.Sequential(nn.ConvTranspose1d(2, 4, 3), nn.InstanceNorm1d(4, affine=True, track_running_stats=True)),
    ],
)
def test_modules_of_torch_start_with_the_numbers_of_a_real_start(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(1)
    expected = make().state_dict()
    model = on_meta(make)
    torch.manual_seed(1)
    start(model)
    for name, value in model.state_dict().items():
        assert value.shape == expected[name].shape
        if not isinstance(model, nn.Transformer):  # its constructor draws once more
            assert torch.equal(value, expected[name]), name


def test_tied_and_frozen_parameters_and_attributes_stay_and_real_ones_keep_their_values() -> None:
    model = nn.Sequential(nn.Linear(3, 3), on_meta(lambda: nn.Linear(3, 3)), nn.Linear(3, 3))
    model[0].weight = model[1].weight
    model[0].weight.requires_grad_(False)
    model[0].weight.mark = "kept"
    real = model[2].weight.detach().clone()
    start(model)
    assert model[0].weight is model[1].weight
    assert not model[0].weight.requires_grad
    assert model[0].weight.mark == "kept"
    assert model[0].weight.isfinite().all()
    assert torch.equal(model[2].weight, real)
