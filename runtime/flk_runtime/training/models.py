"""Models: the models that a run has parallelized, and their optimizers."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from flk_runtime.checkpoint import (
    Declared,
    DistributedStateful,
    Stateful,
    has_own_state_dict,
    inside_of,
    module_state,
    optimizer_state,
    placed,
    with_state,
)
from flk_runtime.distributed import has_fsdp1, mean_loss, parameters_in, process_group
from flk_runtime.errors import SetupError
from flk_runtime.parallel import (
    STRATEGIES,
    ParallelModel,
    ParallelOptions,
    adopt_optimizer,
    parallelize,
)
from flk_runtime.preflight.bootstrap import compare_options
from flk_runtime.system.torch_private import complete_optimizer
from flk_runtime.training.context import RunContext
from flk_runtime.training.elastic import refuse_per_rank
from flk_runtime.training.lines import Metrics
from flk_runtime.training.process import current
from flk_runtime.training.saves import Saves
from flk_runtime.training.step.agreement import Agreement
from flk_runtime.training.step.batches import Batches
from flk_runtime.training.step.first_pass import at_first_pass
from flk_runtime.training.step.steps import Steps


class Models:
    """Applies the run's strategy to models, and has them saved."""

    def __init__(self, context: RunContext, steps: Steps, saves: Saves, metrics: Metrics, batches: Batches) -> None:
        self._context, self._steps, self._saves, self._metrics = context, steps, saves, metrics
        self._batches = batches
        self._models: dict[str, ParallelModel] = {}  # by the names under which they are saved
        self._registered: list[nn.Module] = []  # modules that are saved beside the models
        # The optimizers that the script has handed over, with the sizes of the groups that a restart restores.
        self._optimizers: dict[Optimizer, list[int]] = {}
        self._frozen: set[nn.Parameter] = set()  # in parallelize, so that the strategy would not average them
        communicates = context.options.strategy != "none"
        self._has_registered = self._said_unsaved = False
        self._replaced: set[nn.Parameter] = set()  # trained parameters that load_weights has set after a restart
        self._is_averaged = bool(context.options.outer) or (context.world_size > 1 and communicates)
        self._agreement = Agreement() if context.world_size > 1 and communicates else None
        self.is_held = False
        """Whether backward passes communicate nothing now."""

    def parallelize(self, model: nn.Module, optimizers: Sequence[Optimizer], options: ParallelOptions) -> nn.Module:
        """Apply the strategy, restore model and optimizers, and return the module to call. Collective."""
        context, manager, number = self._context, self._saves.manager, len(self._models)
        name = f"model-{number}" if number else "model"
        if any(model in (parallel.model, parallel.module) for parallel in self._models.values()):
            raise SetupError("this model has already been parallelized: call parallelize once per model")
        _check_optimizers(optimizers)
        # A model that is not trained, such as a teacher, stays in its worker.
        strategy = context.options.outer if any(each.requires_grad for each in model.parameters()) else None
        if strategy and self._steps.outer:
            raise SetupError(f"strategy {strategy.name} trains one model: put all trained parameters into one module")
        if context.options.strategy != "none":
            self._compare(name, options)
        self._metrics.utilisation.watch(model, options.precision.param if options.precision else None)
        if current.planner:
            parallel = current.planner(model, optimizers, options)
        else:
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
        parallel.state.trains_alike = context.options.strategy == "none" and not has_fsdp1(parallel.module)
        if self._is_averaged and (context.options.outer or not STRATEGIES[context.options.strategy].shards):
            self._frozen |= {parameter for parameter in parallel.parameters().values() if not parameter.requires_grad}
        for optimizer in optimizers:
            self._hand_over(optimizer)
        manager.register(name, parallel.state)
        # Names in checkpoints: optimizer, optimizer-0-1, …, and of the second model optimizer-1, optimizer-1-1, …
        first = f"optimizer-{number}" if number else "optimizer"
        for position, optimizer in enumerate(optimizers):
            own = f"optimizer-{number}-{position}" if position else first
            manager.register(own, optimizer_state(own, optimizer, {name: parallel.module}))
        if strategy:
            outer = strategy.loop(parallel, self._steps.done)
            manager.register(strategy.name, outer)
            self._steps.begin_rounds(outer)
        context.closing.append(at_first_pass([parallel.module], manager.begin_rank_rng))
        return parallel.module

    def register(self, name: str, thing: Stateful | MutableMapping[str, Any]) -> None:
        """Save ``thing`` under ``name``; an optimizer by the parameters of the models. Collective."""
        self._has_registered = True
        thing = with_state(thing)
        saved: Stateful | DistributedStateful = thing
        of_script = inside_of(thing)
        if isinstance(thing, Optimizer):
            _check_optimizers([thing])
            self._hand_over(thing)
            shards = STRATEGIES[self._context.options.strategy].shards
            saved = adopt_optimizer(name, thing, self._models, shards=shards) or placed(thing, self._modules())
        elif isinstance(of_script, Optimizer):
            saved = placed(cast("Declared", thing), self._modules())
        elif isinstance(thing, nn.Module):
            saved = module_state(thing)
        if isinstance(of_script, nn.Module):
            self._registered.append(of_script)
        refuse_per_rank("register", {name: saved})
        self._saves.manager.register(name, saved)

    def _modules(self) -> list[nn.Module]:
        return [*(each.module for each in self._models.values()), *self._registered]

    def check_step(self) -> None:
        """Raise SetupError if the state of an optimizer would not be restored, or ranks train apart."""
        for optimizer, sizes in self._optimizers.items():
            if [len(group["params"]) for group in optimizer.param_groups] != sizes and self._saves.manager.can_save:
                raise SetupError(
                    f"the groups of {type(optimizer).__name__} were changed after parallelize or run.register, where a "
                    "restart restores them, which would fail: add all groups and parameters before, and freeze those "
                    "that are not trained"
                )
        if not self._said_unsaved:
            self._say_unsaved()
        if self._models and self._agreement and self._agreement.step():
            self._agreement.compare(self._models.values(), self._optimizers)

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
        chosen = [
            parallel
            for parallel in self._models.values()
            if model is None or model in (parallel.module, parallel.model)
        ]
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
        from flk_runtime.parallel.initialize import load_weights

        load_weights(parallel, path)
        self._replaced.update(parallel.trained().values() if steps.done and not steps.began else ())
        if steps.outer:
            steps.outer.restart()

    def _say_unsaved(self) -> None:
        """Say what most trainings have and this one's checkpoints lack, if the script has registered nothing.

        Raises SetupError if the first step after a restart would begin with other weights than those restored.
        """
        # A model of no optimizer, as for a loss, learns nothing. Without any optimizer that flk knows, each may learn.
        if self._replaced & ({p for each in self._optimizers for p in parameters_in(each)} or self._replaced):
            raise SetupError(
                f"load_weights has replaced what was restored after step {self._steps.done}, so the training would go "
                "on without what it has learned: call it only while run.steps is 0"
            )
        self._said_unsaved = True
        for optimizer in self._optimizers if self._saves.manager.can_save else ():
            for key, each in vars(optimizer).items():
                if isinstance(each, Optimizer) and each not in self._optimizers and not has_own_state_dict(optimizer):
                    self._context.say(
                        f"the optimizer in {key!r} of {type(optimizer).__name__} is in no checkpoint, so its state "
                        "begins anew after a restart: pass it to parallelize, too"
                    )
        if self._has_registered or not self._saves.manager.can_save:
            return
        if not self._optimizers:
            self._context.say(
                "no optimizer is in the checkpoints, so it begins anew after a restart: pass it to parallelize, or "
                "call run.register('optimizer', optimizer)"
            )
        elif any("initial_lr" in group for optimizer in self._optimizers for group in optimizer.param_groups):
            self._context.say(
                "the learning rate scheduler is in no checkpoint, so it begins anew after a restart unless its rate "
                "follows run.steps: call run.register('scheduler', scheduler)"
            )

    def _hand_over(self, optimizer: Optimizer) -> None:
        """Look at the steps of an optimizer that the script has handed over."""
        known = optimizer in self._optimizers
        self._optimizers[optimizer] = [len(group["params"]) for group in optimizer.param_groups]
        if known:
            return
        hooks = [optimizer.register_step_post_hook(lambda *_: self._batches.passed())]
        if self._is_averaged:
            hooks.append(optimizer.register_step_pre_hook(self._before_step))
        self._context.closing.extend(hook.remove for hook in hooks)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Refuse gradients that the strategy does not average, and have closures return the mean loss."""
        for parameter in parameters_in(optimizer) if self._frozen else ():
            if parameter in self._frozen and parameter.requires_grad and parameter.grad is not None:
                raise SetupError(
                    f"a parameter of shape {tuple(parameter.shape)} of {type(optimizer).__name__} was frozen in "
                    "parallelize, so its gradient is not averaged and each rank would train its own: give parallelize "
                    "what is trained later unfrozen"
                    + ("" if self._context.options.outer else ", with find_unused_parameters=True, and freeze it later")
                )
        return (*args[:1], *map(_agreed, args[1:])), {name: _agreed(value) for name, value in kwargs.items()}

    def _compare(self, name: str, options: ParallelOptions) -> None:
        """Compare the options of `parallelize` across ranks; check that the ranks of a node can be a shard group."""
        strategy, info = self._context.options.strategy, self._context.rank_info
        per_node = STRATEGIES[strategy].replicates and options.shard_size is None
        nodes = {"ranks on this node (pass shard_size where nodes differ)": info.local_world_size} if per_node else {}
        compare_options(f"parallelize of {name}", vars(options) | nodes)
        in_order = self._context.rank // info.local_world_size == info.node_rank
        if per_node and not process_group.all_true(in_order):
            raise SetupError(
                f"strategy {strategy} shards a model over the ranks of a node, and here neighbouring ranks are on "
                "different nodes: number ranks node by node (srun -m block, mpirun --map-by slot), or pass shard_size"
            )


def _check_optimizers(optimizers: Sequence[Optimizer]) -> None:
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise SetupError(f"parallelize takes optimizers of torch, and was given a {type(optimizer).__name__}")
        complete_optimizer(optimizer)


def _agreed(argument: Any) -> Any:
    """An argument of a step; of a closure, one that returns the mean loss, by which LBFGS decides on further calls."""
    return functools.partial(mean_loss, argument) if callable(argument) else argument
