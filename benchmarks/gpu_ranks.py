"""What the rank of gpu.py measures: python benchmarks/gpu_ranks.py {rates,train,saves} [--model gpt].

gpu.py starts it under flk's launcher. `train` is a script of flk's library as users write it, which flk plans too.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import flk_runtime as flk
import launch
import measure
from flk_runtime.system import mfu
from flk_runtime.training.run import Run
from gpu_models import MODELS, Block, Transformer, make, tokens_of

WARM_UP = 12  # steps that are not counted: they compile and allocate, and at the first line flk counts FLOPs
LOG_EVERY = 10  # flk's default, in steps
SEQUENCES = 512  # of the dataset of the rates
# Whether blocks are compiled, and the strategy.
CASES = tuple(itertools.product((False, True), ("ddp", "full_shard")))
SAVES = {"in every step": (1, 5), "every 10 steps": (10, 20)}  # steps between saves, and steps of a round


class ByHand(Transformer):
    """The same model as a class of its own, since flk adds a check to the calls of a class that it has sharded."""


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def in_bf16(device: torch.device, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The loss of a batch in autocast, as DDP trains in bf16."""
    with torch.autocast(device.type, torch.bfloat16):
        loss: torch.Tensor = model(batch)
    return loss


def finish(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(device: torch.device, action: Callable[[], object]) -> float:
    """Seconds of an action, which begins when the device has nothing to do."""
    finish(device)
    began = time.perf_counter()
    action()
    finish(device)
    return time.perf_counter() - began


def rate(device: torch.device, step: Callable[[], None], steps: int) -> float:
    """Steps per second."""

    def all_steps() -> None:
        for _ in range(steps):
            step()

    return steps / timed(device, all_steps)


def free() -> None:
    """Give the memory of models that nothing uses any more back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def describe(device: torch.device) -> dict[str, Any]:
    """The device, as `flk_plan` takes it."""
    if device.type == "cpu":
        return {"device": "cpu", "memory": 1 << 34, "backend": "gloo"}
    nccl: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    found = torch.cuda.get_device_properties(device)
    return {
        "device": found.name,
        "memory": found.total_memory,
        "backend": f"CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, nccl))}",
    }


# Steps per second, with flk and by hand


def step_with_flk(run: Run, name: str, *, compiled: bool) -> Callable[[], None]:
    """A training step with Run.parallelize, Run.loader and Run.step."""
    shards = run.strategy != "ddp"
    with run.device:
        model: nn.Module = make(name)
    precision = flk.Precision() if shards else None
    module, optimizer = run.parallelize(
        model, optimizer_of(model), blocks=[Block], precision=precision, compile=compiled
    )
    loss_of = module if shards else partial(in_bf16, run.device, module)
    batches = run.loader(tokens_of(name, SEQUENCES), batch_size=MODELS[name].batch).steps(1_000_000)

    def step() -> None:
        loss = loss_of(next(batches))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss=loss)

    return step


def step_by_hand(strategy: str, device: torch.device, name: str, *, compiled: bool) -> Callable[[], None]:
    """The same with DistributedDataParallel or fully_shard, DataLoader and a mean of the loss every LOG_EVERY steps."""
    with device:
        plain = ByHand(MODELS[name])
    for block in plain.blocks if compiled else ():
        block.compile()
    model: nn.Module = plain
    if strategy == "ddp":
        model = DistributedDataParallel(plain)
    else:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in plain.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(plain, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    optimizer = optimizer_of(model)
    loss_of = partial(in_bf16, device, model) if strategy == "ddp" else model
    batches = batches_by_hand(name, device)
    steps = itertools.count(1)

    def step() -> None:
        loss = loss_of(next(batches))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        number = next(steps)
        if number % LOG_EVERY == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            print(json.dumps({"step": number, "loss": mean.item() / dist.get_world_size()}), flush=True)

    return step


def batches_by_hand(name: str, device: torch.device) -> Iterator[torch.Tensor]:
    """Batches on the device, in another order in each epoch."""
    data: Any = tokens_of(name, SEQUENCES)
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(data)
    loader = DataLoader(data, MODELS[name].batch, sampler=sampler, pin_memory=device.type == "cuda")
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for batch in loader:
            yield batch.to(device, non_blocking=True)


def measure_rates(arguments: argparse.Namespace) -> None:
    """Write the rates of both sides of each case, and the model's FLOPs of a step."""
    name = arguments.model
    device = torch.device(arguments.device or "cuda")
    if device.type == "cuda":
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    with torch.device("meta"):
        batch = torch.zeros(MODELS[name].batch, MODELS[name].length + 1, dtype=torch.int64)
        flops = mfu.count(make(name), [((batch,), {})])
    for compiled, strategy in CASES:
        case = f"{strategy}{', compiled' if compiled else ''}"
        run = flk.init(strategy=strategy, device=device)
        try:
            rates = rates_of(run, arguments, compiled=compiled)
        except Exception as error:  # the compiler may lack what it needs on this machine
            if not compiled:
                raise
            rates = {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}
        launch.write_result({"case": case, "flops": flops, **rates, **describe(device)})
        run.abandon()  # the process group, which was opened by hand, stays
        torch.compiler.reset()
        free()


def rates_of(run: Run, arguments: argparse.Namespace, *, compiled: bool) -> dict[str, Any]:
    """The rates of both sides."""
    device, name = run.device, arguments.model
    sides = {
        "flk": step_with_flk(run, name, compiled=compiled),
        "by hand": step_by_hand(run.strategy, device, name, compiled=compiled),
    }
    for step in sides.values():
        rate(device, step, WARM_UP)
    return measure.alternate(
        {side: partial(rate, device, step, arguments.steps) for side, step in sides.items()},
        arguments.rounds,
        show="{:.2f} steps/s".format,
    )


# Memory and tokens per second, to compare with the plan


def parallelized(run: Run, name: str, *, recompute: bool) -> tuple[nn.Module, Any]:
    """A model in bf16 and its optimizer."""
    with torch.device("meta"):
        model: nn.Module = make(name)
    return run.parallelize(
        model,
        optimizer_of(model),
        blocks=[Block],
        precision=flk.Precision(),
        recompute=recompute,
        init="reset_parameters",
    )


def train(arguments: argparse.Namespace) -> None:
    """Train a model, and write its rates and the most memory that the allocator had. A plan ends in the first step."""
    name = arguments.model
    with flk.init(device=arguments.device, log_every=0) as run:
        module, optimizer = parallelized(run, name, recompute=arguments.recompute)
        batch, on_gpu = tokens_of(name).to(run.device), run.device.type == "cuda"

        def step() -> None:
            loss: torch.Tensor = module(batch)
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss=loss)

        rate(run.device, step, WARM_UP)
        rates = [rate(run.device, step, arguments.steps) for _ in range(arguments.rounds)]
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        peak = torch.cuda.max_memory_reserved() if on_gpu else own
        launch.write_result({"rates": rates, "peak": peak, **describe(run.device)})


# The stop of a save


def measure_saves(arguments: argparse.Namespace) -> None:
    """Write how long each way of saving stops the training, and the rates with and without saves."""
    name = arguments.model
    with flk.init(strategy="ddp", device=arguments.device, log_every=0, save_every=0) as run:
        with run.device:
            model_of_torch: nn.Module = make(name)
        model, optimizer = run.parallelize(model_of_torch, optimizer_of(model_of_torch))
        batch = tokens_of(name).to(run.device)

        def step() -> None:
            loss = in_bf16(run.device, model, batch)
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss=loss)

        step()
        free()
        tensors = [each.detach() for each in model_of_torch.parameters()]
        tensors += [value for state in optimizer.state.values() for value in state.values()]
        size = sum(each.numel() * each.element_size() for each in tensors)
        for _ in range(3):  # the first two make the files
            run.save(wait=True)
        if not run._saves.manager.keeps_in_memory:
            raise SystemExit(f"the launcher keeps no checkpoints of {size / 1e9:.1f} GB in memory: see the line above")
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            ways = Ways(run, model_of_torch, optimizer, tensors, Path(folder))
            cases, errors = ways.working()
            stops = measure.alternate(cases, arguments.rounds, warmup=1, show="{:.3f} s".format)
            ways.close()
        rates = rates_with_saves(run, step, ways, arguments.rounds) if arguments.rates else {}
        launch.write_result({"size": size, "stops": stops, "errors": errors, "rates": rates, **describe(run.device)})


def plain(state: Any) -> Any:
    """A state with plain dictionaries and lists: the stager of torch 2.11 knows no other classes of them."""
    if isinstance(state, Mapping):
        return {key: plain(value) for key, value in state.items()}
    return [plain(each) for each in state] if isinstance(state, (list, tuple)) else state


class Ways:
    """The ways to save the state of a model. Each function returns the seconds that training stops."""

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        tensors: list[torch.Tensor],
        folder: Path,
    ) -> None:
        self.run, self.model, self.optimizer, self.tensors, self.folder = run, model, optimizer, tensors, folder
        on_gpu = run.device.type == "cuda"
        self.group = dist.new_group(backend="gloo")
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=on_gpu,
                use_shared_memory=False,
                use_async_staging=False,  # the next step changes the state: training waits for the copy
                use_non_blocking_copy=on_gpu,
            )
        )
        largest = max(each.numel() * each.element_size() for each in tensors)
        self.buffer = torch.empty(largest, dtype=torch.uint8, pin_memory=on_gpu)

    def all(self) -> dict[str, Callable[[], float]]:
        return {
            "flk": self.with_flk,
            "torch.save": self.with_torch,
            "async_save": self.with_async_save,
            "copy": lambda: timed(self.run.device, self.copy),
        }

    def working(self) -> tuple[dict[str, Callable[[], float]], dict[str, str]]:
        """The ways that this version of torch has, each tried, and the errors of the others."""
        cases, errors = self.all(), {}
        for way in [way for way in cases if way != "flk"]:
            try:
                for _ in range(2):  # torch 2.11's stager fails when it is used again
                    cases[way]()
            except Exception as error:
                errors[way] = f"{type(error).__name__}: {error}".partition("\n")[0]
                del cases[way]
        return cases, errors

    def with_flk(self) -> float:
        seconds = timed(self.run.device, self.run.save)
        self.run._saves.manager.wait()  # so that no way is measured beside the end of another
        return seconds

    def with_torch(self) -> float:
        file = self.folder / "whole.pt"

        def save() -> None:
            torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)

        seconds = timed(self.run.device, save)
        file.unlink()
        return seconds

    def with_async_save(self) -> float:
        pending: list[Any] = []

        def save() -> None:
            model, optimizer = get_state_dict(self.model, self.optimizer)
            content = plain({"model": model, "optimizer": optimizer})
            place = self.folder / "async"
            pending.append(async_save(content, checkpoint_id=place, process_group=self.group, async_stager=self.stager))

        seconds = timed(self.run.device, save)
        pending.pop().result()
        shutil.rmtree(self.folder / "async")
        return seconds

    def copy(self) -> None:
        """Copy as many bytes to the host, into one buffer again and again: no way that copies can be faster."""
        for each in self.tensors:
            flat = each.view(-1).view(torch.uint8)
            self.buffer[: flat.numel()].copy_(flat, non_blocking=True)

    def close(self) -> None:
        self.stager.close()


def rates_with_saves(run: Run, step: Callable[[], None], ways: Ways, rounds: int) -> dict[str, list[float]]:
    """Steps per second with saves in memory, without, and with a plain copy of the state in every step."""

    def saving(every: int, steps: int) -> float:
        run.save()  # the saves that are measured wait for the one before them
        numbers = itertools.count(1)

        def step_and_save() -> None:
            step()
            if next(numbers) % every == 0:
                run.save()

        found = rate(run.device, step_and_save, steps)
        run._saves.manager.wait()
        return found

    def step_and_copy() -> None:
        step()
        ways.copy()
        finish(run.device)

    cases: dict[str, Callable[[], float]] = {what: partial(saving, *each) for what, each in SAVES.items()}
    cases["never"] = partial(rate, run.device, step, SAVES["every 10 steps"][1])
    cases["copy"] = partial(rate, run.device, step_and_copy, SAVES["in every step"][1])
    return measure.alternate(cases, rounds, warmup=1, show="{:.2f} steps/s".format)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("rates", "train", "saves"))
    parser.add_argument("--model", choices=MODELS, default="gpt")
    parser.add_argument("--device", help="default: the GPU")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10, help="steps of a round")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--rates", action="store_true", help="saves: measure rates with saves too")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="for the saves by hand")
    arguments = parser.parse_args()
    {"rates": measure_rates, "train": train, "saves": measure_saves}[arguments.what](arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
