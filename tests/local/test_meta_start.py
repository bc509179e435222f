"""Models on the meta device start with the values of the model's own initialization, or are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import Ranks
from tests.support.small_model import SHARDING, SMALL_MODEL

# An initializer at the root that slices, transposes and copies, and reaches into the blocks.
OWN = (
    SMALL_MODEL
    + """
class Own(Net):
    def __init__(self, tied=False):
        super().__init__(tied)
        self.register_buffer("order", torch.empty(4, dtype=torch.int64))
        self.initialize()

    def initialize(self):
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.trunc_normal_(parameter, std=0.02)
        for block in self.blocks:
            nn.init.orthogonal_(block.up.weight)
            block.down.weight.data.normal_(std=0.1)
            upper, lower = block.up.weight[:9], block.down.weight[:2]
            upper.mul_(2)
            lower.zero_()
            block.up.bias.copy_(torch.randn(25))
            block.down.weight.t()[3] = 7
            first, *_ = block.norm.weight.chunk(2)
            first.copy_(block.down.weight[3, :3])
        self.embedding.weight[0].zero_()
        self.scale.fill_(1.5)
        self.order.copy_(torch.arange(4))

def make(device, kind=Own, **options):
    torch.manual_seed(1)
    with torch.device(device), torch.no_grad():
        return kind(**options)

def state(model):
    whole = lambda t: t.full_tensor() if hasattr(t, "full_tensor") else t
    found = {name: whole(value) for name, value in model.state_dict().items()}
    return {name.removeprefix("module."): value for name, value in found.items()}

def check(expected, model):
    for name, value in state(model).items():
        assert torch.equal(value, expected[name]), (name, value, expected[name])
"""
)


@pytest.mark.promise("Training: A model on the meta device starts with its own initial values")
def test_an_initializer_of_the_model_sets_the_values_of_one_process(ranks: Ranks, tmp_path: Path) -> None:
    script = (
        OWN
        + f"""
import runpy
import flk_diloco
example = runpy.run_path("examples/gpt/train.py")["GPT"]
gpt = {{"vocabulary": 13, "block": 8, "layers": 3, "heads": 2, "width": 6, "dropout": 0.0}}
alone = flk_diloco.DiLoCo(every=1, lr=1.0, momentum=0.0, inner="full_shard")
with group():
    # Two levels of a hybrid strategy need four ranks.
    for name in {SHARDING[3:]} if dist.get_world_size() == 4 else ("none", "ddp", *{SHARDING[:3]}, "diloco"):
        for kind, options in ((Own, {{"tied": name != "full_shard"}}), (example, gpt))[: 1 + (name == "full_shard")]:
            with init(alone if name == "diloco" else name) as run:
                expected = state(make("cpu", kind, **options))
                model = make("meta", kind, **options)
                torch.manual_seed(1 + (run.rank if name != "none" else 0))  # rank 0's values are everybody's
                optimizer = torch.optim.AdamW(model.parameters())
                pair = run.parallelize(model, optimizer, init=kind.initialize, **hybrid(name))
                try:
                    check(expected, pair[0])
                except AssertionError as error:
                    raise AssertionError(name, kind, options) from error
                if kind is Own and name in ("ddp", "full_shard"):
                    train(run, *pair, steps=2)
"""
    )
    for world_size in (2, 4):
        ranks(script, world_size)


def test_weights_in_the_place_of_an_initialization(ranks: Ranks, tmp_path: Path) -> None:
    script = (
        OWN
        + f"""
with group():
    if dist.get_rank() == 0:
        torch.save(make("cpu", Net).state_dict(), "{tmp_path}/weights.pt")
    dist.barrier()
    for name in ("ddp", "full_shard"):
        with init(name) as run:
            expected = state(make("cpu", Net))
            check(expected, run.parallelize(make("meta", Net), init="{tmp_path}/weights.pt"))
"""
    )
    ranks(script, 2)


def test_what_would_start_with_other_values_is_refused(ranks: Ranks) -> None:
    script = (
        OWN
        + """
import runpy
import flk_diloco
example = runpy.run_path("examples/gpt/train.py")["GPT"]

class Scaled(nn.Module):  # has an initializer at its root
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(4) for _ in range(2))
        self.reset_parameters()
    def reset_parameters(self):
        for each in self.parameters():
            nn.init.constant_(each, 0.5)

class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 3))
        self.register_buffer("order", torch.arange(3))

def replace(model):
    model.weight = nn.Parameter(torch.ones(3, 3))

def all_but_order(model):
    model.weight.fill_(1)

def gpt():
    return example(vocabulary=13, block=8, layers=3, heads=2, width=6, dropout=0.0)

with group():
    for name in ("ddp", "full_shard"):
        for words, make_model, function in (
            ("'characters.weight' of the model is on the meta device, where the values that its constructor sets are",
             gpt, None),
            ("init= leaves 'order' of the model unset", Bare, "reset_parameters"),
            ("init= leaves 'order' of the model unset", Bare, all_but_order),
            ("init= leaves 'order' of the model unset", lambda: Bare(), lambda model: model.weight.data.fill_(1)),
            ("init= leaves 'weight' of the model unset", Bare, lambda model: model.order.fill_(1)),
            ("init= puts another tensor in the place of 'weight'", Bare, replace),
        ):
            with init(name) as run, torch.device("meta"):
                model = make_model()
                with torch.device("cpu"):
                    refused(words, lambda: run.parallelize(model, init=function))
    with init("full_shard") as run:
        with torch.device("meta"):
            model = Scaled()
        model = run.parallelize(model, init="reset_parameters")
        assert all((each.full_tensor() == 0.5).all() for each in model.parameters())
"""
    )
    ranks(script, 2)


@pytest.mark.promise("Training: A model on the meta device starts with its own initial values")
@pytest.mark.soak
def test_a_model_of_transformers_on_meta_starts_as_on_a_cpu(ranks: Ranks) -> None:
    pytest.importorskip("transformers")
    script = (
        OWN
        + """
import warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import LlamaConfig, LlamaForCausalLM

def build_llama(device):
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=16, tie_word_embeddings=True,
    )
    torch.manual_seed(1)
    with torch.device(device):
        return LlamaForCausalLM(config)

with group():
    real = build_llama("cpu")
    for name in ("ddp", "full_shard"):
        with init(name) as run:
            refused("pass init=", lambda: run.parallelize(build_llama("meta")))
        with init(name) as run:
            model = build_llama("meta")
            model, optimizer = run.parallelize(
                model, torch.optim.AdamW(model.parameters(), lr=1e-2), init=lambda model: model.init_weights()
            )
            plain = getattr(model, "module", model)
            found = state(model)
            for key, value in state(real).items():
                if value.numel() > 100:
                    assert abs(found[key].std().item() - 0.02) < 0.003, (key, found[key].std())
                else:
                    assert torch.equal(found[key], value), key
            assert torch.equal(plain.model.rotary_emb.inv_freq, real.model.rotary_emb.inv_freq)
            ids = torch.arange(12).view(1, 12)
            for _ in range(2):
                optimizer.zero_grad()
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                run.step()
"""
    )
    ranks(script, 2)
