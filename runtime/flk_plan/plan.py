"""Plan: a prediction for each strategy, of a captured script as it is."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from flk_plan.capture import CapturedModel
from flk_plan.communication import Cluster, shard_count
from flk_plan.hardware import (
    ATTENTION_EFFICIENCY,
    LAUNCH_SECONDS,
    LINK_EFFICIENCY,
    MATMUL_EFFICIENCY,
    MEMORY_EFFICIENCY,
    Gpu,
    type_of,
)
from flk_plan.predict import Prediction, Workload, predict
from flk_plan.state import optimizer_sizes, units_of
from flk_runtime.parallel import STRATEGIES
from flk_runtime.parallel.computation import has_own_forward
from flk_runtime.system import mfu

_PRECISION = "flk.Precision()"
_STRATEGIES = ("ddp", "shard_grad_op", "full_shard", "hybrid_shard", "hybrid_shard_zero2")


def make_plan(captured: CapturedModel, cluster: Cluster) -> dict[str, Any]:
    """The plan as plain data. Its rows are predictions that fit, fastest first, then the others by memory.

    Where a row leaves something out of the time, as ``modelled`` of it tells, all rows are sorted by memory.
    """
    rows = predictions(captured, cluster)
    left_out = list(unmodelled(captured))
    rows.sort(key=lambda row: (not row.fits, row.step_seconds if row.fits and not left_out else row.total))
    gpu, network = cluster.gpu, cluster.network
    half = torch.bfloat16 if gpu.multiplies(torch.bfloat16) else torch.float16
    peak = f"{gpu.peak(half) / 1e12:.0f} TFLOP/s in {'bf16' if half == torch.bfloat16 else 'fp16'}"
    savings = list(_savings(captured, gpu))
    assumptions = [
        f"matrix products reach {MATMUL_EFFICIENCY:.0%} of {peak}, attention {ATTENTION_EFFICIENCY:.0%}; other kernels "
        f"reach {MEMORY_EFFICIENCY:.0%} of {gpu.bandwidth / 1e12:.3g} TB/s",
        f"each GPU sends {gpu.link / 1e9:.0f} GB/s inside of a node, {network / 1e9:.4g} GB/s to other nodes, and "
        f"collectives reach {LINK_EFFICIENCY:.0%} of it",
        f"an operation takes at least {LAUNCH_SECONDS * 1e6:.3g} µs",
        f"{_micro_batches(captured.synced)}, no compilation, and data that is always ready",
    ]
    if _PRECISION in savings:
        assumptions.append(f"the script computes in float32: set precision={_PRECISION} and plan again to compare")
    return {
        **identity(captured, cluster),
        "parameters": sum(each.numel() for each in captured.model.parameters()),
        "world_size": cluster.world_size,
        "gpu": gpu.name,
        "memory": gpu.memory,
        "rows": [{**_as_dict(row), "modelled": not left_out} for row in rows],
        "savings": savings,
        "assumptions": assumptions,
        "warnings": left_out,
    }


def _savings(captured: CapturedModel, gpu: Gpu) -> Iterator[str]:
    """The options that save memory, which the script does not use and can use on these GPUs."""
    refused = any(map(has_own_forward, captured.blocks))  # by `recompute_activations`
    if captured.blocks and not captured.options.recompute and not refused:
        yield "recompute=True"
    if _dtype(captured) == torch.float32 and gpu.multiplies(torch.bfloat16):
        yield _PRECISION


def unmodelled(captured: CapturedModel) -> Iterator[str]:
    """The costs that the predicted times leave out, so that the times cannot be compared."""
    if found := sorted(captured.trace.uncounted):
        yield (
            f"torch has no formula for the FLOPs of {', '.join(found)}, so their computation takes no time here: "
            "register one with torch.utils.flop_counter.register_flop_formula"
        )
    if captured.options.compile:
        yield (
            "compile= is not modelled: the times are of kernels that are not compiled, and that the host launches one "
            "by one"
        )


def identity(captured: CapturedModel, cluster: Cluster) -> dict[str, Any]:
    """The key of results of `flk bench`: a hash of the model and its work in a step, and the hardware."""
    given = captured.options
    # The text of a function has its address. The time of a step does not depend on how values are initialized.
    options = replace(given, init=None, blocks=None)
    chosen = [name for name, each in captured.model.named_modules() if each in captured.blocks]
    facts = (captured.trace.model_flops, captured.synced, options, given.blocks is None, chosen)
    digest = hashlib.sha256(str(facts).encode())
    for name, each in captured.model.named_parameters():
        digest.update(f"{name} {tuple(each.shape)} {each.dtype} {each.requires_grad}\n".encode())
    return {"model": digest.hexdigest()[:16], "hardware": hardware_of(cluster)}


def hardware_of(cluster: Cluster) -> dict[str, Any]:
    """The hardware for which measurements hold."""
    return {"gpu": type_of(cluster.gpu), "nodes": cluster.nodes, "ranks": cluster.gpus, "fabric": cluster.fabric}


def strategies_of(captured: CapturedModel, cluster: Cluster) -> list[str]:
    """The strategies that the model and its options allow and that differ from each other on these nodes."""
    shards = shard_count("hybrid_shard", cluster, captured.options.shard_size)
    hybrid = 1 < shards < cluster.world_size and cluster.world_size % shards == 0
    return [
        name
        for name in _STRATEGIES
        if (hybrid or not STRATEGIES[name].replicates) and (captured.can_shard or not STRATEGIES[name].shards)
    ]


def predictions(captured: CapturedModel, cluster: Cluster) -> list[Prediction]:
    """A prediction for each strategy that the script can have, those that communicate least first."""
    precision = captured.options.precision
    optimizers = [optimizer_sizes(each, cluster.gpu) for each in captured.optimizers]
    states = {key: sizes for each in optimizers for key, sizes in each.states.items()}
    work = Workload(
        units_of(captured.model, captured.blocks, states, precision, ends=captured.options.blocks is None),
        captured.trace,
        _dtype(captured),
        precision.param.itemsize if precision else None,
        precision.reduce.itemsize if precision else None,
        optimizers,
        captured.synced,
    )
    names = strategies_of(captured, cluster)
    return [predict(name, work, cluster, shard_size=captured.options.shard_size) for name in names]


def _dtype(captured: CapturedModel) -> torch.dtype:
    """The dtype of the matrix products."""
    precision = captured.options.precision
    return captured.autocast or (precision.param if precision else mfu.dtype_of(captured.model) or torch.float32)


def _as_dict(row: Prediction) -> dict[str, Any]:
    state = row.state
    return {
        "strategy": row.strategy,
        "fits": row.fits,
        "total": row.total,
        "parameters": state.parameters,
        "gradients": state.gradients,
        "optimizer": state.optimizer,
        "activations": row.activations,
        "gathered": row.gathered,
        "buffers": row.buffers,
        "wire_inside": row.wire.inside,
        "wire_between": row.wire.between,
        "compute_seconds": row.compute_seconds,
        "exposed_seconds": row.exposed_seconds,
        "optimizer_seconds": row.optimizer_seconds,
        "step_seconds": row.step_seconds,
        "mfu": row.mfu,
        "largest_batch": row.largest_batch,
    }


def _micro_batches(synced: Sequence[bool]) -> str:
    if len(synced) == 1:
        return "one micro-batch per step"
    return f"{len(synced)} micro-batches per step, each like the first, of which {sum(synced)} send their gradients"
