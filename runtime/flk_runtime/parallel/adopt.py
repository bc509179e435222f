"""adopt_optimizer(): the state, by the names of parameters, of an optimizer that was made after `parallelize`."""

from __future__ import annotations

from collections.abc import Mapping

from torch.optim import Optimizer

from flk_runtime.checkpoint import OptimizerState
from flk_runtime.errors import SetupError
from flk_runtime.parallel.model import ParallelModel, SeveralModels


def adopt_optimizer(
    name: str, optimizer: Optimizer, models: Mapping[str, ParallelModel], *, shards: bool
) -> Optimizer | OptimizerState:
    """The state of ``optimizer`` by the parameters of those of ``models`` that it trains, which are attached to it.

    The optimizer itself if it trains other parameters too. Raises SetupError then if the strategy ``shards``, since
    rank 0 has the state of its own shards only.
    """
    missing = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    count = len(missing)
    trained: dict[str, ParallelModel] = {}
    for key, model in models.items():
        own = {id(parameter) for parameter in model.parameters().values()}
        if missing & own:
            trained[key] = model
        missing -= own
    if trained and missing and shards:
        raise SetupError(
            f"{name!r} is an optimizer of {count} parameters, and {len(missing)} of them are in no parallelized model: "
            "make an optimizer of their own for these, or put all trained parameters into one module"
        )
    if missing or not trained:
        return optimizer
    for model in trained.values():
        model.attach(optimizer)
    return OptimizerState(optimizer, next(iter(trained.values())) if len(trained) == 1 else SeveralModels(trained))
