from __future__ import annotations

import json

import pytest

from tests.support.ranks import Ranks

TRAIN = """
    import json, torch, flk_runtime as flk
    with flk.init(device="cpu", seed=1, log_every=0) as run:
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        wrapped, optimizer = run.parallelize(model, optimizer)
        numbers = torch.Generator().manual_seed(2)
        x = torch.randn(48, 8, generator=numbers)
        loader = run.loader(torch.utils.data.TensorDataset(x, x[:, :1] * x[:, 1:2]), 12 // run.world_size)
        for _ in loader.epochs(3):
            for x, y in loader:
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(wrapped(x), y).backward()
                optimizer.step()
                run.step()
        print(json.dumps([run.steps, *torch.cat([p.flatten() for p in model.parameters()]).tolist()]))
"""


def test_ddp_trains_as_one_process_does(ranks: Ranks) -> None:
    # The same global steps of 12 samples, on 1 and on 3 ranks.
    (alone,) = ranks(TRAIN, 1)
    together = ranks(TRAIN, 3)
    assert len({rank.output for rank in together}) == 1
    expected, got = json.loads(alone.output), json.loads(together[0].output)
    assert expected[0] == got[0] == 12
    assert got == pytest.approx(expected, abs=1e-5)


def test_none_leaves_communication_to_the_user(ranks: Ranks) -> None:
    (alone,) = ranks(TRAIN, 1)
    first, second = ranks(TRAIN, 2, {"FLK_STRATEGY": "none"})
    assert first.output != second.output
    assert json.loads(first.output) != pytest.approx(json.loads(alone.output), abs=1e-3)


def test_ddp_starts_with_the_parameters_of_rank_0(ranks: Ranks) -> None:
    script = """
        import torch, flk_runtime as flk
        with flk.init(device="cpu") as run:
            torch.manual_seed(run.rank)
            model = torch.nn.Linear(3, 3)
            before = model.weight.sum().item()
            wrapped = run.parallelize(model)
            print(before, model.weight.sum().item(), [p.grad for p in model.parameters()], len(model.state_dict()))
            assert (wrapped is model) == (run.strategy == "none")
    """
    for strategy, same in (("ddp", True), ("none", False)):
        first, second = (rank.output.split() for rank in ranks(script, 2, {"FLK_STRATEGY": strategy}))
        assert first[0] != second[0]
        assert (first[1] == second[1]) == same
        assert first[1] == first[0]
        assert first[2:] == ["[None,", "None]", "2"]


def test_sparse_gradients(ranks: Ranks) -> None:
    script = """
        import torch, flk_runtime as flk
        with flk.init(device="cpu") as run:
            model = run.parallelize(torch.nn.EmbeddingBag(10, 3, sparse=True))
            model(torch.tensor([[run.rank, 5]])).sum().backward()
            print(model.module.weight.grad.to_dense()[:, 0].tolist())
    """
    first, second = ranks(script, 2)
    assert first.output == second.output
    assert json.loads(first.output)[:6] == [0.25, 0.25, 0, 0, 0, 0.5]


def test_a_model_without_parameters(ranks: Ranks) -> None:
    script = """
        import torch, flk_runtime as flk
        with flk.init(device="cpu") as run:
            try:
                run.parallelize(torch.nn.ReLU())
            except flk.SetupError as error:
                print(error)
    """
    for ended in ranks(script, 2):
        assert "no parameter of the model requires a gradient" in ended.output
