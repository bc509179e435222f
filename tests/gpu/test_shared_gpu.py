"""Two ranks that share a GPU by gloo: what is sharded, saved in memory and restored is the state of several ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from flk_runtime.contract import pod_env
from tests.support.gpu import Launch

SCRIPT = """
    import pathlib, signal
    from torch.utils.data import TensorDataset

    kill_at = int(os.environ.get("KILL_AT", 0))
    torch.distributed.init_process_group("cpu:gloo,cuda:gloo")
    with flk.init(device="cuda:0", save_every=1, seed=3) as run:
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.2)) for _ in range(3))
        model = nn.Sequential(nn.Linear(16, 32), *layers, nn.Linear(32, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        model, optimizer = run.parallelize(model, optimizer)
        generator = torch.Generator().manual_seed(5)
        data = TensorDataset(torch.randn(256, 16, generator=generator), torch.randn(256, 1, generator=generator))
        for x, y in run.loader(data, 8).steps(12):
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with open(f"losses.{run.rank}", "a") as file:
                file.write(json.dumps([run.steps, loss.item(), str(x.device)]) + "\\n")
            run.step(loss=loss)
            if run.steps == kill_at and run.rank == 1 and not os.path.exists("killed"):
                pathlib.Path("killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
"""


def losses(folder: Path, rank: int) -> dict[int, float]:
    """The last loss of each step on a rank, and a check that it was computed on the GPU."""
    found = {}
    for line in (folder / f"losses.{rank}").read_text().splitlines():
        step, loss, device = json.loads(line)
        assert device == "cuda:0"
        found[step] = loss
    return found


@pytest.mark.parametrize("strategy", ["ddp", "shard_grad_op", "full_shard", "hybrid_shard"])
def test_a_killed_rank_restores_what_two_ranks_had_on_the_gpu(
    launch: Launch, tmp_path: Path, root: Path, strategy: str
) -> None:
    variables = {pod_env.MEMORY_ROOT: str(root), pod_env.RESTARTS: "3", "FLK_STRATEGY": strategy}
    launch(SCRIPT, processes=2, **variables)
    undisturbed = [losses(tmp_path, rank) for rank in range(2)]
    for rank in range(2):
        (tmp_path / f"losses.{rank}").unlink()
    ended = launch(SCRIPT, processes=2, KILL_AT="7", **variables)
    restored = re.findall(r'"restored":(\d+),"restored_from":"memory"', ended.stdout + ended.stderr)
    assert restored, ended.stdout + ended.stderr
    assert int(restored[-1]) in (6, 7)
    assert [losses(tmp_path, rank) for rank in range(2)] == undisturbed
    assert undisturbed[0] != undisturbed[1]
