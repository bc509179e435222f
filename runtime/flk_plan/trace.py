"""Trace: the operations of one training step on fake tensors, summed up block by block.

The forward and backward passes run on tensors that have shapes and no data. The trace records for each segment of the
step (a block's forward pass, its backward pass, the operations between two of them) how much memory is live, its FLOPs
and its time on a GPU. Identical blocks are run once: the others repeat the recorded segments. So a model of a hundred
layers takes little longer than one of two.
"""

from __future__ import annotations

import contextlib
import functools
import re
import types
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from flk_plan.hardware import Gpu
from flk_runtime.system import mfu, pytree

_PLAIN: Final = (bool, int, float, str, torch.dtype, types.FunctionType)
OUTSIDE: Final = -1  # index of operations that are in the model and in no block
LOSS: Final = -2  # index of operations on the model's outputs
_ATTENTION: Final = "scaled_dot_product"  # in the names of attention's operations
# Operations that read only those elements of their first argument that they return.
_ATEN: Final = torch.ops.aten
_CHOOSES: Final = (_ATEN.embedding.default, _ATEN.index_select.default, _ATEN.gather.default, _ATEN.index.Tensor)
# Operations that only allocate: they take no time.
_ALLOCATES: Final = (_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided)
_POSITION: Final = re.compile("layer|idx|index|number|_id$")  # attributes with a block's place among the blocks


@dataclass(frozen=True)
class Segment:
    """A segment of a step: the forward or backward pass of one block, or the operations between two of them.

    Bytes are of activations and temporary tensors: neither parameters nor their gradients.
    """

    block: int  # index of the block, or OUTSIDE
    backward: bool
    begin: int = 0  # live bytes at its beginning
    peak: int = 0  # most live bytes during it
    model_flops: int = 0  # without the FLOPs that recomputation repeats
    seconds: float = 0.0  # estimated time on the GPU


@dataclass(frozen=True)
class StepTrace:
    """One forward and backward pass, in the order in which its parts ran."""

    segments: tuple[Segment, ...] = ()
    uncounted: frozenset[str] = frozenset()  # operations whose FLOPs torch cannot count

    @property
    def peak(self) -> int:
        """Most live bytes of activations and temporary tensors."""
        return max((segment.peak for segment in self.segments), default=0)

    @property
    def model_flops(self) -> int:
        """FLOPs of the forward and backward passes, without the FLOPs that recomputation repeats."""
        return sum(segment.model_flops for segment in self.segments)

    @property
    def seconds(self) -> float:
        """Estimated time on the GPU, without communication and without the optimizer."""
        return sum(segment.seconds for segment in self.segments)


class _Recorded:
    """A segment that was run: its memory relative to the beginning."""

    def __init__(self, block: int, backward: bool) -> None:
        self.block, self.backward = block, backward
        self.peak = self.change = self.model_flops = 0
        self.seconds = 0.0


@dataclass
class _Template:
    """The recorded segments of a block, for other blocks that are identical."""

    outputs: Any  # with a `_Shape` in place of each tensor
    forward: _Recorded
    backward: _Recorded | None = None  # known after the backward pass of the step


@dataclass
class _Repeated:
    """A segment that was not run: it is like the segment of the template."""

    block: int
    backward: bool
    template: _Template
    change: int

    @property
    def model(self) -> _Recorded:
        """The segment that this one is like."""
        recorded = self.template.backward if self.backward else self.template.forward
        return recorded or _Recorded(self.block, self.backward)  # without a backward pass, it takes nothing


class Tracer:
    """Records a step. Use `recording` around the passes; `result` returns the trace."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], gpu: Gpu) -> None:
        """``blocks`` are the parts of the model that are recorded one by one."""
        self._model, self._blocks = model, list(blocks)
        self._memory = MemoryCounter(gpu, lambda: self._current.backward)
        self._segments: list[_Recorded | _Repeated] = []
        self._current = _Recorded(OUTSIDE, backward=False)
        self._templates: dict[Hashable, _Template] = {}
        self._end: int | None = None  # number of segments of the first micro-batch, once the second has begun

    @property
    def backward_began(self) -> bool:
        """Whether the latest micro-batch is in its backward pass, or after it."""
        return self._current.backward

    def begin_micro_batch(self) -> None:
        """Begin another micro-batch of the step. Only the first one is part of the trace."""
        self._begin(OUTSIDE, backward=False)
        self._end = self._end or len(self._segments)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the operations in this context. The parameters' gradients are replaced by ones that do not count."""
        hooks: list[Any] = [
            each.register_post_accumulate_grad_hook(functools.partial(_set_gradient, torch.empty_like(each)))  # type: ignore[no-untyped-call]
            for each in self._model.parameters()
            if each.requires_grad
        ]
        hooks.append(self._model.register_forward_hook(self._after_model))
        own = [block.__dict__.get("forward") for block in self._blocks]
        for index, block in enumerate(self._blocks):
            block.forward = functools.partial(self._call, index, block.forward)
        self._begin(OUTSIDE, backward=False)
        try:
            with self._memory:
                yield
        finally:
            for block, forward in zip(self._blocks, own, strict=True):
                del block.forward
                if forward is not None:
                    block.forward = forward
            for hook in hooks:
                hook.remove()
            self._finish()

    def result(self) -> StepTrace:
        """The trace of the first micro-batch, with the memory of all blocks, also of blocks that were not run."""
        segments = []
        live = 0
        for each in self._segments[: self._end]:
            model = each.model if isinstance(each, _Repeated) else each
            segments.append(
                Segment(
                    each.block,
                    each.backward,
                    live,
                    live + model.peak,
                    model.model_flops,
                    model.seconds,
                )
            )
            live += each.change
        return StepTrace(tuple(segments), frozenset(self._memory.uncounted))

    def _begin(self, block: int, *, backward: bool) -> _Recorded:
        """End the segment that runs, and begin another one."""
        self._finish()
        self._current = _Recorded(block, backward)
        return self._current

    def _finish(self) -> None:
        memory, current = self._memory, self._current
        current.peak, current.change, current.model_flops, current.seconds = memory.start_segment()
        if current.seconds or current.peak or current.change:
            self._segments.append(current)
        self._current = _Recorded(OUTSIDE, current.backward)

    def _call(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A block's forward pass: recorded, or repeated from the forward pass of an identical block."""
        if not torch.is_grad_enabled() or self._current.backward:  # the second: a recomputation around the block
            return forward(*args, **kwargs)
        key = _signature(index, self._blocks[index], args, kwargs)
        template = self._templates.get(key)
        if template is None:
            args, kwargs = _mark((args, kwargs), lambda: self._begin(OUTSIDE, backward=True))
            recorded = self._begin(index, backward=False)
            outputs = forward(*args, **kwargs)
            self._begin(OUTSIDE, backward=False)
            shapes = pytree.map_leaves(outputs, lambda leaf: _Shape(leaf) if isinstance(leaf, torch.Tensor) else leaf)
            template = self._templates[key] = _Template(shapes, recorded)
            return _mark(outputs, functools.partial(self._begin_backward, index, template))
        return self._repeat(index, template, list(_tensors((args, kwargs))))

    def _after_model(self, model: nn.Module, inputs: Any, outputs: Any) -> Any:
        marked = _mark(outputs, lambda: self._begin(OUTSIDE, backward=True))
        self._begin(LOSS, backward=False)
        return marked

    def _begin_backward(self, index: int, template: _Template) -> None:
        template.backward = self._begin(index, backward=True)

    def _repeat(self, index: int, template: _Template, inputs: list[torch.Tensor]) -> Any:
        shapes = [leaf for leaf in pytree.leaves(template.outputs) if isinstance(leaf, _Shape)]
        # The outputs are tensors of this step, and count as such. The rest is held until the backward pass.
        held = template.forward.change - sum(shape.size for shape in shapes)

        def add(backward: bool) -> None:
            self._finish()
            self._segments.append(_Repeated(index, backward, template, -held if backward else held))
            self._current = _Recorded(OUTSIDE, backward)

        add(backward=False)
        # A parameter is an input too, so that the outputs need gradients as a block's do whose inputs are data.
        trained = sorted((each for each in self._blocks[index].parameters() if each.requires_grad), key=torch.numel)[:1]
        replaced = iter(cast(Any, _Repeat.apply)(lambda: add(backward=True), shapes, *trained, *inputs))
        return pytree.map_leaves(template.outputs, lambda leaf: next(replaced) if isinstance(leaf, _Shape) else leaf)


class Counted(NamedTuple):
    """What a MemoryCounter has counted of a segment."""

    peak: int  # bytes above those at its beginning
    change: int  # bytes at its end, less those at its beginning
    model_flops: int
    seconds: float


class MemoryCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the live bytes of storages that operations allocate, FLOPs, and the time that a GPU would take."""

    def __init__(self, gpu: Gpu, is_backward: Callable[[], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._gpu = gpu
        self._is_backward = is_backward
        self._sizes: dict[int, int] = {}  # bytes of each live storage, by the id of its Python object
        self._live = self._begin = self._peak = self._flops = 0
        self._seconds = 0.0
        self.uncounted: set[str] = set()

    def start_segment(self) -> Counted:
        """Set the counters back. Returns their values."""
        memory = self._peak - self._begin, self._live - self._begin
        counted = Counted(*memory, self._flops, self._seconds)
        self._begin = self._peak = self._live
        self._flops, self._seconds = 0, 0.0
        return counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        written = 0
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            key = id(storage)
            if key not in self._sizes and not any(storage is other.untyped_storage() for other in _tensors(args)):
                size = storage.nbytes()
                self._sizes[key] = size
                self._live += size
                written += size
                weakref.finalize(storage, self._free, key)
        self._peak = max(self._peak, self._live)
        if func._overloadpacket in _ALLOCATES:
            return out
        flops, done = _flops(func, args, kwargs, out)
        if not flops and (unknown := mfu.uncounted(func)):
            self.uncounted.add(unknown)
        recomputed = self._is_backward() and torch.is_grad_enabled()
        if flops and not recomputed:
            self._flops += flops
        if not written and func._schema.is_mutable:  # in place
            written = _size(out)
        if written or flops:
            # Where it reads only what it gives, the rest is of no account: a row of a large embedding.
            read = _size((args[1:], kwargs)) + (written if func in _CHOOSES else _size(args[:1]))
            dtype = next((tensor.dtype for tensor in _tensors(out)), torch.float32)
            self._seconds += self._gpu.seconds(done, read + written, dtype, attention=_ATTENTION in str(func))
        return out

    def _free(self, key: int) -> None:
        self._live -= self._sizes.pop(key)


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[int, int]:
    """FLOPs of an operation, and the FLOPs of its kernel: causal attention skips half of the scores.

    By convention (PaLM, arXiv 2204.02311, appendix B) causal attention counts as if all scores were computed.
    """
    packet = func._overloadpacket
    count = flop_registry.get(packet)
    if count is None and _ATTENTION in str(packet):
        # torch's counter knows the GPU's kernels, and this is the CPU's: with the same arguments at the beginning.
        backward = "backward" in str(packet)
        shapes = [tensor.shape for tensor in args[: 4 if backward else 3]]
        flops = (sdpa_backward_flop_count if backward else sdpa_flop_count)(*shapes)
    else:
        flops = count(*args, **kwargs, out_val=out) if count else 0
    if not flops or _ATTENTION not in str(packet):
        return flops, flops
    names = [argument.name for argument in func._schema.arguments]
    causal = {**dict(zip(names, args, strict=False)), **kwargs}.get("is_causal")
    # The kernels compute the scores again in their backward pass: five products, of which four are the model's.
    model = flops * 4 // 5 if "backward" in str(packet) else flops
    return model, flops // 2 if causal else flops


class _Shape:
    """Shape and dtype of a tensor that is not there."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.size = tensor.numel() * tensor.element_size()


class _Boundary(torch.autograd.Function):
    """The identity. Its backward pass calls a function first."""

    @staticmethod
    def forward(ctx: Any, called: Callable[[], Any], *tensors: torch.Tensor) -> Any:
        ctx.called = called
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.called()
        return (None, *gradients)


class _Repeat(torch.autograd.Function):
    """Stands for a block that is not run: new outputs, and gradients of the inputs in the backward pass.

    It keeps its inputs until then, as a block does whose first operation needs them in the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, called: Callable[[], None], shapes: list[_Shape], *inputs: torch.Tensor) -> Any:
        ctx.save_for_backward(*inputs)
        ctx.called, ctx.inputs = called, [_Shape(each) if each.requires_grad else None for each in inputs]
        ctx.set_materialize_grads(False)
        return tuple(inputs[0].new_empty(shape.shape, dtype=shape.dtype) for shape in shapes)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.called()
        like = next(each for each in gradients if each is not None)
        return (None, None, *(each and like.new_empty(each.shape, dtype=each.dtype) for each in ctx.inputs))


def _set_gradient(gradient: torch.Tensor, parameter: nn.Parameter) -> None:
    parameter.grad = gradient


def _mark(tree: Any, called: Callable[[], Any]) -> Any:
    """The same tree; ``called`` is called in the backward pass, before it goes through the tree's tensors."""
    differentiable = [leaf for leaf in _tensors(tree) if leaf.requires_grad]
    if not differentiable:
        return tree
    marked = cast(Any, _Boundary.apply)(called, *differentiable)
    replaced = {id(old): new for old, new in zip(differentiable, marked, strict=True)}
    return pytree.map_leaves(tree, lambda leaf: replaced.get(id(leaf), leaf))


def _signature(index: int, block: nn.Module, args: Any, kwargs: Any) -> Hashable:
    """A key that is equal for identical blocks: classes, sizes and settings, and the shapes of the inputs.

    Its own number, which many blocks keep under a name such as ``layer_idx``, does not count.
    """
    parts: list[Hashable] = []
    for name, module in block.named_modules():
        settings = tuple(
            (key, _setting(value))
            for key, value in sorted(vars(module).items())
            if not (type(value) is int and value == index and _POSITION.search(key))
        )
        tensors = tuple(
            (key, value.shape, value.dtype, value.requires_grad)
            for key, value in (*module._parameters.items(), *module._buffers.items())
            if value is not None
        )
        parts.append((name, type(module), settings, tensors))
    for leaf in pytree.leaves((args, kwargs)):
        shape = (leaf.shape, leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else id(leaf)
        parts.append(leaf if isinstance(leaf, (bool, int, float, str)) else shape)
    return tuple(parts)


def _setting(value: Any) -> Hashable:
    """A key that is equal for equal settings and for the same function; None for other objects."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_setting, value))
    return value if isinstance(value, _PLAIN) else None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The dense tensors in a tree. Sparse ones have no storage, and the model state counts gradients of all rows."""
    return (leaf for leaf in pytree.leaves(value) if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided)


def _size(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(value))
