"""Measure what a pod among many gets of the headers of shards when it restores from the memory of the pods.

    python benchmarks/memory_headers.py [--rounds 1] [--pods 125]

The eight ranks of one pod are simulated by threads, with the code of a restore and headers of all ranks, of 3,000
tensors: under DDP each rank has written a few of them, and under FSDP a piece of each, where the number of ranks has
changed. What other ranks send is made on the spot. The bytes that the pod receives are compared with those of
one rank that is alone in its pod, which gets each header but its own once. Goal: at most 1.05. The processor time of a
rank is printed.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from unittest import mock

import torch
import torch.distributed as dist

import measure
from flk_runtime.checkpoint import gather, pod_exchange
from flk_runtime.checkpoint.pod_exchange import PodExchange
from flk_runtime.distributed import process_group
from flk_runtime.shared.shard_file import Entry, ShardHeader

TENSORS, ROWS = 3_000, 8_000
PROCESSES = 8
DISTINCT = 16  # headers that are made; other ranks have equal ones


def header(rank: int, ranks: int, *, sharded: bool) -> ShardHeader:
    """The header of a rank's shard."""
    chosen = range(TENSORS) if sharded else range(rank * TENSORS // ranks, (rank + 1) * TENSORS // ranks)
    size = (ROWS // ranks, 64) if sharded else (ROWS, 64)
    entries = [
        Entry(
            f"model.layers.{n}.weight",
            ("model", f"layers.{n}.weight"),
            128 + n * 64,
            64,
            "float32",
            (ROWS, 64),
            at,
            size,
        )
        for n in chosen
        for at in [(rank * size[0] if sharded else 0, 0)]
    ]
    return ShardHeader(100, ranks, rank, tuple(entries), {})


class Pod:
    """One of ``pods`` pods. Its ranks are threads, and what ranks of other pods send is made on the spot."""

    def __init__(self, pods: int, processes: int, blobs: list[bytes]) -> None:
        """``blobs`` are what each rank of the job gives, again and again."""
        self._ranks, self._processes, self._blobs = pods * processes, processes, blobs
        self._here = threading.local()
        self._memory = bytearray(4 * processes * pod_exchange.PODS * pod_exchange.PIECE)
        self._barrier = threading.Barrier(processes)
        self._sent: dict[tuple[int, int], int] = {}  # bytes, by the rank that receives and the one that gives

    def restore(self) -> tuple[int, float]:
        """Have all ranks get all headers. Returns the bytes that came from other pods, and seconds of a rank's CPU."""
        self._sent.clear()
        with ExitStack() as stack:
            for target, name, value in (
                (process_group, "rank", lambda: self._here.rank),
                (process_group, "world_size", lambda: self._ranks),
                (process_group, "comm_device", lambda device: device),
                (dist, "all_gather", self._all_gather),
                (pod_exchange, "_transfer", self._transfer),
                (PodExchange, "_open", lambda *arguments: self._memory),
                (PodExchange, "_meet", lambda exchange: self._barrier.wait()),
            ):
                stack.enter_context(mock.patch.object(target, name, value))
            with ThreadPoolExecutor(self._processes) as pool:
                ended = list(pool.map(self._rank, range(self._processes)))
        return sum(received for received, _ in ended), max(seconds for _, seconds in ended)

    def _rank(self, rank: int) -> tuple[int, float]:
        self._here.rank = rank
        exchange = PodExchange(self._processes, None)
        begin = time.thread_time()
        headers = exchange.all_gather(pod_exchange.unpacked(self._blob(rank)))
        assert len(headers) == self._ranks
        return exchange.received, time.thread_time() - begin

    def _blob(self, rank: int) -> bytes:
        return self._blobs[rank % len(self._blobs)]

    def _all_gather(self, sizes: list[torch.Tensor], own: torch.Tensor) -> None:
        for rank, size in enumerate(sizes):
            size.fill_(len(self._blob(rank)))

    def _transfer(self, sends: object, receives: Iterable[tuple[int, torch.Tensor]]) -> None:
        for rank, memory in receives:
            key = self._here.rank, rank
            begin = self._sent.get(key, 0)
            self._sent[key] = begin + len(memory)
            memory.copy_(torch.frombuffer(bytearray(self._blob(rank)[begin : begin + len(memory)]), dtype=torch.uint8))


def main() -> int:
    parser = measure.parser(__doc__, rounds=1)
    parser.add_argument("--pods", type=int, default=125)
    arguments = parser.parse_args()
    report = measure.Report("memory_headers", arguments)
    ranks = arguments.pods * PROCESSES
    for name, sharded in (("ddp", False), ("full_shard, another number of ranks", True)):
        headers = [header(rank, ranks, sharded=sharded) for rank in range(DISTINCT)]
        unread = {str(each.rank): gather._Unread.of(each)._asdict() for each in headers}
        blobs = [pod_exchange.packed({rank: pod_exchange.packed(each)}) for rank, each in unread.items()]
        pods = {"pod": Pod(arguments.pods, PROCESSES, blobs), "rank": Pod(ranks, 1, blobs)}
        found = {key: [pod.restore() for _ in range(arguments.rounds)] for key, pod in pods.items()}
        megabytes = {key: values[0][0] / 1e6 for key, values in found.items()}  # the same in every round
        seconds = max(each for _, each in found["pod"])
        print(f"{name}: a rank of the pod uses {seconds:.2f} s of processor time")
        what = f"headers for a pod of {PROCESSES} ranks, {ranks} ranks, {name} / for a rank alone in its pod"
        report.compute(what, megabytes["pod"], megabytes["rank"], measure.at_most(1.05), "MB")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
