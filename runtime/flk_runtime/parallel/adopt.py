"""adopt_optimizer(): the state, by the names of parameters, of an optimizer that was made after `parallelize`."""

from __future__ import annotations

from collections.abc import Mapping

from torch.optim import Optimizer

from flk_runtime.checkpoint import DistributedStateful, optimizer_state, trained_modules
from flk_runtime.distributed import parameters_in
from flk_runtime.errors import SetupError
from flk_runtime.parallel import replaced
from flk_runtime.parallel.model import ParallelModel


def adopt_optimizer(
    name: str, optimizer: Optimizer, models: Mapping[str, ParallelModel], *, shards: bool
) -> Optimizer | DistributedStateful:
    """The state of ``optimizer`` by the parameters of the ``models`` that it trains, which are attached to it.

    The optimizer itself if it trains other parameters too. Raises SetupError then if the strategy ``shards``, since
    rank 0 has the state of its own shards only, and for an optimizer of parameters that `parallelize` has replaced.
    """
    replaced.refuse(optimizer)
    modules = {key: model.saved for key, model in models.items()}
    trained, missing = trained_modules(optimizer, modules)
    if trained and missing and shards:
        count = len(parameters_in(optimizer))
        raise SetupError(
            f"{name!r} is an optimizer of {count} parameters, and {missing} of them are in no parallelized model: make "
            "an optimizer of their own for these, or put all trained parameters into one module"
        )
    if missing or not trained:
        return optimizer
    for key in trained:
        models[key].attach(optimizer)
    return optimizer_state(name, optimizer, trained)
