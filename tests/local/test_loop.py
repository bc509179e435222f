"""flk.adopt: loops of the script's own, with models on meshes of any shape."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flk_runtime.contract import pod_env, pod_layout, user_env
from tests.support.collection import often
from tests.support.pods import Pods
from tests.support.ranks import Ranks
from tests.support.small_model import told

# Trains the same batches under each wrap: as a whole, and in two parts of which the second begins under another wrap.
MESHES = """
    import json, os, torch, torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    import flk_runtime as flk

    dist.init_process_group("gloo")
    FOLDER = os.environ["FOLDER"]
    data = [(torch.randn(7, generator=torch.Generator().manual_seed(n)), n) for n in range(48)]

    def build(wrap):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 3), nn.Hardtanh())
        if wrap == "parts":  # the first two ranks train the first layer, the others the second one
            mesh, own = init_device_mesh("cpu", (4,)), ("0", "2")[dist.get_rank() // 2]
            part = nn.ModuleDict({own: model.get_submodule(own)})
            optimizer = torch.optim.AdamW(part.parameters(), lr=0.02, foreach=False)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            return mesh, model, optimizer, scheduler, [part]
        if wrap == "hybrid":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp"))
            fully_shard(model, mesh=mesh)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, foreach=False)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            return mesh["dp", "fsdp"]._flatten(), model, optimizer, scheduler, model
        shape = {"ddp": (4, 1), "fsdp2": (4, 1), "tp": (1, 4), "fsdp2 x tp": (2, 2)}[wrap]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        if wrap == "ddp":
            model = nn.parallel.DistributedDataParallel(model)
        if mesh["tp"].size() > 1:
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if wrap.startswith("fsdp2"):
            fully_shard(model, mesh=mesh["dp"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, foreach=False)
        return mesh["dp"], model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), model

    def spread(model):
        for owner, layer in ((0, model[0]), (2, model[2])):
            for each in layer.parameters():
                dist.broadcast(each.data, owner)

    def train(name, wrap, until):
        mesh, model, optimizer, scheduler, kept = build(wrap)
        progress, seen = {"losses": []}, []
        loop = flk.adopt(
            checkpoint=f"{FOLDER}/{name}", save_every=0, log_every=0,
            model=kept, optimizer=optimizer, scheduler=scheduler, progress=progress,
        )
        parts = mesh.size()
        loader = loop.loader(data, batch_size=8 // parts, mesh=mesh, seed=5)
        for batch, numbers in loader.steps(until):
            if wrap == "parts":
                spread(model), model.zero_grad()
            loss = model(batch).square().sum() / len(batch)
            optimizer.zero_grad(), loss.backward()
            for each in model.parameters() if wrap == "parts" else ():
                dist.all_reduce(each.grad), each.grad.div_(4)
            optimizer.step(), scheduler.step()
            seen.append(numbers.tolist())
            total = loss.detach().clone()
            dist.all_reduce(total)
            progress["losses"].append(round(float(total) / 4, 5))
            loop.step(loss=loss, tokens=8)
        loop.close()
        return loop.steps, progress["losses"], seen

    found = {}
    for wrap in ("ddp", "fsdp2", "tp", "fsdp2 x tp", "hybrid"):
        found[wrap] = [train(wrap, wrap, 6)[1]]
    for first, second in (
        ("ddp", "fsdp2 x tp"), ("fsdp2 x tp", "tp"), ("tp", "fsdp2"), ("tp", "parts"), ("parts", "fsdp2"),
        ("parts", "parts"), ("tp", "hybrid"),
    ):
        train(f"{first}+{second}", first, 3)
        found[first + " then " + second] = [train(f"{first}+{second}", second, 6)[1]]
    print("=", json.dumps(["found", found]))
    _, _, seen = train("batches", "fsdp2 x tp", 2)
    gathered = [None] * 4
    dist.all_gather_object(gathered, seen)
    print("=", json.dumps(["batches", gathered]))
    dist.barrier()
"""


@pytest.mark.promise("Checkpoints: A script's own loop resumes with save and restore, or adopt")
def test_a_loop_trains_the_same_on_every_mesh_and_after_a_change_of_the_mesh(ranks: Ranks, tmp_path: Path) -> None:
    seen = told(ranks(MESHES, 4, {"FOLDER": str(tmp_path)})[0])
    (expected,) = seen["found"].pop("ddp")
    assert len(expected) == 6
    assert len(set(expected)) == 6
    for name, (losses,) in seen["found"].items():
        assert losses == pytest.approx(expected, abs=2e-5), name
    first, second, third, fourth = seen["batches"]
    assert first == second, "ranks of one tensor parallel group have the same batches"
    assert third == fourth
    assert not set(first[0]) & set(third[0])


REFUSED = """
    import contextlib, os, torch, torch.distributed as dist
    from torch import nn
    import flk_runtime as flk
    from flk_runtime.shared.progress import Phase, own_page

    dist.init_process_group("gloo")
    def refused(**objects):
        try:
            flk.adopt(checkpoint=os.environ["FOLDER"], **objects)
        except (flk.SetupError, flk.CheckpointError) as error:
            print(f"refused: {error}")

    stage = nn.Linear(3, 3) if dist.get_rank() == 0 else nn.Sequential(nn.Linear(3, 3))
    optimizer = torch.optim.SGD(stage.parameters(), momentum=0.9)
    refused()
    refused(model=stage, optimizer=optimizer)
    refused(model=nn.Linear(3, 3), optimizer=optimizer)
    refused(loader=torch.utils.data.DataLoader([1, 2]))
    refused(model=[stage, stage])
    loop = flk.adopt(checkpoint=os.environ["FOLDER"], model=flk.per_rank(stage), optimizer=flk.per_rank(optimizer))
    refused(model=nn.Linear(3, 3))
    try:
        flk.init()
    except flk.SetupError as error:
        print(f"refused: {error}")
    with loop.evaluating():
        phases = [own_page().phase]
    assert [*phases, own_page().phase] == [Phase.EVALUATING, Phase.FIRST_STEP]
    stage(torch.ones(3)).sum().backward(), optimizer.step()
    loop.step()
    loop.close()
    try:
        loop.step()
    except flk.SetupError as error:
        print(f"refused: {error}")
    before = [each.detach().clone() for each in stage.parameters()]
    for each in stage.parameters():
        each.data.zero_()
    own = dict(model=flk.per_rank(stage), optimizer=flk.per_rank(optimizer))
    with contextlib.suppress(KeyError), flk.adopt(checkpoint=os.environ["FOLDER"], store_every=5, **own):
        raise KeyError("the loop that failed is over, and another one may begin")
    with flk.adopt(checkpoint=os.environ["FOLDER"], **own) as loop:
        assert loop.steps == 1
        assert all(torch.equal(*pair) for pair in zip(before, stage.parameters(), strict=True))
    dist.barrier()
"""


def test_what_a_loop_cannot_keep_is_refused_by_name(ranks: Ranks, tmp_path: Path) -> None:
    result, _ = ranks(REFUSED, 2, {"FOLDER": str(tmp_path)})
    refused = re.findall(r"refused: (.*)", result.output)
    assert len(refused) == 8, result.output
    for text, words in zip(
        refused,
        (
            "there is nothing to keep",
            "the ranks differ",
            "optimizer is an optimizer of 2 parameters, and 2 of them are in none of the modules",
            "loader is a DataLoader",
            "two parts of a model have the entry",
            "has a run or a loop already",
            "flk.adopt keeps the state of this process's loop",
            "is closed: call step() before close()",
        ),
        strict=True,
    ):
        assert words in text


ALONE = """
    import os, torch, torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel
    import flk_runtime as flk

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    place = os.environ["FOLDER"]
    with flk.adopt(checkpoint=place, save_every=3, log_every=0, model=model, optimizer=optimizer) as loop:
        loader = loop.loader(torch.arange(24.0)[:, None], 2, mesh=mesh["dp"], shuffle=False)
        mine = iter(loader) if loop.rank == 0 else None
        while loop.steps < 12:
            batch = next(mine) if mine else torch.empty(2, 1)
            dist.broadcast(batch, 0)
            assert batch.flatten().tolist() == [2 * loop.steps, 2 * loop.steps + 1]
            optimizer.zero_grad(), model(batch).mean().backward(), optimizer.step()
            loop.step()
            number = torch.tensor(float(loop.rank))
            dist.all_reduce(number)
            assert number == 1
            if loop.steps == 7 and "STOP" in os.environ:
                loop.abandon()
                break
    print("end", loop.steps)
"""


def test_a_rank_may_draw_batches_alone_and_send_them_to_the_others(ranks: Ranks, tmp_path: Path) -> None:
    for environment, steps in (({"STOP": "yes"}, 7), ({}, 12)):
        assert [rank.lines[-1] for rank in ranks(ALONE, 2, {"FOLDER": str(tmp_path), **environment})] == [
            f"end {steps}"
        ] * 2


FAULTS = """
    import os, time, torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    import flk_runtime as flk

    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loop = flk.adopt(model=model, optimizer=optimizer, save_every=1, log_every=1)
    print(f"begins at step {loop.steps}")
    for step in range(loop.steps, 10_000):
        if step == 20 and loop.attempt == 0 and loop.rank == 1:
            os.kill(os.getpid(), 9)
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step * 10 + loop.rank))
        loss = model(x).square().mean()
        optimizer.zero_grad(), loss.backward(), optimizer.step()
        assert not loop.should_stop
        if step == 22:
            open(f"step.{loop.rank}", "w").close()
            while not loop.should_stop:
                time.sleep(0.01)
        loop.step(loss=loss, samples=16)
"""


def test_a_loop_resumes_from_memory_and_all_ranks_stop_after_the_same_step(
    forked_pods: Callable[..., Pods], root: Path
) -> None:
    variables: dict[str, Any] = {
        pod_env.MEMORY_ROOT: str(root),
        user_env.CHECKPOINT: pod_layout.CHECKPOINT_FOLDER,
        pod_env.RESTARTS: "1",
    }
    job = forked_pods(2, 1, script=FAULTS, **variables)
    job.start("train.py")
    job.until(lambda: all((job.folder / f"step.{rank}").exists() for rank in (0, 1)), "the second attempt trains")
    for pod in job.running.values():
        pod.send_signal(signal.SIGTERM)
    assert job.wait() == [143, 143], job.logs_of_all()
    begun = [re.findall(r"begins at step (\d+)", job.log(pod)) for pod in job.running]
    # Rank 1 dies at once after step 20: its launcher may not have looked at that step's shard yet.
    assert begun in ([["0", "19"]] * 2, [["0", "20"]] * 2)
    lines = [json.loads(line) for line in re.findall(r"\[rank 0\] (\{.*\})", job.log(0))]
    assert list(dict.fromkeys(line["step"] for line in lines)) == list(range(1, 24))
    assert lines[-1]["samples_per_s"] > 0
    assert "stopped after step 23, which is saved" in job.log(0)


# Each rank makes the steps of some parameters, and has the state of these.
SHARED_STEPS = """
    import json, os, torch, torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    import flk_runtime as flk

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    class Shared(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure=None):
            for number, each in enumerate(self.param_groups[0]["params"]):
                if number % ranks == rank:
                    momentum = self.state[each].setdefault("momentum", torch.zeros_like(each))
                    momentum.mul_(0.9).add_(each.grad)
                    each.sub_(momentum, alpha=0.1)
                dist.broadcast(each.data, number % ranks)

    class Eager(Shared):  # has all state, and keeps some of it up to date
        def __init__(self, parameters):
            super().__init__(parameters)
            for each in self.param_groups[0]["params"]:
                self.state[each]["momentum"] = torch.zeros_like(each)

    class Unlike(Shared):
        def state_dict(self):
            return super().state_dict() if rank == 0 else {}

    class Sparse(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            self.state[self.param_groups[0]["params"][0]]["pairs"] = torch.eye(2).to_sparse()

    def train(kind, place, *ends, wrap=lambda model: model, declare=lambda optimizer: optimizer):
        losses = []
        for until in ends:
            torch.manual_seed(0)
            model = wrap(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
            optimizer = kind(model.parameters())
            objects = {"model": model, "optimizer": declare(optimizer)}
            with flk.adopt(checkpoint=os.environ["FOLDER"] + place, save_every=0, log_every=0, **objects) as loop:
                for step in range(loop.steps, until):
                    loss = model(torch.full((2, 3), step + 1.0)).square().sum()
                    optimizer.zero_grad(), loss.backward(), optimizer.step()
                    loop.step()
                    losses.append(loss.item())
                loop.save()  # in the block, which is left without a save after an error
        return losses

    def refused(kind, **options):
        try:
            train(kind, f"{kind.__name__}-{len(options)}", 2, **options)
        except flk.CheckpointError as error:
            return str(error)

    print("=", json.dumps(["refused", [
        refused(Shared), refused(Eager), refused(Eager, wrap=DistributedDataParallel),
        refused(Unlike), refused(Sparse),
    ]]))
    resumed = train(Shared, "resumed", 2, 4, 6, declare=flk.per_rank)
    print("=", json.dumps(["found", [train(Shared, "whole", 6, declare=flk.per_rank), resumed]]))
"""


def test_state_that_each_rank_has_a_part_of_is_refused_unless_each_saves_its_own(ranks: Ranks, tmp_path: Path) -> None:
    result = ranks(SHARED_STEPS + "    dist.barrier()\n", 2, {"FOLDER": f"{tmp_path}/"})
    for each in result:
        *parts, unlike, sparse = told(each)["refused"]
        words = ("is a tensor of", "has other values on other ranks", "has other values on other ranks")
        for word, message in zip(words, parts, strict=True):
            assert re.match(f"'momentum' of '0.(weight|bias)' of optimizer {re.escape(word)}", message), message
        assert unlike.startswith("cannot save the optimizer Unlike, whose state_dict() is not like torch's")
        assert sparse.startswith("cannot save 'optimizer.state.0.weight.pairs': it has the layout torch.sparse_coo")
    whole, resumed = told(result[0])["found"]
    assert len(set(whole)) == 6
    assert resumed == pytest.approx(whole, abs=1e-6)


# Ranks of a script that averages gradients itself, whose models or optimizers of torch may be apart.
APART = """
    import json, os, torch, torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    import flk_runtime as flk

    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def train(place, *ends, apart=None, wrap=lambda model: model, declare=lambda thing: thing):
        seen = []
        for until in ends:
            torch.manual_seed(0)
            model = nn.Linear(2, 1)
            if apart == "model":
                model.weight.data.add_(rank)  # as of experts that each rank has for itself
            model = wrap(model)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            state = {"model": declare(model), "optimizer": declare(optimizer)}
            with flk.adopt(checkpoint=os.environ["FOLDER"] + place, save_every=0, log_every=0, **state) as loop:
                for step in range(loop.steps, until):
                    optimizer.zero_grad()
                    model(torch.full((2, 2), step + 1.0)).square().sum().backward()
                    optimizer.step()
                    for each in optimizer.state.values() if apart == "state" and rank else ():
                        each["exp_avg"].mul_(2)
                    if apart == "lack" and rank:
                        optimizer.state.clear()
                    for each in model.parameters() if apart == "rounding" else ():
                        each.data.mul_(1 + 1e-7 * rank)
                    loop.step()
                loop.save()  # in the block, which is left without a save after an error
                seen.append([each.tolist() for each in model.parameters()])
        return seen

    def refused(**options):
        try:
            train(f"{len(options)}", 1, **options)
        except flk.CheckpointError as error:
            return str(error)

    def saved_by_hand():
        torch.manual_seed(rank)
        model = nn.Linear(2, 1)
        try:
            flk.save(1, os.environ["FOLDER"] + "by hand", model=model, optimizer=torch.optim.SGD(model.parameters()))
        except flk.CheckpointError as error:
            return str(error)
"""


@pytest.mark.parametrize("world_size", often((0,), [2, 3]))
def test_what_a_checkpoint_has_once_is_alike_on_all_ranks_or_refused(
    ranks: Ranks, tmp_path: Path, world_size: int
) -> None:
    script = (
        APART
        + """
    print("=", json.dumps(["refused", [
        refused(apart="model"), refused(apart="state"), refused(apart="state", wrap=DistributedDataParallel),
        saved_by_hand(), refused(apart="lack"),
    ]]))
    train("rounding", 2, 3, apart="rounding")
    train("replicated", 2, 3, apart="model", declare=flk.replicated)
    print("=", json.dumps(["own", train("own", 2, 3, apart="model", declare=flk.per_rank)]))
    print("=", json.dumps(["whole", train("whole", 3, apart="model", declare=flk.per_rank)]))
    dist.barrier()
"""
    )
    for each in ranks(script, world_size, {"FOLDER": f"{tmp_path}/"}):
        model, state, of_ddp, by_hand, lacking = told(each)["refused"]
        once = "has other values on other ranks, and a checkpoint has one of each"
        assert model.startswith(f"the parameter 'bias' of optimizer {once}")
        assert state.startswith(f"'exp_avg' of 'bias' of optimizer {once}")
        assert of_ddp.startswith(f"'exp_avg' of 'bias' of optimizer {once}")
        assert by_hand.startswith(f"the parameter 'bias' of optimizer {once}")
        assert lacking.startswith(
            "'exp_avg' of 'bias' of optimizer is a tensor of torch.float32 (1,) on rank 0, and missing on rank 1, "
        )
        assert told(each)["own"][-1] == told(each)["whole"][-1]


# The first training is left out by the second attempt, as scripts do with what they have finished.
SKIPS_THE_FIRST = """
    import os, signal
    import flk_runtime as flk

    def train(place, steps):
        progress = {"of": place}
        loop = flk.adopt(checkpoint=place, save_every=1, log_every=0, progress=progress)
        print(f"{place} begins at step {loop.steps} of {progress['of']}")
        for step in range(loop.steps, steps):
            if (place, step, loop.attempt) == ("second", 2, 0):
                loop.save(wait=True)
                os.kill(os.getpid(), signal.SIGKILL)
            loop.step()
        loop.close()

    if int(os.environ["FLK_ATTEMPT"]) == 0:
        train("first", 5)
    train("second", 4)
    train("./third", 1)
"""


def test_a_training_does_not_resume_from_the_memory_of_another_one(
    forked_pods: Callable[..., Pods], root: Path
) -> None:
    variables = {pod_env.MEMORY_ROOT: str(root), pod_env.RESTARTS: "1", user_env.BACKOFF: "0"}
    job = forked_pods(1, 1, script=SKIPS_THE_FIRST, **variables)
    job.start("train.py")
    assert job.wait() == [0], job.log()
    assert re.findall(r"\w+ begins at .*", job.log()) == [
        "first begins at step 0 of first",
        "second begins at step 0 of second",
        "second begins at step 2 of second",
        "third begins at step 0 of ./third",
    ]
    assert "the checkpoint in pod memory is of another place, first, and is not used here" in job.log()
    assert job.log().count("the memory of the pods keeps only the first training of a process") == 2


# Three trainings in one place, of which rank 1 is killed in the second one.
SEVERAL = """
    import os, random, signal, torch
    from torch import nn
    import flk_runtime as flk

    torch.manual_seed(7)
    random.seed(7)

    def begin(kind, model, optimizer):
        if kind == "run":
            run = flk.init(device="cpu", save_every=SAVE_EVERY)
            return run, *run.parallelize(model, optimizer)
        loop = flk.adopt(save_every=SAVE_EVERY, log_every=0, model=model, optimizer=optimizer)
        return loop, model, optimizer

    def train(number, kind):
        model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        training, model, optimizer = begin(kind, model, torch.optim.AdamW(model.parameters(), lr=0.1))
        split = torch.randperm(100)[:3].tolist(), random.random()
        print(f"{number} begins at {training.steps} with {split}", flush=True)
        for step in range(training.steps, 4):
            if (number, step, training.attempt) == (1, 2, 0):
                training.save(wait=True)
                if training.rank:
                    os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            model(torch.ones(4, 2)).sum().backward()
            optimizer.step()
            training.step()
        training.close()
        print(f"{number} ends after {training.steps} with {sum(each.sum().item() for each in model.parameters())}")

    for number, kind in enumerate(KINDS):
        train(number, kind)
"""


@pytest.mark.parametrize(
    "kinds",
    [("run", "run", "loop"), pytest.param(("loop", "loop", "run"), marks=pytest.mark.soak)],
    ids=["runs", "loops"],
)
def test_each_training_of_a_process_begins_anew_and_resumes_from_its_own_state(
    forked_pods: Callable[..., Pods], root: Path, tmp_path: Path, kinds: tuple[str, ...]
) -> None:
    """They draw the same numbers before their first steps in each attempt, on all ranks."""
    settings = {pod_env.MEMORY_ROOT: str(root), user_env.CHECKPOINT: str(tmp_path / "checkpoint")}
    every = 1 if kinds[0] == "run" else 0
    script = SEVERAL.replace("KINDS", repr(kinds)).replace("SAVE_EVERY", str(every))
    job = forked_pods(1, 2, script=script, **settings, **{pod_env.RESTARTS: "1", user_env.BACKOFF: "0"})
    job.start("train.py")
    assert job.wait() == [0], job.log()
    begun = re.findall(r"(\d) begins at (\d) with (.*)", job.log())
    assert sorted(each[:2] for each in begun) == sorted(
        [("0", "0"), ("1", "0"), ("0", "4"), ("1", "2"), ("2", "0")] * 2
    ), job.log()
    for number in "012":
        assert len({split for each, _, split in begun if each == number}) == 1, job.log()
    ended = re.findall(r"0 ends after 4 with (\S+)", job.log())
    assert len(ended) == 4
    assert len(set(ended[::2])) == 1, job.log()  # of both attempts


# An optimizer of stages of a pipeline, which holds some state only on the last one.
STATE_OF_STAGES = (
    SHARED_STEPS.partition("    class Shared")[0]
    + """
    class Momentum(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure=None):
            for each in self.param_groups[0]["params"]:
                state, gradient = self.state[each], each.grad.to_local()
                state["momentum"] = 0.9 * state.get("momentum", torch.zeros_like(gradient)) + gradient
                if rank:
                    state["count"] = state.get("count", 0) + 1
                    state["own"] = 0.9 * state.get("own", torch.zeros_like(gradient)) + gradient
                each.to_local().sub_(state["momentum"], alpha=0.1)

    def train(kind, place, until, shape):
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp"))
        stage = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        stage[1 - mesh["pp"].get_local_rank()] = nn.Identity()
        fully_shard(stage, mesh=mesh["dp"])
        optimizer = kind(stage.parameters())
        folder = os.environ["FOLDER"] + place
        with flk.adopt(checkpoint=folder, save_every=0, log_every=0, model=[stage], optimizer=optimizer) as loop:
            for step in range(loop.steps, until):
                loss = stage(torch.full((2, 3 + mesh["pp"].get_local_rank()), step + 1.0)).square().sum()
                optimizer.zero_grad(), loss.backward(), optimizer.step()
                loop.step()
            loop.save()  # in the block, which is left without a save after an error
        states = [optimizer.state[each] for each in stage.parameters()]
        return [{key: getattr(each, "tolist", lambda: state["count"])() for key, each in state.items()}
                for state in states]
"""
)


def test_state_of_the_stages_of_a_pipeline_is_that_of_the_ranks_that_have_it(ranks: Ranks, tmp_path: Path) -> None:
    script = (
        STATE_OF_STAGES
        + """
    resumed = [train(Momentum, "resumed", until, (2, 1)) for until in (2, 4)][1]
    print("=", json.dumps(["found", [train(Momentum, "whole", 4, (2, 1)), resumed]]))
    dist.barrier()
"""
    )
    for rank, each in enumerate(ranks(script, 2, {"FOLDER": f"{tmp_path}/"})):
        whole, resumed = told(each)["found"]
        assert resumed == whole
        assert [state.get("count") for state in whole] == [4 if rank else None] * 2
