"""Profiles of ranks that train: each kind of loop, two ranks that communicate, and ranks that cannot be profiled."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flk.manifest.runtime import module_source
from flk_runtime.contract import ExitCode
from flk_runtime.profiling import ask as program
from tests.support.collection import often
from tests.support.pods import Pods

# Each makes steps until the file `stop` is there, and then writes the number of steps and the sum of its parameters.
LOOP = """
    pathlib.Path(f"observer.{rank}").write_text(os.environ["FLK_OBSERVER"])
    stop, step = torch.zeros(1), 0
    while not stop:
        for batch in BATCHES:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            COUNT
        time.sleep(0.005)
        pathlib.Path(f"step.{rank}").write_text(str(step))
        stop = torch.tensor(float(pathlib.Path("stop").exists()))
        dist.broadcast(stop, 0)
    total = sum(float(each.detach().double().sum()) for each in model.parameters())
    pathlib.Path(f"sum.{rank}").write_text(repr((step, total)))
"""
PLAIN = """
    import os, pathlib, time
    import torch, torch.distributed as dist
    from torch.utils.data import DataLoader
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
""" + LOOP.replace("BATCHES", "DataLoader(torch.ones(8, 64), batch_size=8)")
ADOPT = PLAIN.replace("    stop, step", "    import flk_runtime as flk; loop = flk.adopt(model=model)\n    stop, step")
RUN = """
    import os, pathlib, time
    import flk_runtime as flk
    import torch, torch.distributed as dist
    run = flk.init(strategy="ddp")
    rank = run.rank
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    model, optimizer = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.01))
""" + LOOP.replace("BATCHES", "[torch.ones(8, 64)]").replace("COUNT", "run.step()")


def ask(job: Pods, rank: int, **request: Any) -> dict[str, Any]:
    """The answer of the program that `flk profile` runs beside a rank of this job, in which it is the same one."""
    folder = Path((job.folder / f"observer.{rank}").read_text()).parents[2]  # of the launcher
    asked = {"folders": folder.name, "local_rank": rank, **request}
    words = [
        sys.executable,
        "-c",
        module_source(f"flk_runtime/profiling/{Path(program.__file__).name}"),
        json.dumps(asked),
    ]
    environment = {"TMPDIR": str(folder.parent)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def profile(job: Pods, place: int, **arguments: Any) -> dict[str, Any]:
    """The answer to a request for a profile of five steps."""
    given = {"steps": 5, "timeout": 30, "rank": place} | arguments
    return ask(job, place, arguments=given, source=module_source("flk_runtime/profiling/rank.py"))


@pytest.fixture
def two_ranks(forked_pods: Callable[..., Pods], tmp_path: Path) -> Callable[[str], Pods]:
    """Starts a script on two ranks of one pod and waits until both have made some steps."""

    def start(script: str) -> Pods:
        job = forked_pods(1, 2, script=script)
        job.start("train.py")
        job.until(lambda: all((tmp_path / f"step.{rank}").exists() for rank in (0, 1)), "both ranks train")
        return job

    return start


@pytest.mark.promise("Causes: flk stacks, top, profile and metrics show a running job")
@pytest.mark.parametrize(
    "script",
    often((0,), [RUN, ADOPT.replace("COUNT", "loop.step()"), PLAIN.replace("COUNT", "pass")]),
    ids=["run.step", "adopt", "plain script"],
)
def test_one_of_two_ranks_is_profiled_and_the_training_goes_on_as_before(
    two_ranks: Callable[[str], Pods], script: str, tmp_path: Path
) -> None:
    job = two_ranks(script)
    answer = profile(job, 1)
    assert answer.keys() >= {"files"}, (answer, job.log())
    with gzip.open(answer["files"][0]) as file:
        names = {event["name"] for event in json.load(file)["traceEvents"]}
    assert len([name for name in names if name.startswith("ProfilerStep#")]) == 5
    assert {"aten::addmm", "gloo:all_reduce", "Optimizer.step#SGD.step"} <= names
    assert any("DataLoader" in name for name in names) == ("DataLoader" in script)
    (tmp_path / "stop").touch()
    assert job.wait() == [ExitCode.DONE], job.log()
    sums = [(tmp_path / f"sum.{rank}").read_text() for rank in (0, 1)]
    assert sums[0] == sums[1]


def test_ranks_that_cannot_be_profiled_say_why_and_train_on(two_ranks: Callable[[str], Pods], tmp_path: Path) -> None:
    job = two_ranks(PLAIN.replace("COUNT", "pass"))
    assert profile(job, 0, rank=7) == {"error": "absent"}
    assert ask(job, 0, source="def serve(connection, page, arguments): 1 / 0", arguments={}) == {"error": "ended"}
    (tmp_path / "stop").touch()
    assert job.wait() == [ExitCode.DONE], job.log()
