"""A Lightning Trainer whose state flk keeps: it resumes exactly, and saves before a pod goes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support import adapters
from tests.support.pods import Pods

if find_spec("lightning") is None:  # its import takes seconds, in each process of pytest
    pytest.skip("needs lightning from PyPI", allow_module_level=True)

# Two epochs of six steps of two micro-batches, with dropout, a shuffled loader and two validations in each epoch.
TRAIN = """
    import os, pathlib, signal, sys, time, warnings, lightning, torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader, TensorDataset

    from flk_runtime.hosts.lightning import Flk

    warnings.simplefilter("ignore")
    ATTEMPT, RANK = int(os.environ["FLK_ATTEMPT"]), int(os.environ["RANK"])
    DIES = {0: 4, 1: 7} if sys.argv[1] == "dies" else {}

    class Model(lightning.LightningModule):
        def __init__(self, faults):
            super().__init__()
            self.network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
            self.faults, self.seen = faults, {}
        def training_step(self, batch, index):
            x, number = batch
            loss = (self.network(x) - x.sum(1, keepdim=True)).square().mean()
            self.seen[f"{self.trainer.current_epoch} {index}"] = (number.tolist(), loss.item())
            return loss
        def validation_step(self, batch, index):
            torch.rand(1)
            self.log("validated", self.network(batch[0]).mean(), sync_dist=True)
        def on_train_batch_end(self, outputs, batch, index):
            step = self.trainer.global_step
            if self.faults and DIES.get(ATTEMPT) == step and RANK == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if sys.argv[1] == "waits":
                pathlib.Path(f"step.{ATTEMPT}.{RANK}").write_text(str(step))
                while step == 3 and not pathlib.Path("go").exists():
                    time.sleep(0.01)
        def on_save_checkpoint(self, checkpoint):
            checkpoint["seen"] = self.seen
        def on_load_checkpoint(self, checkpoint):
            self.seen = checkpoint["seen"]
        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5), "interval": "step"}]

    def trained(callbacks, distributed_sampler, folder):
        lightning.seed_everything(0, verbose=False)
        data = TensorDataset(torch.randn(48, 4), torch.arange(48))
        model = Model(bool(callbacks))
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, num_nodes=2, strategy="ddp", max_epochs=2, accumulate_grad_batches=2,
            val_check_interval=6, logger=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[*callbacks, ModelCheckpoint(folder, monitor="validated", save_last=True)], log_every_n_steps=3,
            use_distributed_sampler=distributed_sampler,
        )
        batch = 2 if distributed_sampler else 4
        trainer.fit(model, DataLoader(data, batch, shuffle=True), DataLoader(data, 24))
        return trainer, model

    kind = sys.argv[2] == "distributed"
    trainer, model = trained([Flk(save_every=1)], kind, "checkpoints")
    if sys.argv[1] == "dies":
        plain_trainer, plain = trained([], kind, "checkpoints of the other")
        assert model.seen == plain.seen, (model.seen, plain.seen)
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), plain.parameters(), strict=True))
        best = [each.checkpoint_callback.best_model_score for each in (trainer, plain_trainer)]
        assert best[0] == best[1], best
        print("equal", len(model.seen))
"""


@pytest.mark.parametrize("sampler", ["distributed", "random"])
def test_after_a_killed_rank_the_losses_are_those_of_the_undisturbed_training(
    forked_pods: Callable[..., Pods], root: Path, sampler: str
) -> None:
    job = adapters.start(forked_pods, root, TRAIN, 2, "dies", sampler)
    assert job.wait() == [0, 0], job.logs_of_all()
    assert re.findall(r"resumed at step (\d+) from pod memory", job.log(0)) == ["3", "6"]
    assert all("equal 24" in job.log(pod) for pod in job.running)
    lines = [json.loads(line) for line in re.findall(r"\[rank 0\] (\{\"step.*\})", job.log(0))]
    assert [line["step"] for line in lines] == [3, 6, 9, 12]
    assert all(line["samples_per_s"] > 0 and line["loss"] > 0 for line in lines)


def test_all_ranks_save_after_the_same_step_when_a_pod_must_go(forked_pods: Callable[..., Pods], root: Path) -> None:
    job = adapters.start(forked_pods, root, TRAIN, 0, "waits", "distributed")
    paths = [job.folder / f"step.0.{rank}" for rank in (0, 1)]
    job.until(lambda: all(path.exists() and path.read_text() >= "2" for path in paths), "both ranks count steps")
    adapters.ends_saved(job)
