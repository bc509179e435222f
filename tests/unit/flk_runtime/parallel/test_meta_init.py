from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from flk_runtime.errors import SetupError
from flk_runtime.parallel.meta_init import Materializer

CPU = torch.device("cpu")


def build() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(5, 4),
        nn.TransformerEncoderLayer(4, 2, 8),
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
    )


def test_a_meta_start_gives_the_numbers_of_a_real_one() -> None:
    torch.manual_seed(1)
    real = build()
    with torch.device("meta"):
        model = build()
    finished: list[nn.Module] = []
    torch.manual_seed(1)
    Materializer(model, [model[1], model[2]], CPU).run(finished.append, broadcast=False)
    assert finished == [model[1], model[2], model]
    for (name, one), (_, other) in zip(real.state_dict().items(), model.state_dict().items(), strict=True):
        assert torch.equal(one, other), name


def test_tied_and_frozen_parameters_and_attributes_stay() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model[0].weight.requires_grad_(False)
    model[0].weight.mark = "kept"
    Materializer(model, [], CPU).run(lambda unit: None, broadcast=False)
    assert model[0].weight is model[1].weight
    assert not model[0].weight.is_meta
    assert not model[0].weight.requires_grad
    assert model[0].weight.mark == "kept"


def test_parameters_that_are_tied_around_a_block_stay_tied() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    Materializer(model, [model[1]], CPU).run(lambda unit: None, broadcast=False)
    assert model[0].weight is model[2].weight


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Transformer(8, 2, 1, 1, 8, batch_first=True),
        lambda: nn.LSTM(3, 3, 2, bidirectional=True, proj_size=2),
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.PReLU(), nn.GroupNorm(2, 4)),
        lambda: nn.Sequential(nn.Bilinear(2, 3, 4), nn.EmbeddingBag(5, 3, padding_idx=1), nn.RMSNorm(3)),
        lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=6, add_bias_kv=True),
        lambda: nn.Sequential(nn.ConvTranspose1d(2, 4, 3), nn.InstanceNorm1d(4, affine=True, track_running_stats=True)),
    ],
)
def test_modules_of_torch_need_no_initializer(make: Callable[[], nn.Module]) -> None:
    with torch.device("meta"):
        model = make()
    Materializer(model, [], CPU).run(lambda unit: None, broadcast=False)
    assert not any(each.isnan().any() for each in model.state_dict().values())


class Unset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.empty(2)), nn.Parameter(torch.empty(2))

    def reset_parameters(self) -> None:
        self.one.fill_(1)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.arange(3))


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(2, 2))

    def reset_parameters(self) -> None:
        self.block[0].weight.fill_(2)


def test_what_nobody_sets_is_refused() -> None:
    for kind, words in ((Unset, "'two' of 0 .Unset."), (Counts, "'positions' of 0 .Counts.")):
        with torch.device("meta"):
            model = nn.Sequential(kind())
        with pytest.raises(SetupError, match=words):
            Materializer(model, [], CPU).run(lambda unit: None, broadcast=False)


def test_a_reset_around_units_is_refused_and_around_no_units_done() -> None:
    with torch.device("meta"):
        model, other = Around(), Around()
    Materializer(model, [], CPU).run(lambda unit: None, broadcast=False)
    assert model.block[0].weight.tolist() == [[2, 2], [2, 2]]
    with pytest.raises(SetupError, match=r"reset_parameters\(\) of the model \(Around\) sets parameters of blocks"):
        Materializer(other, [other.block], CPU).run(lambda unit: None, broadcast=False)
