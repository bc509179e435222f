from __future__ import annotations

import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flk_runtime.data.map_style import step_sizes
from tests.support.checkpoints import load_with_torch
from tests.support.collection import often
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


@pytest.mark.promise("Checkpoints: A resume is bit-equal at the same number of ranks, and takes each sample once")
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
    refused("this script makes fewer loaders before its first step", lambda: phases("both", 4))
"""
    )
    variables = {"FOLDER": f"{tmp_path}/"}
    before = [sample for each in ranks(begin, 2, variables) for sample in told(each)["seen"] if sample >= 100]
    after = [sample for each in ranks(resume, 3, variables) for sample in told(each)["seen"]]
    assert len(before) == 4
    assert len(after) == 6
    assert len({*before, *after}) == 10
    assert min(after) >= 100


def test_the_same_job_started_again_ends_at_once(ranks: Ranks, tmp_path: Path) -> None:
    first = train(ranks, tmp_path / "folder", 4)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "folder").iterdir())
    again = train(ranks, tmp_path / "folder", 4)
    assert last(first) == last(again)
    assert data(again) == Counter()
    assert before == sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "folder").iterdir())


@pytest.mark.promise("Checkpoints: A resume is bit-equal at the same number of ranks, and takes each sample once")
@pytest.mark.parametrize("worlds", [(3, 2), pytest.param((1, 3), marks=pytest.mark.soak)])
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


@pytest.mark.promise("Checkpoints: A damaged checkpoint is reported, and the one before it is used")
@pytest.mark.parametrize(
    ("kind", "reason"),
    often(
        (1, 3),
        [
            ("cut", "__0_0.distcp has "),
            ("flip", "__0_0.distcp has another checksum than its manifest says"),
            ("missing", "__0_0.distcp is missing"),
            ("foreign", "it has no manifest.json, so it was not completed or flk did not write it"),
            ("empty", "manifest.json belongs to no checkpoint of flk"),
        ],
    ),
)
def test_a_damaged_checkpoint_is_reported_and_the_older_one_used(
    ranks: Ranks, tmp_path: Path, kind: str, reason: str
) -> None:
    folder = tmp_path / "folder"
    undisturbed = train(ranks, folder, 7)
    newest = folder / "step-000000007"
    damage(kind, newest)
    (resumed,) = train(ranks, folder, 7)
    assert f"flk: skipping the damaged checkpoint {newest}: {reason}" in resumed.output
    assert f"flk: resumed at step 6 from {folder}/step-000000006" in resumed.lines
    assert last([resumed]) == last(undisturbed)
    assert sorted(path.name for path in folder.glob("[!.]*")) == ["latest", "step-000000006", "step-000000007"]


def test_ranks_that_do_not_see_the_same_folder_end_with_the_reason(ranks: Ranks, tmp_path: Path) -> None:
    elsewhere = {1: {"FLK_CHECKPOINT": str(tmp_path / "elsewhere")}}
    for rank in train(ranks, tmp_path / "one", 8, 2, of_rank=elsewhere, failing=True):
        assert rank.code == 1
        assert "the ranks do not see the same checkpoint folder" in rank.lines[-1]


@pytest.mark.promise("Checkpoints: Storage that is full, slow or away stops no training and is named")
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


@pytest.mark.parametrize(
    "end",
    often((0,), ["", "training.__exit__(SystemExit, SystemExit(0), None); assert training.closed"]),
    ids=["end", "exit"],
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
