from __future__ import annotations

import json
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flk_runtime.checkpoint.storage import manifest
from flk_runtime.data.map_style import step_sizes
from tests.support.checkpoints import load_with_torch
from tests.support.ranks import Ranks
from tests.support.slow_storage import SLOW_STORAGE
from tests.support.small_model import SMALL_MODEL, told

# Trains until STEPS and prints, per rank, the data of every step and a hash of all parameters at the end.
TRAIN = """
    import hashlib, os, torch, flk_runtime as flk
    from torch import nn
    until, width = int(os.environ["STEPS"]), int(os.environ.get("WIDTH", 8))
    with flk.init(device="cpu", log_every=0) as run:
        model = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.4), nn.ReLU(), nn.Linear(width, 300), nn.Linear(300, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        wrapped, optimizer = run.parallelize(model, optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        run.register("scheduler", scheduler)
        x = torch.randn(41, 4, generator=torch.Generator().manual_seed(2))
        loader = run.loader(torch.utils.data.TensorDataset(x, torch.arange(41)), 4)
        for x, number in loader.steps(until):
            print("data", loader.epoch, *number.tolist())
            loss = (wrapped(x) - x[:, :1]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            run.step(loss=loss)
        content = torch.cat([p.flatten() for p in model.parameters()]).detach().numpy().tobytes()
        print("end", run.steps, optimizer.param_groups[0]["lr"], hashlib.sha256(content).hexdigest())
"""


def train(ranks: Ranks, folder: Path, steps: int, world_size: int = 1, **options: Any) -> list[Any]:
    variables = {"FLK_CHECKPOINT": str(folder), "STEPS": str(steps), "FLK_SAVE_EVERY": "3"}
    variables.update(options.pop("environment", {}))
    return ranks(TRAIN, world_size, variables, **options)


def data(ended: list[Any]) -> Counter[tuple[int, int]]:
    """How often each (epoch, sample) was trained on, by all ranks together."""
    lines = [line.split()[1:] for rank in ended for line in rank.lines if line.startswith("data")]
    return Counter((int(epoch), int(sample)) for epoch, *samples in lines for sample in samples)


def last(ended: list[Any]) -> set[str]:
    """The last lines of all ranks."""
    return {rank.lines[-1] for rank in ended}


def test_a_resumed_run_ends_bit_equal(ranks: Ranks, tmp_path: Path) -> None:
    # From three ranks on it also matters in which order gradients are added up.
    undisturbed = train(ranks, tmp_path / "one", 11, 4)
    first = train(ranks, tmp_path / "two", 5, 4)
    second = train(ranks, tmp_path / "two", 11, 4)
    assert f"flk: resumed at step 5 from {tmp_path}/two/step-000000005" in second[0].lines
    assert len(last(undisturbed)) == 1
    assert last(undisturbed) == last(second)
    assert last(first) != last(second)
    assert data(undisturbed) == data(first) + data(second)
    assert [path.name for path in sorted((tmp_path / "two").glob("[!.]*"))] == [
        "latest",
        "step-000000009",
        "step-000000011",
    ]


def test_a_loader_made_in_an_evaluation_does_not_keep_a_run_from_resuming(ranks: Ranks, tmp_path: Path) -> None:
    evaluation = """
            if run.steps % 2 == 0:
                for _ in run.loader(torch.utils.data.TensorDataset(torch.arange(8)), 2, shuffle=False):
                    pass
    """
    step = "            run.step(loss=loss)"
    script = TRAIN.replace(step, step + evaluation.rstrip())
    variables = {"FLK_CHECKPOINT": str(tmp_path), "FLK_SAVE_EVERY": "3"}
    ranks(script, 2, {**variables, "STEPS": "7"})
    resumed = ranks(script, 2, {**variables, "STEPS": "9"})
    assert f"flk: resumed at step 7 from {tmp_path}/step-000000007" in resumed[0].lines
    assert [line for line in resumed[0].lines if "loader-1" in line] == [
        "flk: 'loader-1' was made after the first step without a name=, so its position is not saved, as is right for "
        "an evaluation"
    ]


# Two phases with data of one length. A restart leaves out the first one when it is done.
PHASES = (
    SMALL_MODEL
    + """
def phases(place, until, both_at_once=False, **named):
    first, second = (torch.utils.data.TensorDataset(torch.arange(base, base + 24.0).view(24, 1)) for base in (0, 100))
    seen = []
    with init("ddp", checkpoint=os.environ["FOLDER"] + place, save_every=1) as run:
        model = nn.Linear(1, 1)
        model, optimizer = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=1e-6))

        def train(loader, count):
            for (x,) in loader.steps(min(count, until)):
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
                run.step()
                seen.extend(map(int, x.flatten()))

        if run.steps < 2:
            loader = run.loader(first, 2)
            later = run.loader(second, 2) if both_at_once else None
            train(loader, 2)
        if until > 2:
            train(later if run.steps == 2 and both_at_once else run.loader(second, 2, **named), 4)
    return seen
"""
)


def test_a_phase_that_a_restart_begins_with_does_not_get_the_position_of_another(ranks: Ranks, tmp_path: Path) -> None:
    begin = (
        PHASES
        + """
with group():
    refused("pass a name= if it is for another phase of the training", lambda: phases("late", 3))
    tell("seen", phases("named", 3, name="second"))
    phases("both", 3, both_at_once=True)
"""
    )
    resume = (
        PHASES
        + """
with group():
    tell("seen", phases("named", 4, name="second"))
    refused("'loader-1' is in the checkpoint, and this script makes fewer loaders", lambda: phases("both", 4))
"""
    )
    variables = {"FOLDER": f"{tmp_path}/"}
    before = [sample for each in ranks(begin, 2, variables) for sample in told(each)["seen"] if sample >= 100]
    after = [sample for each in ranks(resume, 3, variables) for sample in told(each)["seen"]]
    assert len(before) == 4
    assert len(after) == 6
    assert len({*before, *after}) == 10
    assert min(after) >= 100


def test_loaders_that_a_restart_does_not_make_are_of_an_evaluation_or_refused(ranks: Ranks, tmp_path: Path) -> None:
    script = (
        PHASES
        + """
def evaluated(until):
    dataset = torch.utils.data.TensorDataset(torch.arange(24.0).view(24, 1))
    with init("ddp", checkpoint=os.environ["FOLDER"] + "evaluated") as run:
        model = nn.Linear(1, 1)
        model, optimizer = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=1e-6))
        loader = run.loader(dataset, 2)
        if run.steps == 0:
            with torch.no_grad():
                next(iter(run.loader(dataset, 2)))
        for (x,) in loader.steps(until):
            model(x).mean().backward()
            optimizer.step(), run.step()
        return run.steps

with group():
    assert (evaluated(2), evaluated(3)) == (2, 3)
    phases("unread", 2, both_at_once=True)
    refused("'loader-1' is in the checkpoint, and this script makes fewer loaders", lambda: phases("unread", 4))
"""
    )
    lines = ranks(script, 2, {"FOLDER": f"{tmp_path}/"})[0].lines
    place = f"{tmp_path}/evaluated/step-000000002"
    assert f"flk: ignoring 'loader-1' in {place}: this script does not register it" in lines


def test_a_loader_with_a_name_goes_on_where_it_was_whenever_a_restart_makes_it(ranks: Ranks, tmp_path: Path) -> None:
    script = (
        SMALL_MODEL
        + """
def alternate(until):
    first, second = (torch.utils.data.TensorDataset(torch.arange(base, base + 24.0).view(24, 1)) for base in (0, 100))
    with init("ddp", checkpoint=os.environ["FOLDER"], save_every=1) as run:
        model = nn.Linear(1, 1)
        model, optimizer = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=1e-6))
        loader, other = run.loader(first, 2), None
        while run.steps < until:
            if run.steps % 4 == 2:
                other = other or run.loader(second, 2, name="other")
            (x,) = next((other if run.steps % 4 == 2 else loader).steps(run.steps + 1))
            model(x).mean().backward()
            optimizer.step(), run.step()
            yield from map(int, x.flatten())

with group():
    # The second attempt does not make the other loader, and the third one after its first step.
    tell("seen", [number for until in (4, 5, 7) for number in alternate(until)])
"""
    )
    ended = ranks(script, 2, {"FOLDER": str(tmp_path)})
    seen = [number for rank in ended for number in told(rank)["seen"]]
    assert len(seen) == len({*seen}) == 28
    assert len([number for number in seen if number >= 100]) == 8
    kept = f"'other' in {tmp_path}/step-000000004 is the position of a loader that is not made yet, and is kept"
    assert f"flk: {kept}" in ended[0].lines


def test_a_step_is_refused_that_trains_with_a_loader_whose_position_is_lost(ranks: Ranks, tmp_path: Path) -> None:
    script = (
        SMALL_MODEL
        + """
@contextlib.contextmanager
def begin():
    begin.count += 1
    with init("ddp", checkpoint=os.environ["FOLDER"] + str(begin.count)) as run:
        model = nn.Linear(1, 1)
        model, optimizer = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=1e-6))

        def step(*batches):
            sum(model(x).mean() for (x,) in batches).backward()
            optimizer.step(), optimizer.zero_grad(), run.step()
        yield run, model, optimizer, step
begin.count = 0
data = torch.utils.data.TensorDataset(torch.arange(8.0).view(8, 1))

def epochs(**named):
    with begin() as (run, model, optimizer, step):
        for _ in range(2):
            for batch in run.loader(data, 2, **named):
                step(batch)

def beside_another():
    with begin() as (run, model, optimizer, step):
        loader = run.loader(data, 2)
        step(next(iter(loader)))
        for new, batch in zip(run.loader(data, 2).steps(3), loader.steps(3)):
            step(new, batch)

def read_ahead():
    with begin() as (run, model, optimizer, step):
        step(next(iter(run.loader(data, 2))))
        batches = iter(run.loader(data, 2))
        (x,) = next(batches)
        model(x).mean().backward()
        optimizer.step()
        next(batches)
        run.step()

def by_hand():
    with begin() as (run, model, optimizer, step):
        step(next(iter(run.loader(data, 2))))
        for (x,) in run.loader(data, 2):
            model(x).mean().backward()
            with torch.no_grad():
                for each in model.parameters():
                    each -= 1e-6 * each.grad
            run.step()

def evaluated_with_gradients():
    with begin() as (run, model, optimizer, step):
        for batch in run.loader(data, 2):
            model(batch[0]).mean().backward()
            optimizer.step()
            kept = iter(run.loader(data, 2))
            model(next(kept)[0])
            run.step()

def logged(until):
    with init("ddp", checkpoint=os.environ["FOLDER"] + "logged", save_every=1) as run:
        model = nn.Linear(1, 1)
        model, optimizer = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=1e-6))
        loader = run.loader(data, 2)
        def look():
            if run.steps % 2 == 0:
                model(next(iter(run.loader(data, 2)))[0])

        look()
        for (x,) in loader.steps(until):
            model(x).mean().backward()
            optimizer.step(), run.step(), look()

with group():
    logged(3)
    logged(5)  # it makes no other loader before its first step
    words = "position is not saved, and this step trains with it: make one loader before the first step, and loop over"
    for each in (epochs, beside_another, read_ahead, by_hand):
        refused(words, each)
    refused("named 'train' was made before: make it once, and loop over its epochs(n)", lambda: epochs(name="train"))
    evaluated_with_gradients()
"""
    )
    ranks(script, 2, {"FOLDER": f"{tmp_path}/"})


def test_the_same_job_started_again_ends_at_once(ranks: Ranks, tmp_path: Path) -> None:
    first = train(ranks, tmp_path / "folder", 4)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "folder").iterdir())
    again = train(ranks, tmp_path / "folder", 4)
    assert last(first) == last(again)
    assert data(again) == Counter()
    assert before == sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "folder").iterdir())


@pytest.mark.parametrize("worlds", [(3, 2), (1, 3)])
def test_every_sample_once_at_another_world_size(ranks: Ranks, tmp_path: Path, worlds: tuple[int, int]) -> None:
    first = train(ranks, tmp_path / "folder", 2, worlds[0])
    left, _ = step_sizes(41 - 2 * 4 * worlds[0], worlds[1], 4 * worlds[1], drop_last=False)
    second = train(ranks, tmp_path / "folder", 2 + left, worlds[1])
    assert data(first) + data(second) == Counter((0, sample) for sample in range(41))
    assert len(last(second)) == 1


def damage(kind: str, folder: Path) -> None:
    file = folder / "__0_0.distcp"
    content = file.read_bytes()
    if kind == "cut":
        file.write_bytes(content[: len(content) // 2])
    elif kind == "flip":
        # One bit in the parameters: what torch.load alone does not notice.
        place = content.index(load_with_torch(folder)["model"]["4.weight"].numpy().tobytes()) + 20
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    elif kind == "missing":
        file.unlink()
    elif kind == "foreign":
        (folder / "manifest.json").unlink()
    else:
        (folder / "manifest.json").write_bytes(b"")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("cut", "__0_0.distcp has "),
        ("flip", "__0_0.distcp has another checksum than its manifest says"),
        ("missing", "__0_0.distcp is missing"),
        ("foreign", "it has no manifest.json, so it was not completed or flk did not write it"),
        ("empty", "manifest.json belongs to no checkpoint of flk"),
    ],
)
def test_a_damaged_checkpoint_is_reported_and_the_older_one_used(
    ranks: Ranks, tmp_path: Path, kind: str, reason: str
) -> None:
    folder = tmp_path / "folder"
    undisturbed = train(ranks, folder, 7)
    newest = folder / "step-000000007"
    damage(kind, newest)
    (resumed,) = train(ranks, folder, 7)
    assert f"flk: skipping the damaged checkpoint {newest}, renamed to {newest.name}.unreadable: {reason}" in (
        resumed.output
    )
    assert f"flk: resumed at step 6 from {folder}/step-000000006" in resumed.lines
    assert last([resumed]) == last(undisturbed)
    assert sorted(path.name for path in folder.glob("[!.]*")) == [
        "latest",
        "step-000000006",
        "step-000000007",
        "step-000000007.unreadable",
    ]


def test_a_name_that_somebody_writes_into_latest_is_resumed_and_later_ones_are_named(
    ranks: Ranks, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    undisturbed = train(ranks, folder, 7)
    (folder / "latest").write_text("step-000000006\n")
    (resumed,) = train(ranks, folder, 7)
    assert f"flk: {folder}: latest names step 6; the checkpoints of later steps, 7, are not used" in resumed.lines
    assert f"flk: resumed at step 6 from {folder}/step-000000006" in resumed.lines
    assert last([resumed]) == last(undisturbed)
    assert (folder / "latest").read_text().split()[0] == "step-000000007"


def test_ranks_that_do_not_see_the_same_folder_end_with_the_reason(ranks: Ranks, tmp_path: Path) -> None:
    elsewhere = {1: {"FLK_CHECKPOINT": str(tmp_path / "elsewhere")}}
    for rank in train(ranks, tmp_path / "one", 8, 2, of_rank=elsewhere, failing=True):
        assert rank.code == 1
        assert "the ranks do not see the same checkpoint folder" in rank.lines[-1]


def test_a_checkpoint_of_another_model(ranks: Ranks, tmp_path: Path) -> None:
    train(ranks, tmp_path / "folder", 1, 2)
    ended = train(ranks, tmp_path / "folder", 2, 2, environment={"WIDTH": "9"}, failing=True)
    for rank in ended:
        assert rank.code == 1
        assert (
            f"cannot restore 'model' from {tmp_path}/folder/step-000000001: '0.weight' has the shape (8, 4) in "
        ) in rank.lines[-1]


def test_a_folder_that_cant_be_written_to_is_an_error_at_the_start(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for rank in train(ranks, tmp_path / "file" / "folder", 1, 2, failing=True):
        assert rank.code == 1
        assert f"cannot write to the checkpoint folder {tmp_path}/file/folder: Not a directory" in rank.lines[-1]


@pytest.mark.root("mounts a small file system in a namespace of its own")
def test_a_full_disk_keeps_the_last_good_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    script = """
        import ctypes, os, subprocess, sys, torch, flk_runtime as flk
        from flk_runtime.errors import CheckpointError
        folder = os.environ["PLACE"]
        if ctypes.CDLL(None, use_errno=True).unshare(0x00020000):  # CLONE_NEWNS
            sys.exit(77)
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], check=True)

        def start():
            run = flk.init(device="cpu", checkpoint=folder, save_every=0, log_every=0)
            model = torch.nn.Linear(500, 500)
            return run, *run.parallelize(model, torch.optim.AdamW(model.parameters()))

        run, model, optimizer = start()
        try:
            for _ in range(3):  # two checkpoints of 3 MB fit
                model(torch.ones(1, 500)).sum().backward()
                optimizer.step()
                run.step()
                run.save(wait=True)
        except CheckpointError as error:
            print("error", error)
        run.abandon()
        print("folder", [name for name in sorted(os.listdir(folder)) if not name.startswith(".writer")])
        run, *_ = start()
        print("resumed", run.steps)
        run.abandon()
    """
    (ended,) = ranks(script, 1, {"PLACE": str(tmp_path)}, failing=True)
    if ended.code == 77:
        pytest.skip("this container may not make mount namespaces (CAP_SYS_ADMIN)")
    error = f"error cannot write the checkpoint {tmp_path}/step-000000003: No space left on device"
    assert any(line.startswith(error) for line in ended.lines), ended.output
    assert "folder ['latest', 'step-000000001', 'step-000000002']" in ended.lines
    assert "resumed 2" in ended.lines


def test_a_newer_format_is_an_error(ranks: Ranks, tmp_path: Path) -> None:
    train(ranks, tmp_path / "folder", 1)
    path = tmp_path / "folder" / "step-000000001" / "manifest.json"
    content = json.loads(path.read_bytes())
    assert content["metadata"].keys() >= {"job", "code", "flk", "torch", "strategy"}
    newer = {**content, "format": 99, "metadata": {"flk": "9.0"}}
    del newer["checksum"]
    path.write_text(json.dumps({**newer, "checksum": manifest._checksum(newer)}))
    (ended,) = train(ranks, tmp_path / "folder", 2, failing=True)
    assert "flk 9.0 wrote it in format 99" in ended.lines[-1]
    assert path.exists()


def test_what_a_checkpoint_holds_must_be_registered_and_plain(ranks: Ranks, tmp_path: Path) -> None:
    train(ranks, tmp_path / "folder", 1)
    script = """
        import torch, flk_runtime as flk

        class Odd:
            def state_dict(self):
                return {"odd": Odd()}

        def refused(words, action):
            try:
                action()
            except (flk.SetupError, flk.CheckpointError) as error:
                assert words in str(error), error
            else:
                raise AssertionError(words)

        run = flk.init(device="cpu")
        assert run.steps == 1
        refused("registers none: call parallelize", run.step)
        run.abandon()
        run = flk.init(device="cpu", checkpoint="CHECKPOINT2")
        run.parallelize(torch.nn.Linear(1, 1))
        refused("already registered as 'model'", lambda: run.register("model", Odd()))
        refused("'flk.odd': names that begin with 'flk.'", lambda: run.register("flk.odd", Odd()))
        refused("'flk.odd': names that begin with 'flk.'", lambda: run.loader(range(4), 1, name="flk.odd"))
        run.register("odd", Odd())
        refused("cannot save 'odd.odd': it is a __main__.Odd", run.save)
        refused("'best.of': it is a __main__.Odd", lambda: run.register("best", {"of": Odd()}))
        run.abandon()
    """
    ranks(script.replace("CHECKPOINT2", str(tmp_path / "second")), 1, {"FLK_CHECKPOINT": str(tmp_path / "folder")})
    assert list((tmp_path / "second").iterdir()) == []


def test_a_save_that_is_waited_for_is_complete_before_the_run_is_abandoned(ranks: Ranks, tmp_path: Path) -> None:
    script = """
        import os, torch, flk_runtime as flk
        run = flk.init(device="cpu", save_every=0, log_every=0)
        run.parallelize(torch.nn.Linear(3000, 3000))
        run.step()
        run.save(wait=True)
        run.abandon()
        os._exit(0)  # threads end here
    """
    ranks(script, 2, {"FLK_CHECKPOINT": str(tmp_path)})
    assert (tmp_path / "latest").read_text().split()[0] == "step-000000001"


def test_a_run_is_told_of_what_only_a_part_of_was_restored(ranks: Ranks, tmp_path: Path) -> None:
    """flk.restore has restored something else than the model that has got another name."""
    script = """
        import torch, flk_runtime as flk
        model, ema = torch.nn.Linear(1, 1), {"decay": 0.9}
        with flk.adopt(net=model, ema=ema) as loop:
            loop.step()
    """
    ranks(script, 1, {"FLK_CHECKPOINT": str(tmp_path)})
    script = """
        import torch, flk_runtime as flk
        run = flk.init(device="cpu")
        flk.restore(ema={"decay": 0.0})
        run.parallelize(torch.nn.Linear(1, 1))
        run.step()
    """
    (ended,) = ranks(script, 1, {"FLK_CHECKPOINT": str(tmp_path)}, failing=True)
    assert "holds the model 'net', which this script does not register" in ended.output


@pytest.mark.parametrize(
    "end", ["", "training.__exit__(SystemExit, SystemExit(0), None); assert training.closed"], ids=["end", "exit"]
)
@pytest.mark.parametrize("begin", ["flk.init(device='cpu', save_every=2", "flk.adopt(model=model, save_every=2"])
def test_the_end_of_a_training_that_is_not_closed_waits_for_its_save_and_says_what_is_not_saved(
    ranks: Ranks, tmp_path: Path, begin: str, end: str
) -> None:
    script = SLOW_STORAGE + textwrap.dedent(f"""
        import torch, flk_runtime as flk

        model = torch.nn.Linear(1, 1)
        training = {begin}, log_every=0)
        if isinstance(training, flk.Run):
            training.parallelize(model)
        for _ in range(STEPS):
            training.step()
        {end}
    """)
    name = "run" if "init" in begin else "loop"
    for steps, said in (
        (3, [f"flk: the state after step 3 is not saved, since the script ends without {name}.close()"]),
        (4, []),
    ):
        ended = ranks(script.replace("STEPS", f"{steps} - training.steps"), 2, {"FLK_CHECKPOINT": str(tmp_path)})
        assert (tmp_path / "latest").read_text().split()[0] == f"step-{steps // 2 * 2:09}"
        lines = [line for each in ended for line in each.lines if "is not saved" in line]
        found = [line.partition(", which the end")[0] for line in lines]
        assert found == said


def test_a_save_leaves_nothing_in_the_store_for_longer_than_the_next_one(ranks: Ranks, tmp_path: Path) -> None:
    script = """
        import torch, flk_runtime as flk
        from flk_runtime.distributed import process_group
        with flk.init(device="cpu", save_every=0) as run:
            run.parallelize(torch.nn.Linear(1, 1))
            counts = []
            for _ in range(5):
                run.step()
                run.save(wait=True)
                process_group.all_gather(None)
                counts.append(process_group.store().num_keys())
                process_group.all_gather(None)
            print(counts[1], counts[-1])
    """
    for ended in ranks(script, 2, {"FLK_CHECKPOINT": str(tmp_path / "folder")}):
        second, last = ended.lines[-1].split()
        assert second == last


def test_an_end_by_an_exception_saves_nothing_and_leftovers_are_removed(ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / ".step-000000009.1.tmp").mkdir()
    (folder / ".step-000000009.1.tmp" / "__0_0.distcp").write_bytes(b"half")
    script = """
        import torch, flk_runtime as flk
        with flk.init(device="cpu", save_every=0) as run:
            run.parallelize(torch.nn.Linear(1, 1))
            run.step()
            raise KeyError("of the user")
    """
    (ended,) = ranks(script, 1, {"FLK_CHECKPOINT": str(folder)}, failing=True)
    assert ended.code == 1
    assert "of the user" in ended.lines[-1]
    assert list(folder.iterdir()) == []
