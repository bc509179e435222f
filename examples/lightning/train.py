"""A Lightning script: a Trainer with DDP, which detects its launcher. It does not use flk.

flk run --replicas 2 examples/lightning/train.py
torchrun --nproc-per-node 2 examples/lightning/train.py
python examples/lightning/train.py
"""

import json
import os
import sys

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, BATCH, EPOCHS = 64, 8, 2


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))

    def training_step(self, batch, index):
        x, y = batch
        return F.mse_loss(self.network(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main():
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    lightning.seed_everything(0, verbose=False)
    x = torch.randn(SAMPLES, 8)
    data = TensorDataset(x, x.sum(dim=1, keepdim=True))
    model = Model()
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)),
        strategy="ddp" if world_size > 1 else "auto",
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=BATCH // world_size))
    with torch.no_grad():
        loss = F.mse_loss(model.network(x), x.sum(dim=1, keepdim=True))  # of all samples, with this rank's parameters
    norm = torch.stack([parameter.detach().norm() for parameter in model.parameters()]).norm()
    result = {
        "rank": trainer.global_rank,
        "world_size": trainer.world_size,
        "steps": trainer.global_step,
        "loss": loss.item(),
        "norm": norm.item(),
        "started_by": type(getattr(trainer.strategy, "cluster_environment", None)).__name__,
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
