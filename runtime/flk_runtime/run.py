"""A run: this rank's part in one training, from `flk_runtime.init` to `close`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from flk_runtime.checkpoint import storage as snapshot
from flk_runtime.checkpoint.manager import Checkpoint
from flk_runtime.checkpoint.stateful import Stateful
from flk_runtime.data import iterable as streams
from flk_runtime.data.loader import EpochLoader, LoaderContext
from flk_runtime.data.uneven_inputs import join_batches
from flk_runtime.discovery import RankInfo
from flk_runtime.distributed import process_group as group
from flk_runtime.errors import SetupError
from flk_runtime.metrics import logging as metrics
from flk_runtime.metrics import mfu
from flk_runtime.parallel import strategies as parallel
from flk_runtime.parallel.blocks import Blocks
from flk_runtime.parallel.model import OptimizerState, ParallelModel
from flk_runtime.parallel.precision import Precision

T = TypeVar("T")
O = TypeVar("O", bound=Optimizer)  # noqa: E741


class Run:
    """Made by `flk_runtime.init`. Methods marked collective must be called by all ranks, in the same order."""

    def __init__(
        self,
        place: RankInfo,
        *,
        device: torch.device,
        strategy: str,
        seed: int,
        folder: snapshot.Folder | None,
        save_every: int,
        log_every: int,
        owns_group: bool,
        timeouts: group.Timeouts,
    ) -> None:
        self.place = place
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.local_rank = place.local_rank
        self.local_world_size = place.local_world_size
        self.attempt = place.attempt
        self.is_main = self.rank == 0
        self.device = device
        self.seed = seed
        self.strategy = strategy
        self.closed = False
        self._save_every, self._log_every, self._owns_group = save_every, log_every, owns_group
        self._timeouts = timeouts
        self._wrapped: list[ParallelModel] = []
        self._loaders = 0
        self._loader: EpochLoader | None = None  # the one that gave the latest batch
        self._pending = 0  # samples of it since the last step
        self._throughput = metrics.Throughput()
        self._meter = mfu.Meter(device, self.world_size, lambda text: self.print(f"flk: {text}"))
        self._stepped = False
        self._checkpoint = Checkpoint(folder, seed, self.print)
        self.steps = self._checkpoint.steps  # optimizer steps so far, those before a resume included

    # The model

    @overload
    def parallelize(
        self,
        model: nn.Module,
        optimizer: None = None,
        *,
        api: str | None = None,
        precision: Precision | None = None,
        blocks: Blocks | None = None,
        recompute: bool = False,
        compile: bool | str = False,
        shard_size: int | None = None,
        find_unused_parameters: bool = False,
    ) -> nn.Module: ...

    @overload
    def parallelize(
        self,
        model: nn.Module,
        optimizer: O,
        *,
        api: str | None = None,
        precision: Precision | None = None,
        blocks: Blocks | None = None,
        recompute: bool = False,
        compile: bool | str = False,
        shard_size: int | None = None,
        find_unused_parameters: bool = False,
    ) -> tuple[nn.Module, O]: ...

    def parallelize(
        self,
        model: nn.Module,
        optimizer: O | None = None,
        *,
        api: str | None = None,
        precision: Precision | None = None,
        blocks: Blocks | None = None,
        recompute: bool = False,
        compile: bool | str = False,
        shard_size: int | None = None,
        find_unused_parameters: bool = False,
    ) -> nn.Module | tuple[nn.Module, O]:
        """The model to call from now on, wrapped by the strategy, and ``optimizer`` with its parameters. Collective.

        Call what is returned, ``model(x)``, and not its ``forward`` or one of its parts. Rank 0's parameters and
        buffers go to all ranks (not under strategy none). A model on the meta device is given memory and numbers block
        by block, by its modules' ``reset_parameters``. Both are registered for snapshots, and go back to the newest one
        if there is one. The optimizer is the same object, with the same groups. From here on the random numbers of the
        ranks differ. Several models can be parallelized, each with its own optimizer.

        ``api``: fsdp2 (torch's fully_shard; the default where torch has it) or fsdp1 (FullyShardedDataParallel).
        ``precision``: dtypes to compute and to reduce in; the optimizer works on the model's own. ``blocks``: what is
        sharded, recomputed and compiled by itself: classes or their names, or a least number of parameters; by default
        the modules of a repeated class in a ModuleList, ModuleDict or Sequential. ``recompute``: keep no activations
        of blocks. ``compile``: run each block through torch.compile; a string names its backend. ``shard_size``: ranks
        per shard group of a hybrid strategy; by default those of one node. ``find_unused_parameters``: the forward
        pass does not use the same parameters on all ranks.

        Raises SetupError where these do not go together, before any communication.
        """
        number = len(self._wrapped)
        name = f"model-{number}" if number else "model"
        if any(each.model is model or each.called is model for each in self._wrapped):
            raise SetupError("this model has been parallelized before")
        options = parallel.Options(api, precision, blocks, recompute, compile, shard_size, find_unused_parameters)
        self._checkpoint.check_model(name, model)
        self._meter.prepare(model)
        wrapped = parallel.wrap(
            model,
            optimizer,
            self.strategy,
            options,
            device=self.device,
            world_size=self.world_size,
            local_world_size=self.local_world_size,
        )
        self._meter.watch(wrapped.called, precision.param if precision else None)
        self._wrapped.append(wrapped)
        self.register(name, wrapped)
        if optimizer is not None:
            self.register(f"optimizer-{number}" if number else "optimizer", OptimizerState(optimizer, wrapped))
        self._checkpoint.begin_random()
        return wrapped.called if optimizer is None else (wrapped.called, optimizer)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forward and backward passes in here add to the gradients without communicating: all micro-batches of a step
        but the last.

        Under the sharding strategies each rank holds whole gradients meanwhile. A loss is divided by the number of
        micro-batches by the user.
        """
        with contextlib.ExitStack() as stack:
            for wrapped in self._wrapped:
                stack.enter_context(wrapped.no_sync())
            yield

    def clip_grad_norm(
        self,
        max_norm: float,
        *,
        model: nn.Module | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Scale the gradients so that the norm of all of them, over all ranks, is at most ``max_norm``. Collective.

        Returns the norm before, a tensor of no dimension that is the same on all ranks. ``model`` says which one, where
        several have been parallelized. Under strategy none it is each rank's own.
        """
        chosen = [each for each in self._wrapped if model is None or model in (each.called, each.model)]
        if len(chosen) != 1:
            raise SetupError(
                f"clip_grad_norm clips one parallelized model, and there are {len(chosen)}"
                + (": say which, model=" if len(chosen) > 1 else ": call parallelize before")
            )
        return chosen[0].clip(max_norm, norm_type, error_if_nonfinite)

    def register(self, name: str, thing: Stateful) -> None:
        """Put ``thing`` (a learning rate scheduler, say) into snapshots under ``name``; restore it if it is in one.
        Collective.
        """
        self._checkpoint.register(name, thing)

    # The data

    def loader(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool | None = None,
        split: bool = True,
        drop_last: bool = False,
        seed: int | None = None,
        name: str | None = None,
        **options: Any,
    ) -> EpochLoader:
        """Batches of ``batch_size`` samples for this rank, on its device, out of a map-style dataset or an iterable.

        Every step takes ``world_size × batch_size`` samples; nothing is dropped (unless ``drop_last``) or doubled, and
        all ranks take equally many steps. Its position is in the snapshots, under ``name`` (by default by the order of
        calls). A map-style dataset is shuffled unless ``shuffle=False``; an iterable comes in its own order, and
        ``split=False`` says that it is split over ranks and workers already. ``options`` are
        torch.utils.data.DataLoader's: num_workers, collate_fn, pin_memory, persistent_workers, …
        """
        name = name or ("loader" if self._loaders == 0 else f"loader-{self._loaders}")
        self._loaders += 1
        feed = LoaderContext(
            batch_size,
            self.rank,
            self.world_size,
            self.device,
            self.seed if seed is None else seed,
            name,
            steps_done=lambda: self.steps,
            on_begin=self._checkpoint.begin_random,
            on_batch=self._count,
            on_end=self._save_end,
        )
        loader = streams.loader(dataset, feed, shuffle=shuffle, split=split, drop_last=drop_last, **options)
        self.register(name, loader)
        return loader

    def join_batches(self, batches: Iterable[T]) -> Iterator[T]:
        """The user's own ``batches`` of this rank, until one of the ranks has no more: then all stop. Collective.

        Says on rank 0 how many were left where. A `Run.loader` needs none of this: it gives all ranks equally many.
        """
        return join_batches(batches, lambda text: self.print(f"flk: {text}"))

    # The training

    def step(self, loss: torch.Tensor | float | None = None, **values: Any) -> None:
        """Say that the optimizer has made a step. Collective.

        Every ``log_every`` steps a line of metrics is printed: ``loss`` is the mean over the ranks, other ``values``
        are rank 0's. Tensors are read only then. Every ``save_every`` steps a snapshot is written.
        """
        first = not self._stepped
        if first:
            self._checkpoint.settle()
        self.steps += 1
        self._throughput.add(self._pending)
        self._pending = 0
        self._meter.step()
        if self._log_every and self.steps % self._log_every == 0:
            self._report(loss, values)
        if self._save_every and self.steps % self._save_every == 0:
            self.save()
        if first:
            self._timeouts.shorten()

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation since the latest line of metrics, from 0 to 1 (PaLM, arXiv 2204.02311, appendix B).

        None on a CPU or another device whose peak is not known, and until two steps are done. Waits for the device.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self._meter.read()

    @property
    def flops_per_step(self) -> float | None:
        """FLOPs of one step's forward and backward passes, of all ranks together; counted for the first line of metrics
        or `mfu`. Set it where that cannot count them."""
        return self._meter.flops_per_step

    @flops_per_step.setter
    def flops_per_step(self, flops: float) -> None:
        self._meter.flops_per_step = float(flops)

    def save(self) -> None:
        """Write a snapshot now, if there is a folder and a registered model. Collective."""
        if self._checkpoint.writes:
            with self._timeouts.long():  # rank 0 may write for longer than a step may take
                self._checkpoint.save(self.steps)

    # Talking

    def log(self, **values: Any) -> None:
        """Print a line of JSON on rank 0, with the number of steps."""
        self.print(metrics.line({"step": self.steps, **values}))

    def print(self, *values: object) -> None:
        """Print a line on rank 0."""
        if self.is_main:
            # In one piece: print() writes the line's end apart, and another rank's line may come between.
            sys.stdout.write(" ".join(map(str, values)) + "\n")
            sys.stdout.flush()

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""
        dist.barrier()

    def mean(self, value: float, weight: float = 1.0) -> float:
        """The mean of all ranks' ``value``, weighted (by the number of samples, say). Collective."""
        return group.mean(value, weight)

    # The end

    def close(self) -> None:
        """Save the final state and leave the process group. Collective; a second call does nothing."""
        if not self.closed:
            self._save_end()
            # Nobody leaves while another still works: a group's end does not wait for what its threads are doing.
            dist.barrier()
            self._leave(at_once=False)

    def abandon(self) -> None:
        """Leave the process group without saving, and without waiting for the other ranks: they may be dead."""
        if not self.closed:
            self._leave(at_once=True)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def _leave(self, *, at_once: bool) -> None:
        self.closed = True
        if self._owns_group:
            group.leave(at_once=at_once)

    def _report(self, loss: torch.Tensor | float | None, values: dict[str, Any]) -> None:
        # All ranks take part, with a loss or without: a rank that has none must not keep the others waiting.
        mean = (
            group.mean(0.0, 0.0)
            if loss is None
            else group.mean(float(loss.detach() if isinstance(loss, torch.Tensor) else loss), 1.0)
        )
        line: dict[str, Any] = {"step": self.steps}
        if self._loader:
            line["epoch"] = self._loader.epoch
        if loss is not None:
            line["loss"] = mean
        rate = self._throughput.read()
        if rate is not None:
            line["samples_per_s"] = round(rate, 1)
        utilisation = self._meter.read(mark=True)
        if utilisation is not None:
            line["mfu"] = round(utilisation, 4)
        self.print(metrics.line({**line, **values}))

    def _count(self, loader: EpochLoader, samples: int) -> None:
        if loader is not self._loader:  # an evaluation's samples are not the next step's
            self._loader, self._pending = loader, 0
        self._pending += samples

    def _save_end(self) -> None:
        if self._checkpoint.is_due(self.steps):
            self.save()
