"""A training script for tests of elastic jobs that records the samples of each step, and a reader of the records."""

from __future__ import annotations

import json
from pathlib import Path

SAMPLES = 640

# Arguments: the folder for what the ranks write, the pause after each step in seconds, the number of epochs.
TRAIN = """
    import json, pathlib, sys, time
    import torch, torch.nn.functional as F
    from torch.utils.data import Dataset
    import flk_runtime as flk

    folder, pause, epochs = pathlib.Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    torch.manual_seed(0)
    x = torch.randn(640 + 256, 8)
    y = x.sum(1, keepdim=True) + 0.1 * torch.randn(640 + 256, 1)

    class Data(Dataset):
        def __len__(self):
            return 640

        def __getitem__(self, index):
            return x[index], y[index], index

    with flk.init(log_every=0) as run:
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        model, optimizer = run.parallelize(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        loader = run.loader(Data(), batch_size=2, accumulate=1)
        run.print(f"{run.world_size} of {run.full_world_size} ranks from step {run.steps}")
        took = open(folder / f"took.{run.attempt}.{run.rank}", "a", buffering=1)
        for epoch in loader.epochs(epochs):
            for batch in loader:
                taken = set()  # a rank with fewer samples than micro-batches repeats one
                for inputs, targets, numbers in run.micro_batches(batch):
                    taken.update(numbers.tolist())
                    run.backward(F.mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(pause)
                print(json.dumps([run.steps, epoch, sorted(taken), time.time()]), file=took)
                run.step()
        with torch.no_grad():
            run.log(held_out=F.mse_loss(model(x[640:]), y[640:]).item())
"""


def last_step(folder: Path) -> int:
    """The last step that a rank has begun, from 0; -1: none."""
    lines = [line for path in folder.glob("took.*") for line in path.read_text().splitlines() if line.endswith("]")]
    return max((int(json.loads(line)[0]) for line in lines), default=-1)


def samples_by_step(folder: Path) -> dict[int, list[int]]:
    """The samples that each step has taken, over all ranks.

    An attempt that begins at a step discards that step and all later steps of the attempts before it.
    """
    steps: dict[int, list[int]] = {}
    files = sorted(folder.glob("took.*"), key=lambda path: int(path.name.split(".")[1]))
    attempts: dict[int, list[list[object]]] = {}
    for path in files:
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("]")]
        attempts.setdefault(int(path.name.split(".")[1]), []).extend(rows)
    for rows in attempts.values():
        begun: dict[int, list[int]] = {}
        for step, _, samples, _ in rows:
            begun.setdefault(step, []).extend(samples)  # type: ignore[call-overload]
        steps = {step: taken for step, taken in steps.items() if not begun or step < min(begun)} | begun
    return steps
