from __future__ import annotations

import collections
import dataclasses
import itertools
import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import TensorDataset

from flk_runtime.data import Loader, make_loader
from flk_runtime.data.loader import to_device
from flk_runtime.errors import MismatchError, SetupError
from tests.support.loaders import Counted, loader_context

WORLDS = st.integers(1, 9)
BATCHES = st.integers(1, 7)
SAMPLES = st.integers(1, 400)


def loader(samples: int, *, rank: int = 0, world_size: int = 1, batch_size: int = 4, **options: Any) -> Loader:
    return Loader(TensorDataset(torch.arange(samples)), loader_context(batch_size, rank, world_size, **options))


def rest_of_epoch(
    samples: int, consumed: int, world_size: int, batch_size: int, **options: Any
) -> list[list[list[int]]]:
    """What every rank is given in each step, from a position on: [step][rank][sample]."""
    ranks = []
    for rank in range(world_size):
        one = loader(samples, rank=rank, world_size=world_size, batch_size=batch_size, **options)
        position = {"seed": options.get("seed", 0), "epoch": 0, "consumed": consumed, "samples": samples}
        one.load_state_dict(one.state_dict() | position)
        ranks.append(list(one.indices()))
    assert len({len(steps) for steps in ranks}) == 1  # all ranks take equally many steps
    return [list(step) for step in zip(*ranks, strict=True)]


@given(samples=SAMPLES, world_size=WORLDS, batch_size=BATCHES)
def test_an_epoch_gives_every_sample_once(samples: int, world_size: int, batch_size: int) -> None:
    if samples < world_size:
        with pytest.raises(SetupError, match=f"has {samples} samples, fewer than there are ranks"):
            loader(samples, world_size=world_size, batch_size=batch_size)
        return
    steps = rest_of_epoch(samples, 0, world_size, batch_size)
    assert sorted(i for step in steps for share in step for i in share) == list(range(samples))
    for step in steps:
        sizes = [len(share) for share in step]
        assert min(sizes) >= 1
        assert max(sizes) <= min(sizes) + 1  # a step is split evenly
        assert max(sizes) <= batch_size + 1  # one more where a small tail has joined
    assert all(len(share) == batch_size for step in steps[:-1] for share in step)
    whole = loader(samples, world_size=world_size, batch_size=batch_size)
    assert (len(whole), len(whole.dataset)) == (len(steps), samples)


@settings(max_examples=50)
@given(
    samples=SAMPLES,
    worlds=st.lists(st.tuples(WORLDS, BATCHES, st.integers(0, 30)), min_size=1, max_size=5),
    seed=st.integers(0, 5),
)
def test_every_sample_once_though_the_world_changes(
    samples: int, worlds: list[tuple[int, int, int]], seed: int
) -> None:
    assume(samples >= max(world_size for world_size, _, _ in worlds))
    consumed, seen = 0, Counter[int]()
    for number, (world_size, batch_size, most) in enumerate(worlds):
        steps = rest_of_epoch(samples, consumed, world_size, batch_size, seed=seed)
        for step in steps if number == len(worlds) - 1 else steps[:most]:
            given = [i for share in step for i in share]
            left = samples - consumed
            if left >= world_size:
                assert len(set(given)) == len(given)
            consumed += len(set(given))
            seen.update(set(given))
    assert consumed == samples
    assert seen == Counter(range(samples))  # the last world finishes the epoch


@given(samples=SAMPLES, world_size=WORLDS, batch_size=BATCHES)
def test_drop_last_takes_full_steps_only(samples: int, world_size: int, batch_size: int) -> None:
    if samples < world_size * batch_size:
        with pytest.raises(SetupError, match="fewer than a step of all ranks takes"):
            loader(samples, world_size=world_size, batch_size=batch_size, drop_last=True)
        return
    steps = rest_of_epoch(samples, 0, world_size, batch_size, drop_last=True)
    assert len(steps) == samples // (world_size * batch_size)
    given = [i for step in steps for share in step for i in share]
    assert len(set(given)) == len(given) == len(steps) * world_size * batch_size


@pytest.mark.promise("Training: Each sample comes once over ranks and workers")
def test_nine_billion_samples_are_shuffled_without_memory_for_all() -> None:
    class Huge:
        def __len__(self) -> int:
            return 9 * 10**9

        def __getitem__(self, index: int) -> int:
            return index

    one = Loader(Huge(), loader_context(4, 0, 2))
    first = next(iter(one)).tolist()
    assert len({each // 10**9 for each in first}) > 1
    assert all(0 <= each < len(Huge()) for each in first)


def test_epochs_are_those_that_are_left() -> None:
    run = Counted()
    one = loader(10, events=run)
    seen = []
    for epoch in one.epochs(3):
        run.done = epoch + 1
        seen.append((epoch, sum(1 for _ in one)))
    assert seen == [(0, 3), (1, 3), (2, 3)]
    assert run.ended == [3]
    assert list(one.epochs(3)) == []


def test_steps_run_over_as_many_epochs_as_they_take() -> None:
    run = Counted()
    one = loader(10, events=run)
    for _ in one.steps(4):  # an epoch is three steps
        run.done += 1
        one.count_step()
    assert (one.epoch, one.consumed, run.ended) == (1, 4, [4])
    assert list(one.steps(4)) == []
    for _ in one.steps(6):
        run.done += 1
        one.count_step()
    assert (one.epoch, one.consumed, run.done) == (1, 10, 6)  # the interrupted epoch went on


def train(run: Counted, *loaders: Loader) -> None:
    """A step with the latest batches of loaders."""
    run.done += 1
    for each in loaders:
        each.count_step()


def resumed(one: Loader, samples: int) -> Loader:
    other = loader(samples, events=Counted())
    other.load_state_dict(one.state_dict())
    return other


def numbers(batches: Iterable[Any]) -> list[int]:
    return [x for (batch,) in batches for x in batch.tolist()]


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("is_held", [False, True])
def test_each_iteration_begins_an_epoch_as_in_torch(swapped: bool, is_held: bool) -> None:
    run = Counted()
    short, long = loader(8, events=run), loader(20, events=run)  # two and five batches
    pair = (long, short) if swapped else (short, long)
    pairs: Any = None
    first: list[int] = []
    for epoch in short.epochs(3):
        assert (short.state_dict()["epoch"], short.state_dict()["consumed"]) == (epoch, 0)
        pairs = zip(*pair, strict=False)  # also where the one before is kept until now
        for number, batches in enumerate(pairs):
            if not number:
                first += batches[swapped][0].tolist()
            # The end of the step before: a checkpoint has both loaders at the same place.
            assert [each.state_dict()["epoch"] for each in pair] == [epoch] * 2
            assert [each.state_dict()["consumed"] for each in pair] == [4 * number] * 2
            train(run, *pair)
        if not is_held:
            del pairs
    assert run.done == 6
    assert short.epoch == 3
    assert len(set(first)) > 4  # of the long one too, each epoch has an order of its own


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}])
def test_an_iteration_in_which_nothing_is_trained_takes_nothing_from_the_epochs(options: dict[str, Any]) -> None:
    run = Counted()
    one = loader(8, events=run, **options)
    for _ in range(2):
        next(iter(one))
    seen = []
    for epoch in one.epochs(2):
        for batch in one:
            next(iter(one))  # a look while an epoch is going on
            train(run, one)
            next(iter(one))
            seen.append((epoch, batch[0].tolist(), one.state_dict()["consumed"]))
    assert [(epoch, consumed) for epoch, _, consumed in seen] == [(0, 4), (0, 8), (1, 4), (1, 8)]
    for epoch in range(2):
        assert sorted(x for number, batch, _ in seen for x in batch if number == epoch) == list(range(8))
    assert {tuple(next(iter(one))[0].tolist()) for _ in range(6)} == {tuple(next(iter(one))[0].tolist())}


def test_an_epoch_whose_only_step_comes_after_its_batches_is_over_with_it() -> None:
    one = loader(8, events=Counted())
    for epoch in one.epochs(2):
        numbers(one)
        one.count_step()
        assert (one.state_dict()["epoch"], one.state_dict()["consumed"]) == (epoch + 1, 0)


def test_whole_iterations_in_which_nothing_is_trained_take_no_epoch_and_no_rest_of_one() -> None:
    run, seen = Counted(), list[Any]()
    one = loader(8, events=run)
    for attempt in (1, 2):  # the first one ends after a step
        numbers(one)  # the loss before the training, say
        for epoch in itertools.islice(one.epochs(2), attempt):
            numbers(one)  # and in each epoch
            for (batch,) in itertools.islice(one, attempt):
                seen += [(epoch, number) for number in batch.tolist()]
                train(run, one)
        one = resumed(one, 8)
    assert sorted(seen) == [(epoch, number) for epoch in range(2) for number in range(8)]


def test_an_evaluation_that_was_left_begins_anew_after_a_restart() -> None:
    val = loader(20, events=(run := Counted()))
    with torch.no_grad():
        next(iter(val))
    train(run, val)  # with the batch of another loader
    assert sorted(numbers(resumed(val, 20))) == list(range(20))


def test_only_the_next_batch_of_the_loop_that_trains_goes_on() -> None:
    run = Counted()
    one = loader(12, events=run)
    for _ in one:
        train(run, one)
        next(iter(one))
    assert run.went_on == [False, False, True, False, True, False]
    next(iter(one))  # between two epochs
    for _ in range(2):  # each a loop of one step
        next(iter(one))
        train(run, one)
    assert run.went_on[6:] == [False, False, True]
    one = loader(8, events=(run := Counted()))
    for _ in range(2):  # the same loop, between which one rank looks
        for _ in one:
            train(run, one)
        next(iter(one))
    assert run.went_on == [False, True, False, True, True, False]
    for _ in one:  # another loop: one rank may be in it alone
        train(run, one)
    assert run.went_on[6:] == [False, True]


def test_a_position_comes_after_the_batches_that_were_trained() -> None:
    run = Counted()
    one = loader(20, events=run)
    seen: list[int] = []
    for batch in one:
        if run.done == 2:
            break  # the batch that was drawn is not lost
        seen += batch[0].tolist()
        train(run, one)
    other = resumed(one, 20)
    look = next(iter(other))[0].tolist()
    rest = numbers(other)
    assert rest[:4] == look
    assert sorted(seen + rest) == list(range(20))
    assert other.epoch == 1
    assert run.drawn == [0, 1, 2]  # before each batch


def test_the_rest_of_an_epoch_is_for_the_first_iteration_after_a_restart() -> None:
    run = Counted()
    one = loader(20, events=run)
    for _ in itertools.islice(one, 3):
        train(run, one)
    again = resumed(one, 20)
    look = next(iter(again))
    assert numbers(again)[:4] == look[0].tolist()
    assert numbers(again) != numbers(again)
    other = resumed(one, 20)
    iter(other)  # as zip does, whose first loader has no rest
    assert sorted(numbers(other)) == list(range(20))


def test_two_loops_over_one_loader_in_each_step_are_told() -> None:
    one = loader(20)
    told = [one.count_step() for _ in zip(one, one, strict=True)]
    assert told == [False, True, True, True, True]


def test_a_plain_loop_that_goes_on_after_the_first_epoch_is_told() -> None:
    run = Counted()
    one = loader(8, events=run)
    for _ in one.epochs(1):
        for _ in one:
            train(run, one)
    one.is_trained = True
    plain, counted = resumed(one, 8), resumed(one, 8)
    list(plain)
    assert plain._context.events.gone_on == ["loader"]  # type: ignore[attr-defined]
    assert [list(counted) for _ in counted.epochs(2)] != [[]]
    assert counted._context.events.gone_on == []  # type: ignore[attr-defined]


class Growing:
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        assert index < self.count
        return index


def test_an_epoch_has_the_samples_that_the_dataset_has_when_it_begins() -> None:
    data = Growing(8)
    one = Loader(data, loader_context(4))
    for epoch, count in zip(one.epochs(3), (12, 20, 5), strict=True):
        data.count = count
        assert len(one) == -(-count // 4)
        assert sorted(x for batch in one for x in batch.tolist()) == list(range(count)), epoch
    data.count = 12
    next(iter(one))
    other = Loader(Growing(20), loader_context(4))  # the script sets the length later
    other.load_state_dict(one.state_dict())
    with pytest.raises(MismatchError, match="the dataset has 20 samples, and had 12 when epoch 3 began"):
        next(iter(other))


def test_a_position_in_another_order_or_in_an_iterable_is_refused() -> None:
    state = loader(40).state_dict()
    with pytest.raises(MismatchError, match="that of shuffle=False, and in the checkpoint that of shuffle=True"):
        loader(40, shuffle=False).load_state_dict(state)
    with pytest.raises(MismatchError, match="that of shuffle=True, and in the checkpoint that of an iterable"):
        loader(40).load_state_dict(state | {"order": "stream"})


@pytest.mark.parametrize("workers", [0, 2])
def test_the_position_counts_what_was_handed_out(workers: int) -> None:
    # With workers, DataLoader draws indices several batches ahead.
    one = loader(40, num_workers=workers)
    seen = []
    for (batch,) in one:
        seen += batch.tolist()
        if len(seen) == 12:
            break
    position: dict[str, Any] = {
        "seed": 0,
        "epoch": 0,
        "consumed": 12,
        "samples": 40,
        "order": "feistel",
    }
    position["trained"] = False
    assert one.state_dict() == position
    other = loader(40, seed=7, batch_size=3)
    other.load_state_dict(position)
    assert other.state_dict() == position
    seen += [x for (batch,) in other for x in batch.tolist()]
    assert sorted(seen) == list(range(40))


def test_the_global_random_state_is_left_alone() -> None:
    torch.manual_seed(3)
    random.seed(3)
    before = torch.get_rng_state(), random.getstate()
    one = loader(20)
    for _ in one.epochs(2):
        for _ in one:
            pass
    assert torch.get_rng_state().equal(before[0])
    assert random.getstate() == before[1]


def test_what_a_loader_refuses() -> None:
    for batch_size in (0, -1, 1.5, "8"):
        with pytest.raises(SetupError, match="batch_size="):
            loader(8, batch_size=batch_size)  # type: ignore[arg-type]


Pair = collections.namedtuple("Pair", "x y")


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    name: str


def test_batches_are_moved_at_any_depth_and_keep_their_types() -> None:
    x = torch.ones(2)
    batch = {"pair": Pair(x, [x, 3]), "sample": Sample(x, "kept"), "packed": pack_sequence([x]), "none": None}
    moved = to_device(batch, torch.device("meta"))
    assert type(moved["pair"]) is Pair
    assert (moved["pair"].y[1], moved["sample"].name, moved["none"]) == (3, "kept", None)
    tensors = (moved["pair"].x, moved["pair"].y[0], moved["sample"].x, moved["packed"].data)
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert type(moved["packed"]) is PackedSequence
    assert moved["packed"].batch_sizes.device.type == "cpu"  # as PackedSequence.to has it
    assert batch["pair"].x is x


@pytest.mark.parametrize("data", [TensorDataset(torch.arange(4)), iter([torch.ones(())] * 4)])
def test_a_batch_that_collate_fn_has_moved_to_the_device_is_given(monkeypatch: pytest.MonkeyPatch, data: Any) -> None:
    """torch pins only what is on the CPU, and refuses all else."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr("flk_runtime.data.loader.to_device", lambda batch, device: batch)
    moved = torch.empty(4, device="meta")
    on_gpu = dataclasses.replace(loader_context(4, collate_fn=lambda _: moved), device=torch.device("cuda"))
    assert list(make_loader(data, on_gpu)) == [moved]


def test_a_batch_goes_to_a_gpu_from_pinned_memory_unless_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: [done.append("pinned"), tensor][1])
    monkeypatch.setattr(torch.Tensor, "to", lambda _, device, non_blocking: done.append((device.type, non_blocking)))
    to_device([torch.ones(1), torch.ones(1, device="meta")], torch.device("cuda"))
    to_device(torch.ones(1), torch.device("mps"))
    assert done == ["pinned", ("cuda", True), ("cuda", True), ("mps", False)]


def test_the_default_device_of_a_script_is_not_that_of_the_order() -> None:
    expected, one = numbers(loader(20)), loader(20)
    with torch.device("meta"):
        assert numbers(one) == expected
