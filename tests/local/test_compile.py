"""Meta initialization, recomputation and compilation of blocks, under DDP and FSDP2."""

from __future__ import annotations

from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import load_with_torch
from tests.support.ranks import Ranks
from tests.support.small_model import SMALL_MODEL, told

STRATEGIES = ("ddp", "full_shard")

# Counts forward passes of blocks that are not compiled, and compiled graphs. $BASE: the folder for checkpoints.
VARIANTS = """
calls = 0
plain = Block.forward

def counted(self, x):
    global calls
    calls += not torch.compiler.is_compiling()
    return plain(self, x)

def start(run, name, variant):
    global calls
    options = {{"recompute": variant in ("recompute", "both")}}
    if variant in ("compile", "both"):
        options["compile"] = "eager"
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    warnings.filterwarnings("ignore", "The .grad attribute")  # of the compiler's own looking
    Block.forward = plain if variant in ("compile", "both") else counted
    init = "reset_parameters" if variant == "meta" else None
    pair = run.parallelize(*build(meta=variant == "meta"), init=init, **hybrid(name), **options)
    calls = 0
    return pair

with group():
    for variant, names in {variants}.items():
        for name in names:
            case = f"{{name}}-{{variant}}"
            with init(name, checkpoint=os.environ["BASE"] + "/" + case) as run:
                seen = train(run, *start(run, name, variant), steps=2)
                tell(case, [seen, calls, torch._dynamo.utils.counters["stats"]["unique_graphs"]])
"""


# Calls of plain blocks and compiled graphs in 2 steps of 2 blocks, and the strategies of ranks. A compiler's first
# look takes long, so each variant with one has a strategy of its own.
EXPECTED = {
    "meta": (4, 0, STRATEGIES),
    "recompute": (8, 0, STRATEGIES),
    "compile": (0, 1, ("ddp",)),
    "both": (0, 1, ("full_shard",)),
}


def test_losses_and_names_stay(ranks: Ranks, tmp_path: Path) -> None:
    def run(world_size: int, variants: dict[str, Any]) -> dict[str, Any]:
        script = SMALL_MODEL + VARIANTS.format(variants=variants)
        return told(ranks(script, world_size, {"BASE": str(tmp_path)})[0])

    alone = run(1, {"plain": ["ddp"], **{variant: ["none"] for variant in EXPECTED}})
    expected, plain_calls, _ = alone.pop("ddp-plain")
    assert plain_calls == 4
    names = list(load_with_torch(tmp_path / "ddp-plain" / "step-000000002")["model"])
    found = run(2, {variant: names for variant, (_, _, names) in EXPECTED.items()})
    assert (len(alone), len(found)) == (4, 6)
    for case, (seen, calls, graphs) in (found | alone).items():
        assert seen == pytest.approx(expected, abs=1e-6), case
        assert (calls, graphs) == EXPECTED[case.partition("-")[2]][:2], case
    for case in found:
        content = load_with_torch(tmp_path / case / "step-000000002")
        assert sorted(content["model"]) == sorted(names), case


@pytest.mark.soak
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param(True, id="inductor")])
def test_a_compiler_trains_as_eager_does(fork_server: ForkServerContext, tmp_path: Path, compiler: str | bool) -> None:
    """The soak has inductor, whose C++ takes a minute to compile. The other one ends where inductor would begin."""
    script = (
        SMALL_MODEL
        + f"""
warnings.simplefilter("ignore")  # inductor uses names that torch itself deprecates
with init("none") as run:
    for compile in (False, {compiler!r}):
        tell(str(bool(compile)), train(run, *run.parallelize(*build(), compile=compile), steps=2))
    tell("graphs", torch._dynamo.utils.counters["stats"]["unique_graphs"])
"""
    )
    # One thread: inductor's pool of compiler processes does not start in a forked process.
    ranks = Ranks(fork_server, tmp_path, patience=240)  # the C++ compiler takes long on a busy machine
    found = told(ranks(script, 1, {"TORCHINDUCTOR_COMPILE_THREADS": "1"})[0])
    assert found["graphs"] == 1
    assert found["True"] == pytest.approx(found["False"], abs=1e-5)


@pytest.mark.soak
def test_a_parallelized_model_is_saved_whole_by_torch(ranks: Ranks, tmp_path: Path) -> None:
    """torch.save and copy.deepcopy take a compiled, recomputed model, of DDP and of one process, as a plain one."""
    script = (
        SMALL_MODEL
        + """
import copy
with group(), init("ddp") as run:
    model, optimizer = run.parallelize(*build(), recompute=True, compile="eager")
    words = data(1, 1)[0][0][0]
    warnings.filterwarnings("ignore", "The .grad attribute")
    loss = loss_of(model, words)
    path = f"{os.environ['BASE']}/{run.rank}.pt"
    torch.save(model, path)
    for twin in (torch.load(path, weights_only=False), copy.deepcopy(getattr(model, "module", model))):
        inner = getattr(twin, "module", twin)
        assert type(inner.blocks[0]) is Block
        again = loss_of(inner, words)
        assert again.item() == loss.item()
        again.backward()
        inner.head.weight.data.zero_()
    assert loss_of(model, words).item() == loss.item()
    tell("done", True)
"""
    )
    for world_size in (1, 2):
        for rank in ranks(script, world_size, {"BASE": str(tmp_path)}):
            assert told(rank) == {"done": True}
