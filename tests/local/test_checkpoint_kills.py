"""kill -9 at random moments of saves: the next attempt finds the last completed checkpoint, whole and of one step."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.collection import often
from tests.support.ranks import Ranks

# All values of the state are the number of the step, so a mixed state shows. The ranks kill themselves when $DELAY
# seconds have passed since the second step.
TRAIN = """
    import os, signal, threading, torch, flk_runtime as flk

    class Counter:
        value = 0
        def state_dict(self):
            return {"value": self.value, "tensor": torch.full((5,), float(self.value))}
        def load_state_dict(self, state):
            assert state["tensor"].unique().tolist() == [state["value"]]
            self.value = state["value"]

    run = flk.init(device="cpu", save_every=1, log_every=0, strategy=os.environ["STRATEGY"])
    model = torch.nn.Sequential(*(torch.nn.Linear(129, 129) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = run.parallelize(model, optimizer)
    run.register("counter", counter := Counter())
    begun = run.steps
    values = lambda: [getattr(p, "to_local", lambda: p)().detach() for p in model.parameters()]
    moments = lambda: [s["exp_avg"] for s in optimizer.state.values()]
    if begun:
        assert counter.value == begun, (counter.value, begun)
        for value in values() + [getattr(m, "to_local", lambda: m)() for m in moments()]:
            assert value.unique().tolist() in ([], [begun]), (value, begun)
    print("begins", begun, flush=True)
    while True:
        model(torch.ones(2, 129)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            for value in values() + moments():
                getattr(value, "to_local", lambda: value)().fill_(run.steps + 1)
        counter.value = run.steps + 1
        run.step()
        if run.steps == begun + 2:
            threading.Timer(float(os.environ["DELAY"]), os.kill, (os.getpid(), signal.SIGKILL)).start()
"""


def kill_again_and_again(ranks: Ranks, place: str, rounds: int, strategy: str, latest: Path) -> None:
    chosen = random.Random(strategy)
    known = 0
    for _ in range(rounds):
        delay = chosen.random() * 0.3
        variables = {"FLK_CHECKPOINT": place, "STRATEGY": strategy, "DELAY": str(delay)}
        ended = ranks(TRAIN, 2, variables, failing=True)
        begun = [int(line.split()[1]) for rank in ended for line in rank.lines if line.startswith("begins")]
        assert begun == [known, known], [rank.output for rank in ended]
        known = int(latest.read_text().split()[0].removeprefix("step-")) if latest.exists() else 0
        assert known > begun[0], "no checkpoint was completed"


@pytest.mark.promise("Checkpoints: S3 keeps them as a folder does")
@pytest.mark.parametrize("strategy", often((1,), ["ddp", "full_shard"]))
def test_a_kill_at_any_moment_leaves_the_last_completed_checkpoint(ranks: Ranks, tmp_path: Path, strategy: str) -> None:
    kill_again_and_again(ranks, str(tmp_path / "folder"), 5, strategy, tmp_path / "folder" / "latest")


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("strategy", ["ddp", "full_shard"])
def test_a_hundred_kills_at_any_moment_leave_the_last_completed_checkpoint(
    ranks: Ranks, tmp_path: Path, strategy: str
) -> None:
    kill_again_and_again(ranks, str(tmp_path / "folder"), 100, strategy, tmp_path / "folder" / "latest")
