"""Run: what a training script uses to parallelize, load data, count steps, log and save, from `init` to `close`."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from flk_runtime.checkpoint import CheckpointManager, OptimizerState, Stateful
from flk_runtime.checkpoint.interval import COMPUTED, AutoInterval
from flk_runtime.contract import VERSION, user_env
from flk_runtime.contract.exit_codes import ExitCode
from flk_runtime.contract.record import SOURCES
from flk_runtime.data import (
    EpochLoader,
    LoaderContext,
    StepShare,
    join_batches,
    length_of,
    make_loader,
    share_of_worker,
    split,
)
from flk_runtime.diloco import DiLoCo, Membership
from flk_runtime.discovery import RankInfo
from flk_runtime.distributed import process_group
from flk_runtime.errors import CheckpointError, SetupError
from flk_runtime.metrics import logging, mfu
from flk_runtime.metrics.shares import Shares
from flk_runtime.parallel import (
    STRATEGIES,
    Blocks,
    ParallelModel,
    ParallelOptions,
    Precision,
    adopt_optimizer,
    find_blocks,
    parallelize,
)
from flk_runtime.preflight import report
from flk_runtime.preflight.options import compare_options
from flk_runtime.shared import progress
from flk_runtime.shared.progress import Phase
from flk_runtime.system import rng

if TYPE_CHECKING:
    from flk_runtime.diloco.worker import OuterLoop

T = TypeVar("T")
O = TypeVar("O", bound=Optimizer)  # noqa: E741


class Run:
    """This rank's side of a training run. Made by `flk_runtime.init`.

    All ranks must call the methods marked "Collective.", in the same order.
    """

    def __init__(
        self,
        rank_info: RankInfo,
        *,
        device: torch.device,
        strategy: str,
        diloco: DiLoCo | None,
        seed: int,
        checkpoint: str | None,
        save_every: int,
        keep: tuple[int, int],
        log_every: int,
        owns_group: bool,
        keep_batch: bool,
        timeouts: process_group.Timeouts,
    ) -> None:
        """The process group is open. ``owns_group``: `close` destroys it. Collective.

        ``strategy`` is that of the ranks of the process group; with ``diloco`` they are one of several workers.
        ``keep_batch``: a step of an elastic job has as many samples with fewer ranks as with all.
        """
        self.rank_info = rank_info
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.local_rank = rank_info.local_rank
        self.local_world_size = rank_info.local_world_size
        self.full_world_size = max(rank_info.full_world_size, self.world_size)  # of an elastic job with all its pods
        self._keep_batch = keep_batch
        self._node_rank = rank_info.node_rank
        self.attempt = rank_info.attempt
        self.is_main = self.rank == 0
        self.device = device
        self.seed = seed
        self.strategy = strategy
        self.closed = False
        self._diloco = diloco
        self._member = Membership.read(diloco) if diloco else Membership()
        self.worker, self.workers = self._member.worker, self._member.workers
        self._outer: OuterLoop | None = None
        self._save_every, self._log_every, self._owns_group = save_every, log_every, owns_group
        self._timeouts = timeouts
        self._models: list[ParallelModel] = []
        self._loader_count = 0
        self._said_not_saved = False
        self._loader: EpochLoader | None = None  # the one that gave the latest batch
        self._samples = 0  # given by it since the latest step, to all ranks
        self._share: StepShare | None = None  # this rank's share of the latest batch
        self._fraction = 1.0  # of that batch that is in the current micro-batch
        self._throughput = logging.Throughput()
        self._meter = mfu.Meter(device, self.world_size, lambda text: self.print(f"flk: {text}"))
        self._first_step_done = False
        self._page = progress.own_page()
        self._page.phase = Phase.TRAINING
        self._shares = Shares(self._page)
        rank_seed = rng.derive_seed("worker", seed, self.worker, 0) if self.worker else seed
        self._checkpoints = CheckpointManager(
            checkpoint,
            rank_seed,
            self.print,
            metadata=_metadata(strategy),
            timeout=timeouts.first,
            on_saved=self._note_saved,
            keep=keep,
        )
        CheckpointManager.of_run = self._checkpoints
        self.steps = self._checkpoints.steps  # optimizer steps so far, including those before a resume
        self._auto: AutoInterval | None = None
        if save_every == COMPUTED:
            nodes = max(1, self.world_size // self.local_world_size)
            self._auto = AutoInterval(self.steps, nodes, self.attempt)
        self._page.restored_from = SOURCES.index(self._checkpoints.source)
        self._page.restored = self.steps

    # Model and optimizer

    @overload
    def parallelize(
        self,
        model: nn.Module,
        optimizer: None = None,
        *,
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
        precision: Precision | None = None,
        blocks: Blocks | None = None,
        recompute: bool = False,
        compile: bool | str = False,
        shard_size: int | None = None,
        find_unused_parameters: bool = False,
    ) -> nn.Module | tuple[nn.Module, O]:
        """Apply the run's strategy to ``model``; return the module to call in its place, and ``optimizer``.

        Collective. Call the returned module, and neither its ``forward`` nor one of its children. Rank 0's parameters
        and buffers are sent to all ranks (except under strategy none). A model on the meta device is materialized block
        by block, with the values that ``reset_parameters`` of its modules sets. The optimizer is the same object, with
        the same groups. Both are saved in checkpoints, and restored if the run was resumed. After the call each rank
        draws different random numbers. Several models can be parallelized, each with its own optimizer.

        - ``precision``: dtypes of the computation and of the reduction; the optimizer works in the model's own.
        - ``blocks``: modules that are sharded, recomputed and compiled one by one: classes, their names, or a minimum
          number of parameters. Default: the modules of a repeated class in a ModuleList, ModuleDict or Sequential.
        - ``recompute``: drop the activations of blocks and compute them again in the backward pass.
        - ``compile``: compile each block with torch.compile; a string is the name of the backend.
        - ``shard_size``: number of ranks in a shard group of a hybrid strategy. Default: the ranks of one node.
        - ``find_unused_parameters``: ranks do not all use the same parameters in a forward pass.

        Raises SetupError, before any communication, if these do not fit each other or the model, and CheckpointError if
        the checkpoint is of another model.
        """
        number = len(self._models)
        name = _model_name(number)
        if any(model in (each.model, each.module) for each in self._models):
            raise SetupError("this model has already been parallelized: call parallelize once per model")
        if self._diloco and number:
            raise SetupError("strategy diloco trains one model: put all trained parameters into one module")
        options = ParallelOptions(precision, blocks, recompute, compile, shard_size, find_unused_parameters)
        if self.strategy != "none":
            self._compare_parallel(name, options)
        self._checkpoints.check_model(name, model)
        self._meter.prepare(model)
        parallel = parallelize(
            model,
            optimizer,
            self.strategy,
            options,
            device=self.device,
            world_size=self.world_size,
            local_world_size=self.local_world_size,
        )
        self._meter.watch(parallel.module, precision.param if precision else None)
        self._models.append(parallel)
        self._checkpoints.register(name, parallel.state)
        if optimizer is not None:
            self._checkpoints.register(
                f"optimizer-{number}" if number else "optimizer", OptimizerState(optimizer, {name: parallel.module})
            )
        if self._diloco:
            from flk_runtime.diloco.worker import OuterLoop

            self._outer = OuterLoop(
                parallel, find_blocks(parallel.model, blocks), self._diloco, self._member, self.steps
            )
            self.register("diloco", self._outer)
            self.steps = self._outer.begin(self.steps)
        self._checkpoints.start_rank_rng()
        return parallel.module if optimizer is None else (parallel.module, optimizer)

    def _compare_parallel(self, name: str, options: ParallelOptions) -> None:
        """Compare the options of `parallelize` across ranks; check that the ranks of a node can be a shard group."""
        per_node = STRATEGIES[self.strategy].replicates and options.shard_size is None
        nodes = {"ranks on this node (pass shard_size where nodes differ)": self.local_world_size} if per_node else {}
        compare_options(f"parallelize of {name}", vars(options) | nodes)
        in_order = self.rank // self.local_world_size == self._node_rank
        if per_node and not process_group.all_true(in_order)():
            raise SetupError(
                f"strategy {self.strategy} shards a model over the ranks of a node, and here neighbouring ranks are on "
                "different nodes: number ranks node by node (srun -m block, mpirun --map-by slot), or pass shard_size"
            )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which backward passes accumulate gradients without communication.

        Use it for all micro-batches of a step but the last, and divide each loss by the number of micro-batches. Under
        the sharding strategies each rank holds full gradients meanwhile.
        """
        with contextlib.ExitStack() as stack:
            for parallel in self._models:
                stack.enter_context(parallel.no_sync())
            yield

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
        return self._select(model, "clip_grad_norm").clip_grad_norm(max_norm, norm_type, error_if_nonfinite)

    def _select(self, model: nn.Module | None, method: str) -> ParallelModel:
        chosen = [each for each in self._models if model is None or model in (each.module, each.model)]
        if len(chosen) != 1:
            action = "select one with model=" if len(chosen) > 1 else "call parallelize before"
            raise SetupError(f"{method} works on one parallelized model, and there are {len(chosen)}: {action}")
        return chosen[0]

    def register(self, name: str, thing: Stateful) -> None:
        """Save ``thing``, such as a learning rate scheduler, in checkpoints under ``name``. Collective.

        Rank 0's state is saved or each rank's own: see `flk_runtime.per_rank`. It is restored now if the run was
        resumed from a checkpoint that has it. An optimizer that was made after `parallelize`, of parameters of what
        that returned, is saved as one that was passed to it. Raises SetupError if the name is taken, if the checkpoint
        has it and the first step has been made, or if an optimizer holds other parameters beside sharded ones;
        CheckpointError if its state does not fit.
        """
        saved: Stateful | OptimizerState = thing
        if isinstance(thing, Optimizer):
            models = {_model_name(number): model for number, model in enumerate(self._models)}
            saved = adopt_optimizer(name, thing, models, shards=STRATEGIES[self.strategy].shards)
        self._checkpoints.register(name, saved)

    # Data

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
        """A loader of this rank's batches of ``batch_size`` samples, on its device. Collective.

        Every step takes ``world_size * batch_size`` samples, and all ranks take the same number of steps. In an elastic
        job it takes ``full_world_size * batch_size``, also with fewer ranks, unless the job scales its batch: then a
        rank's batch is larger, and `micro_batches` splits it. No sample is dropped (unless ``drop_last``) or repeated.
        ``dataset`` is map-style or iterable; a map-style one is shuffled unless ``shuffle=False``, an iterable keeps
        its order, and ``split=False`` declares that it is already split over ranks and workers. The position is saved
        in checkpoints under ``name`` (default: by the order of calls); that of a loader that is made after the first
        step without a name, for an evaluation, is not. ``options`` are those of torch.utils.data.DataLoader:
        num_workers, collate_fn, pin_memory, …

        Raises SetupError if the dataset is too small or an option contradicts the loader, and CheckpointError if the
        checkpoint's position is of another dataset.
        """
        # An evaluation may make a loader anew each time, and a resumed run has made another number of them.
        saved = name is not None or not self._first_step_done
        name = name or ("loader" if self._loader_count == 0 else f"loader-{self._loader_count}")
        self._loader_count += 1
        context = LoaderContext(
            batch_size,
            self.rank,
            self.world_size,
            self.device,
            self.seed if seed is None else seed,
            name,
            steps_done=lambda: self.steps,
            on_begin=self._checkpoints.start_rank_rng,
            on_batch=self._count_samples,
            on_end=self._save_progress,
            full_world_size=self.full_world_size if self._keep_batch else self.world_size,
        )
        shared = {"batch_size": batch_size, "shuffle": shuffle, "split": split, "drop_last": drop_last}
        if self.workers > 1 and split:
            dataset = share_of_worker(dataset, self.worker, self.workers)
        length = length_of(dataset) if split else None
        compare_options(f"loader {name!r}", shared | {"seed": context.seed, "length of the dataset": length})
        loader = make_loader(dataset, context, shuffle=shuffle, split=split, drop_last=drop_last, **options)
        if saved:
            self.register(name, loader)
        elif not self._said_not_saved:
            self._said_not_saved = True
            self.print(
                f"flk: {name!r} was made after the first step without a name=, so its position is not saved, as is "
                "right for an evaluation"
            )
        return loader

    def join_batches(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield this rank's ``batches`` until one of the ranks has no more; then all ranks stop. Collective.

        For batches of the user's own that may differ in number; torch's Join handles the same case for gradients.
        Prints on rank 0 how many were left on which rank. A loader of `loader` needs none of this.
        """
        return join_batches(batches, lambda text: self.print(f"flk: {text}"))

    @property
    def accumulation(self) -> int:
        """Number of micro-batches into which `micro_batches` splits the latest batch; the same on all ranks."""
        return self._share.pieces if self._share else 1

    def micro_batches(self, batch: T) -> Iterator[T]:
        """Yield parts of a loader's latest ``batch`` with at most ``batch_size`` samples each, for an elastic job.

        Call `backward` with the mean loss of each part, and optimizer.step() after the last one. Gradients are
        accumulated, and communicated in the last part only. With all ranks there is one part: the batch. The batch is a
        pytree; tensors and lists with an entry for each sample are split. Collective: all ranks take as many parts.

        Raises SetupError if the batch must be split and nothing in it has an entry for each sample.
        """
        samples = self._share.given if self._share else 1
        for number, (part, fraction) in enumerate(split(batch, self.accumulation, samples), 1):
            self._fraction = fraction
            with contextlib.nullcontext() if number == self.accumulation else self.no_sync():
                yield part
        self._fraction = 1.0

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of ``loss``, the mean over this rank's latest batch or micro-batch.

        It is weighted so that the ranks' mean gradient is that of the mean over the global batch, also where ranks have
        different numbers of samples; ``loss.backward()`` weights all ranks alike.
        """
        weight = self._share.weight(self.world_size, self._fraction) if self._share else 1.0
        (loss if weight == 1.0 else loss * weight).backward()  # type: ignore[no-untyped-call]

    # Steps and checkpoints

    def step(self, loss: torch.Tensor | float | None = None, **values: Any) -> None:
        """Record one optimizer step (log, checkpoint). Call on all ranks after optimizer.step(). Collective.

        Every ``log_every`` steps a line of metrics is printed on rank 0, with the mean of ``loss`` over the ranks that
        give one, and rank 0's ``values``; tensors have one element and are read only then. Every ``save_every`` steps
        a checkpoint is written. At the first step CheckpointError is raised if the checkpoint that was resumed holds a
        model and none was parallelized, and SetupError after `close`; see also `save`.

        After a pod has received SIGTERM, all ranks save after the same step, and this raises SystemExit with code 143.
        """
        self._check_open("step")
        first = not self._first_step_done
        if first:
            self._checkpoints.finish_restoring()
            self._first_step_done = True
        self.steps += 1
        if self._outer:
            self.steps = self._outer.step(self.steps)
        self._page.record_step(self.steps)
        self._throughput.add(self._samples)
        self._samples = 0
        self._meter.step()
        if self._log_every and self.steps % self._log_every == 0:
            self._log_metrics(loss, values)
        if self._auto:
            self._save_when_due(self._auto)
        elif self._save_every and self.steps % self._save_every == 0:
            self.save()
        else:
            self._checkpoints.poll()
        if first:
            self._timeouts.shorten()
        if self._checkpoints.can_save and self._page.must_stop(self.steps):
            self._stop()

    def save(self, *, wait: bool = False) -> None:
        """Write a checkpoint now, if there is a place for it and a parallelized model. Collective.

        Training stops until the state is copied to memory; a thread writes it. With ``wait``, training stops until the
        checkpoint is complete; a run that ends with `abandon` needs it. A checkpoint that is still being written
        is awaited first. Raises CheckpointError on all ranks if one of them could not be written or a state cannot be
        saved, and SetupError after `close`.
        """
        self._check_open("save")
        if self._checkpoints.can_save:
            self._page.phase = Phase.SAVING
            with self._timeouts.long():  # a rank may wait for its last write for longer than a step
                self._checkpoints.save(self.steps)
                if wait:
                    self._checkpoints.wait()
            self._page.phase = Phase.TRAINING

    def load_weights(self, path: str | os.PathLike[str], *, model: nn.Module | None = None) -> None:
        """Load the weights at ``path`` into a parallelized model, and nothing else. Collective.

        ``path``: a safetensors file, a file of torch.save, a folder of Hugging Face's or of
        torch.distributed.checkpoint, or a place of flk's checkpoints. Each rank reads what it needs. ``model`` selects
        one of several. Call it before the first step of a run that was not resumed; under strategy diloco in all
        workers, with the same weights. Raises CheckpointError if a tensor is missing or has another shape, and
        SetupError if the choice of the model is ambiguous, or if steps are done under strategy diloco.
        """
        from flk_runtime.checkpoint.files import Weights
        from flk_runtime.checkpoint.load import SavedCheckpoint, SavedObject

        parallel = self._select(model, "load_weights")
        if self._outer and self.steps:
            raise SetupError(
                f"load_weights after step {self.steps} would undo what the workers of strategy diloco have learned: "
                "call it only while run.steps is 0"
            )
        parallel.state.read(SavedObject(cast("SavedCheckpoint", Weights(os.fspath(path))), "model", {}))
        if self._outer:
            self._outer.restart()

    def export(self, file: str | os.PathLike[str]) -> None:
        """Save now, and write the model in that checkpoint to one safetensors file on rank 0. Collective.

        Raises CheckpointError if there is no place for checkpoints, or the file cannot be written.
        """
        from flk_runtime.checkpoint.files import export_weights

        place = self._checkpoints.place
        if not (self._checkpoints.can_save and place):
            raise CheckpointError("export needs checkpoints and a parallelized model: pass checkpoint= to init")
        self._save_progress()
        self._complete_save()
        process_group.on_main(lambda: export_weights(place, file))

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

    # Output and communication

    def log(self, **values: Any) -> None:
        """Print a line of JSON on rank 0, with the number of steps."""
        self.print(logging.line({"step": self.steps, **values}))

    def print(self, *values: object) -> None:
        """Print a line on rank 0."""
        if self.is_main:
            # One write: print() writes the newline separately, and another rank's line may come in between.
            sys.stdout.write(" ".join(map(str, values)) + "\n")
            sys.stdout.flush()

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""
        dist.barrier()

    def mean(self, value: float, weight: float = 1.0) -> float:
        """The mean of all ranks' ``value``, weighted by ``weight``, such as a number of samples. Collective.

        The result is the same on all ranks, and NaN if all weights are 0.
        """
        return process_group.mean(value, weight)

    # End

    def close(self) -> None:
        """Save what is not saved yet and destroy the process group. A second call does nothing. Collective."""
        if not self.closed:
            self._save_progress()
            self._complete_save()
            if self._outer:
                self._outer.close(self.steps)
            # No rank leaves while another still communicates: destroying a group does not wait for its threads.
            dist.barrier()
            self._leave(at_once=False)

    def abandon(self) -> None:
        """Destroy the process group without saving and without waiting for other ranks, which may have died."""
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

    def _stop(self) -> NoReturn:
        """Save, and end this rank, because a pod of the job received SIGTERM. Collective."""
        self._save_progress()
        self._complete_save()
        self.print(f"flk: stopped after step {self.steps}, which is saved")
        raise SystemExit(int(ExitCode.PREEMPTED))

    def _check_open(self, method: str) -> None:
        if self.closed:
            raise SetupError(f"this run is closed: call {method}() before close(), or begin another run with init()")

    def _complete_save(self) -> None:
        """Wait until the latest checkpoint is complete."""
        self._page.phase = Phase.SAVING
        self._checkpoints.wait()
        self._page.phase = Phase.TRAINING

    def _save_when_due(self, auto: AutoInterval) -> None:
        """Save if the computed interval is over; rank 0 then computes the next one. Collective where it saves."""
        if self.steps < auto.next or not self._checkpoints.can_save:
            return
        begin = time.monotonic()
        auto.begin(self.steps)
        self.save()
        auto.copied(time.monotonic() - begin)
        interval, line = process_group.on_main(lambda: auto.choose(self.steps, self._page.step_seconds))
        auto.next = self.steps + interval
        if line:
            self.print(line)

    def _note_saved(self, step: int) -> None:
        self._page.saved = step
        if self._auto:
            self._auto.completed(step)

    def _leave(self, *, at_once: bool) -> None:
        self.closed = True
        if self._owns_group:
            process_group.leave(at_once=at_once)

    def _log_metrics(self, loss: torch.Tensor | float | None, values: dict[str, Any]) -> None:
        # All ranks take part, so that a rank without a loss does not make the others wait.
        mean = (
            process_group.mean(0.0, 0.0)
            if loss is None
            else process_group.mean(float(loss.detach() if isinstance(loss, torch.Tensor) else loss), 1.0)
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
        line |= self._shares.read()
        if self._outer:
            line |= self._outer.metrics
        self.print(logging.line({**line, **values}))

    def _count_samples(self, loader: EpochLoader, share: StepShare) -> None:
        self._share, self._fraction = share, 1.0
        if loader is not self._loader:  # samples of an evaluation do not count for the next step
            self._loader, self._samples = loader, 0
        self._samples += share.samples
        self._shares.add_wait(loader.waited)
        loader.waited = 0.0

    def _save_progress(self) -> None:
        if self._checkpoints.has_progress_since_save(self.steps):
            self.save()


def _model_name(number: int) -> str:
    """The name under which the model that was parallelized as this one, from 0 on, is saved."""
    return f"model-{number}" if number else "model"


def _metadata(strategy: str) -> dict[str, str]:
    """What writes the checkpoints of this run."""
    return {
        "job": os.environ.get(user_env.JOB, ""),
        "code": report.code_version(),
        "flk": VERSION,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "strategy": strategy,
    }
