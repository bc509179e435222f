"""Collectives on pytrees: `all_reduce` and `broadcast` of nested containers, in few messages.

Leaves are tensors, numbers and, if NumPy is imported, arrays. Tensors and writable arrays are changed in place and
returned as the same objects; numbers and read-only arrays are returned as new objects, in new containers. Any other
leaf (a string, None) is sent by `broadcast`, and returned unchanged by `all_reduce`.

Tensors of one device and dtype are sent in buckets. Before that, the ranks compare what they are about to send with one
all-reduce of 16 bytes. If structures, shapes, dtypes, devices or arguments differ, every rank raises a SetupError that
names the first difference. In a world of one nothing is sent or copied, and the given tree is returned.

`all_reduce` follows `allreduce!` of Lux.jl's DistributedUtils, and Horovod's allreduce. `synchronize` uses `broadcast`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy

from flk_runtime.distributed import buckets
from flk_runtime.distributed.consistency import check_consistent
from flk_runtime.distributed.process_group import comm_device
from flk_runtime.errors import SetupError
from flk_runtime.system.pytree import map_leaves, walk

T = TypeVar("T")

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}
# Dtypes that backends do not reduce, and the dtype they are sent as. Sums wrap around as torch's own do.
_SENT_AS = {torch.bool: torch.uint8, torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
_REDUCIBLE = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int32, torch.int64),
    *_SENT_AS,
}
_NUMBERS = {bool: torch.int64, int: torch.int64, float: torch.float64, complex: torch.complex128}


def broadcast(tree: T, root: int = 0) -> T:
    """Return the leaves of rank ``root`` on every rank. Collective.

    Tensors and writable arrays receive root's elements in place; their shapes, dtypes and devices must be the same on
    all ranks, and so must the containers. All other leaves (numbers, strings, None, any object) are pickled.

    Raises SetupError, on every rank, where the ranks' trees differ or a tensor cannot be sent.
    """
    if not begin("broadcast", root=root):
        return tree
    leaves = _Leaves(tree, None)
    leaves.check_consistent(f"broadcast(root={root})")
    values = leaves.others
    if values:
        dist.broadcast_object_list(values, src=root)
    broadcast_tensors(leaves.tensors, root)
    return leaves.rebuilt(tree, values)


def all_reduce(tree: T, op: str = "sum") -> T:
    """Return the reduction of all ranks' leaves, on every rank. Collective.

    ``op`` is "sum", "mean", "max", "min" or "product". "mean" takes floating point and complex tensors, and any number,
    for which it returns a float; tensors are divided before the sum, as gradients are, so float16 does not overflow.
    For bool tensors, sum and max are "or", product and min are "and"; Python bools are added up as integers. Complex
    leaves have sums and means only.

    Raises SetupError, on every rank, for an unknown ``op``, and where the ranks' trees differ or a leaf cannot be
    reduced.
    """
    if not begin("all_reduce", op=op):
        return tree
    leaves = _Leaves(tree, op)
    leaves.check_consistent(f"all_reduce({op})")
    values = list(leaves.others)
    numbers = [_number(value) for value in values]
    for kind in _NUMBERS:
        positions = [position for position, number in enumerate(numbers) if type(number) is kind]
        if positions:
            results = _reduced_numbers(kind, [numbers[position] for position in positions], op)
            for position, result in zip(positions, results, strict=True):
                values[position] = _of_same_type(values[position], result)
    for bucket in buckets.split(leaves.tensors):
        _reduce_bucket(bucket, op)
    return leaves.rebuilt(tree, values)


def is_numeric(value: object) -> bool:
    """Whether a leaf is a tensor, an array or a number."""
    return isinstance(value, torch.Tensor) or _is_array(value) or _number(value) is not None


def broadcast_tensors(tensors: Sequence[torch.Tensor], root: int) -> None:
    """Copy the elements of rank ``root``'s tensors into the tensors of every rank. Collective.

    Shapes, dtypes and devices must be the same on all ranks; they are not compared.
    """
    for bucket in buckets.split(tensors):
        flat = buckets.pack(bucket, share=True)
        sent = flat.to(comm_device(flat.device))
        if sent.numel():
            dist.broadcast(sent.view(torch.uint8), src=root)  # as bytes: no backend supports every dtype
        if dist.get_rank() != root:
            buckets.unpack(sent.to(flat.device), bucket)


def describe(tensor: torch.Tensor) -> str:
    """Dtype, shape and device type of a tensor, which must be the same on all ranks."""
    if is_lazy(tensor):
        return "a tensor"
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} on {tensor.device.type}"


def unsendable(tensor: torch.Tensor) -> str:
    """Why the elements of a tensor cannot be sent; an empty string if they can."""
    if hasattr(tensor, "device_mesh"):
        return "a DTensor: each rank holds another shard of it, and its wrapper keeps the shards consistent"
    if is_lazy(tensor):
        return "not initialized yet: call the model once before"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return "sparse or quantized: convert it before"
    if tensor.device.type == "meta":
        return "on the meta device: it has no elements"
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return "expanded, so its elements share memory: clone it before"
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


class _Leaves:
    """The leaves of a tree: ``tensors``, each once, with arrays as tensor copies, and ``others``.

    ``op`` is the reduction that follows; None for a broadcast.
    """

    def __init__(self, tree: object, op: str | None) -> None:
        self.tensors: list[torch.Tensor] = []
        self.others: list[Any] = []
        self._lines: list[tuple[str, str]] = []
        self._problems: list[str] = []
        self._arrays: dict[int, torch.Tensor] = {}  # by the array's id
        seen: dict[int, str] = {}
        for node in walk(tree):
            kind, problem = (node.container, "") if node.container else self._add(node.path, node.value, seen, op)
            # Problems are compared too, so that a rank with a problem of its own does not raise alone.
            self._lines.append((node.path, f"{kind}, {problem}" if problem else kind))
            if problem:
                self._problems.append(f"{node.path} is {kind}, {problem}")

    def check_consistent(self, call: str) -> None:
        check_consistent(call, self._lines)
        if self._problems:  # the same on all ranks, by the check
            raise SetupError(f"{call}: {self._problems[0]}")

    def rebuilt(self, tree: T, values: Sequence[Any]) -> T:
        """``tree`` with the received arrays, and with ``values`` in place of the other leaves."""
        remaining = iter(values)

        def leaf(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value
            if id(value) not in self._arrays:
                return next(remaining)
            result = self._arrays[id(value)].numpy()
            if not value.flags.writeable:
                return result
            value[...] = result
            return value

        return map_leaves(tree, leaf)

    def _add(self, path: str, value: Any, seen: dict[int, str], op: str | None) -> tuple[str, str]:
        """Take in one leaf; return what it is, and why it cannot be exchanged (empty if it can)."""
        array = _is_array(value)
        if not array and not isinstance(value, torch.Tensor):
            self.others.append(value)
            if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
                return f"a {type(value).__name__}", "use synchronize() for it"
            return ("a value", "") if op is None else _describe_number(value, op)
        if id(value) in seen:  # tied weights are reduced once
            return f"the same as {seen[id(value)]}", ""
        seen[id(value)] = path
        if array:
            try:
                self._arrays[id(value)] = torch.from_numpy(value.copy())
            except (TypeError, ValueError):
                return f"an array of {value.dtype}", "a dtype that torch does not have: convert it"
            value = self._arrays[id(value)]
        self.tensors.append(value)
        problem = unsendable(value) or ("" if op is None else _irreducible(value.dtype, op))
        return ("an array, " if array else "") + describe(value), problem


def _is_array(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc"


def _number(value: Any) -> Any:
    """A Python or NumPy number as a Python number; None for anything else, such as a member of an enumeration."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.number, numpy.bool_)):
        value = value.item()
    return value if type(value) in _NUMBERS else None


def _describe_number(value: object, op: str) -> tuple[str, str]:
    number = _number(value)
    if number is None:
        return "a value", ""
    kind = f"a number ({type(number).__name__})"
    if isinstance(number, int) and not -(1 << 63) <= number < 1 << 63:
        return kind, "more than 64 bits: make it a float"
    if isinstance(number, complex) and op not in ("sum", "mean"):
        return kind, f"complex numbers have no {op}"
    return kind, ""


def _irreducible(dtype: torch.dtype, op: str) -> str:
    """Why a tensor of ``dtype`` has no such reduction; empty if it has."""
    if dtype.is_complex:
        return "" if op in ("sum", "mean") else f"complex tensors have no {op}"
    if op == "mean" and not dtype.is_floating_point:
        return "cannot average an integer tensor: convert it to floating point"
    return "" if dtype in _REDUCIBLE else "dtype not supported by any backend: convert it"


def _reduced_numbers(kind: type, numbers: list[Any], op: str) -> list[Any]:
    flat = torch.tensor(numbers, dtype=_NUMBERS[kind], device=comm_device(torch.device("cpu")))
    dist.all_reduce(torch.view_as_real(flat) if flat.is_complex() else flat, _OPS[op])
    results = flat.tolist()
    if op == "mean":  # divided after the sum, which is exact for integers
        return [number / dist.get_world_size() for number in results]
    return [bool(number) for number in results] if kind is bool and op in ("max", "min") else results


def _of_same_type(value: Any, result: Any) -> Any:
    """``result`` as a NumPy scalar if ``value`` is one."""
    if type(value) in _NUMBERS:
        return result
    whole = value.dtype.kind in "biu" and not isinstance(result, bool)
    return sys.modules["numpy"].asarray(result)[()] if whole else type(value)(result)


def _reduce_bucket(bucket: list[torch.Tensor], op: str) -> None:
    dtype = bucket[0].dtype
    flat = buckets.pack(bucket, share=True)
    if op == "mean":
        flat.mul_(1 / dist.get_world_size())
    sent = flat.to(comm_device(flat.device), _SENT_AS.get(dtype, dtype))
    if sent.numel():
        reduce_op = _OPS[op]
        if dtype is torch.bool:
            reduce_op = dist.ReduceOp.MAX if op in ("sum", "max") else dist.ReduceOp.MIN
        dist.all_reduce(torch.view_as_real(sent) if sent.is_complex() else sent, reduce_op)
    buckets.unpack(sent.to(flat.device, dtype), bucket)
