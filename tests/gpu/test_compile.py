"""Compiled blocks on a GPU: after a kill they compute what they computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gpu import RESTARTED, Launch, restarts, said, seen

# Attempt 0 makes five steps and is killed. Attempt 1 begins after step 3.
TRAIN = """
    def train(strategy, options):
        with flk.init(strategy=strategy, save_every=0, log_every=0) as run:
            model = make()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer = run.parallelize(model, optimizer, compile=options, blocks="Block")
            while run.steps < 5:
                torch.manual_seed(run.steps)
                x = torch.randn(64, WIDTH, device=run.device)
                loss = F.mse_loss(model(x), x.roll(1))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.step()
                note(str(run.steps), loss.item())
                if run.steps == 3 and ATTEMPT == 0:
                    run.save(wait=True)
            if ATTEMPT == 0:
                kill()
            run.log(graphs=torch._dynamo.utils.counters["stats"]["unique_graphs"])
"""


@pytest.mark.parametrize("strategy", ["no_shard", "full_shard"])
@pytest.mark.parametrize("options", [True, {"mode": "reduce-overhead"}], ids=["default", "cuda-graphs"])
def test_compiled_blocks_go_on(launch: Launch, tmp_path: Path, root: Path, strategy: str, options: object) -> None:
    found = said(launch(RESTARTED, TRAIN, f"train({strategy!r}, {options!r})\n", **restarts(tmp_path, memory=root)))
    first, second = seen(tmp_path, 0), seen(tmp_path, 1)
    assert sorted(second) == ["4", "5"]
    assert [second[step] for step in ("4", "5")] == pytest.approx([first[step] for step in ("4", "5")], rel=1e-6)
    assert first["4"] != first["5"]
    assert found["graphs"] >= 1
