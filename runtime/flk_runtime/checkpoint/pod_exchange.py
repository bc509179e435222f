"""PodExchange: ranks give bytes to other pods, where what several ranks of a pod need arrives once.

What a rank gives to a pod is received by the rank with the same place in that pod, which writes it to memory that all
ranks of the pod share. This memory is small, so the bytes travel in pieces: in each turn a rank receives at most one
piece of the ranks in a few other pods. A receiver writes to one half of the memory while the others read the other one.
"""

from __future__ import annotations

import io
import json
import mmap
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

import torch
import torch.distributed as dist

from flk_runtime.distributed import process_group
from flk_runtime.errors import checkpoint_error
from flk_runtime.shared.memory_messages import EXCHANGE, EXCHANGE_BYTES
from flk_runtime.shared.progress import heartbeat
from flk_runtime.system import host

PODS: Final = 2  # that a rank receives from in a turn
PIECE = EXCHANGE_BYTES // (2 * PODS)  # bytes that a rank receives of another one in a turn
_CPU: Final = torch.device("cpu")

T = TypeVar("T")
Sizes = Mapping[int, Sequence[int]]  # bytes of each piece, by rank or pod
Use = Callable[[int, int, torch.Tensor], None]  # a rank or a pod, the number of the piece, and its memory


class PodExchange:
    """Exchange of bytes between pods of ``processes`` ranks each. All methods are collective but those that say so."""

    def __init__(self, processes: int, folder: Path | None) -> None:
        """``folder`` is in memory that the ranks of this pod share; None: each rank is a pod. Raises StorageError."""
        self.received = 0
        """Bytes that this rank has received from other pods."""
        self.device = _CPU
        """The device on which bytes travel, if the ranks have more than one."""
        self._rank, ranks = process_group.rank(), process_group.world_size()
        self._processes, self._pods = processes, ranks // processes
        self._pod, self._place = divmod(self._rank, processes)
        self._near = range(self._pod * processes, (self._pod + 1) * processes)
        self._half = processes * PODS * PIECE
        self._turns = 0
        self._memory: mmap.mmap | None = None if ranks == 1 else self._open(folder)

    def is_near(self, rank: int) -> bool:
        """Whether a rank is in this pod. Not collective."""
        return rank in self._near

    def pod_of(self, rank: int) -> int:
        """The pod of a rank, counted from 0. Not collective."""
        return rank // self._processes

    def receives(self, rank: int) -> bool:
        """Whether this rank receives for its pod what ``rank`` gives to it. Not collective."""
        return rank != self._rank and rank % self._processes == self._place

    def all_gather(self, values: Mapping[str, bytes]) -> list[Mapping[str, bytes]]:
        """The values of all ranks, by their names, in the order of ranks. They travel once to each pod."""
        if self._memory is None:
            return [values]
        data = packed(values)
        sizes = [
            torch.zeros(1, dtype=torch.int64, device=self._group_device) for _ in range(self._pods * len(self._near))
        ]
        dist.all_gather(sizes, torch.tensor([len(data)], device=self._group_device))
        found = [bytearray(int(size)) for size in sizes]
        wanted = {rank: _cut(len(each)) for rank, each in enumerate(found)}
        given = dict.fromkeys(range(self._pods), _cut(len(data)))

        def fill(pod: int, number: int, memory: torch.Tensor) -> None:
            memory.copy_(_view(data[number * PIECE : number * PIECE + len(memory)]))

        def take(rank: int, number: int, memory: torch.Tensor) -> None:
            begin = number * PIECE
            found[rank][begin : begin + len(memory)] = memory.numpy().tobytes()

        self.exchange(wanted, given, fill, take)
        return [*map(unpacked, found)]

    def share_in_pod(self, value: T) -> list[T]:
        """The values of the ranks of this pod in the order of ranks; as JSON. Collective in the pod."""
        found = self.swap({rank: value for rank in self._near if rank != self._rank})
        return [value if rank == self._rank else found[rank] for rank in self._near]

    def swap(self, values: Mapping[int, T]) -> dict[int, T]:
        """Give each of these ranks a value, and return what they give this one. They call it too; as JSON."""
        ranks, device = list(values), self._group_device
        given = [_view(zlib.compress(json.dumps(value).encode(), 1)).to(device) for value in values.values()]
        sizes = [torch.tensor([len(each)], device=device) for each in given]
        lengths = [torch.zeros_like(each) for each in sizes]
        _transfer(zip(ranks, sizes, strict=True), zip(ranks, lengths, strict=True))
        data = [torch.empty(int(length), dtype=torch.uint8, device=device) for length in lengths]
        _transfer(zip(ranks, given, strict=True), zip(ranks, data, strict=True))
        texts = [zlib.decompress(each.cpu().numpy().tobytes()) for each in data]
        return {rank: json.loads(text) for rank, text in zip(ranks, texts, strict=True)}

    def exchange(self, wanted: Sizes, given: Sizes, fill: Use, take: Use) -> None:
        """Move pieces of at most PIECE bytes.

        ``wanted`` are what this pod gets from each rank, the same in all ranks of the pod. ``given`` is what this rank
        gives to each pod, its own among them: ``fill(pod, number, memory)`` writes a piece. ``take(rank, number,
        memory)`` is called in all ranks of the pod with a piece that has arrived.
        """
        arriving: dict[tuple[int, int], list[int]] = {}  # ranks, by the turn in which their piece arrives
        leaving: dict[tuple[int, int], list[int]] = {}  # pods
        for rank, sizes in wanted.items():
            for number in range(len(sizes)):
                arriving.setdefault((self._distance(rank // self._processes) // PODS, number), []).append(rank)
        for pod, sizes in given.items():
            for number in range(len(sizes)):
                leaving.setdefault(((self._pod - pod) % self._pods // PODS, number), []).append(pod)
        for turn in sorted({*arriving, *leaving}):
            number = turn[1]
            views = {rank: self._view(rank, wanted[rank][number]) for rank in arriving.get(turn, ())}
            sends = []
            for pod in leaving.get(turn, ()):
                if pod == self._pod:
                    fill(pod, number, views[self._rank])
                    continue
                packed = torch.empty(given[pod][number], dtype=torch.uint8)
                fill(pod, number, packed)
                sends.append((pod * self._processes + self._place, packed.to(self.device)))
            mine = {rank: view for rank, view in views.items() if self.receives(rank)}
            data = {rank: view.to(self.device) for rank, view in mine.items()}  # the views themselves, if on the CPU
            _transfer(sends, data.items())
            for rank, view in mine.items():
                self.received += len(view)
                view.copy_(data[rank])
            if views:
                self._meet()
                for rank, view in views.items():
                    take(rank, number, view)
                self._turns += 1
            heartbeat()

    @property
    def _group_device(self) -> torch.device:
        return process_group.comm_device(_CPU)

    def _distance(self, pod: int) -> int:
        """How many pods a pod comes after this one, in a circle."""
        return (pod - self._pod) % self._pods

    def _view(self, rank: int, size: int) -> torch.Tensor:
        """The shared memory for a piece of ``rank`` in this turn."""
        assert self._memory is not None  # noqa: S101
        pod, place = divmod(rank, self._processes)
        slot = place * PODS + self._distance(pod) % PODS
        begin = self._turns % 2 * self._half + slot * PIECE
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=size, offset=begin)

    def _meet(self) -> None:
        """Wait until all ranks of the pod are here."""
        others = [rank for rank in self._near if rank != self._rank]
        token = torch.zeros(1, dtype=torch.uint8, device=self._group_device)
        _transfer([(rank, token) for rank in others], [(rank, token.clone()) for rank in others])

    def _open(self, folder: Path | None) -> mmap.mmap:
        size = 2 * self._half
        if folder is None or self._processes == 1:
            return mmap.mmap(-1, size)
        path = folder / EXCHANGE
        try:
            if self._rank == self._near[0]:  # the file stays, and the launcher may have reserved it
                path.touch(mode=0o600)
                with open(path, "r+b") as file:
                    host.allocate(file.fileno(), size)
            self._meet()
            with open(path, "r+b") as file:
                memory = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise checkpoint_error(f"no memory to restore: {path}: {error.strerror}", error) from error
        return memory


def packed(values: Mapping[str, bytes]) -> bytes:
    """Values with their names as one value."""
    sizes = json.dumps({name: len(value) for name, value in values.items()})
    return b"\n".join([sizes.encode(), b"".join(values.values())])


def unpacked(data: bytes | bytearray) -> dict[str, bytes]:
    """The values that `packed` has put together. Raises ValueError if it has not."""
    sizes, _, rest = data.partition(b"\n")
    stream = io.BytesIO(rest)
    return {name: stream.read(size) for name, size in json.loads(sizes).items()}


def _transfer(sends: Iterable[tuple[int, torch.Tensor]], receives: Iterable[tuple[int, torch.Tensor]]) -> None:
    """Send tensors to ranks and receive tensors of ranks, all at the same time."""
    operations = [dist.P2POp(dist.irecv, tensor, rank) for rank, tensor in receives]
    operations += [dist.P2POp(dist.isend, tensor, rank) for rank, tensor in sends]
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def _view(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _cut(size: int) -> list[int]:
    """The sizes of the pieces of so many bytes."""
    return [min(PIECE, size - begin) for begin in range(0, size, PIECE)]
