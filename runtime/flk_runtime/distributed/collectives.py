"""all_reduce(): the reduction of the tensors and numbers in nested containers, in few messages.

Tensors are changed in place and returned as the same objects; numbers are returned as new ones, in new containers. Any
other leaf, such as a string, is returned unchanged. Tensors of one device and dtype are sent in buckets. Before that,
the ranks compare what they are about to send with one all-reduce of 16 bytes. If structures, shapes, dtypes, devices or
arguments differ, every rank raises a SetupError that names the first difference. In a world of one nothing is sent or
copied, and the given tree is returned.

It follows `allreduce!` of Lux.jl's DistributedUtils, and Horovod's allreduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from flk_runtime.distributed.consistency import check_consistent
from flk_runtime.distributed.process_group import comm_device
from flk_runtime.errors import SetupError
from flk_runtime.system.pytree import leaves, map_leaves, walk

T = TypeVar("T")

BUCKET_BYTES = 25 << 20  # the default of DistributedDataParallel (bucket_cap_mb)
_OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# Dtypes that backends do not reduce, and the dtype they are sent as. Sums wrap around as torch's own do.
_SENT_AS = {torch.bool: torch.uint8, torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
_REDUCIBLE = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int32, torch.int64),
    *_SENT_AS,
}
_NUMBERS = {bool: torch.int64, int: torch.int64, float: torch.float64}


def all_reduce(tree: T, op: str = "sum") -> T:
    """Return the reduction of all ranks' leaves, on every rank. Collective.

    ``op`` is "sum", "mean", "max" or "min". "mean" takes floating point and complex tensors, and any number, for which
    it returns a float; tensors are divided before the sum, as gradients are, so float16 does not overflow. For bool
    tensors, sum and max are "or", min is "and"; Python bools are added up as integers. Complex tensors have sums and
    means only.

    Raises SetupError, on every rank, for an unknown ``op``, and where the ranks' trees differ or a leaf cannot be
    reduced, such as an array of NumPy.
    """
    if not begin("all_reduce", op=op):
        return tree
    check(f"all_reduce({op})", tree, lambda value: _described(value, op))
    numbers = iter(_reduced_numbers([leaf for leaf in leaves(tree) if is_number(leaf)], op))
    tensors = {id(leaf): leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor)}  # a tied one once
    for bucket in split(tensors.values()):
        _reduce_bucket(bucket, op)
    return map_leaves(tree, lambda leaf: next(numbers) if is_number(leaf) else leaf)


def check(call: str, tree: object, described: Callable[[Any], tuple[str, str]]) -> None:
    """Raise SetupError on all ranks if ``tree`` differs between them, or a leaf cannot be sent. Collective.

    ``described`` says what a leaf is, and why it cannot be sent, which is empty if it can.
    """
    lines: list[tuple[str, str]] = []
    problems: list[str] = []
    paths: dict[int, str] = {}  # of tensors
    for node in walk(tree):
        kind, problem = (node.container, "") if node.container else described(node.value)
        if problem:
            kind = f"{kind}, {problem}"  # compared too, so that a rank with a problem of its own does not raise alone
            problems.append(f"{node.path} is {kind}")
        if isinstance(node.value, torch.Tensor):
            first = paths.setdefault(id(node.value), node.path)
            kind = kind if first == node.path else f"the same as {first}"
        lines.append((node.path, kind))
    check_consistent(call, lines)
    if problems:
        raise SetupError(f"{call}: {problems[0]}")


def is_number(value: object) -> bool:
    """Whether a leaf is a number of Python, and no member of an enumeration."""
    return type(value) in _NUMBERS


def describe(tensor: torch.Tensor) -> str:
    """Dtype, shape and device type of a tensor, which must be the same on all ranks."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} on {tensor.device.type}"


def unsendable(tensor: torch.Tensor) -> str:
    """Why the elements of a tensor cannot be sent; an empty string if they can."""
    if hasattr(tensor, "device_mesh"):
        return "a DTensor: each rank holds another shard of it, and its wrapper keeps the shards consistent"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return "sparse or quantized: convert it before"
    return ""


def begin(call: str, *, op: str = "sum", root: int | None = None) -> bool:
    """Check the arguments of a collective, and return whether there is more than one rank. Raises SetupError."""
    if not dist.is_initialized():
        raise SetupError(f"{call} needs the process group: call flk_runtime.init() before")
    if op not in _OPS:
        raise SetupError(f"{call}: unknown op={op!r}: expected one of {', '.join(_OPS)}")
    world_size = dist.get_world_size()
    if root is not None and (not isinstance(root, int) or not 0 <= root < world_size):
        raise SetupError(f"{call}: root={root!r}: expected a rank from 0 to {world_size - 1}")
    return world_size > 1


def split(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group ``tensors`` by device and dtype, in their order, into buckets of at most BUCKET_BYTES.

    A larger tensor has a bucket of its own.
    """
    done: list[list[torch.Tensor]] = []
    current: dict[tuple[torch.device, torch.dtype], tuple[list[torch.Tensor], int]] = {}
    for tensor in tensors:
        key = tensor.device, tensor.dtype
        bucket, size = current.get(key, ([], 0))
        added = tensor.numel() * tensor.element_size()
        if bucket and size + added > BUCKET_BYTES:
            bucket, size = [], 0
        if not bucket:
            done.append(bucket)
        bucket.append(tensor)
        current[key] = bucket, size + added
    return done


def pack(bucket: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elements of all tensors of a bucket as one flat tensor of their dtype, of shape (sum of numel,).

    A single contiguous tensor is not copied: the result is a view of it.
    """
    if len(bucket) == 1 and bucket[0].is_contiguous() and not bucket[0].is_conj() and not bucket[0].is_neg():
        return bucket[0].detach().view(-1)
    return torch.cat([tensor.detach().resolve_conj().resolve_neg().reshape(-1) for tensor in bucket])


@torch.no_grad()
def unpack(flat: torch.Tensor, bucket: Sequence[torch.Tensor]) -> None:
    """Copy the elements of ``flat``, as `pack` made it, into the tensors of the bucket."""
    if len(bucket) == 1 and flat.data_ptr() == bucket[0].data_ptr() and flat.dtype == bucket[0].dtype:
        return  # a view of the tensor
    for tensor, part in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
        part = part.view(tensor.shape)
        for dimension, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.numel():  # expanded: torch copies nothing to elements that share their memory
                tensor, part = tensor.narrow(dimension, 0, 1), part.narrow(dimension, 0, 1)
        tensor.copy_(part)


def _described(value: object, op: str) -> tuple[str, str]:
    """A leaf in words, and why it cannot be reduced; the reason is empty if it can be, or stays as it is."""
    if isinstance(value, torch.Tensor):
        return describe(value), unsendable(value) or _irreducible(value.dtype, op)
    if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
        return f"a {type(value).__name__}", "use synchronize() for it"
    if not is_number(value):
        return described_value(value)
    kind = f"a number ({type(value).__name__})"
    is_too_long = isinstance(value, int) and not -(1 << 63) <= value < 1 << 63
    return kind, "more than 64 bits: make it a float" if is_too_long else ""


def described_value(value: object) -> tuple[str, str]:
    """The description that `check` takes of a leaf that is neither a tensor nor a number: it is not sent."""
    if isinstance(value, complex) or hasattr(value, "__array__"):
        return f"a {type(value).__name__}", "pass a tensor, such as torch.as_tensor(…), or a float"
    return "not sent", ""


def _irreducible(dtype: torch.dtype, op: str) -> str:
    """Why a tensor of ``dtype`` has no such reduction; empty if it has."""
    if dtype.is_complex:
        return "" if op in ("sum", "mean") else f"complex tensors have no {op}"
    if op == "mean" and not dtype.is_floating_point:
        return "cannot average an integer tensor: convert it to floating point"
    return "" if dtype in _REDUCIBLE else "dtype not supported by any backend: convert it"


def _reduced_numbers(numbers: list[Any], op: str) -> list[Any]:
    results = list(numbers)
    for dtype in (torch.int64, torch.float64):
        positions = [place for place, number in enumerate(numbers) if _NUMBERS[type(number)] is dtype]
        if not positions:
            continue
        flat = torch.tensor(
            [numbers[place] for place in positions], dtype=dtype, device=comm_device(torch.device("cpu"))
        )
        dist.all_reduce(flat, _OPS[op])
        for place, result in zip(positions, flat.tolist(), strict=True):
            # Divided after the sum, which is exact for integers.
            results[place] = result / dist.get_world_size() if op == "mean" else result
            if isinstance(numbers[place], bool) and op in ("min", "max"):
                results[place] = bool(result)
    return results


def _reduce_bucket(bucket: list[torch.Tensor], op: str) -> None:
    dtype = bucket[0].dtype
    flat = pack(bucket)
    if op == "mean":
        flat.mul_(1 / dist.get_world_size())
    sent = flat.to(comm_device(flat.device), _SENT_AS.get(dtype, dtype))
    if sent.numel():
        reduce_op = _OPS[op]
        if dtype is torch.bool:
            reduce_op = dist.ReduceOp.MAX if op in ("sum", "max") else dist.ReduceOp.MIN
        dist.all_reduce(torch.view_as_real(sent) if sent.is_complex() else sent, reduce_op)
    unpack(sent.to(flat.device, dtype), bucket)
