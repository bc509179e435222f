"""Predict: memory, bytes on the wire, time of a step and MFU of each strategy, from the trace of one step.

Sources: ZeRO (Rajbhandari et al., arXiv 1910.02054), FSDP (Zhao et al., arXiv 2304.11277), and the counts of bytes of
ring collectives (nccl-tests, doc/PERFORMANCE.md).
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flk_plan.communication import Cluster, Collective, CollectiveKind, When, collectives, shard_count
from flk_plan.hardware import (
    FRAGMENTATION,
    LAUNCH_SECONDS,
    MEMORY_EFFICIENCY,
    RESERVED,
)
from flk_plan.state import OptimizerSizes, StateBytes, Unit, model_state
from flk_plan.trace import LOSS, OUTSIDE, Segment, StepTrace
from flk_runtime.parallel.strategies import STRATEGIES


@dataclass(frozen=True)
class Wire:
    """Bytes that one rank sends in one step."""

    inside: float  # to ranks of its own node
    between: float  # to other nodes


@dataclass(frozen=True)
class Prediction:
    """Memory and time that one strategy needs. Bytes are rank 0's, which has the largest shards."""

    strategy: str
    state: StateBytes
    activations: int
    gathered: int  # full parameters and gradients of the blocks that are in use
    buffers: int  # of collectives
    live: int  # most bytes that tensors take at one time
    total: int  # that the allocator has to get for them
    fits: bool
    wire: Wire
    compute_seconds: float
    exposed_seconds: float  # by which communication, and copies to and from its buffers, make the step longer
    optimizer_seconds: float
    mfu: float | None  # None: the device has no published peak, or there are FLOPs that torch cannot count
    largest_batch: float  # the micro-batch that fits, as a multiple of the script's

    @property
    def step_seconds(self) -> float:
        """Duration of a step."""
        return self.compute_seconds + self.exposed_seconds + self.optimizer_seconds


@dataclass(frozen=True)
class Workload:
    """A traced micro-batch of a step, and the dtypes in which parameters are used and gradients are summed."""

    units: Sequence[Unit]
    trace: StepTrace
    dtype: torch.dtype  # of most matrix products
    parameter_size: int | None = None  # bytes of an element of a gathered parameter; None: as it is kept
    reduce_size: int | None = None  # bytes of an element of a gradient that is summed; None: as the parameter is kept
    optimizers: Sequence[OptimizerSizes] = ()
    synced: Sequence[bool] = (True,)  # for each micro-batch of a step: its gradients are communicated


def predict(strategy: str, work: Workload, cluster: Cluster, *, shard_size: int | None = None) -> Prediction:
    """Predict one strategy. ``shard_size``: ranks in a shard group of a hybrid strategy; default: a node's ranks."""
    kind = STRATEGIES[strategy]
    shards = shard_count(strategy, cluster, shard_size)
    state = model_state(work.units, shards)
    buckets = state.gradients if strategy == "ddp" and cluster.world_size > 1 else 0  # flk wraps nothing for one rank
    memory = _Memory(work, shards, reshards=kind.reshards, sharded=kind.shards, buckets=buckets)
    held = state.parameters + state.optimizer
    needed = memory.pools if cluster.gpu.overlaps else memory.peak  # a CPU has neither streams nor pools
    total = int((held + needed) / (1 - FRAGMENTATION))
    usable = cluster.gpu.memory - RESERVED
    sent = list(collectives(strategy, work.units, cluster.world_size, shards, work.parameter_size, work.reduce_size))
    inside = between = exposed = 0.0
    for number, synced in enumerate(work.synced):
        gathers = kind.reshards or number == 0 or work.synced[number - 1]  # else the parameters are still there
        wire, longer = _communication(
            [each for each in sent if (synced if each.when is When.OPTIMIZER else gathers)], work, cluster
        )
        inside, between, exposed = inside + wire.inside, between + wire.between, exposed + longer
    # The optimizer reads gradients, the parameters that have some, and its state, and writes these parameters and its
    # state. A gradient is as large as its parameter.
    update = 3 * state.gradients + 2 * state.optimizer
    update_seconds = update / (cluster.gpu.bandwidth * MEMORY_EFFICIENCY)
    compute = work.trace.seconds * len(work.synced)
    step = compute + exposed + update_seconds
    activations = work.trace.peak
    free = usable - (total - activations / (1 - FRAGMENTATION))
    mfu = None
    if not (cluster.gpu.flops or work.trace.uncounted) and cluster.gpu.multiplies(work.dtype):
        mfu = work.trace.model_flops * len(work.synced) / step / cluster.gpu.peak(work.dtype)
    return Prediction(
        strategy=strategy,
        state=state,
        activations=activations,
        gathered=memory.gathered,
        buffers=memory.buffers,
        live=held + memory.peak,
        total=total,
        fits=total <= usable,
        wire=Wire(inside, between),
        compute_seconds=compute,
        exposed_seconds=exposed,
        optimizer_seconds=update_seconds,
        mfu=mfu,
        largest_batch=max(0.0, free * (1 - FRAGMENTATION) / activations),
    )


class _Memory:
    """The most bytes over a step beside parameters and optimizer state, and the parts that they consist of.

    A segment of the step needs its activations, the full parameters that are in use, the buffers of collectives and the
    gradients that are ready. ``peak`` is the most that is live at one time.

    CUDA's caching allocator keeps a pool of memory for each stream, and a pool does not shrink, so a GPU needs the sum
    of the pools' peaks, ``pools``. FSDP gathers parameters in one stream and sums gradients, which stay there, in
    another one (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py). It copies what it has gathered out into the
    stream of the computation, and holds the output of one all-gather until the next one is copied.

    DDP has ``buckets``, into which it copies gradients, at all times (Reducer in torch/csrc/distributed/c10d).
    """

    def __init__(self, work: Workload, shards: int, *, reshards: bool, sharded: bool, buckets: int) -> None:
        self.peak = self.gathered = self.buffers = 0
        self._reshards = reshards
        self._full, self._reduced, own = (
            collections.Counter[int](),
            collections.Counter[int](),
            collections.Counter[int](),
        )
        self._ends = 0  # full parameters of units that are neither blocks nor kept, as an embedding
        for unit in work.units:
            if unit.block == OUTSIDE and not unit.is_kept:
                self._ends += unit.full_bytes(work.parameter_size)
            self._full[unit.block] += unit.full_bytes(work.parameter_size)
            self._reduced[unit.block] += unit.full_bytes(work.reduce_size, trained_only=True)
            own[unit.block] += sum(each.local_numel(shards) * each.size for each in unit.parameters if each.trained)
        self._order = [
            each.block for each in work.trace.segments if not each.backward and each.block >= 0 and each.block in own
        ]
        self._place = {block: place for place, block in enumerate(self._order)}
        self._held = list(itertools.accumulate((self._full[block] for block in self._order), initial=0))
        all_gradients = sum(own.values())
        gradients = 0  # of the blocks whose backward pass is over
        kept = 0  # gradients of earlier micro-batches
        if len(work.synced) > 1 and sharded:
            trained = sum(each.full_bytes(work.reduce_size, trained_only=True) for each in work.units)
            kept, gradients = (0, all_gradients) if all(work.synced) else (trained, 0)
        elif len(work.synced) > 1:
            gradients = all_gradients
        compute = 0  # peak of the pool of the stream that computes
        for segment in work.trace.segments:
            gathered = output = summed = 0
            if sharded:
                gathered = self._in_use(segment)
                output, summed = self._in_flight(segment)
            self.gathered, self.buffers = max(self.gathered, gathered), max(self.buffers, output + summed)
            self.peak = max(self.peak, segment.peak + gathered + output + summed + gradients + kept + buckets)
            compute = max(compute, segment.peak + gathered + summed + kept)
            if segment.backward and len(work.synced) == 1:
                gradients += own.get(segment.block, 0)
        # Beside the gradients, the step of the optimizer has temporary tensors, in the stream that computes.
        local = [
            each.local_numel(shards) * each.size for unit in work.units for each in unit.parameters if each.trained
        ]
        temporary = max(
            (int(each.of_all * sum(local) + each.of_largest * max(local, default=0)) for each in work.optimizers),
            default=0,
        )
        self.peak = max(self.peak, all_gradients + buckets + temporary)
        compute = max(compute, temporary)
        self.pools = self.peak
        if sharded:
            self.pools = compute + self._outputs() + all_gradients

    def _in_use(self, segment: Segment) -> int:
        """Bytes of full parameters: the segment's block, the next block, and the parameters in no block."""
        place = self._place.get(segment.block)
        root = self._full.get(OUTSIDE, 0) - (self._ends if self._reshards and place is not None else 0)
        last = len(self._order) - 1
        if not self._reshards:  # all from the forward pass until their own backward pass
            if segment.backward:
                return root + self._held[last + 1 if place is None else place + 1]
            return root + self._held[last + 1 if place is None else min(place + 2, last + 1)]
        if place is None:
            return root + (self._full[self._order[-1]] if self._order and segment.block == LOSS else 0)
        following = place - 1 if segment.backward else place + 1
        prefetched = self._full[self._order[following]] if 0 <= following <= last else 0
        return root + self._full[segment.block] + prefetched

    def _in_flight(self, segment: Segment) -> tuple[int, int]:
        """Bytes of an all-gather's output, and of full gradients that are the input of a reduce-scatter."""
        if segment.block not in self._place:
            return 0, 0
        return self._full[segment.block], self._reduced[segment.block] if segment.backward else 0

    def _outputs(self) -> int:
        """Most bytes of the outputs of two all-gathers that follow each other."""
        gathered = [self._full[block] for block in (OUTSIDE, *self._order) if block in self._full]
        return max((first + second for first, second in itertools.pairwise([0, *gathered])), default=0)


def _communication(sent: Sequence[Collective], work: Workload, cluster: Cluster) -> tuple[Wire, float]:
    """Bytes that a rank sends for one micro-batch, and the seconds by which communication makes it longer.

    Collectives run one after the other, beside the computation. A block's parameters are gathered while the block
    before it computes, so no computation overlaps with the first all-gather, of the root unit where there is one.
    Gradients are sent while the next blocks of the backward pass compute, so no computation overlaps with the last
    ones: of the root unit, or of DDP's last bucket.
    """
    inside = sum(each.sent for each in sent if cluster.is_inside(each.ranks, each.stride))
    wire = Wire(inside, sum(each.sent for each in sent) - inside)
    if not sent:
        return wire, 0.0
    copied = sum(_copy_seconds(each, cluster) for each in sent)
    if not cluster.gpu.overlaps:
        return wire, copied + sum(each.seconds(cluster) for each in sent)
    forward = sum(each.seconds for each in work.trace.segments if not each.backward)
    backward = sum(each.seconds for each in work.trace.segments if each.backward)
    seconds = {when: [each.seconds(cluster) for each in sent if each.when == when] for when in When}
    first = sum(each.seconds(cluster) for each in _first(sent, When.FORWARD))
    last = sum(each.seconds(cluster) for each in _first(sent, When.OPTIMIZER))
    behind_forward = sum(seconds[When.FORWARD]) - first
    behind_backward = sum(seconds[When.BACKWARD]) + sum(seconds[When.OPTIMIZER]) - last
    exposed = first + max(0.0, behind_forward - forward) + last + max(0.0, behind_backward - backward)
    return wire, copied + exposed


def _first(sent: Sequence[Collective], when: When) -> list[Collective]:
    """The collectives of the units whose parameters are used first, and so updated last: the root and an embedding."""
    found = [each for each in sent if each.when is when]
    return [each for each in found if each is found[0] or (each.unit is not None and _is_first(each.unit, found[0]))]


def _is_first(unit: Unit, first: Collective) -> bool:
    return unit is first.unit or (unit.block == OUTSIDE and not unit.is_kept)


def _copy_seconds(each: Collective, cluster: Cluster) -> float:
    """Time in which FSDP splits gathered data into parameters, or copies gradients into a buffer.

    It reads and writes all bytes, and the host launches an operation for each parameter. Source:
    torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py (copy-out of the all-gather, copy-in of the
    reduce-scatter). DDP's copies of gradients into its buckets and back are not counted.
    """
    if each.unit is None or each.kind is CollectiveKind.ALL_REDUCE:
        return 0.0
    return LAUNCH_SECONDS * len(each.unit.parameters) + 2 * each.full_bytes / (
        cluster.gpu.bandwidth * MEMORY_EFFICIENCY
    )
