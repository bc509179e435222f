"""Models: the models that a run has parallelized, and their optimizers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from flk_runtime.checkpoint import (
    INTERNAL,
    Declared,
    DistributedStateful,
    Stateful,
    Values,
    module_state,
    optimizer_state,
    stateful_of,
)
from flk_runtime.distributed import process_group, settle
from flk_runtime.errors import SetupError, shipped
from flk_runtime.parallel import (
    STRATEGIES,
    ParallelModel,
    ParallelOptions,
    adopt_optimizer,
    find_blocks,
    parallelize,
)
from flk_runtime.preflight.options import compare_options
from flk_runtime.run.agreement import Agreement, check_replicas
from flk_runtime.run.batches import Batches
from flk_runtime.run.context import RunContext
from flk_runtime.run.elastic import refuse_per_rank
from flk_runtime.run.metrics import Metrics
from flk_runtime.run.optimizers import OptimizerWatch
from flk_runtime.run.saves import Saves
from flk_runtime.run.steps import Steps
from flk_runtime.system import pytree

if TYPE_CHECKING:
    from flk_runtime.parallel.average import Average


class Models:
    """Applies the run's strategy to models, and has them saved."""

    def __init__(self, context: RunContext, steps: Steps, saves: Saves, metrics: Metrics, batches: Batches) -> None:
        self._context, self._steps, self._saves, self._metrics = context, steps, saves, metrics
        self._batches = batches
        self._models: dict[str, ParallelModel] = {}  # by the names under which they are saved
        self._averages = 0
        self._optimizers: list[Optimizer] = []  # that are saved
        self._groups: list[tuple[Optimizer, int]] = []  # optimizers with the number of groups that a restart restores
        self._others: list[Stateful] = []  # that are saved, and may have the state of any optimizer
        averages = bool(context.options.diloco) or (context.world_size > 1 and context.options.strategy != "none")
        self._watch = OptimizerWatch(batches, averages=averages, trained=self.parameters)
        communicates = context.options.strategy != "none"
        self._agreement = Agreement() if context.world_size > 1 and communicates else None
        if context.world_size > 1 and not communicates:
            saves.before_save = lambda: check_replicas(self._models.values())
        context.closing.append(self._watch.close)
        self.is_held = False
        """Whether backward passes communicate nothing now."""

    def parallelize(self, model: nn.Module, optimizers: Sequence[Optimizer], options: ParallelOptions) -> nn.Module:
        """Apply the strategy, restore model and optimizers, and return the module to call. Collective."""
        context, manager, number = self._context, self._saves.manager, len(self._models)
        name = f"model-{number}" if number else "model"
        if any(model in (each.model, each.module) for each in self._models.values()):
            raise SetupError("this model has already been parallelized: call parallelize once per model")
        _check_optimizers(optimizers)
        if context.options.diloco and number:
            raise SetupError("strategy diloco trains one model: put all trained parameters into one module")
        if context.options.diloco and options.offload:
            raise SetupError("offload= cannot be used under strategy diloco: leave it out")
        has_mesh = options.mesh is not None or options.tp is not None
        if has_mesh and context.options.diloco:
            raise SetupError("mesh= and tp= cannot be used under strategy diloco: leave them out")
        if has_mesh:
            self._batches.check_unused()
        if context.options.strategy != "none":
            self._compare(name, options)
        manager.check_model(name, model, lacks_frozen=not options.save_frozen)
        self._metrics.utilisation.prepare(model)
        self._watch.forget()
        parallel = parallelize(
            model,
            optimizers,
            context.options.strategy,
            options,
            device=context.options.device,
            world_size=context.world_size,
            local_world_size=context.rank_info.local_world_size,
        )
        self._models[name] = parallel
        if parallel.mesh:
            self._batches.divide(parallel.mesh.part, parallel.mesh.parts)
            self._metrics.utilisation.copies = parallel.mesh.sharding.size()
            manager.draw_as(parallel.mesh.seed)
        self._optimizers += optimizers
        self._groups += [(each, len(each.param_groups)) for each in optimizers]
        settle(parallel.trained().values())
        manager.register(name, parallel.state)
        for key, thing in parallel.beside.items():
            manager.register(f"{INTERNAL}{key}.{name}", thing, internal=True)
        if options.compile:
            self._saves.keep_code()
        self._metrics.utilisation.watch(parallel.module, options.precision.param if options.precision else None)
        for position, optimizer in enumerate(optimizers):
            own = f"optimizer-{number}-{position}" if position else f"optimizer-{number}" if number else "optimizer"
            manager.register(own, optimizer_state(own, optimizer, {name: parallel.saved}))
        if context.options.diloco and context.member:
            from flk_runtime.diloco.worker import OuterLoop

            blocks = find_blocks(parallel.model, options.blocks)
            outer = OuterLoop(parallel, blocks, context.options.diloco, context.member, self._steps.done)
            manager.register("diloco", outer)
            self._steps.begin_rounds(outer)
        manager.start_rank_rng()
        return parallel.module

    def average(self, decay: float, model: nn.Module | None) -> Average:
        """A moving average of the parameters of one model, which is saved and restored. Collective."""
        shipped("flk_runtime.parallel.average", "run.average", "average")
        from flk_runtime.parallel.average import Average

        average = Average(self.select(model, "average"), decay)
        self._saves.manager.register(f"average-{self._averages}" if self._averages else "average", average)
        self._averages += 1
        return average

    def register(self, name: str, thing: Stateful | MutableMapping[str, Any]) -> None:
        """Save ``thing`` under ``name``; an optimizer by the parameters of the models. Collective."""
        found = stateful_of(thing)
        thing = cast("Stateful", thing) if found is None else found
        saved: Stateful | DistributedStateful = thing
        of_script = thing.thing if isinstance(thing, Declared) else thing
        if isinstance(of_script, Optimizer):
            self._optimizers.append(of_script)
        elif isinstance(of_script, Values) or not type(of_script).__module__.startswith(("torch.", "flk_runtime.")):
            self._others.append(of_script)
        elif isinstance(of_script, LRScheduler):
            self._watch.scheduled.append(of_script.optimizer)
        if isinstance(thing, Optimizer):
            self._groups.append((thing, len(thing.param_groups)))
            shards = STRATEGIES[self._context.options.strategy].shards
            saved = adopt_optimizer(name, thing, self._models, shards=shards)
        elif isinstance(thing, nn.Module):
            saved = module_state(thing)
        refuse_per_rank("register", {name: saved})
        self._saves.manager.register(name, saved)

    def check_step(self) -> None:
        """Raise SetupError if a state of an optimizer is not saved or would not be restored, or ranks train apart."""
        for optimizer, groups in self._groups:
            if len(optimizer.param_groups) != groups and self._saves.manager.can_save:
                raise SetupError(
                    f"a group was added to {type(optimizer).__name__} after parallelize or run.register, where a "
                    "restart restores it, which would fail: add all groups before, and freeze their parameters until "
                    "they are trained"
                )
        if self._watch.is_unchecked and self._saves.manager.can_save:
            self._watch.check_saved(self._optimizers, map(_may_have_states, self._others))
        if self._models and self._agreement and self._agreement.step():
            self._agreement.compare(self._models.values(), self._watch.stepped())

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which backward passes of all models accumulate gradients without communication."""
        if self.is_held:  # in a context that goes on after this one
            yield
            return
        with contextlib.ExitStack() as stack:
            for parallel in self._models.values():
                stack.enter_context(parallel.no_sync())
            self.is_held = True
            try:
                yield
            finally:
                self.is_held = False

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of all models, as optimizers take them."""
        return list(dict.fromkeys(each for model in self._models.values() for each in model.parameters().values()))

    def select(self, model: nn.Module | None, method: str) -> ParallelModel:
        """The parallelized model that is ``model``, or the only one. ``method`` needs it, and is named in the error."""
        chosen = [each for each in self._models.values() if model is None or model in (each.module, each.model)]
        if len(chosen) != 1:
            action = "select one with model=" if len(chosen) > 1 else "call parallelize before"
            raise SetupError(f"{method} works on one parallelized model, and there are {len(chosen)}: {action}")
        return chosen[0]

    def load_weights(self, path: str | os.PathLike[str], model: nn.Module | None) -> None:
        """Load the weights at ``path`` into one model. Collective."""
        parallel, steps = self.select(model, "load_weights"), self._steps
        if steps.outer and steps.done:
            raise SetupError(
                f"load_weights after step {steps.done} would undo what the workers of strategy diloco have learned: "
                "call it only while run.steps is 0"
            )
        shipped("flk_runtime.parallel.initialize", "run.load_weights", "weights")
        from flk_runtime.parallel.initialize import load_weights

        load_weights(parallel, path)
        if steps.outer:
            steps.outer.restart()

    def _compare(self, name: str, options: ParallelOptions) -> None:
        """Compare the options of `parallelize` across ranks; check that the ranks of a node can be a shard group."""
        strategy, info = self._context.options.strategy, self._context.rank_info
        per_node = STRATEGIES[strategy].replicates and options.shard_size is None
        nodes = {"ranks on this node (pass shard_size where nodes differ)": info.local_world_size} if per_node else {}
        compare_options(f"parallelize of {name}", vars(options) | nodes)
        in_order = self._context.rank // info.local_world_size == info.node_rank
        if per_node and not process_group.all_true(in_order)():
            raise SetupError(
                f"strategy {strategy} shards a model over the ranks of a node, and here neighbouring ranks are on "
                "different nodes: number ranks node by node (srun -m block, mpirun --map-by slot), or pass shard_size"
            )


def _check_optimizers(optimizers: Sequence[Optimizer]) -> None:
    for number, each in enumerate(optimizers):
        if not isinstance(each, Optimizer):
            raise SetupError(f"parallelize takes optimizers of torch, and was given a {type(each).__name__}")
        if any(each is other for other in optimizers[:number]):
            raise SetupError(f"parallelize was given the same {type(each).__name__} twice: pass each optimizer once")


def _may_have_states(thing: Stateful) -> bool:
    """Whether an object of the script may have the state of an optimizer or of a scheduler."""
    if not isinstance(thing, Values):
        return True
    values = thing.state_dict()
    parts = [values, *(each for each in values.values() if isinstance(each, Mapping))]
    return any({"last_epoch", "param_groups", "state"} & part.keys() for part in parts) or any(
        isinstance(leaf, torch.Tensor) for leaf in pytree.leaves(values)
    )
