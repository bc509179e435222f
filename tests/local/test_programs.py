"""Programs as their users write them, for torchrun: under `flk run` they train to the same losses, to the bit."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]
RANKS = 2
FLK = ("-m", "flk", "run", "--replicas", str(RANKS))
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))

BEGIN = """
import json, torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
unseeded = torch.rand(()).item()
losses = []

def tell():
    print(json.dumps({"rank": rank, "ranks": ranks, "losses": losses, "unseeded": unseeded}), flush=True)
    dist.destroy_process_group()
"""

# A small image classifier with dropout and a schedule by epochs; each rank draws its own dropout.
DIGITS = """
torch.manual_seed(1)
model = DDP(nn.Sequential(
    nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d(0.25), nn.Flatten(), nn.Linear(72, 10)
))
data = TensorDataset(torch.rand(64, 1, 8, 8), torch.arange(64) % 10)
torch.manual_seed(100 + rank)
sampler = DistributedSampler(data, seed=2)
loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=1)
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.nll_loss(F.log_softmax(model(images), 1), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    schedule.step()
tell()
"""

# A recurrent language model that carries its state over batches, with clipping and its own step of SGD.
WORDS = """
torch.manual_seed(1)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.recurrent, self.head = nn.Embedding(20, 8), nn.LSTM(8, 8, 2, dropout=0.2), nn.Linear(8, 20)
        self.head.weight = self.embedding.weight

    def forward(self, words, state):
        output, state = self.recurrent(self.embedding(words), state)
        return self.head(output), state

model = DDP(Model())
words = torch.randint(0, 20, (200, 4 * ranks))[:, 4 * rank : 4 * rank + 4]
torch.manual_seed(100 + rank)
state = None
for begin in range(0, 190, 19):
    model.zero_grad()
    state = None if state is None else tuple(each.detach() for each in state)
    output, state = model(words[begin : begin + 19], state)
    loss = F.cross_entropy(output.flatten(0, 1), words[begin + 1 : begin + 20].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    with torch.no_grad():
        for each in model.parameters():
            each.add_(each.grad, alpha=-5.0)
    losses.append(loss.item())
tell()
"""

# A residual network with synchronized metrics, weight decay, warm-up, accumulation and an evaluation.
IMAGES = """
torch.manual_seed(1)

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )

    def forward(self, x):
        return F.relu(x + self.layers(x))

parts = [nn.Conv2d(3, 8, 3), Block(8), Block(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)]
model = DDP(nn.Sequential(*parts))
data = TensorDataset(torch.rand(48, 3, 10, 10), torch.arange(48) % 5)
sampler = DistributedSampler(data)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
for epoch in range(2):
    sampler.set_epoch(epoch)
    model.train()
    for number, (images, labels) in enumerate(DataLoader(data, batch_size=6, sampler=sampler, drop_last=True)):
        images = images + 0.1 * torch.randn_like(images)
        loss = F.cross_entropy(model(images), labels, label_smoothing=0.1) / 2
        loss.backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item())
    model.eval()
    with torch.no_grad():
        losses.append(model(torch.ones(1, 3, 10, 10)).sum().item())
tell()
"""

# A torchvision for CUDA beside a torch for CPUs cannot load its own operators, and ends at two that it describes.
# Neither timm's models nor TRL's trainer compute with one.
TORCHVISION = """
import importlib.util, pathlib, torch
vision = importlib.util.find_spec("torchvision")
if vision:
    try:
        torch.ops.load_library(pathlib.Path(vision.origin).parent / "_C.so")
    except OSError:
        for name in ("nms", "qnms"):
            torch.library.define("torchvision::" + name, "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""

# TRL's trainer for supervised fine-tuning, with a tokenizer and data of its own.
FINE_TUNING = """
import json, tempfile, torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

unseeded = torch.rand(()).item()
words = {word: number for number, word in enumerate(["<pad>", "<eos>", *"abcdefgh"])}
plain = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
plain.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>")
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=len(words), n_positions=16, n_embd=8, n_layer=1, n_head=2))
data = Dataset.from_list([{"text": " ".join("abcdefgh"[(3 * i + j * j) % 8] for j in range(8))} for i in range(32)])
with tempfile.TemporaryDirectory() as folder:
    config = SFTConfig(
        output_dir=folder, max_steps=4, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1,
        report_to=[], save_strategy="no", max_length=16, use_cpu=True, disable_tqdm=True, bf16=False, seed=3,
    )
    trainer = SFTTrainer(model=model, args=config, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    rank, ranks = trainer.args.process_index, trainer.args.world_size
    losses = [float(each.double().norm()) for each in trainer.model.parameters()]
print(json.dumps({"rank": rank, "ranks": ranks, "losses": losses, "unseeded": unseeded}), flush=True)
"""

# A convolutional network of timm with its optimizer, schedule, loss, clipping and average of the weights.
TIMM = """
from timm import create_model
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3, dispatch_clip_grad, distribute_bn, random_seed, reduce_tensor

random_seed(7, rank)
model = create_model("test_resnet", num_classes=4, drop_rate=0.1)
average = ModelEmaV3(model, decay=0.9)
model = DDP(model)
optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-2, weight_decay=0.05)
schedule = CosineLRScheduler(optimizer, t_initial=4, warmup_t=1, warmup_lr_init=1e-4)
loss_of = LabelSmoothingCrossEntropy(0.1)
for step in range(4):
    loss = loss_of(model(torch.randn(4, 3, 64, 64)), torch.arange(4))
    optimizer.zero_grad()
    loss.backward()
    dispatch_clip_grad(model.parameters(), 1.0)
    optimizer.step()
    average.update(model.module)
    schedule.step(step + 1)
    losses.append(reduce_tensor(loss.detach(), ranks).item())
distribute_bn(model, ranks, reduce=True)
losses += [float(each.double().norm()) for each in average.module.state_dict().values()]
tell()
"""

PROGRAMS = {
    "digits": (BEGIN + DIGITS, ()),
    "words": (BEGIN + WORDS, ()),
    "images": (BEGIN + IMAGES, ()),
    "trl": (TORCHVISION + FINE_TUNING, ("trl", "datasets", "transformers")),
    "timm": (TORCHVISION + BEGIN + TIMM, ("timm", "torchvision")),
}


def trained(launcher: tuple[str, ...], program: Path) -> list[dict[str, Any]]:
    """What each rank says at its end, in the order of ranks."""
    strange = ("FLK_", "TORCHELASTIC_", "PET_", "ACCELERATE_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(strange)}
    offline = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, program.name]
    ended = subprocess.run(
        command, cwd=program.parent, env=clean | offline, capture_output=True, text=True, timeout=500
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = [line[line.find("{") :] for line in ended.stdout.splitlines() if '{"rank": ' in line]
    return sorted((json.loads(line) for line in lines), key=lambda result: result["rank"])


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_trains_as_under_torchrun(tmp_path: Path, name: str) -> None:
    source, packages = PROGRAMS[name]
    if missing := [each for each in packages if importlib.util.find_spec(each) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}; `make soak` installs it")
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(source))
    flk, torchrun = trained(FLK, program), trained(TORCHRUN, program)
    assert [each["rank"] for each in flk] == [each["rank"] for each in torchrun] == list(range(RANKS))
    assert [each["losses"] for each in flk] == [each["losses"] for each in torchrun]
    assert flk[0]["ranks"] == RANKS
    assert len({each["unseeded"] for each in (*flk, *torchrun)}) == 2 * RANKS
