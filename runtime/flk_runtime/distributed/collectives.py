"""Collectives on trees: `broadcast`, `all_reduce` and `reduce` of nested containers, in few messages.

Leaves are tensors, numbers and, where NumPy is loaded, arrays. Tensors and writable arrays are changed in place, and
come back as the same objects; numbers and read-only arrays come back new, in new containers. Leaves that are neither
(strings, None) are sent by `broadcast`, and come back unchanged from the others.

Tensors of a device and dtype travel together, in buckets. Before that the ranks compare what they are about to send:
one all-reduce of 16 bytes. Structures, shapes, dtypes, devices or arguments that differ are a SetupError on every rank
that names the first difference. A world of one sends and copies nothing, and returns the tree that it was given.
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
from flk_runtime.distributed.pytree import replace, walk
from flk_runtime.errors import SetupError

T = TypeVar("T")

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}
# What backends do not add up travels as what they do. Sums wrap around as torch's own do.
_WIRE = {torch.bool: torch.uint8, torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
_REDUCIBLE = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int32, torch.int64),
    *_WIRE,
}
_NUMBERS = {bool: torch.int64, int: torch.int64, float: torch.float64, complex: torch.complex128}


def broadcast(tree: T, root: int = 0) -> T:
    """``root``'s leaves on every rank. Collective.

    Tensors and writable arrays take root's elements in place; their shapes, dtypes and devices must be the same on all
    ranks, and so must the containers. Everything else (numbers, strings, None, any object) comes from root by pickle.
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
    """The leaves of all ranks combined, on every rank. Collective.

    ``op`` is "sum", "mean", "max", "min" or "product". A mean is of floating point and complex tensors and of all
    numbers (of which it makes floats); tensors are divided first, as gradients are, so float16 does not overflow. Of
    bool tensors sum and max are "or", product and min are "and"; Python's bools are added up as integers. Of complex
    leaves there are sums and means only.
    """
    return _reduced("all_reduce", tree, op, None)


def reduce(tree: T, op: str = "sum", root: int = 0) -> T:
    """As `all_reduce`, but only ``root`` gets the result; the other ranks get back what they gave. Collective."""
    return _reduced("reduce", tree, op, root)


def is_content(value: object) -> bool:
    """Whether a leaf is a tensor, an array or a number."""
    return isinstance(value, torch.Tensor) or _is_array(value) or _number(value) is not None


def broadcast_tensors(tensors: Sequence[torch.Tensor], root: int) -> None:
    """Root's elements into every rank's tensors, which must be alike on all ranks. Collective."""
    for bucket in buckets.split(tensors):
        flat = buckets.pack(bucket, share=True)
        sent = flat.to(comm_device(flat.device))
        if sent.numel():
            dist.broadcast(sent.view(torch.uint8), src=root)  # as bytes: no backend sends every dtype
        if dist.get_rank() != root:
            buckets.unpack(sent.to(flat.device), bucket)


def describe(tensor: torch.Tensor) -> str:
    """A tensor as far as all ranks must have the same."""
    if is_lazy(tensor):
        return "a tensor"
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} on {tensor.device.type}"


def unsendable(tensor: torch.Tensor) -> str:
    """Why a tensor can't be exchanged as a whole; empty where it can."""
    if hasattr(tensor, "device_mesh"):
        return "a DTensor: each rank holds another part of it, and its wrapper keeps the parts in step"
    if is_lazy(tensor):
        return "not initialized yet: run the model once before"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return "sparse or quantized: convert it before"
    if tensor.device.type == "meta":
        return "on the meta device, where it has no elements"
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return "expanded, so that elements share memory: clone it before"
    return ""


def begin(call: str, *, op: str = "sum", root: int | None = None) -> bool:
    """Whether there is anything to do. Raises SetupError for wrong arguments."""
    if not dist.is_initialized():
        raise SetupError(f"{call} needs the process group: call flk_runtime.init() before")
    if op not in _OPS:
        raise SetupError(f"{call}: unknown op={op!r}: expected one of {', '.join(_OPS)}")
    world_size = dist.get_world_size()
    if root is not None and (not isinstance(root, int) or not 0 <= root < world_size):
        raise SetupError(f"{call}: root={root!r}: expected a rank from 0 to {world_size - 1}")
    return world_size > 1


class _Leaves:
    """The leaves of a tree: ``tensors`` (arrays among them as copies, each object once), and the ``others``.

    ``op`` is the reduction that is to come; None: a broadcast.
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
            # A problem is part of what is compared: a rank that has it alone must not raise alone.
            self._lines.append((node.path, f"{kind}, {problem}" if problem else kind))
            if problem:
                self._problems.append(f"{node.path} is {kind}, {problem}")

    def check_consistent(self, call: str) -> None:
        check_consistent(call, self._lines)
        if self._problems:  # all ranks have the same
            raise SetupError(f"{call}: {self._problems[0]}")

    def rebuilt(self, tree: T, values: Sequence[Any]) -> T:
        """``tree`` with arrays as they came, and ``values`` in the place of the others."""
        left = iter(values)

        def leaf(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value
            if id(value) not in self._arrays:
                return next(left)
            result = self._arrays[id(value)].numpy()
            if not value.flags.writeable:
                return result
            value[...] = result
            return value

        return replace(tree, leaf)

    def _add(self, path: str, value: Any, seen: dict[int, str], op: str | None) -> tuple[str, str]:
        """Put a leaf where it belongs, and say what it is, and what forbids to exchange it."""
        array = _is_array(value)
        if not array and not isinstance(value, torch.Tensor):
            self.others.append(value)
            if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
                return f"a {type(value).__name__}", "which synchronize() is for"
            return ("a value", "") if op is None else _describe_number(value, op)
        if id(value) in seen:  # tied weights: reduced once
            return f"the same as {seen[id(value)]}", ""
        seen[id(value)] = path
        if array:
            try:
                self._arrays[id(value)] = torch.from_numpy(value.copy())
            except (TypeError, ValueError):
                return f"an array of {value.dtype}", "which torch does not have: convert it"
            value = self._arrays[id(value)]
        self.tensors.append(value)
        problem = unsendable(value) or ("" if op is None else _irreducible(value.dtype, op))
        return ("an array, " if array else "") + describe(value), problem


def _is_array(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc"


def _number(value: Any) -> Any:
    """A number as one of Python's; None for anything else. Subclasses (enumerations) are no numbers."""
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
        return kind, "beyond 64 bits: make it a float"
    if isinstance(number, complex) and op not in ("sum", "mean"):
        return kind, f"and there is no {op} of it"
    return kind, ""


def _irreducible(dtype: torch.dtype, op: str) -> str:
    """Why there is no such reduction of a tensor; empty where there is."""
    if dtype.is_complex:
        return "" if op in ("sum", "mean") else f"and there is no {op} of it"
    if op == "mean" and not dtype.is_floating_point:
        return "and a mean is no integer: convert it to floating point"
    return "" if dtype in _REDUCIBLE else "which no backend adds up: convert it"


def _reduced(call: str, tree: T, op: str, root: int | None) -> T:
    if not begin(call, op=op, root=root):
        return tree
    leaves = _Leaves(tree, op)
    leaves.check_consistent(f"{call}({op})" if root is None else f"{call}({op}, root={root})")
    values = list(leaves.others)
    numbers = [_number(value) for value in values]
    for kind in _NUMBERS:
        places = [place for place, number in enumerate(numbers) if type(number) is kind]
        if places:
            results = _reduced_numbers(kind, [numbers[place] for place in places], op, root)
            for place, result in zip(places, results, strict=True):
                values[place] = _alike(values[place], result)
    for bucket in buckets.split(leaves.tensors):
        _reduce_bucket(bucket, op, root)
    return leaves.rebuilt(tree, values)


def _reduced_numbers(kind: type, numbers: list[Any], op: str, root: int | None) -> list[Any]:
    flat = torch.tensor(numbers, dtype=_NUMBERS[kind], device=comm_device(torch.device("cpu")))
    _exchange(torch.view_as_real(flat) if flat.is_complex() else flat, _OPS[op], root)
    if root is not None and dist.get_rank() != root:
        return numbers
    results = flat.tolist()
    if op == "mean":  # divided at last: the sum of integers is exact
        return [number / dist.get_world_size() for number in results]
    return [bool(number) for number in results] if kind is bool and op in ("max", "min") else results


def _alike(value: Any, result: Any) -> Any:
    """``result`` as a NumPy scalar if ``value`` is one."""
    if type(value) in _NUMBERS:
        return result
    whole = value.dtype.kind in "biu" and not isinstance(result, bool)
    return sys.modules["numpy"].asarray(result)[()] if whole else type(value)(result)


def _reduce_bucket(bucket: list[torch.Tensor], op: str, root: int | None) -> None:
    receives = root is None or dist.get_rank() == root
    dtype = bucket[0].dtype
    flat = buckets.pack(bucket, share=receives)
    if op == "mean":
        flat.mul_(1 / dist.get_world_size())
    sent = flat.to(comm_device(flat.device), _WIRE.get(dtype, dtype))
    if sent.numel():
        how = _OPS[op]
        if dtype is torch.bool:
            how = dist.ReduceOp.MAX if op in ("sum", "max") else dist.ReduceOp.MIN
        _exchange(torch.view_as_real(sent) if sent.is_complex() else sent, how, root)
    if receives:
        buckets.unpack(sent.to(flat.device, dtype), bucket)


def _exchange(flat: torch.Tensor, how: Any, root: int | None) -> None:
    if root is None:
        dist.all_reduce(flat, op=how)
    else:
        dist.reduce(flat, dst=root, op=how)
