"""Model FLOPs: counted as the formulas of the field have them, and compared with the peak of the device."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from flk_runtime.system import mfu

VOCABULARY, LENGTH, LAYERS, HEADS, WIDTH, BATCH = 61, 32, 3, 4, 48, 5


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.network = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.mix(x).split(WIDTH, dim=-1)
        )
        x = x + self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.network(x)


class GPT(nn.Module):
    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        self.recompute = recompute  # by checkpoint: reentrant or not
        self.letters = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.scale = torch.ones(WIDTH)  # a tensor that is neither parameter nor buffer
        self.scores = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.letters(x) * self.scale
        for layer in self.layers:
            x = layer(x) if self.recompute is None else checkpoint(layer, x, use_reentrant=self.recompute)
        return self.scores(x)


def formula() -> int:
    """6N + 12·L·H·Q·T per token, N without the embedding (PaLM, appendix B); biases and norms multiply nothing."""
    weights = sum(p.numel() for p in GPT().parameters() if p.dim() > 1) - VOCABULARY * WIDTH
    return BATCH * LENGTH * (6 * weights + 12 * LAYERS * HEADS * (WIDTH // HEADS) * LENGTH)


def letters() -> torch.Tensor:
    return torch.empty(BATCH, LENGTH, dtype=torch.int64, device="meta")


@pytest.mark.parametrize("recompute", [None, False, True])
def test_a_gpt_has_the_flops_of_the_formula_recomputed_or_not(recompute: bool | None) -> None:
    assert mfu.count(mfu.skeleton(GPT(recompute)), [((letters(),), {})]) == formula()


def test_frozen_parameters_need_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False))
    model[0].weight.requires_grad_(False)
    model[1].weight.requires_grad_(False)
    x = torch.empty(3, 8, device="meta")
    with pytest.raises(ValueError, match="depends on a parameter"):
        mfu.count(mfu.skeleton(model), [((x,), {})])
    model[1].weight.requires_grad_(True)
    assert mfu.count(mfu.skeleton(model), [((x,), {})]) == 2 * 3 * (8 * 16 + 2 * 16 * 4)


def test_a_skeleton_leaves_its_model_alone_and_keeps_ties() -> None:
    model = GPT().to(torch.bfloat16)
    model.scores.weight = model.letters.weight
    before = {name: value.clone() for name, value in model.state_dict().items()}
    copied = mfu.skeleton(model)
    assert {p.device.type for p in copied.parameters()} == {"meta"}
    assert {p.dtype for p in copied.parameters()} == {torch.float32}
    assert copied.scores.weight is copied.letters.weight
    assert model.letters.weight.device.type == "cpu"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989),
        ("NVIDIA H100 80GB HBM3", torch.float16, 989),
        ("NVIDIA H100 80GB HBM3", torch.float32, 67),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756),
        ("NVIDIA H20", torch.bfloat16, 148),
        ("NVIDIA GB200", torch.bfloat16, 2500),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312),
        ("NVIDIA A100-PCIE-40GB", torch.float32, 19.5),
        ("NVIDIA RTX A6000", torch.bfloat16, 154.85),
        ("AMD Instinct MI300X", torch.bfloat16, 1300),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", torch.bfloat16, None),
        ("NVIDIA A1000 Laptop GPU", torch.bfloat16, None),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, None),
        ("NVIDIA H100 80GB HBM3", torch.float8_e4m3fn, None),
        ("NVIDIA B200", torch.float32, 75),
        ("Tesla T4", torch.bfloat16, None),
        ("Tesla T4", torch.float16, 65),
        ("Tesla V100-PCIE-16GB", torch.float16, 112),
        ("NVIDIA A10G", torch.bfloat16, 70),
        ("cpu", torch.float32, None),
    ],
)
def test_peaks_are_those_of_the_device(name: str, dtype: torch.dtype, tflops: float | None) -> None:
    found = mfu.peak(name, dtype)
    assert found == (tflops * 1e12 if tflops else None)


def test_tf32_has_a_peak_of_its_own() -> None:
    assert mfu.peak("NVIDIA A100-SXM4-80GB", torch.float32, tf32=True) == 156e12


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU with a published peak: 1 TFLOP/s in float32, 2 in bfloat16."""
    monkeypatch.setattr(mfu, "PEAKS", (("cpu", 2, 2, 2, 1),))


def meter(model: nn.Module, said: list[str], world_size: int = 1, dtype: torch.dtype | None = None) -> mfu.Meter:
    made = mfu.Meter(torch.device("cpu"), world_size, said.append)
    made.watch(model, dtype)
    return made


def read_after_a_step(measured: mfu.Meter, clock: Clock) -> float | None:
    """The utilisation in a step of one second after the first one."""
    measured.begin()
    clock.now += 1
    measured.steps += 1
    return measured.read()


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(("dtype", "tflops"), [(None, 1), (torch.bfloat16, 2)])
def test_mfu_is_flops_by_time_and_peak(clock: Clock, dtype: torch.dtype | None, tflops: float) -> None:
    said: list[str] = []
    model = GPT()
    measured = meter(model, said, 4, dtype)
    assert measured.read() is None
    for _ in range(2):  # two micro-batches
        model(torch.zeros(BATCH, LENGTH, dtype=torch.int64))
    clock.now += 50  # the first step is not measured
    measured.begin()
    assert measured.read() is None  # no step has been timed
    for _ in range(10):
        model(torch.zeros(1, 1, dtype=torch.int64))  # only the first step's calls are counted
        clock.now += 0.5
        measured.steps += 1
    assert measured.flops_per_step == 4 * 2 * formula()
    assert measured.read(mark=True) == pytest.approx(2 * formula() / 0.5 / (tflops * 1e12))
    assert measured.read() == pytest.approx(2 * formula() / 0.5 / (tflops * 1e12))  # the latest
    clock.now += 1
    measured.steps += 1
    assert measured.read() == pytest.approx(2 * formula() / 1 / (tflops * 1e12))
    assert said == []


@pytest.mark.usefixtures("known")
def test_autocast_says_what_products_are_computed_in(clock: Clock) -> None:
    model = nn.Linear(4, 4)
    measured = meter(model, [])
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.zeros(2, 4))
    assert read_after_a_step(measured, clock) == pytest.approx(2 * 2 * 2 * 4 * 4 / 2e12)  # x needs no gradient


@pytest.mark.usefixtures("known")
def test_evaluation_is_not_training(clock: Clock) -> None:
    model = nn.Linear(4, 4)
    measured = meter(model, said := [])
    with torch.no_grad():
        model(torch.zeros(2, 4))
    model.eval()
    model(torch.zeros(2, 4))
    assert read_after_a_step(measured, clock) is None
    assert said == ["no mfu: the FLOPs of this model could not be counted (it was not called in the first step)"]


class Stubborn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if x.sum().item() < 1e9 else x

    def __deepcopy__(self, memo: dict[int, Any]) -> Stubborn:
        raise TypeError("holds a socket")


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("copied", [True, False])
def test_what_cannot_be_counted_is_said_once(clock: Clock, monkeypatch: pytest.MonkeyPatch, copied: bool) -> None:
    if copied:
        monkeypatch.delattr(Stubborn, "__deepcopy__")
    model = Stubborn()
    said: list[str] = []
    measured = meter(model, said)
    model(torch.zeros(2, 4))
    assert read_after_a_step(measured, clock) is None
    assert measured.read() is None
    (line,) = said
    assert line.startswith("no mfu: the FLOPs of this model could not be counted (")


def test_an_unknown_gpu_is_named_once(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Z9000")
    model = nn.Linear(4, 4)
    said: list[str] = []
    measured = mfu.Meter(torch.device("cuda", 0), 1, said.append)
    measured.watch(model, torch.bfloat16)
    model(torch.zeros(2, 4))
    measured.begin()
    assert measured.read() is measured.read() is None
    assert said == ["no mfu: the peak of NVIDIA Z9000 in bfloat16 is not known"]


@pytest.mark.usefixtures("known")
def test_a_run_with_several_models_has_none() -> None:
    measured = meter(nn.Linear(4, 4), said := [])
    measured.watch(nn.Linear(4, 4).requires_grad_(False))
    assert said == []  # one is trained
    measured.watch(nn.Linear(4, 4))
    assert said == ["no mfu: it is measured for a single model, and the run has several"]
    measured.begin()
    assert measured.read() is None


def test_counting_draws_none_of_the_random_numbers_of_the_training() -> None:
    """A restart counts again, and would go on with others than those of an undisturbed training."""
    model, before = mfu.skeleton(nn.Linear(2, 2)), random.getstate()
    model.register_forward_pre_hook(lambda *_: random.random() < 0 or None)
    assert mfu.count(model, [((torch.empty(1, 2, device="meta"),), {})])
    assert random.getstate() == before


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("whole", [True, False])
def test_a_script_may_compile_the_model_or_a_function_around_it(whole: bool) -> None:
    """The compiler takes what it traces of a hook for good, as the list of calls that would grow at each step."""
    measured = meter(model := Layer(), [])
    step: Any = torch.compile(model if whole else lambda x: model(x), backend="eager", fullgraph=True)
    step(torch.zeros(2, 3, WIDTH))
    measured.begin()
    step(torch.zeros(2, 3, WIDTH))
    assert len(measured._calls) == whole
