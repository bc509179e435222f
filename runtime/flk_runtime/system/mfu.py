"""Model FLOPs utilisation (MFU): the fraction of the devices' peak FLOP/s that the model's own FLOPs use.

MFU = model FLOPs of a step × steps per second ÷ (devices × peak), as in PaLM (arXiv 2204.02311, appendix B). Model
FLOPs are the matrix products and convolutions of one forward and backward pass. Operations that are repeated to save
memory (activation checkpointing, the scores in the backward pass of fused attention) are not counted.

The FLOPs are counted once, by torch's FlopCounterMode, on a copy of the model without data (device meta), called as the
model was called in the first step. So the counter does not slow the training down, and sharding, compilation and fused
kernels do not change what it counts.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import is_lazy
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from flk_runtime.system import pytree, rng
from flk_runtime.system.torch_private import dispatch_mode, skip_code

Call = tuple[tuple[Any, ...], dict[str, Any]]

# Published peaks in TFLOP/s, dense (without structured sparsity): of bfloat16; of float16; of float32 computed in TF32;
# of float32 itself. None: not published, or the device has no such units. One that has no TF32 computes in float32. The
# first entry whose words are all in the device's name is used. Sources: the vendors' data sheets, for one GPU of the
# tables for HGX B200 and B300, GB200 NVL72 and GB300 NVL72; bfloat16 as in torchtitan/tools/utils.py where that has it.
PEAKS: tuple[tuple[str, float | None, float, float | None, float | None], ...] = (
    ("GB300", 2500, 2500, 1250, 80),
    ("GB200", 2500, 2500, 1250, 80),
    ("B300", 2250, 2250, 1125, 75),
    ("B200", 2250, 2250, 1125, 75),
    ("GH200", 989, 989, 494, 67),
    ("H200 NVL", 835, 835, 417, 60),
    ("H200", 989, 989, 494, 67),
    ("H100 NVL", 835, 835, 417, 60),
    ("H100 PCIe", 756, 756, 378, 51),
    ("H100", 989, 989, 494, 67),
    ("H20", 148, 148, 74, 44),
    ("A100", 312, 312, 156, 19.5),
    ("A10", 125, 125, 62.5, 31.2),
    ("A10G", 70, 70, 35, 35),
    ("A40", 149.7, 149.7, 74.8, 37.4),
    ("L40S", 362, 362, 183, 91.6),
    ("L4", 121, 121, 60, 30.3),
    ("A6000", 154.85, 154.85, 77.4, 38.7),
    ("V100 PCIe", None, 112, 14, 14),
    ("V100", None, 125, 15.7, 15.7),
    ("T4", None, 65, 8.1, 8.1),
    ("MI355X", 2500, 2500, None, 157.3),
    ("MI325X", 1300, 1300, 653.7, 163.4),
    ("MI300X", 1300, 1300, 653.7, 163.4),
    ("MI250X", 191.5, 191.5, None, None),
)
# Operations of torch that multiply matrices, if flop_registry has no formula for them.
_MULTIPLIES = re.compile("mm$|mm_|gemm|rnn|lstm|gru|attention")
# Operations that multiply none: communication, and torch's own marks.
_NAMESPACES = ("prim", "prims", "c10d", "_c10d_functional", "profiler")


def uncounted(operation: Any) -> str:
    """The name of an operation whose FLOPs torch cannot count, such as a custom kernel; empty for any other one."""
    packet = operation._overloadpacket
    name, namespace = str(packet), operation.namespace
    if packet in flop_registry or namespace in _NAMESPACES:
        return ""
    return name if namespace != "aten" or _MULTIPLIES.search(name) else ""


def peak(name: str, dtype: torch.dtype, *, tf32: bool = False) -> float | None:
    """The peak in FLOP/s of a device of this name for matrix products in ``dtype``; None if it is not known.

    ``tf32``: products of float32 tensors are computed in TF32.
    """
    for model, bfloat, half, tensor_float, single in PEAKS:
        if is_device(model, name):
            chosen = {torch.bfloat16: bfloat, torch.float16: half, torch.float32: tensor_float if tf32 else single}
            found = chosen.get(dtype)
            return None if found is None else found * 1e12
    return None


def is_device(model: str, name: str) -> bool:
    """Whether torch's ``name`` of a device has all words of ``model``. A MIG instance, a part of a device, is none."""
    words = set(name.lower().replace("-", " ").split())
    return set(model.lower().split()) <= words and "mig" not in words


def skeleton(model: nn.Module) -> nn.Module:
    """A copy of ``model`` without data: parameters, buffers and other tensors on device meta, in float32."""
    model = getattr(model, "_orig_mod", model)  # the module that torch.compile was called with
    memo: dict[int, Any] = {}
    for module in model.modules():
        others = (value for value in vars(module).values() if isinstance(value, torch.Tensor))
        for tensor in (*module._parameters.values(), *module._buffers.values(), *others):
            if tensor is not None:
                memo[id(tensor)] = _without_data(tensor)
    return copy.deepcopy(model, memo)


def count(model: nn.Module, calls: Sequence[Call]) -> int:
    """Model FLOPs of the forward and backward passes of these calls of a `skeleton`, with arguments on device meta.

    Raises ValueError if no output depends on a parameter, or the FLOPs of an operation cannot be counted, and what the
    model raises without data.
    """
    counter = FlopCounterMode(display=False)
    again = _Recomputed(counter)
    # SDPBackend.MATH: fused attention kernels recompute in their backward pass, which would be counted.
    with rng.OwnNumbers(0).used(), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), counter, again:
        for arguments, named in calls:
            outputs = pytree.leaves(model(*arguments, **named))
            differentiable = [output for output in outputs if isinstance(output, torch.Tensor) and output.requires_grad]
            if not differentiable:
                raise ValueError("no tensor that it returns depends on a parameter")
            again.backward = True
            torch.autograd.backward([output.sum() for output in differentiable])
            again.backward = False
    return counter.get_total_flops() - again.flops


def dtype_of(model: nn.Module) -> torch.dtype | None:
    """The dtype that most elements of the parameters of ``model`` have; None if it has no parameters."""
    sizes: dict[torch.dtype, int] = {}
    for parameter in filter(lambda each: not is_lazy(each), model.parameters()):
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    return max(sizes, key=lambda each: sizes[each], default=None)


class Meter:
    """Measures the MFU of a run with one model: FLOPs per step, counted in the first step, and the time of the steps.

    ``warn`` is called with a line where MFU cannot be measured.
    """

    def __init__(self, device: torch.device, world_size: int, warn: Callable[[str], None]) -> None:
        self.flops_per_step: float | None = None  # of all ranks together
        self.steps = 0  # since the mark: the caller counts them
        self._device, self._world_size, self._warn = device, world_size, warn
        self._name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        self._is_off = False
        self._skeleton: nn.Module | None = None
        self._calls: list[Call] = []  # of the model in the first step
        self._hook: Any = None
        self._dtype: torch.dtype | None = None  # of the matrix products; None: there is no model yet
        self._since: float | None = None  # the mark: time of the latest line of metrics, or of the first step's end
        self._latest: float | None = None

    def watch(self, model: nn.Module, dtype: torch.dtype | None = None) -> None:
        """Copy the `skeleton` of a model that is about to be wrapped, and record its calls in the first step.

        ``dtype`` is the strategy's compute dtype, if any. A frozen model, such as a reference, is left out.
        """
        dtype = dtype or dtype_of(model)
        is_trained = any(parameter.requires_grad for parameter in model.parameters())
        if self._device.type == "cpu" and peak(self._name, torch.float16) is None:
            self._is_off = True  # without a warning: a CPU is not expected to have a peak
        if self._is_off or dtype is None or not is_trained:
            return
        if self._dtype is not None:
            self._give_up("it is measured for a single model, and the run has several")
            return
        self._dtype = dtype
        try:
            self._skeleton = skeleton(model)
        except Exception as error:
            self._uncountable(error)
            return

        def called(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            if torch.compiler.is_compiling() or not module.training or not torch.is_grad_enabled():
                return  # in the graph of a function it would stay after the first step
            if torch.is_autocast_enabled(self._device.type):
                self._dtype = torch.get_autocast_dtype(self._device.type)
            self._calls.append(pytree.map_leaves((arguments, named), _without_data))

        skip_code(called.__code__)
        self._hook = model.register_forward_pre_hook(called, with_kwargs=True)

    def begin(self) -> None:
        """Begin after the first step, which is not timed: it compiles and opens connections."""
        if self._hook:
            self._hook.remove()
        self._mark()

    def read(self, *, mark: bool = False) -> float | None:
        """The utilisation since the mark, or the latest one if no step was made since; ``mark`` sets a new mark.

        The caller has synchronized the device. None if it cannot be measured, or before the second step.
        """
        now = time.perf_counter()
        if self._since is None or self._dtype is None or self._is_off:
            return None
        highest = peak(self._name, self._dtype, tf32=uses_tf32())
        if highest is None:
            self._give_up(f"the peak of {self._name} in {str(self._dtype).removeprefix('torch.')} is not known")
            return None
        if self.flops_per_step is None:
            self._count()
        if self.flops_per_step is None:
            return None
        if self.steps:
            self._latest = self.flops_per_step * self.steps / max(now - self._since, 1e-9) / highest / self._world_size
        if mark:
            self._mark()
        return self._latest

    def _count(self) -> None:
        try:
            if not self._calls or not self._skeleton:
                raise ValueError("it was not called in the first step")
            self.flops_per_step = float(count(self._skeleton, self._calls) * self._world_size)
        except Exception as error:  # a model may need data, and raise anything
            self._uncountable(error)
        self._skeleton, self._calls = None, []

    def _uncountable(self, error: Exception) -> None:
        reason = str(error).partition("\n")[0] or type(error).__name__
        self._give_up(f"the FLOPs of this model could not be counted ({reason})")

    def _give_up(self, reason: str) -> None:
        self._warn(f"no mfu: {reason}")
        self._is_off = True

    def _mark(self) -> None:
        self.steps, self._since = 0, time.perf_counter()


class _Recomputed(dispatch_mode()):  # type: ignore[misc]
    """Adds up what ``counter``, entered before, counts for activations that the backward pass recomputes."""

    def __init__(self, counter: FlopCounterMode) -> None:
        super().__init__()
        self.flops = 0
        self.backward = False
        self._counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if unknown := uncounted(func):
            raise ValueError(f"torch has no formula for {unknown}")
        # Checkpointing repeats its part of the forward pass with gradients enabled; backward operators run without.
        if not (self.backward and torch.is_grad_enabled()):
            return func(*args, **(kwargs or {}))
        before = self._counter.get_total_flops()
        result = func(*args, **(kwargs or {}))
        self.flops += self._counter.get_total_flops() - before
        return result


def _without_data(value: Any) -> Any:
    """A tensor of the same shape on device meta, in float32 if it is floating point; any other value unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    dtype = torch.float32 if value.is_floating_point() else value.dtype
    empty = torch.empty_like(value, dtype=dtype, device="meta", requires_grad=False)
    if isinstance(value, nn.Parameter):
        return nn.Parameter(empty, requires_grad=value.requires_grad)
    return empty


def uses_tf32() -> bool:
    """Return whether torch computes products of float32 matrices in TF32 on a GPU."""
    matmul: Any = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)  # torch >= 2.9; reading both ways of setting it may raise
    return bool(precision == "tf32" if precision not in (None, "none") else matmul.allow_tf32)
