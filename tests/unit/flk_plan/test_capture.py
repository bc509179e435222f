"""A script that is planned gets parameters without data, and everything is as before when it has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from flk_plan.capture import _HAS_RMS_NORM, CapturedModel, _Session, capture
from flk_plan.choice import choose
from flk_plan.communication import Cluster
from flk_plan.hardware import GPUS
from flk_plan.plan import make_plan
from flk_runtime.errors import SetupError
from flk_runtime.parallel import ParallelOptions
from flk_runtime.system import mfu
from flk_runtime.training.process import current

BEGIN = """
import contextlib, torch
from torch import nn
from flk_runtime.parallel import ParallelOptions
from flk_runtime.training.process import current

def block():
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

def shard(model, *optimizers, **options):  # as Run.parallelize
    return current.planner(model, optimizers, ParallelOptions(**options))
"""
MODEL = """
model = nn.Sequential(*(block() for _ in range(3)))
x = torch.randn(4, 8)
"""
STEP = """
model(x).square().mean().backward()
optimizer.step()
raise AssertionError("the script went on after its first step")
"""


@pytest.fixture
def captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Captures a script that begins with BEGIN."""
    monkeypatch.setattr("sys.argv", [])
    monkeypatch.syspath_prepend(tmp_path)  # it restores the path, which the script changes too

    def run(script: str) -> CapturedModel:
        path = tmp_path / "train.py"
        path.write_text(BEGIN + script)
        return capture([str(path)], GPUS["h100"])

    return run


def test_modules_have_parameters_without_data_and_share_those_that_the_script_shares() -> None:
    dropout = functional.dropout
    with _Session(GPUS["h100"]).patches():
        given = nn.Parameter(torch.ones(3), requires_grad=False)
        given.note = "kept"  # type: ignore[attr-defined]
        first, second = nn.ParameterList([given]), nn.ParameterDict({"x": given})
        layer = nn.Linear(2, 2)
        assert functional.dropout is not dropout
    shared: Any = first[0]
    assert shared is second["x"]
    assert isinstance(shared, FakeTensor)
    assert (shared.shape, shared.requires_grad, shared.note) == ((3,), False, "kept")
    assert isinstance(layer.weight, FakeTensor)
    assert isinstance(layer.weight, nn.Parameter)
    assert functional.dropout is dropout
    assert not isinstance(nn.Linear(2, 2).weight, FakeTensor)


NORMS = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(1024) for _ in range(4))
        self.norms.to(torch.bfloat16)

    def forward(self, x):
        for norm in self.norms:
            x = norm(x)
        return x

model = Model()
shard(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.1))
x = torch.zeros(64, 1024, dtype=torch.bfloat16)
model(x).backward(x)
optimizer.step()
"""


@pytest.mark.skipif(not _HAS_RMS_NORM, reason="torch has no kernel of RMSNorm before 2.9")
def test_rms_norm_keeps_its_input_as_the_kernel_of_a_gpu_does(captured: Any) -> None:
    trace = captured(NORMS).trace
    outputs, scales = 4 * 64 * 1024 * 2, 4 * 64 * 4
    gradients = 2 * 64 * 1024 * 2  # of the output and the input of one, and of its weight
    assert outputs + scales <= trace.peak <= outputs + scales + gradients + 1024 * 2


def test_a_script_that_is_planned_parallelizes_one_model() -> None:
    session = _Session(GPUS["h100"])
    with session.patches():
        assert current.planner is not None
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert current.planner(model, [optimizer], ParallelOptions()).module is model
        assert session.captured is not None
        assert session.captured.model is model
        with pytest.raises(SetupError, match="parallelizes several"):
            current.planner(model, [optimizer], ParallelOptions())
    assert current.planner is None


ADAMW = "optimizer = torch.optim.AdamW(model.parameters())\n"
SCRIPTS = {
    "a model on the meta device": """
with torch.device("meta"):
    model = nn.Sequential(block(), block(), nn.BatchNorm1d(8))
x = torch.randn(4, 8)
"""
    + ADAMW
    + "shard(model, optimizer, init=lambda model: None)"
    + STEP,
    "a model on the meta device that the script gives memory": """
with torch.device("meta"):
    model = block()
x = torch.randn(4, 8)
model.to_empty(device="cpu").apply(lambda each: each.reset_parameters() if hasattr(each, "reset_parameters") else None)
"""
    + ADAMW
    + "shard(model, optimizer)"
    + STEP,
    "a model that is moved and converted": MODEL
    + ADAMW
    + "model.to('cpu').bfloat16()\nassert optimizer.param_groups[0]['params'][0].dtype == torch.bfloat16\n"
    + "x = x.bfloat16()\nshard(model, optimizer)"
    + STEP,
    "an optimizer made after parallelize": MODEL + "shard(model)\n" + ADAMW + STEP,
    "an optimizer made after parallelize, in mixed precision": MODEL
    + "from flk_runtime import Precision\nshard(model, precision=Precision())\n"
    + ADAMW
    + STEP,
    "values of tensors that are read": MODEL
    + ADAMW
    + """
shard(model, optimizer)
loss = model(x).square().mean()
assert 0.5 not in model(x)  # read by torch itself
assert torch.isfinite(loss) and loss.isfinite().all() and not torch.isnan(loss)
assert f"{loss:.3f}" == "0" and loss.detach().numpy() == 0 and loss.tolist() == 0.0
assert torch.allclose(loss, loss) and torch.equal(loss, loss)
assert torch.distributions.Categorical(logits=model(x)).sample().shape == (4,)
"""
    + STEP,
    "a mask of the data, whose values are known": MODEL
    + ADAMW
    + """
shard(model, optimizer)
mask = torch.tensor([True, False, True, False])
assert model(x)[mask].shape == (2, 8) and model(x)[mask, None, torch.arange(8) < 2].shape == (2, 1)
model(x)[mask, 1:].square().mean().backward()
optimizer.step()
""",
    "a hook for gradients after parallelize": MODEL
    + ADAMW
    + "shard(model, optimizer)\n"
    + "for each in model.parameters():\n    each.register_post_accumulate_grad_hook(print)\n"
    + STEP,
    "sparse gradients": """
model = nn.Sequential(nn.Embedding(16, 8, sparse=True), nn.Linear(8, 8))
x = torch.arange(4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
shard(model, optimizer)
"""
    + STEP,
    "a model that stays in evaluation mode": MODEL + ADAMW + "model.eval()\nshard(model, optimizer)" + STEP,
    "gradients that are used": MODEL
    + ADAMW
    + """
shard(model, optimizer)
scaler = torch.amp.GradScaler("cpu")
scaler.scale(model(x).square().mean()).backward()
scaler.unscale_(optimizer)
assert nn.utils.clip_grad_norm_(model.parameters(), 1.0).shape == ()
scaler.step(optimizer)
raise AssertionError("the script went on after its first step")
""",
    "a step of another optimizer, and a module beside the script": MODEL
    + ADAMW
    + """
import beside
shard(model, optimizer)
other = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
other.step()
"""
    + STEP,
    "a process group that the script opens": """
torch.distributed.init_process_group("nccl")
"""
    + MODEL
    + ADAMW
    + "shard(model, optimizer)"
    + STEP,
}


@pytest.mark.parametrize("what", SCRIPTS)
def test_a_script_is_captured_with(what: str, captured: Any, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("")
    found = captured(SCRIPTS[what])
    assert (len(found.optimizers), found.can_shard) == (1, what != "sparse gradients")
    assert found.trace.model_flops > 0


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (MODEL + ADAMW + STEP, ""),
        ("raise RuntimeError('as torch does where a wrapper gets no data')", ""),
        (
            "raise OSError('no such weights\\nin any folder')\n",
            ".* from that call; it raised OSError: no such weights$",
        ),
        ("", ""),
    ],
)
def test_a_script_without_parallelize_ends_at_its_first_step_with_the_reason(
    script: str, said: str, captured: Any
) -> None:
    with pytest.raises(SetupError, match=rf"the script did not call run\.parallelize{said}"):
        captured(script)


def test_a_selection_by_values_is_refused(captured: Any) -> None:
    script = MODEL + "shard(model)\nmodel(x)[model(x) > 0].mean().backward()\n"
    with pytest.raises(SetupError, match=r"depends on values of the model \(aten.nonzero.default\), .* have: for"):
        captured(script)


def test_a_model_on_meta_without_an_initializer_is_refused_as_in_a_run(captured: Any) -> None:
    script = "with torch.device('meta'):\n    model = block()\nshard(model)\n"
    with pytest.raises(SetupError, match=r"'0.weight' of the model is on the meta device, .*: pass init="):
        captured(script)


def test_a_model_of_several_optimizers_that_parallelize_does_not_know_is_refused(captured: Any) -> None:
    script = MODEL + "shard(model)\noptimizer = torch.optim.AdamW(model[0].parameters())\n" + STEP
    with pytest.raises(SetupError, match=r"several optimizers train the model"):
        captured(script)


ACCUMULATE = (
    MODEL
    + ADAMW
    + """
parallel = shard(model, optimizer)
def micro_batch(**changes):
    model(x, **changes).square().mean().backward()
"""
)
UNSYNCED = "with parallel.no_sync():\n    "
STEPS = {
    "one": ("micro_batch()", [True]),
    "plain": ("for _ in range(3): micro_batch()", [True, True, True]),
    "no_sync each": (f"for _ in range(2):\n    {UNSYNCED}    micro_batch()\nmicro_batch()", [False, False, True]),
    "no_sync around": (f"{UNSYNCED}for _ in range(2): micro_batch()\nmicro_batch()", [False, False, True]),
    "no_sync backward": (f"y = model(x).sum()\n{UNSYNCED}y.backward()\nmicro_batch()", [False, True]),
    "two calls": ("(model(x) + model(x)).square().mean().backward()", [True]),
    "an evaluation before": ("model.eval()\nmodel(x)\nmodel.train()\nmicro_batch()", [True]),
}


def rows(found: CapturedModel) -> dict[str, dict[str, Any]]:
    plan = make_plan(found, Cluster(1, 8, GPUS["h100"], 1e9))
    return {row["strategy"]: row for row in plan["rows"]}


@pytest.mark.parametrize("what", STEPS)
def test_micro_batches_of_a_step_are_found(what: str, captured: Any) -> None:
    script, synced = STEPS[what]
    found = captured(f"{ACCUMULATE}\n{script}\noptimizer.step()")
    assert found.synced == synced
    calls = 2 if what == "two calls" else 1
    product = 2 * 4 * 8 * 32  # each of 6 linear layers makes three, and the first one has no gradient of its input
    assert found.trace.model_flops == calls * (3 * 6 - 1) * product


def test_all_rows_count_all_micro_batches(captured: Any) -> None:
    steps = {name: rows(captured(f"{ACCUMULATE}\n{STEPS[name][0]}\noptimizer.step()")) for name in STEPS}
    one = steps["one"]
    assert len(one) == 3
    for name in ("plain", "no_sync each"):
        for key, row in steps[name].items():
            assert row["compute_seconds"] == pytest.approx(3 * one[key]["compute_seconds"])
    sent = {name: {key: row["wire_inside"] for key, row in rows.items()} for name, rows in steps.items()}
    alone = sent["one"]
    for name in alone:
        assert sent["plain"][name] == pytest.approx(3 * alone[name])
    # Without a synchronization ddp sends nothing, and full_shard gathers: twice a block, once what is in no block.
    assert sent["no_sync each"]["ddp"] == alone["ddp"]
    assert sent["no_sync each"]["shard_grad_op"] == alone["shard_grad_op"]
    assert sent["no_sync each"]["full_shard"] == pytest.approx(alone["full_shard"] * (3 * 2 + 1) / 3)
    for key, row in steps["no_sync each"].items():
        assert (row["total"] > steps["plain"][key]["total"]) == (key != "ddp"), key


WIDE = """
model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)) for _ in range(3)))
x = torch.randn(512, 512)
"""


def test_a_script_is_predicted_with_its_precision_and_recomputation(captured: Any) -> None:
    def row(options: str = "") -> dict[str, Any]:
        script = "from flk_runtime import Precision\n" + WIDE + ADAMW + f"shard(model, optimizer, {options})" + STEP
        return rows(captured(script))["full_shard"]

    plain, half, again = row(), row("precision=Precision()"), row("recompute=True")
    assert half["compute_seconds"] < plain["compute_seconds"] < again["compute_seconds"]
    assert max(half["activations"], again["activations"]) < plain["activations"]
    assert half["wire_inside"] < plain["wire_inside"]
    assert half["parameters"] == plain["parameters"]


@pytest.mark.parametrize(
    ("options", "gpu", "savings"),
    [
        ("", "h100", ["recompute=True", "flk.Precision()"]),
        ("", "t4", ["recompute=True"]),  # it does not multiply bfloat16
        ("precision=Precision()", "h100", ["recompute=True"]),
        ("recompute=True", "v100", []),
    ],
)
def test_what_saves_memory_is_said_if_the_script_and_the_gpu_can_use_it(
    options: str, gpu: str, savings: list[str], captured: Any
) -> None:
    found = captured(
        "from flk_runtime import Precision\n" + WIDE + ADAMW + f"shard(model, optimizer, {options})" + STEP
    )
    plan = make_plan(found, Cluster(1, 8, GPUS[gpu], 1e9))
    assert plan["savings"] == savings
    said = "the script computes in float32: set precision=flk.Precision() and plan again to compare"
    assert (said in plan["assumptions"]) == ("flk.Precision()" in savings)


def test_a_script_that_recomputes_by_itself_is_not_told_to(captured: Any) -> None:
    own = """
import functools
from torch.utils.checkpoint import checkpoint
for block in model:
    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
"""
    found = captured(WIDE + own + ADAMW + "shard(model, optimizer)" + STEP)
    assert make_plan(found, Cluster(1, 8, GPUS["t4"], 1e9))["savings"] == []


def test_the_mfu_of_a_step_in_autocast_is_of_the_peak_of_its_products(captured: Any) -> None:
    steps = {}
    for dtype in ("bfloat16", "float32"):
        step = f"with torch.autocast('cpu', torch.bfloat16, enabled={dtype == 'bfloat16'}): y = model(x)\n"
        steps[dtype] = rows(captured(f"{ACCUMULATE}\n{step}y.square().mean().backward()\noptimizer.step()"))
    of_autocast, plain = (steps[dtype]["ddp"] for dtype in ("bfloat16", "float32"))
    peaks = GPUS["h100"].peak(torch.bfloat16) / GPUS["h100"].peak(torch.float32)
    same_time = of_autocast["step_seconds"] / plain["step_seconds"]
    assert of_autocast["mfu"] * same_time * peaks == pytest.approx(plain["mfu"])


def test_a_plan_has_the_shard_size_of_the_script(captured: Any) -> None:
    found = captured(MODEL + ADAMW + "shard(model, optimizer, shard_size=2)" + STEP)
    shares = {key: row["parameters"] for key, row in rows(found).items()}  # of a node with eight ranks
    assert shares["hybrid_shard"] == shares["hybrid_shard_zero2"] == shares["ddp"] / 2
    found = captured(MODEL + ADAMW + "shard(model, optimizer, shard_size=3)" + STEP)
    assert not any("hybrid" in key for key in rows(found))  # a run with three of eight ranks is refused


def test_the_optimizer_takes_no_time_for_frozen_parameters(captured: Any) -> None:
    script = MODEL + "model[0].requires_grad_(False)\noptimizer = torch.optim.AdamW(model[1:].parameters())\n"
    script += "shard(model, optimizer)"
    trained = rows(captured(MODEL + ADAMW + "shard(model, optimizer)" + STEP))["ddp"]
    frozen = rows(captured(script + STEP))["ddp"]
    assert frozen["optimizer_seconds"] == pytest.approx(trained["optimizer_seconds"] * 2 / 3)


def test_a_state_that_goes_from_call_to_call_is_planned(captured: Any) -> None:
    script = f"{ACCUMULATE}\ny = x\nfor _ in range(3): y = model(y)\ny.square().mean().backward()\noptimizer.step()"
    found = rows(captured(script))
    once = rows(captured(f"{ACCUMULATE}\nmicro_batch()\noptimizer.step()"))
    assert found["ddp"]["compute_seconds"] > 2.5 * once["ddp"]["compute_seconds"]


CLOSURE = """
def closure():
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return loss

shard(model, optimizer)
optimizer.step(closure)
raise AssertionError("the script went on after its first step")
"""


def test_a_step_with_a_closure_is_planned(captured: Any) -> None:
    found = captured(MODEL + ADAMW + CLOSURE)
    assert found.trace.model_flops == captured(MODEL + ADAMW + "shard(model, optimizer)" + STEP).trace.model_flops


def test_an_optimizer_that_makes_no_step_without_data_is_refused_by_name(captured: Any) -> None:
    found = captured(MODEL + "optimizer = torch.optim.LBFGS(model.parameters())\n" + CLOSURE)
    with pytest.raises(SetupError, match=r"^plan cannot make a step of LBFGS on tensors without data: .*'closure'"):
        rows(found)


SIMILAR = (
    """
class Block(nn.Module):
    def __init__(self, stride, act=nn.functional.relu):
        super().__init__()
        self.conv, self.drop, self.act = nn.Conv1d(8, 8, 3, stride=stride, padding=1), nn.Dropout(0.0), act

    def forward(self, x):
        return self.act(self.conv(x))

model = nn.Sequential(Block(1), {blocks})  # the gradient goes to the input of all but the first
x = torch.randn(4, 8, 64)
"""
    + ADAMW
    + """
shard(model, optimizer)
y = model(x)
assert y.shape == (4, 8, {length}), y.shape
y.square().mean().backward()
optimizer.step()
"""
)


def test_blocks_that_differ_in_a_tuple_or_a_function_are_not_alike(captured: Any) -> None:
    def peaks(*blocks: str, length: int = 64) -> list[int]:
        found = captured(SIMILAR.replace("{blocks}", ", ".join(blocks)).replace("{length}", str(length)))
        return [each.peak - each.begin for each in found.trace.segments if each.block > 0 and not each.backward]

    first, second, third = peaks("Block(1)", "Block(2)", "Block(1)", length=32)
    assert second < first
    assert third == second
    first, second = peaks("Block(1)", "Block(1, lambda x: x.repeat(1, 9, 1)[:, :8])")
    assert second > 2 * first
    for function in ("lambda x, n=n: x.repeat(1, n, 1)[:, :8]", "(lambda n: lambda x: x.repeat(1, n, 1)[:, :8])(n)"):
        first, second = peaks(f"*(Block(1, {function}) for n in (1, 9))")
        assert second > 2 * first


TIMED = (
    """
model = nn.Sequential(nn.Embedding({rows}, 8), nn.Linear(8, 8), nn.ReLU(inplace={inplace}), nn.Linear(8, 8))
x = torch.zeros(2, 8, dtype=torch.int64)
"""
    + ADAMW
)


def test_an_embedding_reads_its_rows_only_and_operations_in_place_take_time(captured: Any) -> None:
    def forward(rows: int = 1 << 20, inplace: bool = False) -> float:
        script = TIMED.replace("{rows}", str(rows)).replace("{inplace}", str(inplace))
        found = captured(script + "shard(model, optimizer)" + STEP)
        return sum(each.seconds for each in found.trace.segments if not each.backward)

    assert forward() == forward(rows=16)
    assert forward(inplace=True) == forward()


CUSTOM = """
@torch.library.custom_op("flk_test::attend", mutates_args=())
def attend(x: torch.Tensor) -> torch.Tensor:
    return x @ x.T @ x

attend.register_fake(torch.empty_like)
attend.register_autograd(lambda ctx, gradient: gradient.clone())

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return attend(self.linear(x))

model, x = Model(), torch.randn(4, 8)
"""


def test_a_model_that_is_compiled_is_not_ranked(captured: Any) -> None:
    found = captured(MODEL + ADAMW + "shard(model, optimizer, compile=True)" + STEP)
    assert {row["modelled"] for row in make_plan(found, Cluster(1, 8, GPUS["h100"], 1e9))["rows"]} == {False}
    with pytest.raises(SetupError, match=r"compile= is not modelled"):
        choose(found, Cluster(1, 8, GPUS["h100"], 1e9), [])


def test_a_kernel_whose_flops_are_unknown_is_a_warning(captured: Any) -> None:
    found = captured(CUSTOM + ADAMW + "shard(model, optimizer)" + STEP)
    plan = make_plan(found, Cluster(1, 8, GPUS["h100"], 1e9))
    assert "no formula for the FLOPs of flk_test.attend, so" in plan["warnings"][0]
    assert {(row["mfu"], row["modelled"]) for row in plan["rows"]} == {(None, False)}
    memory = [row["total"] for row in plan["rows"]]
    assert memory == sorted(memory)  # they are not ranked by times that leave something out
    with pytest.raises(SetupError, match=r"no formula for the FLOPs of flk_test\.attend.*; `flk bench` can measure it"):
        choose(found, Cluster(1, 8, GPUS["h100"], 1e9), [])
    with pytest.raises(ValueError, match=r"torch has no formula for flk_test\.attend"):
        mfu.count(mfu.skeleton(found.model), [((torch.empty(4, 8, device="meta"),), {})])


TRANSFORMERS = """
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{folder}").to("cpu")
model.train()
optimizer = torch.optim.AdamW(model.parameters())
shard(model, optimizer)
words = torch.arange(12).view(1, 12) % 5  # some are the padding, and there is no mask
model(input_ids=words, labels=words).loss.backward()
optimizer.step()
raise AssertionError("the script went on after its first step")
"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_a_model_of_transformers_is_planned(kind: str, captured: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "Llama": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
        "GPT2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16},
    }
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes[kind]
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "weights")
    found = captured(TRANSFORMERS.format(folder=tmp_path / "weights"))
    assert found.trace.model_flops > 0
    plan = make_plan(found, Cluster(1, 8, GPUS["h100"], 1e9))
    assert {row["modelled"] for row in plan["rows"]} == {True}
