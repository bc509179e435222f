"""Capture: runs a training script up to its first step, without memory for its model, and traces that step.

The script runs as rank 0 of the planned job on a process group that sends nothing. Its parameters are fake tensors:
they have a shape and no data. Data and everything else are real. When the optimizer makes its first step, the script
ends.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from flk_runtime.errors import SetupError
from flk_runtime.parallel import ParallelOptions, Precision, strategies
from flk_runtime.parallel.blocks import find_blocks
from flk_runtime.parallel.recompute import recompute_activations
from flk_runtime.plan.hardware import Gpu
from flk_runtime.plan.trace import StepTrace, Tracer
from flk_runtime.system import pytree

_FAKE = "_flk_fake"  # attribute of a parameter: the one without data that modules have in its place


@dataclass
class CapturedModel:
    """A model that the script has parallelized, and the first step that was traced."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    options: ParallelOptions
    blocks: list[nn.Module]
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)  # of the first step
    trace: StepTrace | None = None


class _StepDone(BaseException):
    """Ends the script after its first step."""


def capture(command: Sequence[str], gpu: Gpu) -> CapturedModel:
    """Run ``script.py args`` or ``-m module args`` up to the first step of its optimizer.

    The process group is open, and $RANK and the like say that this is rank 0. Raises SetupError if the script ends
    before, or parallelizes no model, and what the script raises.
    """
    session = _Session(gpu)
    with session.patches():
        try:
            _run(command)
        except _StepDone:
            pass
        except SystemExit as error:
            if error.code not in (None, 0):
                raise SetupError(f"the script ended with exit code {error.code} before its first step") from None
    captured = session.captured
    if captured is None:
        raise SetupError(
            "the script did not call run.parallelize: plan takes the model and the optimizer from that call"
        )
    if captured.trace is None:
        raise SetupError("the script ended before its optimizer made a step: plan traces the first step")
    return captured


def _run(command: Sequence[str]) -> None:
    if command[0] == "-m":
        sys.argv = list(command[1:])
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(command)
        runpy.run_path(command[0], run_name="__main__")


class _Session:
    """One run of a script: makes parameters fake, and records from the model's first call to the optimizer's step."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.captured: CapturedModel | None = None
        self._tracer: Tracer | None = None
        self._recording = contextlib.ExitStack()
        self._hooks: list[Any] = []

    @contextlib.contextmanager
    def patches(self) -> Iterator[None]:
        """The context in which a script runs."""
        # torch annotates that the hook returns None, and documents that it may return a parameter.
        hook = register_module_parameter_registration_hook(self._fake_parameter)  # type: ignore[arg-type]
        with (
            strategies.planned_by(self._capture),
            _WithoutData(),
            _dropout_of_gpus(),
            warnings.catch_warnings(),
        ):
            # nn.TransformerEncoder copies its layer, and copying looks at the address of the data.
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            try:
                yield
            finally:
                self._recording.close()
                hook.remove()

    def _fake_parameter(self, module: nn.Module, name: str, given: nn.Parameter | None) -> nn.Parameter | None:
        """Return the fake parameter that a module gets in place of one with data; it is one for all modules."""
        if given is None or isinstance(given, FakeTensor) or is_lazy(given):
            return None
        fake: nn.Parameter | None = getattr(given, _FAKE, None)
        if fake is None:
            with self._mode:
                data = torch.empty(given.shape, dtype=given.dtype)
            fake = nn.Parameter(data, given.requires_grad)
            vars(fake).update(vars(given))
            setattr(given, _FAKE, fake)
        return fake

    def _capture(self, model: nn.Module, optimizers: Sequence[Optimizer], options: ParallelOptions) -> None:
        if self.captured is not None:
            raise SetupError("plan works for a script that parallelizes one model, and this one parallelizes several")
        blocks = find_blocks(model, options.blocks)
        self.captured = CapturedModel(model, optimizers, options, blocks)
        self._hooks = [model.register_forward_pre_hook(self._before_forward, with_kwargs=True)]
        if not optimizers:
            raise SetupError(
                "run.parallelize was called without an optimizer: plan needs it, for the memory of its state"
            )
        self._hooks += [each.register_step_pre_hook(self._before_step) for each in optimizers]

    def _before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        captured = self.captured
        assert captured is not None  # noqa: S101
        if not (model.training and torch.is_grad_enabled()):
            return
        captured.calls.append((args, kwargs))
        if self._tracer is None:
            self._tracer = Tracer(model, captured.blocks, self._gpu)
            options = captured.options
            self._recording.enter_context(
                _as_trained(model, captured.blocks, precision=options.precision, recompute=options.recompute)
            )
            self._recording.enter_context(self._tracer.recording())

    def _before_step(self, *_: Any) -> None:
        captured = self.captured
        if captured is not None and self._tracer is not None:
            self._recording.close()
            for hook in self._hooks:
                hook.remove()
            captured.trace = self._tracer.result()
            raise _StepDone


def retrace(captured: CapturedModel, gpu: Gpu, *, precision: Precision | None, recompute: bool) -> StepTrace:
    """Trace the captured step in another precision, or with recomputation. Needs the model as the script made it."""
    model, blocks = captured.model, captured.blocks
    args, kwargs = captured.calls[0]
    parameter = next(model.parameters())
    assert isinstance(parameter.data, FakeTensor)  # noqa: S101
    tracer = Tracer(model, blocks, gpu)
    with (
        _WithoutData(),
        _dropout_of_gpus(),
        _as_trained(model, blocks, precision=precision, recompute=recompute),
        parameter.data.fake_mode,
        tracer.recording(),
    ):
        outputs = model(*args, **kwargs)
        ends = [leaf for leaf in pytree.leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        torch.autograd.backward(ends, [torch.empty_like(each) for each in ends])
    assert captured.trace is not None  # noqa: S101
    return tracer.result().with_loss_of(captured.trace)


@contextlib.contextmanager
def _as_trained(
    model: nn.Module, blocks: Sequence[nn.Module], *, precision: Precision | None, recompute: bool
) -> Iterator[None]:
    """Give the model the dtypes and the recomputation that `run.parallelize` would give it."""
    with contextlib.ExitStack() as stack:
        if recompute:
            for block in blocks:
                recompute_activations(block)
                stack.callback(block.__dict__.pop, "forward")
        if precision:
            stack.enter_context(_parameters_in(model, precision.param))
            for module in (*blocks, model):  # FSDP casts at the border of each block
                output = precision.output if module is model else precision.param
                for hook in _casts(module, precision.param, output):
                    stack.callback(hook.remove)
        yield


@contextlib.contextmanager
def _parameters_in(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Give the model parameters of another dtype, as FSDP does in its passes."""
    changed: list[tuple[nn.Module, str, nn.Parameter]] = []
    replaced: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, each in module._parameters.items():
            if each is not None and each.is_floating_point() and each.dtype != dtype:
                if id(each) not in replaced:
                    replaced[id(each)] = nn.Parameter(torch.empty_like(each, dtype=dtype), each.requires_grad)
                changed.append((module, name, each))
                module._parameters[name] = replaced[id(each)]
    try:
        yield
    finally:
        for module, name, each in changed:
            module._parameters[name] = each


def _casts(module: nn.Module, inputs: torch.dtype, outputs: torch.dtype) -> tuple[RemovableHandle, RemovableHandle]:
    """Hooks that cast the floating-point tensors which go into ``module`` and come out of it."""

    def cast(leaf: Any, dtype: torch.dtype) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return pytree.map_leaves((args, kwargs), lambda leaf: cast(leaf, inputs))

    def after(module: nn.Module, args: Any, result: Any) -> Any:
        return pytree.map_leaves(result, lambda leaf: cast(leaf, outputs))

    return module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)


class _WithoutData(TorchFunctionMode):
    """Answers 0 where a script reads the value of a fake tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS and isinstance(args[0], FakeTensor):
            return _READS[func]
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _dropout_of_gpus() -> Iterator[None]:
    """Have dropout keep the same tensors as on a GPU.

    It keeps a mask of one byte for each element. Attention's kernels draw the mask again in the backward pass, while
    torch's attention on a CPU takes a slow path for dropout, which keeps all scores.
    """
    drop, attention = F.dropout, F.scaled_dot_product_attention

    def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return torch.native_dropout(input, p, training)[0] if training and p else input

    def attend(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *rest: Any, **options: Any
    ) -> Any:
        return attention(query, key, value, attn_mask, 0.0, *rest, **options)

    # A TorchFunctionMode does not see the calls that torch's own functions make, as multi_head_attention_forward does.
    F.dropout, F.scaled_dot_product_attention = dropout, attend
    try:
        yield
    finally:
        F.dropout, F.scaled_dot_product_attention = drop, attention


_READS: dict[Callable[..., Any], Any] = {
    torch.Tensor.item: 0.0,
    torch.Tensor.__float__: 0.0,
    torch.Tensor.__int__: 0,
    torch.Tensor.__bool__: False,
}


def open_group(world_size: int) -> None:
    """Open a process group of ``world_size`` ranks of which only this one, rank 0, exists."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
