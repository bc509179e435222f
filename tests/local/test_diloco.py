"""DiLoCo with real processes: workers of several ranks, a hub, and launchers whose ranks are killed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flk_diloco.server import Hub
from flk_runtime.contract import pod_env, user_env
from tests.support.pods import Pods
from tests.support.ports import held_ports
from tests.support.ranks import Ended, Ranks

# Trains on the same global batches however the ranks are divided among workers, and prints a hash of the parameters.
TRAIN = """
import hashlib, json, os, torch, flk_runtime as flk
from torch import nn

settings = json.loads(os.environ["SETTINGS"])
torch.manual_seed(int(os.environ.get("INIT", 3)))
model = nn.Sequential(*(nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(3)), nn.Linear(7, 5))
optimizer = getattr(torch.optim, settings["optimizer"])(model.parameters(), lr=settings.get("lr", 0.05))
ranks = settings["ranks"]  # of all workers
with flk.init(log_every=0) as run:
    first = run.worker * run.world_size + run.rank
    run.parallelize(nn.Linear(7, 5).requires_grad_(False))  # as a teacher, which is in no round
    model, optimizer = run.parallelize(model, optimizer)
    if "weights" in settings:
        run.load_weights(settings["weights"], model=model)
    generator = torch.Generator().manual_seed(5)
    for _ in range(run.steps):  # of the attempts before
        torch.randn(ranks, 4, 7, generator=generator)
    while run.steps < settings["steps"]:
        batch = torch.randn(ranks, 4, 7, generator=generator)[first]
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        run.step()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    values = torch.cat([p.detach().flatten() for p in whole])
    digest = hashlib.sha256(bytes(values.numpy())).hexdigest()
    print("RESULT", json.dumps({"worker": run.worker, "rank": run.rank, "digest": digest, "values": values.tolist()}))
"""


class Workers:
    """Runs TRAIN as several workers that meet at a hub in this process."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.hub = Hub("127.0.0.1", 0, "", log=print)
        self.hub.start()
        self.output = ""  # of all ranks of the latest run

    def __call__(self, workers: int, size: int, options: str, **settings: object) -> list[dict[str, object]]:
        of_rank = {}
        with held_ports() as free_port:
            ports = [free_port() for _ in range(workers)]
            for process in range(workers * size):
                worker, rank = divmod(process, size)
                names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
                of_rank[process] = {
                    **{name: str(value) for name, value in names.items()},
                    "MASTER_PORT": str(ports[worker]),
                    user_env.WORKER: str(worker),
                    "INIT": str(3 + worker),  # parameters of the first worker become those of all
                }
            environment = {
                user_env.STRATEGY: "diloco",
                pod_env.DILOCO_OPTIONS: options,
                user_env.WORKERS: str(workers),
                pod_env.SERVICE_ADDRESS: f"127.0.0.1:{self.hub.port}",
                "SETTINGS": json.dumps({"optimizer": "AdamW", "ranks": workers * size, **settings}),
            }
            ended = self._ranks(TRAIN, workers * size, environment, of_rank)
        self.output = "".join(each.output for each in ended)
        return told(ended)


@pytest.fixture
def launched(forked_pods: Callable[..., Pods]) -> Iterator[Callable[..., Pods]]:
    """Starts a job whose pods are workers of one rank, each with a rendezvous of its own. Pod 0 has the hub."""
    with held_ports() as free_port:

        def start(pods: int, script: str, options: str, **settings: object) -> Pods:
            variables = {
                user_env.STRATEGY: "diloco",
                user_env.WORKERS: str(pods),
                pod_env.DILOCO_OPTIONS: options,
                pod_env.SERVICE_ADDRESS: f"127.0.0.1:{free_port()}",
                pod_env.SERVICE: "flk_diloco",
                pod_env.RESTARTS: "1",
                "SETTINGS": json.dumps({"optimizer": "AdamW", "ranks": pods, **settings}),
            }
            job = forked_pods(pods, script=script, **variables)
            for pod in range(pods):
                job.variables_of[pod] = {pod_env.RDZV_ENDPOINT: f"127.0.0.1:{free_port()}"}
            job.start("train.py")
            return job

        yield start


@pytest.fixture
def workers(ranks: Ranks) -> Iterator[Workers]:
    made = Workers(ranks)
    yield made
    made.hub.close()


def plain(ranks: Ranks, world_size: int, **settings: object) -> list[dict[str, object]]:
    """The same training with strategy ddp."""
    shared = {"optimizer": "AdamW", "ranks": world_size, **settings}
    return told(ranks(TRAIN, world_size, {user_env.STRATEGY: "ddp", "SETTINGS": json.dumps(shared)}))


def told(ended: list[Ended]) -> list[dict[str, object]]:
    return [json.loads(line.partition(" ")[2]) for rank in ended for line in rank.lines if line.startswith("RESULT ")]


def test_one_worker_equals_its_inner_optimizer(ranks: Ranks) -> None:
    settings = {"SETTINGS": json.dumps({"optimizer": "AdamW", "ranks": 1, "steps": 20})}
    options = {user_env.STRATEGY: "diloco", pod_env.DILOCO_OPTIONS: "every=1,lr=1,momentum=0,dtype=fp32"}
    (alone,) = told(ranks(TRAIN, 1, {**settings, **options}))
    (inner,) = plain(ranks, 1, steps=20)
    assert alone["values"] == pytest.approx(inner["values"], abs=1e-6)


def test_rounds_of_one_step_of_sgd_equal_gradient_averaging(ranks: Ranks, workers: Workers) -> None:
    found = workers(3, 1, "every=1,lr=1,momentum=0,dtype=fp32", optimizer="SGD", steps=20)
    averaged = plain(ranks, 3, optimizer="SGD", steps=20)
    for each in found:
        assert each["values"] == pytest.approx(averaged[0]["values"], abs=1e-6)


def test_a_script_that_trains_other_parameters_than_it_began_with_is_refused(ranks: Ranks) -> None:
    """Under an inner strategy that lets parameters be unfrozen."""
    settings = {"SETTINGS": json.dumps({"optimizer": "SGD", "ranks": 1, "steps": 3})}
    script = TRAIN.replace("run.step()", "run.step()\n        model[3].weight.requires_grad_(False)")
    options = {user_env.STRATEGY: "diloco", pod_env.DILOCO_OPTIONS: "every=2,inner=full_shard"}
    (ended,) = ranks(script, 1, {**settings, **options}, failing=True)
    expected = "SetupError: '3.weight' is not trained any more, and the workers of strategy diloco"
    assert expected in ended.output, ended.output


@pytest.mark.promise("Extensions: Sites over slow links train one model")
def test_workers_of_two_ranks_agree(workers: Workers) -> None:
    found = workers(2, 2, "inner=full_shard,every=5,dtype=int4", steps=10)
    assert len({str(each["digest"]) for each in found}) == 1
    assert len(found) == 4


@pytest.mark.promise("Extensions: Sites over slow links train one model")
@pytest.mark.soak
def test_a_killed_hub_loses_nothing(launched: Callable[..., Pods], workers: Workers) -> None:
    """It is killed when two workers have sent the open round. The third one is away when they meet the new hub."""
    kill = """
        if run.worker == 1 and run.steps == 15:
            time.sleep(1)
            address = f'FLK_SERVICE_ADDRESS={os.environ["FLK_SERVICE_ADDRESS"]}\\0'
            for process in pathlib.Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    command, environ = ((process / name).read_text() for name in ("cmdline", "environ"))
                    if "flk_diloco" in command and address in environ:
                        own = os.getpid()
                        away = f"kill -9 {process.name}; kill -STOP {own}; sleep 8; kill -CONT {own}"
                        subprocess.run(away, shell=True)
        optimizer.zero_grad()
"""
    script = "import contextlib, pathlib, subprocess, time\n" + TRAIN.replace("        optimizer.zero_grad()\n", kill)
    options = "every=10,lr=1,momentum=0,dtype=fp32"
    job = launched(3, script, options, steps=30)
    codes = job.wait()
    output = job.logs_of_all()
    assert codes == [0, 0, 0], output
    assert "the service flk_diloco has ended; starting it again" in output
    expected = {each["digest"] for each in workers(3, 1, options, steps=30)}
    assert {json.loads(text)["digest"] for text in re.findall(r"RESULT (\{.*\})", output)} == expected


@pytest.mark.promise("Extensions: Sites over slow links train one model")
def test_a_killed_worker_returns_and_the_others_go_on(launched: Callable[..., Pods]) -> None:
    """Worker 1 is killed within a round. It has no checkpoint, so it gets everything from a peer."""
    loop = """
    target = 100_000
    while run.steps < target:
        if run.worker == 1 and run.steps == 15 and run.attempt == 0:
            os.kill(os.getpid(), 9)
        if run.worker == 1 and run.attempt == 1 and not os.path.exists("target"):
            with open("unfinished", "w") as file:
                file.write(str(run.steps + 30))
            os.rename("unfinished", "target")
        if os.path.exists("target"):  # the others are at most one round further
            target = int(open("target").read())
"""
    script = TRAIN.replace('    while run.steps < settings["steps"]:\n', loop)
    assert script != TRAIN
    job = launched(2, script, "every=10,lr=1,momentum=0,dtype=fp32")
    codes = job.wait()
    output = job.logs_of_all()
    assert codes == [0, 0], output
    found = [json.loads(text) for text in re.findall(r"RESULT (\{.*\})", output)]
    assert len(found) == 2
    assert len({each["digest"] for each in found}) == 1, output
    assert "worker 1 has caught up: it goes on after step" in output
    assert "[pod 1] attempt 2" in output
    assert "[pod 0] attempt 2" not in output


# Saves after every step, so that a resume begins within a round.
RESUMED = TRAIN.replace("log_every=0", "log_every=0, save_every=1").replace(
    "        optimizer.zero_grad()\n",
    """        if (run.rank, run.steps, run.attempt) == (1, 7, 0):
            os.kill(os.getpid(), 9)
        optimizer.zero_grad()
""",
)


@pytest.mark.soak
def test_a_worker_of_two_ranks_that_is_resumed_trains_as_if_it_had_not_been_killed(
    forked_pods: Callable[..., Pods], ranks: Ranks, tmp_path: Path
) -> None:
    """int8: what rounding has lost is restored, too."""
    settings = {"SETTINGS": json.dumps({"optimizer": "AdamW", "ranks": 2, "steps": 15})}
    options = {user_env.STRATEGY: "diloco", pod_env.DILOCO_OPTIONS: "every=5,dtype=int8,inner=full_shard"}
    launched = {pod_env.PROCESSES: "2", pod_env.RESTARTS: "1", user_env.CHECKPOINT: str(tmp_path / "checkpoints")}
    job = forked_pods(script=RESUMED, **launched, **settings, **options)
    job.start("train.py")
    codes = job.wait()
    output = job.logs_of_all()
    assert codes == [0], output
    assert re.search(r"flk: resumed at step [1-7] from ", output), re.findall(r"flk: .*", output)
    found = {json.loads(text)["digest"] for text in re.findall(r"RESULT (\{.*\})", output)}
    assert found == {each["digest"] for each in told(ranks(TRAIN, 2, {**settings, **options}))}
    assert len(found) == 1
