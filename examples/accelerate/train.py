"""A Hugging Face Accelerate script: an Accelerator, which reads the launcher's variables. It does not use flk.

flk run --replicas 2 examples/accelerate/train.py
torchrun --nproc-per-node 2 examples/accelerate/train.py
python examples/accelerate/train.py
"""

import json
import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, BATCH, EPOCHS = 64, 8, 2


def main():
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(0)
    x = torch.randn(SAMPLES, 8)
    data = TensorDataset(x, x.sum(dim=1, keepdim=True))
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data, batch_size=BATCH // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    steps = 0
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            loss = F.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1

    with torch.no_grad():
        model = accelerator.unwrap_model(model)
        x = x.to(accelerator.device)
        loss = F.mse_loss(model(x), x.sum(dim=1, keepdim=True))  # of all samples, with this rank's parameters
    norm = torch.stack([parameter.detach().norm() for parameter in model.parameters()]).norm()
    result = {
        "rank": accelerator.process_index,
        "world_size": accelerator.num_processes,
        "steps": steps,
        "loss": loss.item(),
        "norm": norm.item(),
    }
    sys.stdout.write(json.dumps(result) + "\n")
    accelerator.end_training()


if __name__ == "__main__":
    main()
