"""Training loops of the script's own in pods, which flk.adopt keeps, or flk.restore, flk.save and flk.must_stop."""

from __future__ import annotations

import base64
import json
import re
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
        if step == 3:
            with loop.evaluating():
                time.sleep(12)
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(2 * step + loop.rank))
        loss = model(batch).square().mean()
        optimizer.zero_grad(), loss.backward(), optimizer.step()
        loop.step(loss=loss)
        while loop.attempt == 0 and loop.steps == 6 and not loop.should_stop:
            flk.heartbeat()
            time.sleep(0.2)  # until a pod is deleted
    loop.close()
"""


TRAINER = """
import torch
from torch import nn
import flk_runtime as flk

def train():
    run = flk.init(log_every=0)
    model = run.parallelize(nn.Linear(4, 4), recompute=False)
    optimizer = flk.DistributedOptimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    run.close()
    loop = flk.adopt(model=nn.Linear(2, 2), checkpoint="/tmp/other")
    loop.close()
    print("trained", run.world_size)
"""


def test_a_package_in_the_image_may_call_all_of_flk(flk: Any, image: str, tmp_path: Path) -> None:
    """Nothing that the client reads names what it calls: the package is written in the pod."""
    (tmp_path / "train.py").write_text("import trainer\ntrainer.train()\n")
    setup = f"echo {base64.b64encode(TRAINER.encode()).decode()} | base64 -d > trainer.py"
    options = ["--setup", setup, "--image", image, "--cpu", "100m", "--name", "packaged"]
    assert flk("submit", "train.py", *options, cwd=tmp_path).code == 0
    ended = flk("wait", "packaged")
    assert ended.code == 0, ended.stderr
    assert "[rank 0] trained 1" in flk("logs", "packaged", "--no-follow").stdout


# tests/local/test_loop.py proves it with launchers on this machine.
@pytest.mark.soak
def test_a_loop_of_the_scripts_own_resumes_from_memory_when_a_pod_is_deleted(
    flk: Any, kubectl: Any, image: str, eventually: Any, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))
    options = ["--name", "own", "--replicas", "2", "--image", image, "--cpu", "100m"]
    options += ["--hang-timeout", "step=4s"]  # a third of what the evaluation takes
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


# The first job fails after two saves in memory, and ends with what its second attempt restores. The second one trains
# until a pod is deleted.
SAVES = """
    import itertools, os, sys, time
    import torch, torch.distributed as dist
    import flk_runtime as flk

    dist.init_process_group("gloo")
    model = torch.nn.Linear(2, 1)
    begun = flk.restore(model=model)
    print(f"begins at step {begun} with {model.weight.max().item():g}", flush=True)
    if os.environ["FLK_ATTEMPT"] == "0":
        for step in itertools.count(begun + 1):
            torch.nn.init.constant_(model.weight, step)
            if flk.must_stop(step):
                flk.save(step, wait=True, model=model)
                sys.exit(143)
            if sys.argv[1] == "fails":
                flk.save(step, wait=True, model=model)
                if step == 2:
                    dist.barrier()
                    os._exit(3)
            time.sleep(0.1)
"""


# tests/local/test_end_from_memory.py and test_preemption.py prove it with launchers on this machine.
@pytest.mark.soak
def test_a_script_that_saves_by_itself_loses_no_step_at_its_end_and_at_the_deletion_of_a_pod(
    flk: Any, kubectl: Any, image: str, checkpoints_claim: None, eventually: Any, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(SAVES))
    options = ["--name", "own", "--replicas", "2", "--image", image, "--cpu", "50m", "--grace", "20s"]
    options += ["--store-every", "1000", "--checkpoint", "checkpoints:/checkpoints"]

    def log(rank: int = 0) -> str:
        return str(flk("logs", "own", "--rank", str(rank), "--no-follow").stdout)

    def begun(rank: int) -> list[str]:
        return re.findall(r"begins at step (\d+ with \S+)", log(rank))

    assert flk("submit", "train.py", *options, "--", "fails", cwd=tmp_path).code == 0
    ended = flk("wait", "own")
    assert ended.code == 0, ended.stderr
    assert "resumed at step 2 from pod memory" in log()
    assert [begun(rank)[1:] for rank in (0, 1)] == [["2 with 2"]] * 2
    assert flk("delete", "own").code == 0

    assert flk("submit", "train.py", *options, "--", "trains", cwd=tmp_path).code == 0
    eventually("both ranks train on", lambda: begun(0) and begun(1))
    assert re.search(r"resumed at step 2 from /checkpoints\S*/step-", log())
    kubectl("delete", "pod", "own-worker-1")
    ended = flk("wait", "own")
    assert ended.code == 0, ended.stderr
    state = json.loads(flk("status", "own", "-o", "json").stdout)
    (saved,) = re.findall(r"received SIGTERM; saved after step (\d+)", state["attempts"][0]["cause"])
    assert int(saved) > 2
    assert [begun(rank)[-1] for rank in (0, 1)] == [f"{saved} with {saved}"] * 2
    assert flk("delete", "own").code == 0
