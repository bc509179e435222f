"""Run: a training run, with which a script parallelizes, loads data, counts steps, logs and saves."""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import nn
from torch.optim import Optimizer

from flk_runtime.checkpoint import Stateful
from flk_runtime.data import EpochLoader, EvaluationLoader, LoaderOptions
from flk_runtime.discovery import RankInfo
from flk_runtime.parallel import ParallelArgs, ParallelOptions
from flk_runtime.training.backward import Backward
from flk_runtime.training.context import RunContext
from flk_runtime.training.models import Models
from flk_runtime.training.options import RunOptions
from flk_runtime.training.training import Training

if TYPE_CHECKING:
    from typing_extensions import Unpack

O = TypeVar("O", bound="Optimizer | Sequence[Optimizer]")  # noqa: E741


class Run(Training):
    """This rank's side of a training run. Made by `flk_runtime.init`.

    All ranks must call the methods marked "Collective.", in the same order.
    """

    def __init__(self, rank_info: RankInfo, options: RunOptions, given: dict[str, Any], *, owns_group: bool) -> None:
        """``given`` are the arguments of `init`, of which ``options`` were made."""
        self.given = given
        context = RunContext.begin(rank_info, options)
        super().__init__(context, owns_group=owns_group)
        self._models = Models(context, self._steps, self._saves, self._metrics, self._batches)
        self._backward = Backward(context, self._models, self._batches)

    @overload
    def parallelize(self, model: nn.Module, optimizer: None = None, **options: Unpack[ParallelArgs]) -> nn.Module: ...

    @overload
    def parallelize(self, model: nn.Module, optimizer: O, **options: Unpack[ParallelArgs]) -> tuple[nn.Module, O]: ...

    def parallelize(
        self, model: nn.Module, optimizer: O | None = None, **options: Unpack[ParallelArgs]
    ) -> nn.Module | tuple[nn.Module, O]:
        """Apply the run's strategy to ``model``; return the module to call in its place, and ``optimizer``.

        Collective. Call the returned module, and neither its ``forward`` nor one of its children. Rank 0's parameters
        and buffers are sent to all ranks (except under strategy none). A model on the meta device needs
        ``init``, and is never whole on a rank. ``optimizer`` is one or a list of several: the same objects, with the
        same groups. All are saved in checkpoints, and restored if the run was resumed. An optimizer of the model that
        was made before and not passed raises SetupError at its step if the strategy shards. All ranks draw the same
        random numbers until the returned module is called first with gradients, or a loader draws a batch. Several
        models can be parallelized, each with its own optimizers.

        ``options`` are `flk_runtime.parallel.ParallelArgs`. Raises SetupError, before any communication, if they do not
        fit each other or the model, and CheckpointError if the checkpoint is of another model.
        """
        chosen = ParallelOptions(**options)
        optimizers = [] if optimizer is None else [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        module = self._models.parallelize(model, optimizers, chosen)
        return module if optimizer is None else (module, optimizer)

    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which backward passes accumulate gradients without communication.

        `micro_batches` uses it. In a loop without it, use it for all micro-batches of a step but the last, and divide
        each loss by their number. Under the sharding strategies each rank holds full gradients meanwhile.
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

    def register(self, name: str, thing: Stateful | MutableMapping[str, Any]) -> None:
        """Save ``thing``, such as a learning rate scheduler or a dictionary, in checkpoints under ``name``. Collective.

        Rank 0's state is saved or each rank's own: see `flk_runtime.per_rank`. It is restored now if the run was
        resumed from a checkpoint that has it. An optimizer that was made after `parallelize`, of parameters of the
        returned module, is saved as if it had been passed to it. Raises SetupError if the name is taken or begins
        with ``flk.``, if ``thing`` has no state, if the checkpoint has it and the first step has been made, or if an
        optimizer holds other parameters beside sharded ones; CheckpointError if its state does not fit.
        """
        self._models.register(name, thing)

    def loader(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        shuffle: bool | None = None,
        drop_last: bool = False,
        accumulate: int | None = None,
        seed: int | None = None,
        name: str | None = None,
        **options: Any,
    ) -> EpochLoader:
        """A loader of this rank's batches for training, shuffled and with the incomplete last batch. Collective.

        Every step takes ``world_size * batch_size * accumulate`` samples. No sample is repeated, and all ranks take the
        same number of steps. With ``accumulate`` the loader gives micro-batches, for `micro_batches`. Batches are on
        the run's device. The position is saved in checkpoints, except for a loader without a name that is made after
        the first step: where there are checkpoints, `step` raises SetupError if it has trained with that.
        `flk_runtime.data.LoaderOptions` describes the arguments; ``options`` are the options of
        torch.utils.data.DataLoader: num_workers, collate_fn, pin_memory, … A ``sampler`` or ``batch_sampler`` is one of
        a single process: all ranks draw the same order from it, and each takes its share.

        Raises SetupError if the dataset is too small, the ranks' data differ, an option contradicts the loader, or the
        name is taken, and CheckpointError if the checkpoint's position is of another dataset.
        """
        return self._batches.make_loader(
            dataset, LoaderOptions(batch_size, shuffle, drop_last, accumulate, seed, name, options)
        )

    def evaluation(self, dataset: Any, batch_size: int, **options: Any) -> EvaluationLoader:
        """A loader for an evaluation, which yields pairs of a batch and the number of its samples. Collective.

        Each loop over it takes all of ``dataset`` in its order, each sample once over all ranks. All ranks get equally
        many batches, on the run's device, so that the passes of a sharded model fit together. A rank without a sample
        for a step gets a batch that counts already, with the number 0. `EvaluationLoader` shows how to take the mean.

        It has no position: nothing is saved, and training goes on as without it, also between two micro-batches.
        The arguments are as in `loader`; a batch may have one sample more than ``batch_size``.
        Raises SetupError if there is no sample.
        """
        return self._batches.make_evaluation(dataset, LoaderOptions(batch_size, of_torch=options))

    def micro_batches(self, batch: Any) -> Iterator[Any]:
        """Yield the micro-batches of ``batch``, which a loader with ``accumulate=`` gave.

        Collective: all ranks take as many, ``accumulate``, more in an elastic job that lacks ranks, fewer at the end of
        an epoch. Each is what ``collate_fn`` made of its samples, at most ``batch_size``; nothing is split. Call
        `backward` with the mean loss of each, and optimizer.step() after the loop. The gradients are communicated in
        the last micro-batch only.

        Raises SetupError for any other batch, such as one that the script has made or changed, and inside of another
        loop over micro-batches.
        """
        return self._backward.micro_batches(batch)

    def backward(self, loss: torch.Tensor, weight: torch.Tensor | float | None = None) -> None:
        """Compute the gradients of ``loss``, the mean over this rank's latest batch or micro-batch.

        It is weighted so that the optimizer gets the gradient of the mean over all ranks and micro-batches of the step.
        ``weight`` says how much this mean counts, such as the number of tokens without padding: a number or a tensor
        with one element, which may differ between ranks and be 0. By default each sample that the loader took counts as
        much, also where ranks have different numbers of them; ``loss.backward()`` would weight all ranks alike. Where
        ``collate_fn`` leaves samples out, pass the number of those that are left. ``loss`` may be what
        ``scaler.scale`` returns. If all weights are 0, so are the gradients. Where the weight is 0, ``loss`` may be
        NaN, but not its gradient: cross_entropy is right without labels, a division by their number is not.

        With a ``weight`` it is collective: the weights are added up over the ranks, and the host waits for no device.
        In several micro-batches the gradients are right after the last one, when the sum of the weights is known.

        Raises SetupError with a ``weight`` in `no_sync`, for a second call for the same micro-batch, and in several
        micro-batches without a parallelized model; and without one if the loaders of the step give batches of different
        sizes and it is not called in a loop over `micro_batches`.
        """
        self._backward.backward(loss, weight)

    def step(self, loss: torch.Tensor | float | None = None, **values: Any) -> None:
        """Count a step that the script's optimizer has made: call it after optimizer.step(). Collective.

        Every ``log_every`` steps a line of metrics is printed on rank 0, with the mean of ``loss`` over the ranks that
        give one, and rank 0's ``values``; tensors have one element and are read only then. Raises CheckpointError at
        the first step if the checkpoint that was resumed holds a model and none was parallelized; SetupError after
        `close`, and if a loop over `micro_batches` was left before its end, or over one loader trains beside another.

        The step ends where a loader is asked for the next batch, its loop over epochs or steps ends, or `close` is
        called; here, if no loader has given a batch since the latest step. There every ``save_every`` steps a
        checkpoint is written, with what the script has done meanwhile; that raises CheckpointError as `save` does.
        After a pod has received SIGTERM, all ranks save after the same step, and raise SystemExit with code 143.
        Of several steps with one batch, those after the first end here, and a restart from one goes on with the next
        batch: to have all of them or none in a checkpoint, call this once for each batch, after the last of them.
        """
        self._check_open("step")
        if self._backward.has_looped:
            self._backward.check_step()
        self._models.check_step()
        batches = self._batches
        if not self._steps.began:
            batches.say_if_data_begin_anew()
        samples, draws = batches.take_samples()
        self._steps.record(loss, values, samples=samples, draws=draws, epoch=batches.epoch)

    def load_weights(self, path: str | os.PathLike[str], *, model: nn.Module | None = None) -> None:
        """Load the weights at ``path`` into a parallelized model, and nothing else. Collective.

        ``path``: a safetensors file, a file of torch.save, a folder of Hugging Face's or of
        torch.distributed.checkpoint, or a place of flk's checkpoints. Each rank reads what it needs. ``model`` selects
        one of several. Call it before the first step of a run that was not resumed; under strategy diloco in all
        workers, with the same weights. Raises CheckpointError if a tensor is missing or has another shape, and
        SetupError if the choice of the model is ambiguous, or if steps are done under strategy diloco.
        """
        self._models.load_weights(path, model)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation since the latest line of metrics, from 0 to 1 (PaLM, arXiv 2204.02311, appendix B).

        None on a CPU or another device whose peak is not known, and until two steps are done. Waits for the device.
        """
        return self._metrics.read_utilisation()

    @property
    def flops_per_step(self) -> float | None:
        """FLOPs of a step's passes, of all ranks together. None before the first line, and where flk cannot count."""
        return self._metrics.utilisation.flops_per_step
