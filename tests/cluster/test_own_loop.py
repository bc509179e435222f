"""A training loop of the script's own in pods, whose state flk.adopt keeps."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

TRAIN = """
    import time, torch, torch.distributed as dist
    from torch import nn
    import flk_runtime as flk

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    loop = flk.adopt(model=model, optimizer=optimizer, save_every=1, log_every=1)
    for step in range(loop.steps, 12):
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(2 * step + loop.rank))
        loss = model(batch).square().mean()
        optimizer.zero_grad(), loss.backward(), optimizer.step()
        loop.step(loss=loss)
        while loop.attempt == 0 and loop.steps == 6 and not loop.should_stop:
            time.sleep(0.2)  # until a pod is deleted
    loop.close()
"""


# tests/local/test_loop.py proves it with launchers on this machine.
@pytest.mark.soak
def test_a_loop_of_the_scripts_own_resumes_from_memory_when_a_pod_is_deleted(
    flk: Any, kubectl: Any, image: str, eventually: Any, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))
    options = ["--name", "own", "--replicas", "2", "--image", image, "--cpu", "100m"]
    assert flk("submit", "train.py", *options, cwd=tmp_path).code == 0
    eventually("the ranks get to step 6", lambda: '"step": 6,' in flk("logs", "own", "--no-follow").stdout)
    kubectl("delete", "pod", "own-worker-1")
    ended = flk("wait", "own")
    assert ended.code == 0, ended.stderr
    first, second = json.loads(flk("status", "own", "-o", "json").stdout)["attempts"]
    assert (first["outcome"], second["restored_from"]) == ("preempted", "memory")
    assert "resumed at step 7 from pod memory" in flk("logs", "own", "--no-follow").stdout
    steps = [
        json.loads(line[9:])["step"]
        for line in flk("logs", "own", "--no-follow").stdout.splitlines()
        if line.startswith('[rank 0] {"step"')
    ]
    assert steps == sorted(set(steps))
    assert steps[-1] == 12
