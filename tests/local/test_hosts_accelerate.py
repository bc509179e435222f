"""A loop with an Accelerator whose state flk keeps: it resumes exactly, and saves before a pod goes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from tests.support import adapters
from tests.support.collection import skip_without
from tests.support.pods import Pods

skip_without("accelerate")

# Three epochs of three steps of two micro-batches, with dropout, an evaluation after each, and samples that are noisy.
TRAIN = """
    import os, pathlib, signal, sys, time, torch
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from torch.utils.data import DataLoader, Dataset, TensorDataset

    from flk_runtime.hosts.accelerate import adopt

    ATTEMPT, RANK = int(os.environ["FLK_ATTEMPT"]), int(os.environ["RANK"])
    DIES = {0: 2, 1: 4} if sys.argv[1] == "dies" else {}
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)

    class Noisy(Dataset):
        def __len__(self):
            return 24
        def __getitem__(self, index):
            return torch.full((4,), index / 24) + torch.rand(4), index

    class Average:
        value = 0.0
        def state_dict(self):
            return {"value": self.value}
        def load_state_dict(self, state):
            self.value = state["value"]

    def trained(kept):
        set_seed(5)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        loader, evaluation = DataLoader(Noisy(), 2, shuffle=True), DataLoader(Noisy(), 6)
        model, optimizer, loader, evaluation, scheduler = accelerator.prepare(
            model, optimizer, loader, evaluation, scheduler
        )
        average, progress = Average(), {"seen": []}
        accelerator.register_for_checkpointing(average)
        loop = adopt(accelerator, save_every=1, log_every=3, progress=progress) if kept else None
        for epoch in range(loader.iteration, 3):
            model.train()
            for batch, numbers in loader:
                with accelerator.accumulate(model):
                    loss = (model(batch) - 1).square().mean()
                    accelerator.backward(loss)
                    optimizer.step(), scheduler.step(), optimizer.zero_grad()
                average.value += accelerator.reduce(loss.detach(), "mean").item()
                progress["seen"].append([epoch, accelerator.gather(numbers).tolist(), average.value])
                if accelerator.sync_gradients and kept:
                    if DIES.get(ATTEMPT) == loop.steps + 1 and RANK == 1:
                        os.kill(os.getpid(), signal.SIGKILL)
                    loop.step(loss=loss, samples=8)
                    pathlib.Path(f"step.{ATTEMPT}.{RANK}").write_text(str(loop.steps))
                    while sys.argv[1] == "waits" and loop.steps == 2 and not pathlib.Path("go").exists():
                        time.sleep(0.01)
            model.eval()
            total = sum(model(batch).mean().detach() for batch, _ in evaluation)
            progress["seen"].append([epoch, accelerator.reduce(total).item()])
        if kept:
            loop.close()
        accelerator._dataloaders.clear(), accelerator._models.clear(), accelerator._custom_objects.clear()
        accelerator._optimizers.clear(), accelerator._schedulers.clear()
        return progress["seen"], model

    seen, model = trained(True)
    if sys.argv[1] == "dies":
        plain_seen, plain = trained(False)
        assert seen == plain_seen, (seen, plain_seen)
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), plain.parameters(), strict=True))
        print("equal", len(seen))
"""


def test_after_a_killed_rank_the_losses_are_those_of_the_undisturbed_training(
    forked_pods: Callable[..., Pods], root: Path
) -> None:
    job = adapters.start(forked_pods, root, TRAIN, 2, "dies")
    assert job.wait() == [0, 0], job.logs_of_all()
    assert re.findall(r"resumed at step (\d+) from pod memory", job.log(0)) == ["1", "3"]
    assert all("equal 21" in job.log(pod) for pod in job.running)
    lines = [json.loads(line) for line in re.findall(r"\[rank 0\] (\{\"step.*\})", job.log(0))]
    assert [line["step"] for line in lines] == [3, 6, 9]


def test_all_ranks_save_after_the_same_step_when_a_pod_must_go(forked_pods: Callable[..., Pods], root: Path) -> None:
    job = adapters.start(forked_pods, root, TRAIN, 0, "waits")
    job.until(lambda: all((job.folder / f"step.0.{rank}").exists() for rank in (0, 1)), "both ranks train")
    adapters.ends_saved(job)
