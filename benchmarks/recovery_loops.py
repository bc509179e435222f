"""Measure the time from the SIGKILL of a rank to the next step of loops of other packages, their imports included.

    python benchmarks/recovery_loops.py [--rounds 8] [--ranks 2] [--host transformers]

A Trainer of Transformers, a Trainer of Lightning and a loop of Accelerate train a small model with DDP, each in a
script that imports its packages at its top. On flk's side the adapter of the package keeps the state in the memory of
the pod. On the other side torchrun starts the same script without the adapter, and the loop saves after 15 steps and
resumes with the checkpoints of its package. When all ranks have made 20 steps, one is killed. The time ends with the
first step that all have finished afterwards. A package that is not installed is not measured. The job of Accelerate
names in `preload` what its loop imports, since prepare() imports datasets if that is installed.
Goals: at most 2 s, and at most a tenth of torchrun's time.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from functools import partial
from typing import Final

import launch
import measure
from flk_runtime.contract import pod_env
from recovery import GOAL, compare, seconds_to_recover

IN_ALL: Final = measure.at_most(1)  # of SECONDS
SECONDS: Final = 2.0

# Behind the imports of each script: step() notes a step, and says whether the training is to end.
CLOCK: Final = """
second = os.path.exists("killed")
times = open(f"{'second' if second else 'first'}.{os.getpid()}", "w", buffering=1)
made = itertools.count(1)


def step():
    print(time.time(), file=times)
    return next(made) >= 20 and second


def make_model():
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1))


def make_loader():
    x = torch.randn(16_384, 64)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)


adopted = "FLK_ATTEMPT" in os.environ
"""

IMPORTS: Final = """
import itertools
import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
"""

TRANSFORMERS: Final = """
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
{clock}

class Clock(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        control.should_save = state.global_step == 15 and not adopted
        control.should_training_stop |= step()


trainer = Trainer(
    model=LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    ),
    args=TrainingArguments(
        output_dir="saved",
        max_steps=100_000,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        ddp_find_unused_parameters=False,
    ),
    train_dataset=[{{"input_ids": line, "labels": line}} for line in torch.randint(64, (512, 16))],
    callbacks=[Clock()],
)
if adopted:
    adopt(trainer, save_every=1)
trainer.train(resume_from_checkpoint=get_last_checkpoint("saved") if second and not adopted else None)
"""

LIGHTNING: Final = """
import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
{clock}

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = make_model()

    def training_step(self, batch, index):
        inputs, targets = batch
        return (self.network(inputs) - targets).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class Clock(lightning.Callback):
    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop |= step()


keeper = Flk(save_every=1) if adopted else ModelCheckpoint("saved", every_n_train_steps=15, save_last=True)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    strategy="ddp",
    max_epochs=1_000,
    callbacks=[keeper, Clock()],
    logger=False,
    enable_checkpointing=not adopted,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Model(), make_loader(), ckpt_path="last" if second and not adopted else None)
"""

ACCELERATE: Final = """
from accelerate import Accelerator
{clock}

accelerator = Accelerator(cpu=True)
model = make_model()
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader())
loop = adopt(accelerator, save_every=1) if adopted else None
if second and not adopted:
    accelerator.load_state("saved")
for epoch in range(1_000):
    for number, (inputs, targets) in enumerate(loader, 1):
        loss = (model(inputs) - targets).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if loop:
            loop.step(loss=loss)
        elif number == 15 and not second:
            accelerator.save_state("saved")
        if over := step():
            break
    if over:
        break
if loop:
    loop.close()
accelerator.end_training()
"""

# The loop of each package, and the line by which its script gets flk's adapter.
HOSTS: Final = {
    "transformers": (TRANSFORMERS, "from flk_hosts.transformers import adopt"),
    "lightning": (LIGHTNING, "from flk_hosts.lightning import Flk"),
    "accelerate": (ACCELERATE, "from flk_hosts.accelerate import adopt"),
}

# What the job of a loop names for the fork server, where that is more than its script imports at its top.
PRELOAD: Final = (
    {"accelerate": "accelerate datasets flk_hosts.accelerate"} if importlib.util.find_spec("datasets") else {}
)


def script(host: str, *, adopted: bool) -> str:
    """The script of a loop, with flk's adapter or without it."""
    loop, adapter = HOSTS[host]
    return IMPORTS + loop.format(clock=(adapter if adopted else "") + CLOCK)


def recovery_of(launcher: launch.Launcher, ranks: int, text: str, preload: str = "") -> float:
    """Seconds from the kill of a rank to the first step that all have finished afterwards, with memory for flk's saves.

    flk's launcher imports the modules ``preload`` before the ranks. Raises NoRecoveryError.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        os.environ |= {pod_env.MEMORY_ROOT: memory, pod_env.PRELOAD: preload}
        return seconds_to_recover(launcher, ranks, 1, text)


def main() -> int:
    parser = measure.parser(__doc__, rounds=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--host", choices=HOSTS, help="one package only")
    arguments = parser.parse_args()
    hosts = [host for host in HOSTS if arguments.host in (None, host) and importlib.util.find_spec(host)]
    if not hosts:
        measure.skip("none of these packages is installed")
    report = measure.Report("recovery_loops", arguments)
    for host in hosts:
        measure.progress(host)
        cases = {
            "flk": partial(recovery_of, launch.flk, arguments.ranks, script(host, adopted=True), PRELOAD.get(host, "")),
            "torchrun": partial(recovery_of, launch.torchrun, arguments.ranks, script(host, adopted=False)),
        }
        named = f", preload {PRELOAD[host]}" if host in PRELOAD else ""
        what = f"recovery of a loop of {host}, {arguments.ranks} ranks{named}"
        seconds = compare(report, what, cases, arguments.rounds, GOAL)
        report.compare(f"{what}, flk / limit", seconds, [SECONDS] * len(seconds), IN_ALL, "s")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
