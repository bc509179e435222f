"""Measure the steps per second of loops of other packages that flk keeps, against the same loops under torchrun.

    python benchmarks/hosted.py [--rounds 8] [--ranks 2] [--steps 300]

A Trainer of Transformers, a Trainer of Lightning and a loop of Accelerate each train a small model with DDP. On flk's
side its launcher starts the script, and its adapter keeps the state, with its defaults: a checkpoint in memory every
100 steps. On the other side torchrun starts the same script without the adapter.
The time begins after the first 20 steps. A package that is not installed is not measured. Goal: at least 0.98 of the
rate of the others. The processor time of a step on rank 0 may be 1.02 times theirs: it is the same on a busy machine,
where rates are not.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import launch
import measure
from example import WARM_UP, rate
from flk_runtime.contract import pod_env

QUANTITIES = {"rate": (measure.at_least(0.98), "steps/s"), "processor time of a step": (measure.at_most(1.02), "ms")}
WIDTH, BATCH = 256, 32


def make_model() -> nn.Module:
    """A model of 1.3 million parameters, (BATCH, WIDTH) -> (BATCH, 1)."""
    wide = 4 * WIDTH
    return nn.Sequential(nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, wide), nn.GELU(), nn.Linear(wide, 1))


def dataset(steps: int, ranks: int) -> TensorDataset:
    """Samples for as many steps of all ranks."""
    x = torch.randn(steps * ranks * BATCH, WIDTH)
    return TensorDataset(x, x.sum(1, keepdim=True))


def with_accelerate(adopted: bool, ranks: int, steps: int, step: Callable[[], None]) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(dataset(steps, ranks), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    loop: Any = None
    if adopted:
        from flk_hosts.accelerate import adopt

        loop = adopt(accelerator)
    for inputs, targets in loader:
        loss = (model(inputs) - targets).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if loop:
            loop.step(loss=loss, samples=BATCH * ranks)
        step()
    if loop:
        loop.close()


def with_lightning(adopted: bool, ranks: int, steps: int, step: Callable[[], None]) -> None:
    import lightning

    class Model(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = make_model()

        def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
            inputs, targets = batch
            loss: torch.Tensor = (self.network(inputs) - targets).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    class Clock(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, *_: object, **__: object) -> None:
            step()

    callbacks: list[Any] = [Clock()]
    if adopted:
        from flk_hosts.lightning import Flk

        callbacks.insert(0, Flk())
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp",
        max_epochs=1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), DataLoader(dataset(steps, ranks), batch_size=BATCH, shuffle=True))


def with_transformers(adopted: bool, ranks: int, steps: int, step: Callable[[], None]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: object, **__: object) -> None:
            step()

    small = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
    )
    samples = [{"input_ids": line, "labels": line} for line in torch.randint(256, (512, 64))]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=LlamaForCausalLM(small),
            args=TrainingArguments(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=4,
                logging_steps=10,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
                ddp_find_unused_parameters=False,
            ),
            train_dataset=samples,
        )
        if adopted:
            from flk_hosts.transformers import adopt

            adopt(trainer)
        trainer.add_callback(Clock())  # after flk's
        trainer.train()


HOSTS = {
    "transformers": with_transformers,
    "lightning": with_lightning,
    "accelerate": with_accelerate,
}


def measure_rank(arguments: argparse.Namespace) -> None:
    """Train on this rank. Rank 0 writes the QUANTITIES after step WARM_UP."""
    times: dict[int, float] = {}
    spent: list[float] = []

    def step() -> None:
        times[len(times) + 1] = time.perf_counter()
        spent.append(time.process_time())

    HOSTS[arguments.host](arguments.adopted, arguments.ranks, arguments.steps, step)
    if int(os.environ["RANK"]) == 0:
        launch.write_result([rate(times), 1e3 * (spent[-1] - spent[WARM_UP - 1]) / (len(spent) - WARM_UP)])


def quantities(launcher: launch.Launcher, arguments: argparse.Namespace, *more: str) -> list[float]:
    """The QUANTITIES of rank 0 in one job, with checkpoints in memory if the launcher keeps them."""
    script = [__file__, "--ranks", str(arguments.ranks), "--steps", str(arguments.steps), *more]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        variables = {pod_env.MEMORY_ROOT: memory, "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}
        (result,) = launch.run_ranks(script, arguments.ranks, launcher, variables)
    return list(result)


def main() -> int:
    parser = measure.parser(__doc__, rounds=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--host", choices=HOSTS, help="one package only")
    parser.add_argument("--adopted", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if launch.RESULT in os.environ:
        measure_rank(arguments)
        return 0
    if arguments.steps <= WARM_UP:
        parser.error(f"--steps {arguments.steps}: the first {WARM_UP} steps are not measured, so expected more")
    hosts = [host for host in HOSTS if arguments.host in (None, host) and importlib.util.find_spec(host)]
    if not hosts:
        measure.skip("none of these packages is installed")
    report = measure.Report("hosted", arguments)
    for host in hosts:
        cases = {
            "flk": partial(quantities, launch.flk, arguments, "--host", host, "--adopted"),
            "torchrun": partial(quantities, launch.torchrun, arguments, "--host", host),
        }
        values = measure.alternate(cases, arguments.rounds, show="{0[0]:.1f} steps/s, {0[1]:.1f} ms".format)
        for number, (name, (goal, unit)) in enumerate(QUANTITIES.items()):
            flk, torchrun = ([round_[number] for round_ in values[side]] for side in cases)
            what = f"{name} of a loop of {host}, {arguments.ranks} ranks, flk / torchrun"
            report.compare(what, flk, torchrun, goal, unit)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
