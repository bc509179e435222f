"""Checkpoints that flk 0.1.0 wrote resume to the bit, also those of its strategies on FSDP1, which are no more.

`recorded/checkpoints-0.1.0.tar.xz` holds the checkpoints of two ranks after 3 steps of TRAIN with torch 2.13: under
ddp, and under full_shard on FSDP1 and on FSDP2. LOSSES are what those runs gave in 6 steps without a break.
"""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import pytest
import torch

from tests.support.ranks import Ranks
from tests.support.small_model import told

RECORDED = Path(__file__).parent / "recorded" / "checkpoints-0.1.0.tar.xz"
LOSSES = [
    0.17828018963336945, 0.039422061294317245, 0.028600990772247314, 0.056294720619916916, 0.033033160492777824,
    0.05155225470662117,
]  # fmt: skip

TRAIN = """
import json, os, torch, flk_runtime as flk
from torch import nn

with flk.init(device="cpu", log_every=0, save_every=0, checkpoint=os.environ["PLACE"]) as run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Dropout(0.25), nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer = run.parallelize(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    run.register("scheduler", scheduler)
    losses = []
    for x in run.loader([torch.tensor([n / 7, n / 5 - 1, 1 / (n + 1)]) for n in range(24)], 3).steps(6):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        run.step()
        losses.append(run.mean(loss.item()))
print("=", json.dumps(["losses", losses]))
"""


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the recorded checkpoints."""
    folder = tmp_path_factory.mktemp("recorded")
    with tarfile.open(RECORDED) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Debian's Python 3.11.2 has no filters
        archive.extractall(folder)
    return folder


@pytest.mark.parametrize(
    ("written", "strategy"),
    [
        ("ddp", "ddp"),
        ("full_shard-fsdp2", "full_shard"),
        ("full_shard-fsdp1", "full_shard"),
        ("full_shard-fsdp1", "ddp"),
    ],
)
def test_a_checkpoint_of_an_earlier_version_resumes_bit_equal(
    ranks: Ranks, recorded: Path, tmp_path: Path, written: str, strategy: str
) -> None:
    place = tmp_path / "checkpoints"
    shutil.copytree(recorded / written, place)
    ended = ranks(TRAIN, 2, {"PLACE": str(place), "FLK_STRATEGY": strategy})
    assert f"flk: resumed at step 3 from {place}/step-000000003" in ended[0].lines
    if not drops_as_recorded():
        pytest.skip("the dropout of this torch drops other elements than that of the torch that wrote the losses")
    assert told(ended[0])["losses"] == LOSSES[3:]


def drops_as_recorded() -> bool:
    """Whether torch's dropout draws the same elements as that of torch 2.13; that of torch 2.6 does not."""
    generator = torch.Generator().manual_seed(0)
    return torch.empty(8).bernoulli_(0.7, generator=generator).tolist() == [0, 0, 1, 0, 1, 0, 1, 1]
