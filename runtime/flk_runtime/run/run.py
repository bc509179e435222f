"""Run: a training run, with which a script parallelizes, loads data, counts steps, logs and saves."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from flk_runtime.checkpoint import Stateful
from flk_runtime.data import EpochLoader, EvaluationLoader, LoaderOptions, join_batches
from flk_runtime.discovery import RankInfo
from flk_runtime.distributed import process_group
from flk_runtime.distributed.process_group import Numbers
from flk_runtime.errors import SetupError
from flk_runtime.metrics import logging
from flk_runtime.parallel import Average, ParallelArgs, ParallelOptions
from flk_runtime.run.backward import Backward
from flk_runtime.run.batches import Batches
from flk_runtime.run.context import RunContext
from flk_runtime.run.metrics import Metrics
from flk_runtime.run.models import Models
from flk_runtime.run.options import RunOptions
from flk_runtime.run.saves import Saves
from flk_runtime.run.steps import Steps

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")
O = TypeVar("O", bound="Optimizer | Sequence[Optimizer]")  # noqa: E741


class Run:
    """This rank's side of a training run. Made by `flk_runtime.init`.

    All ranks must call the methods marked "Collective.", in the same order.
    """

    def __init__(self, rank_info: RankInfo, options: RunOptions, *, owns_group: bool) -> None:
        """The process group is open. ``owns_group``: `close` destroys it. Collective."""
        context = RunContext.begin(rank_info, options)
        self.rank_info, self.attempt = rank_info, rank_info.attempt
        self.rank, self.world_size, self.full_world_size = context.rank, context.world_size, context.full_world_size
        self.local_rank, self.local_world_size = rank_info.local_rank, rank_info.local_world_size
        self.worker, self.workers = context.member.worker, context.member.workers
        self.device, self.seed, self.strategy = options.device, options.seed, options.strategy
        self.is_main, self.closed = self.rank == 0, False
        self._context, self._owns_group = context, owns_group
        self._metrics = Metrics(context)
        self._saves = Saves(context)
        self._steps = Steps(context, self._saves, self._metrics)
        self._models = Models(context, self._steps, self._saves, self._metrics)
        self._batches = Batches(context, self._steps, self._saves, self._metrics)
        self._backward = Backward(context, self._models, self._batches)

    @property
    def steps(self) -> int:
        """Optimizer steps so far, including those before a resume."""
        return self._steps.done

    @steps.setter
    def steps(self, steps: int) -> None:
        self._steps.done = steps

    @overload
    def parallelize(self, model: nn.Module, optimizer: None = None, **options: Unpack[ParallelArgs]) -> nn.Module: ...

    @overload
    def parallelize(self, model: nn.Module, optimizer: O, **options: Unpack[ParallelArgs]) -> tuple[nn.Module, O]: ...

    def parallelize(
        self, model: nn.Module, optimizer: O | None = None, **options: Unpack[ParallelArgs]
    ) -> nn.Module | tuple[nn.Module, O]:
        """Apply the run's strategy to ``model``; return the module to call in its place, and ``optimizer``.

        Collective. Call the returned module, and neither its ``forward`` nor one of its children. Rank 0's parameters
        and buffers are sent to all ranks (except under strategy none). A model on the meta device is materialized block
        by block, and needs ``init``. ``optimizer`` is one or a list of several: the same objects, with the same groups.
        All are saved in checkpoints, and restored if the run was resumed. An optimizer of the model that was made
        before and not passed raises SetupError at its step if the strategy shards. After the call each rank draws
        different random numbers. Several models can be parallelized, each with its own optimizers.

        - ``precision``: dtypes of the computation and of the reduction; the optimizer works in the model's own.
        - ``blocks``: modules that are sharded, recomputed and compiled one by one: classes, their names, paths such as
          ``["layers.*", "embed", "head"]``, a function of path and module, or a minimum number of parameters. Default:
          the modules of a repeated class in a ModuleList, ModuleDict or Sequential.
        - ``recompute``: drop the activations of blocks and compute them again in the backward pass; or of the modules
          that are named as for ``blocks``, such as ``"Attention"``.
        - ``compile``: compile each block with torch.compile; a string is the backend, a dictionary all its options.
        - ``shard_size``: number of ranks in a shard group under a hybrid strategy. Default: the ranks of one node.
        - ``reshard_after_forward``: number of ranks over which a block's parameters stay sharded between its forward
          and backward passes, under full_shard and hybrid_shard; such as a node's. Default: the whole shard group.
        - ``find_unused_parameters``: ranks do not all use the same parameters in a forward pass.
        - ``init``: for a model on the meta device, a function that is called with it once it is sharded, and sets the
          values of parameters and buffers; the path of weights, as of `load_weights`; or "reset_parameters", which says
          that the methods of this name of its modules set all values.
        - ``save_frozen``: whether checkpoints have the parameters that require no gradient. With False, as for the base
          of LoRA, the script loads them before each start, and a checkpoint has only the hashes of their values.

        Raises SetupError, before any communication, if these do not fit each other or the model, and CheckpointError if
        the checkpoint is of another model.
        """
        names = ParallelArgs.__annotations__
        if unknown := [name for name in options if name not in names]:
            raise TypeError(f"parallelize() has no argument {unknown[0]!r}: expected one of {', '.join(names)}")
        optimizers = [] if optimizer is None else [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        module = self._models.parallelize(model, optimizers, ParallelOptions(**options))
        return module if optimizer is None else (module, optimizer)

    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which backward passes accumulate gradients without communication.

        `micro_batches` uses it. In a loop without it, use it for all micro-batches of a step but the last, and divide
        each loss by the number of micro-batches. Under the sharding strategies each rank holds full gradients
        meanwhile.
        """
        return self._models.no_sync()

    def clip_grad_norm(
        self,
        max_norm: float,
        *,
        model: nn.Module | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Scale the gradients so that their total norm, over all ranks, is at most ``max_norm``. Collective.

        Returns the norm before, a tensor of shape () that is the same on all ranks; under strategy none it is each
        rank's own. ``model`` selects one of several parallelized models. Raises SetupError if it selects none or the
        choice is ambiguous, and RuntimeError if ``error_if_nonfinite`` and the norm is NaN or infinite.
        """
        return self._models.select(model, "clip_grad_norm").clip_grad_norm(max_norm, norm_type, error_if_nonfinite)

    def average(self, decay: float = 0.999, *, model: nn.Module | None = None) -> Average:
        """An exponential moving average (EMA) of the trained parameters of a model, under any strategy. Collective.

        Call ``update()`` of it after each optimizer.step(), and evaluate in ``with average.applied():``. The values are
        those of torch's AveragedModel with get_ema_multi_avg_fn(decay), which cannot copy a sharded model. It is saved
        in checkpoints, and restored if the run was resumed. ``model`` selects one of several parallelized models.
        Raises SetupError if that is ambiguous, or ``decay`` is not between 0 and 1; CheckpointError if its state does
        not fit.
        """
        return self._models.average(decay, model)

    def register(self, name: str, thing: Stateful) -> None:
        """Save ``thing``, such as a learning rate scheduler, in checkpoints under ``name``. Collective.

        Rank 0's state is saved or each rank's own: see `flk_runtime.per_rank`. It is restored now if the run was
        resumed from a checkpoint that has it. An optimizer that was made after `parallelize`, of parameters of the
        returned module, is saved as if it had been passed to it. Raises SetupError if the name is taken or begins
        with ``flk.``, if the checkpoint has it and the first step has been made, or if an optimizer holds other
        parameters beside sharded ones; CheckpointError if its state does not fit.
        """
        self._models.register(name, thing)

    def loader(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool | None = None,
        split: bool = True,
        drop_last: bool = False,
        accumulate: int = 1,
        seed: int | None = None,
        name: str | None = None,
        **options: Any,
    ) -> EpochLoader:
        """A loader of this rank's batches for training, shuffled and with the incomplete last batch. Collective.

        Defaults: a map-style ``dataset`` is shuffled anew in each epoch unless ``shuffle=False``, and an iterable keeps
        its order. No sample is dropped unless ``drop_last=True``, so the last step of an epoch has fewer samples or a
        few more. No sample is repeated, and all ranks take the same number of steps.

        Every step takes ``world_size * batch_size * accumulate`` samples. With ``accumulate``, a batch is
        ``accumulate`` micro-batches of ``batch_size`` samples, into which `micro_batches` splits it. In an elastic job
        a step takes ``full_world_size * batch_size * accumulate`` samples, also with fewer ranks, unless the job scales
        its batch: then a rank's batch has more micro-batches. ``split=False`` declares that an iterable is already
        split over ranks and workers. The position is saved in checkpoints under ``name`` (default: by the order of
        calls), except for a loader without a name that is made after the first step. ``options`` are the options of
        torch.utils.data.DataLoader: num_workers, collate_fn, pin_memory, … Batches are on the run's device.

        Raises SetupError if the dataset is too small or an option contradicts the loader, and CheckpointError if the
        checkpoint's position is of another dataset.
        """
        of_run = LoaderOptions(batch_size, shuffle, split, drop_last, accumulate, seed, name, options)
        return self._batches.make_loader(dataset, of_run)

    def evaluation(self, dataset: Any, batch_size: int, *, split: bool = True, **options: Any) -> EvaluationLoader:
        """A loader for an evaluation, which yields pairs of a batch and the number of its samples. Collective.

        Each loop over it takes all of ``dataset`` in its order, each sample once over all ranks. All ranks get equally
        many batches, on the run's device, so that the passes of a sharded model fit together. A rank without a sample
        for a step gets a batch that counts already, with the number 0: for example where there are fewer samples than
        ranks. `mean` ignores values of weight 0:

            losses, counts = [], []
            for (x, y), count in evaluation:
                losses.append(loss_of(model, x, y))
                counts.append(count)
            loss = run.mean(losses, weight=counts)

        It has no position: nothing is saved, and training goes on as without it, also between two micro-batches.
        ``dataset``, ``split`` and ``options`` are those of `loader`; a batch may have one sample more than
        ``batch_size``. Raises SetupError if there is no sample, or no data on a rank with ``split=False``.
        """
        return self._batches.make_evaluation(dataset, LoaderOptions(batch_size, split=split, of_torch=options))

    def join_batches(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield this rank's ``batches`` until one of the ranks has no more; then all ranks stop. Collective.

        For batches of the user's own that may differ in number; torch's Join handles the same case for gradients.
        Prints on rank 0 how many were left on which rank. A loader of `loader` needs none of this.
        """
        return join_batches(batches, self._context.say)

    @property
    def accumulation(self) -> int:
        """Number of micro-batches into which `micro_batches` splits the latest batch; the same on all ranks.

        Raises SetupError if it differs between the loaders of the step.
        """
        return self._batches.accumulation

    def micro_batches(self, batch: T) -> Iterator[T]:
        """Yield the micro-batches of a loader's ``batch``, of about ``batch_size`` samples each.

        There are ``accumulate`` of them, more in an elastic job that lacks ranks, fewer at the end of an epoch. Call
        `backward` with the mean loss of each, and optimizer.step() after the loop. Gradients are accumulated, and
        communicated in the last micro-batch only. The batch is a pytree; tensors and lists with an entry for each
        sample are split. It is known by its tensors: of several loaders, each batch is split as its loader says. A
        batch whose tensors the script has made itself counts as the latest one. Collective: all ranks take as many
        micro-batches.

        Raises SetupError if the batch must be split and nothing in it has an entry for each sample, if it is of several
        loaders that differ, and inside of another loop over micro-batches.
        """
        return self._backward.micro_batches(batch)

    def backward(self, loss: torch.Tensor, weight: torch.Tensor | float | None = None) -> None:
        """Compute the gradients of ``loss``, the mean over this rank's latest batch or micro-batch.

        It is weighted so that the optimizer gets the gradient of the mean over all ranks and micro-batches of the step.
        ``weight`` is what this mean counts, such as the number of tokens that are not padding: a number or a tensor
        with one element, which may differ between ranks and be 0. By default each sample counts as much, also where
        ranks have different numbers of them; ``loss.backward()`` would weight all ranks alike. ``loss`` may be what
        ``scaler.scale`` returns. If all weights are 0, so are the gradients. Where the weight is 0, ``loss`` may be
        NaN, but not its gradient: cross_entropy is right without labels, a division by their number is not.

        With a ``weight`` it is collective. The sum of the weights is added up over the ranks as a tensor on the device
        of the run, so the host waits for no device: once in a step with one micro-batch, before the backward pass. With
        several, it is known in the last one only. Until then the weights are divided by an estimate, the sum over the
        ranks for the first micro-batch; after the last pass the gradients of all parallelized models are multiplied by
        the estimate divided by the sum.

        Raises SetupError with a ``weight`` in `no_sync`, for a second call for the same micro-batch, and in several
        micro-batches without a parallelized model or with a DistributedOptimizer; and without one if the loaders of the
        step give batches of different sizes and it is not called in a loop over `micro_batches`.
        """
        self._backward.backward(loss, weight)

    def step(self, loss: torch.Tensor | float | None = None, **values: Any) -> None:
        """Count a step that the script's optimizer has made: call it after optimizer.step(), which it does not call.

        Collective. It logs and saves what is due.

        Every ``log_every`` steps a line of metrics is printed on rank 0, with the mean of ``loss`` over the ranks that
        give one, and rank 0's ``values``; tensors have one element and are read only then. Every ``save_every`` steps
        a checkpoint is written. At the first step CheckpointError is raised if the checkpoint that was resumed holds a
        model and none was parallelized, and SetupError after `close`, and if a loop over `micro_batches` was left
        before its end; see also `save`.

        After a pod has received SIGTERM, all ranks save after the same step, and this raises SystemExit with code 143.
        """
        self._check_open("step")
        self._backward.check_step()
        self._steps.record(loss, values, samples=self._batches.take_samples(), epoch=self._batches.epoch)

    def save(self, *, wait: bool = False) -> None:
        """Write a checkpoint now, if there is a place for it and a parallelized model. Collective.

        Training stops until the state is copied to memory; a thread writes it. With ``wait``, training stops until the
        checkpoint is complete; a run that ends with `abandon` needs it. A checkpoint that is still being written
        is awaited first. Raises CheckpointError on all ranks if one of them could not be written or a state cannot be
        saved, and SetupError after `close`.
        """
        self._check_open("save")
        self._saves.save(self.steps, wait=wait)

    def load_weights(self, path: str | os.PathLike[str], *, model: nn.Module | None = None) -> None:
        """Load the weights at ``path`` into a parallelized model, and nothing else. Collective.

        ``path``: a safetensors file, a file of torch.save, a folder of Hugging Face's or of
        torch.distributed.checkpoint, or a place of flk's checkpoints. Each rank reads what it needs. ``model`` selects
        one of several. Call it before the first step of a run that was not resumed; under strategy diloco in all
        workers, with the same weights. Raises CheckpointError if a tensor is missing or has another shape, and
        SetupError if the choice of the model is ambiguous, or if steps are done under strategy diloco.
        """
        self._models.load_weights(path, model)

    def export(self, file: str | os.PathLike[str]) -> None:
        """Save now, and write the model in that checkpoint to one safetensors file on rank 0. Collective.

        Under strategy diloco the trained parameters are those on which the workers agreed in the latest round. Raises
        CheckpointError if there is no place for checkpoints, or the file cannot be written.
        """
        self._saves.export(self.steps, file)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation since the latest line of metrics, from 0 to 1 (PaLM, arXiv 2204.02311, appendix B).

        None on a CPU or another device whose peak is not known, and until two steps are done. Waits for the device.
        """
        return self._metrics.read_utilisation()

    @property
    def flops_per_step(self) -> float | None:
        """FLOPs of one step's forward and backward passes, of all ranks together; counted for the first line of metrics
        or `mfu`. Set it where that cannot count them."""
        return self._metrics.utilisation.flops_per_step

    @flops_per_step.setter
    def flops_per_step(self, flops: float) -> None:
        self._metrics.utilisation.flops_per_step = float(flops)

    def log(self, **values: Any) -> None:
        """Print a line of JSON on rank 0, with the number of steps."""
        self.print(logging.line({"step": self.steps, **values}))

    def print(self, *values: object) -> None:
        """Print a line on rank 0."""
        self._context.print(*values)

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""
        dist.barrier()

    def mean(self, value: Numbers, weight: Numbers = 1.0) -> float:
        """The mean of all ranks' ``value``, weighted by ``weight``, such as a number of samples. Collective.

        A rank gives one value, or several as a sequence or a tensor, also none; and one weight for all of them or as
        many weights. What has the weight 0 does not count, and may be NaN. The result is the same on all ranks, and NaN
        if all weights are 0. Raises SetupError for another number of weights.
        """
        return process_group.mean(value, weight)

    def close(self) -> None:
        """Save what is not saved yet and destroy the process group. A second call does nothing. Collective."""
        if not self.closed:
            self._steps.close()
            dist.barrier()  # no rank leaves while another still communicates: leaving does not wait for its threads
            self._leave(at_once=False)

    def abandon(self) -> None:
        """Destroy the process group without saving and without waiting for other ranks, which may have died."""
        if not self.closed:
            self._leave(at_once=True)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.abandon() if kind else self.close()

    def _check_open(self, method: str) -> None:
        if self.closed:
            raise SetupError(f"this run is closed: call {method}() before close(), or begin another run with init()")

    def _leave(self, *, at_once: bool) -> None:
        self.closed = True
        if self._owns_group:
            process_group.leave(at_once=at_once)
