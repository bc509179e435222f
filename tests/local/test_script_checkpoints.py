"""flk.save and flk.restore in scripts with a loop of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flk_runtime.contract import pod_env, user_env
from tests.support.collection import often
from tests.support.pods import Pods
from tests.support.ranks import Ranks
from tests.support.small_model import COUNTING, told

SCRIPT = """
    import json, os, torch, torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    import flk_runtime as flk

    wrap = os.environ["WRAP"]
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    if wrap == "ddp":
        model = DistributedDataParallel(model)
    elif wrap == "fsdp2":
        from torch.distributed.fsdp import fully_shard
        fully_shard(model[0]); fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], 0.5)
    progress = {"epoch": 0, "note": "none"}
    things = dict(model=model, optimizer=optimizer, scheduler=scheduler, progress=progress)
    begun = flk.restore(**things)
    losses = []
    for step in range(begun, int(os.environ["STEPS"])):
        x = torch.randn(8, 7, generator=torch.Generator().manual_seed(step))
        loss = (model(x) + torch.rand(())).square().mean()
        loss.backward()
        optimizer.step(); optimizer.zero_grad(); scheduler.step()
        progress.update(epoch=step + 1, note="some")
        losses.append(loss.item())
        assert not flk.must_stop(step + 1), "no launcher says so"
        flk.save(step + 1, wait=step + 1 == int(os.environ["STEPS"]), **things)
    print("=", json.dumps(["seen", [begun, losses, progress["epoch"], scheduler.get_last_lr()]]))
    if dist.is_initialized():
        dist.barrier()
"""


RUN_SAVES_TOO = """
    import os, torch
    import flk_runtime as flk

    with flk.init() as run:
        model = run.parallelize(torch.nn.Linear(2, 2))
        try:
            flk.save(1, model=model)
        except (flk.SetupError, flk.CheckpointError) as error:
            print(error)
        flk.save(1, checkpoint=os.environ["ELSEWHERE"], model=model, wait=True)
"""


LONG_PAUSE = """
    import os, sys, time, torch
    from pathlib import Path
    import flk_runtime as flk
    from flk_runtime.checkpoint.save import background

    background._PAUSE = 1e9  # times of the copy: days
    model, latest = torch.nn.Linear(200, 200), Path(os.environ["FLK_CHECKPOINT"], "latest")
    read = lambda: latest.read_text().split()[0] if latest.exists() else "none"
    flk.save(1, model=model)
    time.sleep(0.5)
    print("first:", read())
    flk.save(2, model=model)
    print("second:", read())
    flk.save(3, model=model, wait=True)
    print("third:", read())
    flk.save(4, model=model)
    exec(os.environ["END"])
"""


@pytest.mark.parametrize(
    ("end", "code", "latest"),
    often(
        (0,),
        [
            ("", 0, 4),
            ("sys.exit()", 0, 4),
            ("sys.exit(143)", 143, 4),
            ("sys.exit(3)", 3, 3),
            ("raise ValueError", 1, 3),
        ],
    ),
)
def test_the_end_of_a_process_of_multiprocessing_waits_for_writes(
    ranks: Ranks, tmp_path: Path, end: str, code: int, latest: int
) -> None:
    """Unless it fails: the ranks that it would wait for may be gone."""
    (result,) = ranks(LONG_PAUSE, 1, {"FLK_CHECKPOINT": str(tmp_path), "END": end}, failing=code != 0)
    assert result.code == code
    assert (tmp_path / "latest").read_text().split()[0] == f"step-{latest:09d}"


def test_a_run_and_a_script_do_not_save_in_the_same_place(ranks: Ranks, tmp_path: Path) -> None:
    place, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    (result,) = ranks(RUN_SAVES_TOO, 1, {"FLK_CHECKPOINT": str(place), "ELSEWHERE": str(elsewhere)})
    expected = f"the run saves its own state in {place}: use run.register() and run.save(), or pass another checkpoint="
    assert expected in result.output
    assert (elsewhere / "latest").read_text().split()[0] == "step-000000001"


@pytest.mark.promise("Checkpoints: A script's own loop resumes with save and restore, or adopt")
@pytest.mark.parametrize(("wrap", "world_size"), [("none", 1), ("ddp", 2), ("fsdp2", 2)])
def test_a_script_with_its_own_loop_resumes_bit_equal(ranks: Ranks, tmp_path: Path, wrap: str, world_size: int) -> None:
    def run(folder: str, steps: int) -> list[object]:
        variables = {"FLK_CHECKPOINT": str(tmp_path / folder), "STEPS": str(steps), "WRAP": wrap}
        seen: list[object] = told(ranks(SCRIPT, world_size, variables)[0])["seen"]
        return seen

    _, whole, _, rates = run("whole", 6)
    begun, first, _, _ = run("two", 3)
    resumed, second, epoch, rates_again = run("two", 6)
    assert (begun, resumed, epoch) == (0, 3, 6)
    assert isinstance(first, list)
    assert isinstance(second, list)
    assert first + second == whole
    assert rates_again == rates


ODD_OPTIMIZERS = (
    """
import json, os, warnings, torch, torch.distributed as dist
from torch import nn
import flk_runtime as flk

wrap = os.environ["WRAP"]
dist.init_process_group("gloo")

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.late, self.last = nn.Linear(7, 5), nn.Linear(5, 5), nn.Linear(5, 3)
    def forward(self, x, late):
        x = self.first(x)
        return self.last(self.late(x) if late else x)
"""
    + COUNTING
    + """
def build(make):
    torch.manual_seed(0)
    model = Model()
    if wrap == "ddp":
        model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    elif wrap == "fsdp2":
        from torch.distributed.fsdp import fully_shard
        for each in (*model.children(), model):
            fully_shard(each)
    elif wrap.startswith("fsdp1"):
        warnings.simplefilter("ignore")  # torch's FSDP1 calls what torch has deprecated
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=wrap == "fsdp1 original",
            device_id=torch.device("cpu"),
        )
    return {"model": model, "optimizer": make(model.parameters())}

def train(make, name, until):
    things, losses = build(make), []
    begun = flk.restore(os.environ["FLK_CHECKPOINT"] + name, **things)
    if begun:
        with torch.no_grad():
            things["model"](torch.zeros(1, 7), True)  # under FSDP2 full parameters are left now
    for step in range(begun, until):
        part = 0 if wrap == "none" else dist.get_rank()  # without a wrapper nothing averages
        x = torch.randn(8, 7, generator=torch.Generator().manual_seed(step * 10 + part))
        loss = things["model"](x, step >= 3).square().mean()
        loss.backward()
        things["optimizer"].step(), things["optimizer"].zero_grad()
        losses.append(loss.item())
    flk.save(until, checkpoint=os.environ["FLK_CHECKPOINT"] + name, wait=True, **things)
    return losses

Counting.with_text = not wrap.startswith("fsdp1")
for make in (torch.optim.AdamW, Counting):
    name = make.__name__
    parts = [train(make, name, until) for until in (2, 4, 6)]
    print("=", json.dumps([name, [train(make, name + "-whole", 6), sum(parts, [])]]))
dist.barrier()
"""
)


@pytest.mark.promise("Checkpoints: State of optimizers comes back to its parameter, or is refused")
@pytest.mark.parametrize("wrap", often((2,), ["none", "ddp", "fsdp2", "fsdp1", "fsdp1 original"]))
def test_optimizers_with_parameters_without_gradients_and_with_numbers_in_their_state(
    ranks: Ranks, tmp_path: Path, wrap: str
) -> None:
    variables = {"FLK_CHECKPOINT": str(tmp_path / "checkpoints-"), "WRAP": wrap}
    seen = told(ranks(ODD_OPTIMIZERS, 2, variables)[0])
    for whole, parts in seen.values():
        assert parts == whole
    assert list(seen) == ["AdamW", "Counting"]


FSDP1 = """
import json, os, warnings, torch, torch.distributed as dist
from torch import nn
import flk_runtime as flk

warnings.simplefilter("ignore")  # torch's FSDP1 calls what torch has deprecated
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
dist.init_process_group("gloo")
torch.manual_seed(0)
model = FullyShardedDataParallel(
    nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
    use_orig_params=os.environ["WRAP"] == "fsdp1 original", device_id=torch.device("cpu"),
)
things = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.05)}
losses = []
for step in range(flk.restore(**things), int(os.environ["STEPS"])):
    x = torch.randn(8, 7, generator=torch.Generator().manual_seed(step))
    loss = model(x.chunk(dist.get_world_size())[dist.get_rank()]).square().mean()
    loss.backward()
    things["optimizer"].step(), things["optimizer"].zero_grad()
    dist.all_reduce(loss)
    losses.append(loss.item() / dist.get_world_size())
flk.save(int(os.environ["STEPS"]), wait=True, **things)
print("=", json.dumps(["losses", losses]))
"""


@pytest.mark.promise("Checkpoints: A script's own loop resumes with save and restore, or adopt")
@pytest.mark.parametrize("wrap", often((0,), ["fsdp1", "fsdp1 original"]))
def test_a_script_that_wraps_its_model_in_fsdp1_resumes_at_another_world_size(
    ranks: Ranks, tmp_path: Path, wrap: str
) -> None:
    def losses(folder: str, world_size: int, steps: int) -> list[float]:
        variables = {"FLK_CHECKPOINT": str(tmp_path / folder), "STEPS": str(steps), "WRAP": wrap}
        found: list[float] = told(ranks(FSDP1, world_size, variables)[0])["losses"]
        return found

    whole = losses("whole", 4, 4)
    assert losses("parts", 4, 2) == whole[:2]
    assert losses("parts", 2, 4) == pytest.approx(whole[2:], abs=1e-6)


UNFIT = """
    import os, torch, flk_runtime as flk
    from torch import nn

    def restore(**things):
        try:
            print(flk.restore(os.environ["PLACE"], **things))
        except flk.CheckpointError as error:
            print(error)

    model = nn.Linear(2, 2)
    adam = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(adam, 9)
    flk.save(1, checkpoint=os.environ["PLACE"], wait=True, model=model, optimizer=adam, scheduler=scheduler)
    restore(model=model, average=nn.Linear(2, 2))
    restore(network=nn.Linear(2, 2))
    restore(model=nn.Linear(2, 3))
    restore(model=nn.Linear(2, 2, bias=False))
    restore(model=nn.Sequential(nn.Linear(2, 2)))
    restore(model=model, optimizer=torch.optim.SGD(model.parameters(), momentum=0.9))
    other = torch.optim.AdamW([{"params": model.weight}, {"params": model.bias}])
    restore(model=model, optimizer=other)
    restore(model=model, optimizer=adam, scheduler=torch.optim.lr_scheduler.OneCycleLR(adam, 0.1, 9))
    os.environ["PLACE"] += "-own"
    flk.save(1, checkpoint=os.environ["PLACE"], wait=True, model=flk.per_rank(model))
    restore(model=model)
"""


def test_what_does_not_fit_a_checkpoint_is_named(ranks: Ranks, tmp_path: Path) -> None:
    (result,) = ranks(UNFIT, 1, {"PLACE": str(tmp_path / "place")})
    place = f"{tmp_path}/place/step-000000001"
    seen = [line for line in result.lines if line != f"flk: resumed at step 1 from {place}"]
    assert seen == [
        f"flk: 'average' is not in {place}, and begins anew",
        f"flk: ignoring 'optimizer' in {place}: this script does not register it before its first step",
        f"flk: ignoring 'scheduler' in {place}: this script does not register it before its first step",
        "1",
        f"flk: 'network' is not in {place}, and begins anew",
        f"{place} holds the model 'model', which this script does not register, and has no 'network', which would "
        "begin anew while the rest goes on: register it under its name in the checkpoint, or name another place for "
        "checkpoints",
        f"cannot restore 'model' from {place}: 'model.weight' has the shape (2, 2) in {place}, and the "
        "shape (3, 2) here",
        f"cannot restore 'model' from {place}: unexpected key 'bias': the module has no such entry",
        f"cannot restore 'model' from {place}: unexpected key 'weight': the module has no such entry",
        f"cannot restore 'optimizer' from {place}: it is the state of another optimizer than SGD: of AdamW",
        f"cannot restore 'optimizer' from {place}: it has 1 groups of parameters, and the optimizer 2",
        f"cannot restore 'scheduler' from {place}: it is the state of another scheduler than OneCycleLR: it has "
        "'gamma', and no 'cycle_momentum'",
        f"flk: resumed at step 1 from {tmp_path}/place-own/step-000000001",
        f"cannot restore 'model' from {tmp_path}/place-own/step-000000001: each rank has a state of its own, which "
        "flk.per_rank(…) or another number of ranks has saved; resume as then, pass the object as flk.replicated(…) if "
        "rank 0's state is right for all ranks, or pass it under another name so that it starts anew",
    ]


STATES_OF_RANKS = """
    import json, os, torch, torch.distributed as dist, flk_runtime as flk
    from torch.utils.data import DataLoader

    class Position:
        def __init__(self):
            self.position = 0
        def state_dict(self):
            return {"position": self.position, "generator": torch.full((4,), self.position, dtype=torch.uint8)}
        def load_state_dict(self, state):
            assert state["generator"].tolist() == [state["position"]] * 4
            self.position = state["position"]

    class LoaderOfALibrary(Position, DataLoader):  # as StatefulDataLoader is
        def __init__(self):
            DataLoader.__init__(self, range(4))
            Position.__init__(self)

    class ParallelAwareLoader(LoaderOfALibrary):
        pass

    class Wrapper:
        def __init__(self):
            self.inner = LoaderOfALibrary()
        def __getattr__(self, name):
            return getattr(self.inner, name)
        def set(self, position):
            self.inner.position = position

    LoaderOfALibrary.__module__ = "torchdata.stateful_dataloader.stateful_dataloader"
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if ranks > 1 else 0

    plain, subclass, wrapper, counter = LoaderOfALibrary(), ParallelAwareLoader(), Wrapper(), Position()
    dictionary, own_dictionary = {}, {}
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    things = {
        "scheduler": scheduler, "dictionary": dictionary, "own_dictionary": flk.per_rank(own_dictionary),
        "plain": plain, "subclass": subclass, "wrapper": wrapper, "counter": flk.replicated(counter),
    }
    refused = []
    for name in list(things) if os.environ["RESTORES"] else []:
        try:
            flk.restore(os.environ["PLACE"], model=model, optimizer=optimizer, **{name: things[name]})
        except flk.CheckpointError as error:
            refused.append(str(error))
    if not os.environ["RESTORES"]:
        for each in (plain, subclass, counter):
            each.position = 10 + rank
        wrapper.set(10 + rank)
        scheduler.last_epoch = 10 + rank
        dictionary["position"] = own_dictionary["position"] = 10 + rank
        flk.save(1, checkpoint=os.environ["PLACE"], model=model, optimizer=optimizer, wait=True, **things)
    print("=", json.dumps(["shared", [scheduler.last_epoch, counter.position, dictionary.get("position")]]))
    own = [plain.position, subclass.position, wrapper.position, own_dictionary.get("position")]
    print("=", json.dumps(["own", own]))
    print("=", json.dumps(["refused", refused]))
    if ranks > 1:
        dist.barrier()
"""


def test_each_rank_gets_its_own_state_unless_it_is_known_to_be_shared(ranks: Ranks, tmp_path: Path) -> None:
    place = str(tmp_path / "states")
    ranks(STATES_OF_RANKS, 2, {"PLACE": place, "RESTORES": ""})
    again = [told(each) for each in ranks(STATES_OF_RANKS, 2, {"PLACE": place, "RESTORES": "yes"})]
    assert [each["shared"] for each in again] == [[10] * 3] * 2
    assert [each["own"] for each in again] == [[10] * 4, [11] * 4]
    assert [each["refused"] for each in again] == [[], []]


def test_a_state_of_each_rank_is_refused_by_name_at_another_number_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    place = str(tmp_path / "states")
    ranks(STATES_OF_RANKS, 2, {"PLACE": place, "RESTORES": ""})
    (alone,) = ranks(STATES_OF_RANKS, 1, {"PLACE": place, "RESTORES": "yes"})
    seen = told(alone)
    assert seen["shared"] == [10] * 3
    assert seen["own"] == [0, 0, 0, None]
    assert seen["refused"] == [
        f"cannot restore {name!r} from {place}/step-000000001: each rank has a state of its own, which "
        "flk.per_rank(…) or another number of ranks has saved; resume as then, pass the object as flk.replicated(…) if "
        "rank 0's state is right for all ranks, or pass it under another name so that it starts anew"
        for name in ("own_dictionary", "plain", "subclass", "wrapper")
    ]


GOES_BACK = """
    import torch
    import flk_runtime as flk

    model = torch.nn.Linear(1, 1)
    print("begins at", flk.restore(model=model))
    for step in (1, 2, 3):
        torch.nn.init.constant_(model.weight, step)
        flk.save(step, model=model)
    torch.nn.init.constant_(model.weight, torch.nan)
    print("goes back to", flk.restore(model=model), model.weight.item())
    flk.save(4, model=model, wait=True)
"""

WITHOUT_A_GROUP = """
    import os, torch
    import flk_runtime as flk

    model = torch.nn.Linear(1, 1)
    flk.save(1, checkpoint=os.environ["OWN"] + os.environ["RANK"], wait=True, model=model)
    for action in (flk.restore, lambda **objects: flk.save(1, **objects)):
        try:
            action(model=model)
        except (flk.SetupError, flk.CheckpointError) as error:
            print(error)
"""


RANK_0_ONLY = """
    import os, warnings, torch, torch.distributed as dist, flk_runtime as flk
    dist.init_process_group("gloo")
    place, one = os.environ["PLACE"], torch.ones(1)
    warnings.simplefilter("ignore")  # quantized tensors are deprecated
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    values = {"x": {"y": one}, "x.y": one}
    problems = [values, {"sparse": torch.eye(2).to_sparse()}, {"quantized": quantized}]
    for values in [*problems, {"fine": one}, *problems]:
        try:
            flk.save(1, checkpoint=place, values=values, wait=True)
            print("saved")
        except flk.CheckpointError as error:
            print(error)
    dist.barrier()
"""


def test_what_rank_0_cannot_save_is_an_error_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    problems = [
        "two tensors of a state have the name 'values.x.y': rename a key",
        "cannot save 'values.sparse': it has the layout torch.sparse_coo, and checkpoints hold dense tensors with "
        "values; save the plain tensors that it consists of",
        "cannot save 'values.quantized': it is quantized, and checkpoints hold dense tensors with values; save the "
        "plain tensors that it consists of",
    ]
    for result in ranks(RANK_0_ONLY, 2, {"PLACE": str(tmp_path / "place")}):
        assert result.lines == [*problems, "saved", *problems]


def test_a_script_goes_back_to_what_it_has_saved_last(ranks: Ranks, tmp_path: Path) -> None:
    for begin in (0, 4):
        (result,) = ranks(GOES_BACK, 1, {"FLK_CHECKPOINT": str(tmp_path)})
        said = [line for line in result.lines if not line.startswith("flk:")]
        assert said == [f"begins at {begin}", "goes back to 3 3.0"]
        assert (tmp_path / "latest").read_text().split()[0] == "step-000000004"


@pytest.mark.promise("Checkpoints: Two writers of one place make one checkpoint, whole")
def test_ranks_without_a_process_group_do_not_save_in_one_place(ranks: Ranks, tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    for result in ranks(WITHOUT_A_GROUP, 2, {"FLK_CHECKPOINT": str(place), "OWN": str(tmp_path / "own")}):
        assert len(result.lines) == 2
        for line in result.lines:
            assert line.startswith("there are 2 ranks and no process group: call torch.distributed.init_process_group")
    assert not place.exists()
    assert {path.name for path in tmp_path.iterdir()} >= {"own0", "own1"}


SGD = """
    import torch
    import flk_runtime as flk

    BEGIN
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], 0.1)
    state = {}
    flk.restore("ELSEWHERE", state=state)
    begun = flk.restore(state=state)
    for step in range(begun, min(begun + 5, 10)):
        weight.grad = torch.ones(2)
        optimizer.step()
        flk.save(step + 1, state=state, wait=True)
    if begun < 10:
        raise ArithmeticError(f"the loss is not finite after step {begun + 5}")
"""


@pytest.mark.parametrize("begin", ["", 'flk.init(device="cpu")'], ids=["alone", "init"])
def test_the_steps_of_an_attempt_go_on_where_flk_has_restored(
    forked_pods: Callable[..., Pods], tmp_path: Path, begin: str
) -> None:
    """SGD has no count of its own. The last attempt has nothing left to train."""
    script = SGD.replace("ELSEWHERE", str(tmp_path / "elsewhere")).replace("BEGIN", begin)
    variables = {pod_env.RESTARTS: "2", user_env.CHECKPOINT: str(tmp_path / "checkpoints")}
    job = forked_pods(1, 1, script=script, **variables)
    job.start("train.py")
    assert job.wait() == [0], job.logs_of_all()
    record = job.record()
    told = [(each.step, each.restored, each.restored_from) for each in record.attempts]
    assert told == [(5, 0, "start"), (10, 5, "storage"), (10, 10, "storage")]
    assert "at step 0 again" not in job.log()
    assert record.goodput is not None
    assert record.goodput.seconds["computing"] > 0


# Two trainings with flk.restore and flk.save, a run and a loop, of which some are in one place.
SEVERAL = """
    import os, torch
    from torch import nn
    import flk_runtime as flk

    def things():
        model = nn.Linear(2, 1)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}

    def with_script(place):
        objects = things()
        for step in range(flk.restore(place, **objects), 2):
            flk.save(step + 1, place, **objects)

    def with_run(place):
        with flk.init(device="cpu", checkpoint=place) as run:
            run.parallelize(*things().values())
            run.step()

    def with_loop(place):
        with flk.adopt(checkpoint=place, **things()) as loop:
            loop.step()

    def tried(train, place):
        try:
            train(os.environ["FOLDER"] + place)
            print("trained")
        except flk.SetupError as error:
            print("refused", error)

    for number, (first, second) in enumerate([
        (with_script, with_script), (with_script, with_run), (with_script, with_loop), (with_run, with_script)
    ]):
        tried(first, str(number)), tried(second, str(number)), tried(second, f"{number}-own")
    try:
        flk.save(3, os.environ["FOLDER"] + "3", **things())
    except flk.SetupError as error:
        print("at last", error)
"""


def test_a_training_that_would_resume_from_another_one_of_the_process_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    (result,) = ranks(SEVERAL, 1, {"FOLDER": f"{tmp_path}/"}, one_process=True)
    lines = [line for line in result.lines if line.startswith(("trained", "refused"))]
    assert [line.partition(" ")[0] for line in lines] == ["trained", "refused", "trained"] * 4
    words = (
        "flk.restore: this process has trained another optimizer with the checkpoints in",
        "this process has saved another training in",
        "this process has saved another training in",
        "flk.restore: a run or a loop of this process, which is closed, has its state in",
    )
    assert all(text in line for text, line in zip(words, lines[1::3], strict=True)), lines
    assert "at last flk.save: a run or a loop of this process, which is closed, has its state in" in result.output


# The data are split after the restore, and each step drops other units.
SPLIT = """
    import json, os, torch
    from torch import nn
    import flk_runtime as flk

    torch.manual_seed(42)
    model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    things = {"model": model, "optimizer": optimizer}
    if os.environ["KIND"] == "script":
        begun, step_of = flk.restore(**things), lambda step: flk.save(step, wait=True, **things)
    elif os.environ["KIND"] == "loop":
        loop = flk.adopt(save_every=1, log_every=0, **things)
        begun, step_of = loop.steps, lambda _: loop.step()
    else:
        run = flk.init(device="cpu", save_every=1, log_every=0)
        model, optimizer = run.parallelize(model, optimizer)
        begun, step_of = run.steps, lambda _: run.step()
    split = torch.randperm(60)[:5].tolist()
    losses = []
    for step in range(begun, int(os.environ["STEPS"])):
        loss = model(torch.ones(4, 2)).square().mean()
        loss.backward(), optimizer.step(), optimizer.zero_grad()
        losses.append(loss.item())
        step_of(step + 1)
    print("=", json.dumps(["seen", [begun, split, losses]]))
    if os.environ["KIND"] != "script":
        (run if os.environ["KIND"] == "run" else loop).close()
"""


@pytest.mark.parametrize("kind", often((0, 2), ["script", "loop", "run"]))
def test_what_a_script_draws_before_its_first_step_is_the_same_in_each_attempt(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    def attempt(place: str, steps: int) -> Any:
        environment = {"FLK_CHECKPOINT": str(tmp_path / place), "STEPS": str(steps), "KIND": kind}
        return told(ranks(SPLIT, 1, environment)[0])["seen"]

    _, split, whole = attempt("whole", 4)
    first, second = attempt("resumed", 2), attempt("resumed", 4)
    assert (first[1], second[0], second[1]) == (split, 2, split)
    assert first[2] + second[2] == whole  # also the units that are dropped
