"""What the plan knows of a model that tensor parallelism splits: volumes and memory by hand, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from flk_plan.capture import CapturedModel
from flk_plan.choice import choose
from flk_plan.communication import Cluster
from flk_plan.hardware import GPUS
from flk_plan.plan import make_plan
from flk_plan.trace import Tracer
from flk_runtime.errors import SetupError
from flk_runtime.parallel import ParallelOptions

H100 = GPUS["h100"]
PLAN = {"*.up": "colwise", "*.down": "rowwise"}


class Block(nn.Module):
    """Eight numbers to 32 and back, for which the split needs one sum in each pass."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        return self.down(self.up(x).relu())


def captured(width: int = 8, batch: int = 4, **options: Any) -> CapturedModel:
    """Two blocks, and four samples in a micro-batch; after the first step."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        blocks = [Block(width), Block(width)]
        model = nn.Sequential(*blocks)
        x = torch.zeros(batch, width)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    tracer = Tracer(model, blocks, H100)
    with mode, tracer.recording():
        model(x).square().mean().backward()
    given = ParallelOptions(**{"tp_plan": PLAN, **options})
    return CapturedModel(model, [optimizer], given, list(blocks), [((x,), {})], tracer.result())


def rows(model: CapturedModel, cluster: Cluster) -> dict[tuple[str, int, bool], dict[str, Any]]:
    plan = make_plan(model, cluster)
    return {(row["strategy"], row["tp"], row["recompute"]): row for row in plan["rows"] if row["precision"] != "bf16"}


def test_volumes_and_memory_of_split_layers() -> None:
    """Four ranks: two parts of the data, and each layer over two ranks.

    A block of 8·32 + 32 + 32·8 + 8 = 552 numbers has 280 on a rank: 16·8 + 16 + 8·16 + 8. FSDP2 sends half of its
    1,120 bytes in each of two all-gathers and one reduce-scatter. The sum of a block's output has 4·8·4 = 128 bytes,
    of which a ring of two sends as many; and so has the sum of the second block's gradient of its input.
    """
    found = rows(captured(), Cluster(1, 4, H100, 1e9))
    row, whole = found["full_shard", 2, False], found["full_shard", 1, False]
    assert row["wire_inside"] == 2 * 3 * 560 + 3 * 128
    assert whole["wire_inside"] == 2 * 3 * 552 * 4 * 3 / 4
    assert (row["parameters"], row["gradients"], row["optimizer"]) == (1120, 1120, 1120)
    assert row["wire_between"] == 0
    # The outputs of the layers up, and of the relus, take half.
    assert row["activations"] < whole["activations"]
    assert row["exposed_seconds"] > whole["exposed_seconds"]
    assert ("ddp", 2, False) not in found  # tp= needs a strategy that shards
    # torch ends a recomputation when it has what the backward pass needs, before the sum of the block's output.
    assert found["full_shard", 2, True]["wire_inside"] == row["wire_inside"]


def test_between_nodes_shards_are_sent_and_sums_stay_inside() -> None:
    found = rows(captured(), Cluster(2, 2, H100, 1e9))
    row = found["full_shard", 2, False]
    assert (row["wire_inside"], row["wire_between"]) == (3 * 128, 2 * 3 * 560)
    assert {tp for _, tp, _ in found} == {1, 2}  # not 4, which would leave the node
    assert ("hybrid_shard", 1, False) in found
    assert ("hybrid_shard", 2, False) not in found  # a node has one part of the data


def test_rows_are_in_the_order_of_the_time_for_equally_many_samples() -> None:
    plan = make_plan(captured(1024, 4096), Cluster(1, 4, H100, 1e9))
    times = [row["step_seconds"] * row["tp"] for row in plan["rows"]]
    assert times == sorted(times)
    assert plan["rows"][0]["tp"] == 1
    assert any("with TP n, n ranks have the same samples" in text for text in plan["assumptions"])
    mfu = {row["tp"]: row["mfu"] for row in plan["rows"] if row["strategy"] == "full_shard"}
    assert mfu[1] > mfu[2] > mfu[4]


def test_a_model_that_fits_only_when_it_is_split_gets_a_mesh() -> None:
    model = captured(8192, 16)  # each block's parameters take 2.0 GiB in float32, which FSDP2 has whole in use
    memory = int(6.5 * (1 << 30))
    plan = make_plan(model, Cluster(1, 8, GPUS["h100"].__class__("H100", memory, 3.35e12, 450e9), 1e9))
    fits = [row for row in plan["rows"] if row["fits"]]
    assert fits
    assert all(row["tp"] > 1 for row in fits if row["precision"] == "as written")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 2, "tp_plan": {"*.up": "sequence_parallel"}}, "plan does not model the style 'sequence_parallel'"),
        ({"tp": 2, "tp_plan": {"0": "colwise"}}, "plan does not model the split of '0', a Block"),
        ({"tp": 3}, r"the mesh \(tp 3\) does not divide the world size, 4"),
        ({"tp": 2, "tp_plan": {"up": "colwise"}}, "the model has no such module"),
    ],
)
def test_what_is_not_modelled_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        make_plan(captured(**options), Cluster(1, 4, H100, 1e9))


def test_sizes_that_do_not_fit_have_no_rows_and_the_plan_says_why() -> None:
    plan = make_plan(captured(6), Cluster(1, 4, H100, 1e9))
    assert {row["tp"] for row in plan["rows"]} == {1, 2, 4}
    plan = make_plan(captured(5), Cluster(1, 8, H100, 1e9))  # 20 is no multiple of 8
    assert {row["tp"] for row in plan["rows"]} == {1, 2, 4}
    assert "no row has tp=8: tp=8 does not divide dimension 0 of 0.up.weight, 20" in plan["warnings"]
    plan = make_plan(captured(tp_plan={"*.up": "colwise"}), Cluster(1, 2, H100, 1e9))  # down gets half of its input
    assert {row["tp"] for row in plan["rows"]} == {1}
    assert any("no row has tp=2, with which the model's forward pass fails" in text for text in plan["warnings"])


def test_without_a_plan_of_the_model_there_are_no_rows_with_split_layers() -> None:
    assert {tp for _, tp, _ in rows(captured(tp_plan=None), Cluster(1, 4, H100, 1e9))} == {1}


def test_auto_chooses_among_the_strategies_that_shard_for_a_script_with_tp() -> None:
    chosen = choose(captured(1024, 4096, tp=2), Cluster(1, 4, H100, 1e9), [])
    assert chosen["strategy"] in ("shard_grad_op", "full_shard")
    assert "ddp" not in chosen["reason"]
