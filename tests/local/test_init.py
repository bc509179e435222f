from __future__ import annotations

import json
import signal

import pytest

from tests.support.ranks import Ranks


def test_alone_is_a_world_of_one(ranks: Ranks) -> None:
    script = """
        import torch, torch.distributed as dist, flk_runtime as flk
        run = flk.init(device="cpu")
        assert (run.rank, run.local_rank, run.world_size, run.local_world_size, run.attempt) == (0, 0, 1, 1, 0)
        assert run.is_main and run.device == torch.device("cpu") and run.rank_info.launcher == "alone"
        assert run.mean(3.0) == 3.0
        assert flk.init() is run
        assert flk.init(device="cpu") is run  # as in a notebook's cell that runs again
        try:
            flk.init(device="cpu", seed=1)
        except ValueError as error:
            assert "init was already called with other arguments: call flk.init() without arguments" in str(error)
        else:
            raise AssertionError
        run.barrier()
        model = torch.nn.LazyLinear(1)  # it gets its shapes in its first pass
        assert run.parallelize(model) is model
        assert model(torch.ones(1, 2)).shape == (1, 1)
        run.close()
        run.close()
        assert not dist.is_initialized()
    """
    ranks(script, 1)


def test_a_later_call_may_name_some_of_the_arguments(ranks: Ranks) -> None:
    script = """
        import flk_runtime as flk
        run = flk.init(device="cpu", seed=3, log_every=0)
        assert flk.init(seed=3) is run
        try:
            flk.init(seed=4)
        except ValueError as error:
            assert str(error).endswith("(differs: seed)"), error
        else:
            raise AssertionError
        run.close()
    """
    ranks(script, 1)


def test_few_functions_of_flk_run_at_the_start(ranks: Ranks) -> None:
    """Lambdas and comprehensions do not count. With a hundred and more, nobody could read a start from end to end."""
    script = """
        import sys, flk_runtime as flk
        init, called = flk.init, set()
        def note(frame, event, argument):
            code = frame.f_code
            if event == "call" and "flk_runtime" in code.co_filename and code.co_name[0] != "<":
                called.add((code.co_filename, code.co_qualname if sys.version_info >= (3, 11) else code.co_firstlineno))
        sys.setprofile(note)
        run = init(device="cpu")
        sys.setprofile(None)
        run.close()
        print(len(called))
    """
    for world_size in (1, 2):
        for ended in ranks(script, world_size):
            assert int(ended.output) <= 80


def test_a_group_that_is_there_is_used_and_left(ranks: Ranks) -> None:
    script = """
        import torch.distributed as dist, flk_runtime as flk
        dist.init_process_group("gloo")
        with flk.init(device="cpu") as run:
            assert run.mean(run.rank) == 0.5
        assert dist.is_initialized()
        dist.destroy_process_group()
    """
    ranks(script, 2)


def test_ranks_that_the_script_has_started_itself_know_their_nodes(ranks: Ranks) -> None:
    """By torch.multiprocessing, with a part of torchrun's variables; Lightning sets the last ones."""
    script = """
        import os, socket, torch, torch.distributed as dist, flk_runtime as flk
        from flk_runtime.distributed.process_group import place
        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo")
        socket.gethostname = lambda: f"node-{rank // 2}"
        given = {name: os.environ.pop(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
        for left in ((), ("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "WORLD_SIZE")):
            os.environ.update({name: given[name] for name in left})
            found = place()
            assert (found.rank, found.local_rank, found.node_rank) == (rank, rank % 2, rank // 2)
            assert (found.world_size, found.local_world_size, found.nodes) == (4, 2, 2)
            [os.environ.pop(name) for name in left]
        with flk.init(device="cpu", strategy="hybrid_shard") as run:
            run.parallelize(torch.nn.Linear(2, 2))
            with flk.main_process_first(local=True):
                print("first", run.rank % 2)
        dist.destroy_process_group()
    """
    ranks(script, 4)


@pytest.mark.parametrize("variable", ["FLK_SEED", "SCRIPT_SEED"])
def test_ranks_draw_alike_until_the_training_begins(ranks: Ranks, variable: str) -> None:
    script = """
        import os, random, torch, flk_runtime as flk
        if "SCRIPT_SEED" in os.environ:  # another one on each rank, of which rank 0's counts
            seed = int(os.environ["SCRIPT_SEED"]) + 1000 * int(os.environ["RANK"])
            torch.manual_seed(seed), random.seed(seed)
            expected = torch.nn.Linear(3, 3).weight.sum().item(), random.random()
            torch.manual_seed(seed), random.seed(seed)
        with flk.init(device="cpu") as run:
            model = torch.nn.Linear(3, 3)
            if "SCRIPT_SEED" in os.environ and run.rank == 0:
                state = random.getstate()
                assert expected == (model.weight.sum().item(), random.random())
                random.setstate(state)
            print("model", model.weight.sum().item())
            model = run.parallelize(model)
            print("split", run.seed, torch.rand(1).item(), random.random())
            model(torch.ones(1, 3))
            print("numbers", torch.rand(1).item(), random.random())
        print("after", torch.rand(1).item(), random.random())
    """
    first, second = ranks(script, 2, {variable: "7"})
    again, _ = ranks(script, 2, {variable: "7"})
    other, _ = ranks(script, 2, {variable: "8"})
    assert first.lines[1].startswith("split 7 ")
    for number, alike in enumerate((True, True, False, True)):
        assert (first.lines[number] == second.lines[number]) is alike, first.lines[number]
        assert first.lines[number] != other.lines[number]
    assert first.lines == again.lines


def test_a_script_without_a_seed_draws_the_same_in_each_attempt_and_one_of_another_generator_counts(
    ranks: Ranks,
) -> None:
    script = """
        import random, torch, flk_runtime as flk
        random.seed(11)
        expected = random.random()
        random.seed(11)
        with flk.init(device="cpu") as run:
            assert random.random() == expected
            print(run.seed, torch.rand(1).item())
        print(torch.rand(1).item())
        with flk.init(device="cpu", checkpoint="") as run:
            print(run.seed, torch.rand(1).item())
    """
    first, again = ranks(script, 1)[0], ranks(script, 1)[0]
    assert first.lines == again.lines
    assert first.lines[0].startswith("0 ")
    assert len({line.split()[-1] for line in first.lines}) == 3


def test_a_process_that_imports_the_script_is_refused(ranks: Ranks) -> None:
    """As workers of a DataLoader do under Python 3.14, which does not fork them."""
    script = """
        import multiprocessing, flk_runtime as flk
        with flk.init(device="cpu"):
            process = multiprocessing.get_context("spawn").Process(target=print)
            process.start()
            process.join()
            assert process.exitcode == 1
    """
    (ended,) = ranks(script, 1)
    assert "SetupError: multiprocessing starts a process anew" in ended.output


def test_metrics_are_lines_of_json_on_rank_0(ranks: Ranks) -> None:
    script = """
        import torch, flk_runtime as flk
        with flk.init(log_every=2, device="cpu") as run:
            loader = run.loader(torch.utils.data.TensorDataset(torch.arange(24)), 4)
            for _ in loader.epochs(2):
                for _ in loader:
                    loss = torch.tensor(float(run.rank), requires_grad=True)
                    # A rank without a loss keeps nobody waiting, and does not count.
                    run.step(loss=loss if run.steps < 4 or run.rank else None, norm=torch.tensor([2.5]))
            run.log(nothing=float("nan"), much=float("-inf"), who=run.is_main, list=[torch.tensor(1), "x"])
            run.print("done", run.mean(run.rank, weight=run.rank))
    """
    first, second = ranks(script, 2)
    assert second.output == ""
    *steps, last = [json.loads(line) for line in first.lines[:-1]]
    assert [(line["step"], line["epoch"], line.get("loss"), line["norm"]) for line in steps] == [
        (2, 0, 0.5, 2.5),
        (4, 1, 0.5, 2.5),
        (6, 1, None, 2.5),
    ]
    assert all(line["samples_per_s"] > 0 for line in steps)
    assert last == {"step": 6, "nothing": "nan", "much": "-inf", "who": True, "list": [1, "x"]}
    assert first.lines[-1] == "done 1.0"


def test_a_peers_death_leaves_nobody_hanging(ranks: Ranks) -> None:
    script = """
        import atexit, os, signal, torch, flk_runtime as flk
        run = flk.init(device="cpu")
        model, optimizer = torch.nn.Linear(4, 1), None
        model = run.parallelize(model)
        for step in range(100):
            if step == 3 and run.rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                model(torch.ones(1, 4)).sum().backward()
            except RuntimeError:
                print("noticed")
                run.abandon()
                break
    """
    ended = ranks(script, 3, failing=True)
    assert [rank.code for rank in ended] == [0, 0, -signal.SIGKILL]
    assert "noticed" in ended[0].output
    assert "noticed" in ended[1].output
