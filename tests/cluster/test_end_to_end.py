"""The main path as its user walks it: submit, logs, wait, status, with the example and with scripts of her own."""

from __future__ import annotations

import json
import re
import textwrap
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Ranks

# Small enough for pods on two cores that other tests share; the same work here and in the pods. Two layers: a block of
# its own is what repeats.
SMALL = ["--steps", "12", "--batch-size", "4", "--layers", "2", "--width", "32", "--block", "32"]
EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt" / "train.py"
ENOUGH = 400  # seconds for a job of a few steps

TORCHRUN_STYLE = """
    import os
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group(backend="gloo")
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    print(f"rank {rank} local {local} of {dist.get_world_size()} done")
    dist.destroy_process_group()
"""
PACKAGE = "from project.deep.answer import ANSWER\nimport sys\nprint(ANSWER + 1, sys.argv[1:])\n"


def metrics(log: str) -> list[dict[str, Any]]:
    """What a rank printed as lines of JSON, or rank 0 of several."""
    lines = [line.removeprefix("[rank 0] ") for line in log.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(textwrap.dedent(text))


@pytest.mark.promise("Jobs: The example trains in the cluster as it does here")
@pytest.mark.timeout(900)
def test_the_example_trains_in_the_cluster_as_it_does_here(
    flk: Any, image: str, fork_server: ForkServerContext
) -> None:
    """In the cluster the model is sharded within pods and replicated across them; here each rank has all of it."""
    options = ["--replicas", "2", "--processes", "2", "--cpu", "100m", "--env", "OMP_NUM_THREADS=1", "--restarts", "0"]
    submitted = flk("submit", *options, "--strategy", "hybrid_shard", "--", *SMALL)
    assert submitted.code == 0, submitted.stderr
    name = submitted.stdout.strip()
    assert submitted.stdout == f"{name}\n"
    assert re.fullmatch(r"train-[a-z0-9]{5}", name)
    assert "bundled example" in submitted.stderr
    for following in (f"flk logs {name}", f"flk status {name}", f"flk wait {name}"):
        assert following in submitted.stderr

    logs = flk("logs", name, timeout=ENOUGH)
    assert logs.code == 0, logs.stderr
    for rank in range(4):
        assert f'[rank {rank}] {{"rank": {rank}, ' in logs.stdout
    waited = flk("wait", name, timeout=ENOUGH)
    assert waited.code == 0, waited.stderr
    status = json.loads(flk("status", name, "-o", "json").stdout)
    assert status["phase"] == "Succeeded"
    assert len(status["pods"]) == 2

    script = f"import runpy, sys\nsys.argv = {[str(EXAMPLE), *SMALL]}\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    here = Ranks(fork_server, flk.folder)(script, 4, {"FLK_STRATEGY": "ddp"})
    there, local = metrics(logs.stdout)[-1], metrics(here[0].output)[-1]
    assert there["step"] == local["step"] == 12
    assert there["heldout_loss"] == pytest.approx(local["heldout_loss"], abs=1e-4)


@pytest.mark.promise("Jobs: A script for torchrun runs unchanged, on this machine and in a cluster")
@pytest.mark.timeout(900)
@pytest.mark.soak
def test_a_torchrun_style_package_of_several_files_runs_unchanged_on_an_image_without_flk(
    flk: Any, torch_image: str
) -> None:
    write(flk.folder, "project/__init__.py", "")
    write(flk.folder, "project/deep/__init__.py", "")
    write(flk.folder, "project/deep/answer.py", "ANSWER = 41")
    write(flk.folder, "project/train.py", PACKAGE + textwrap.dedent(TORCHRUN_STYLE))
    options = ["--replicas", "2", "--processes", "2", "--image", torch_image, "--cpu", "100m"]
    submitted = flk("submit", "-m", "project.train", *options, "--follow", "--", "--lr", "$HOME `x`", timeout=ENOUGH)
    assert submitted.code == 0, submitted.stderr
    lines = submitted.stdout.splitlines()
    for rank in range(4):
        assert f"[rank {rank}] 42 ['--lr', '$HOME `x`']" in lines
        assert f"[rank {rank}] rank {rank} local {rank % 2} of 4 done" in lines
