"""Capture: runs a training script up to its first step, without memory for its model, and traces that step.

The script runs as rank 0 of the planned job, in a process group whose other ranks do the same as this one. Its
parameters are fake tensors: they have a shape and no data. Data and everything else are real. When the optimizer makes
its first step, the script ends.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from flk_plan.fake import META, FakeMode, WithoutData
from flk_plan.hardware import Gpu
from flk_plan.trace import StepTrace, Tracer
from flk_runtime.distributed import parameters_in
from flk_runtime.errors import SetupError
from flk_runtime.parallel import ParallelModel, ParallelOptions, Precision
from flk_runtime.parallel.blocks import find_blocks, sharded_units
from flk_runtime.parallel.checks import check_shardable
from flk_runtime.parallel.computation import recompute_activations
from flk_runtime.parallel.initialize import check_init, meta_names
from flk_runtime.system import pytree, trial
from flk_runtime.training.process import current

_NOT_CALLED = "the script did not call run.parallelize: plan takes the model and the optimizer from that call"
_FAKE = "_flk_fake"  # attribute of a parameter: the one without data that modules have in its place


@dataclass
class CapturedModel:
    """A model that the script has parallelized, and its first step, of which the first micro-batch was traced."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    options: ParallelOptions
    blocks: list[nn.Module]
    trace: StepTrace = field(default_factory=StepTrace)  # without segments until the step is made
    synced: list[bool] = field(default_factory=lambda: [True])  # for each micro-batch: its gradients are communicated
    autocast: torch.dtype | None = None  # in which the model was called
    can_shard: bool = field(default=False, init=False)  # `run.parallelize` would not refuse to shard the model

    def __post_init__(self) -> None:
        """Look now: what the script does to the model later, such as hooks, is allowed."""
        with contextlib.suppress(SetupError):
            check_shardable(self.model, self.blocks, self.options, "sharding")
            self.can_shard = True


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
            trial.run_script(command)
        except _StepDone:
            pass
        except SystemExit as error:
            raise SetupError(f"the script ended with exit code {error.code} before its first step") from None
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise SetupError(
                f"the first step depends on values of the model ({error.func}), which plan does not have: for a plan, "
                "write loss[mask].mean() as (loss * mask).sum() / mask.sum(), and leave out what reads values where "
                "FLK_TRIAL is set"
            ) from error
        except Exception as error:
            if not isinstance(error, SetupError) and session.captured is None and current.training is None:
                text = str(error).strip().partition("\n")[0]
                # Such as a script with torch's own wrappers.
                raise SetupError(f"{_NOT_CALLED}; it raised {type(error).__name__}: {text}") from None
            raise
    captured = session.captured
    if captured is None:
        raise SetupError(_NOT_CALLED)
    if not captured.trace.segments:
        raise SetupError("the script ended before its optimizer made a step: plan traces the first step")
    return captured


class _Session:
    """One run of a script: makes parameters fake, and records from the model's first call to the optimizer's step."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._mode = FakeMode(0)
        self.captured: CapturedModel | None = None
        self._tracer: Tracer | None = None
        self._trained: list[nn.Parameter] = []  # of the model; during its calls it may have others of lower precision
        self._training = True  # the mode of the model in its latest call; one from Transformers may train in another
        self._recording = contextlib.ExitStack()
        self._hook: Any = None  # of the model's calls

    @contextlib.contextmanager
    def patches(self) -> Iterator[None]:
        """The context in which a script runs."""
        # torch annotates that the hook returns None, and documents that it may return a parameter.
        hooks = [
            register_module_parameter_registration_hook(self._fake_parameter),  # type: ignore[arg-type]
            register_optimizer_step_pre_hook(self._before_step),
        ]
        with (
            current.observed(planner=self._capture),
            WithoutData(),
            _of_the_plan(),
            _kernels_of_gpus(),
            warnings.catch_warnings(),
        ):
            # nn.TransformerEncoder copies its layer, and copying looks at the address of the data.
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            try:
                yield
            finally:
                self._recording.close()
                for hook in hooks:
                    hook.remove()

    def _fake_parameter(self, module: nn.Module, name: str, given: nn.Parameter | None) -> nn.Parameter | None:
        """Return the fake parameter that a module gets in place of one with data; it is one for all modules."""
        if given is None or isinstance(given, FakeTensor) or is_lazy(given):
            return None
        fake: nn.Parameter | None = getattr(given, _FAKE, None)
        if fake is None:
            with self._mode:
                data = torch.empty(given.shape, dtype=given.dtype, device="cpu")  # also of one on the meta device
            fake = nn.Parameter(data, given.requires_grad)
            vars(fake).update(vars(given))
            setattr(given, _FAKE, fake)
            setattr(fake, META, given.is_meta)
        return fake

    def _capture(self, model: nn.Module, optimizers: Sequence[Optimizer], options: ParallelOptions) -> ParallelModel:
        if self.captured is not None:
            raise SetupError("plan works for a script that parallelizes one model, and this one parallelizes several")
        unset = [name for name, each in model.named_parameters() if getattr(each, META, False)]
        check_init([*unset, *meta_names(model)], options.init)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[name] = torch.zeros_like(buffer, device="cpu")
        self.captured = CapturedModel(model, optimizers, options, find_blocks(model, options.blocks))
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._hook = model.register_forward_pre_hook(self._before_forward)
        planned = ParallelModel(model)
        planned.no_sync = self._no_sync  # type: ignore[method-assign]
        return planned

    @contextlib.contextmanager
    def _no_sync(self) -> Iterator[None]:
        """Record of which micro-batches the gradients are not communicated: their backward pass is in this context."""
        assert self.captured is not None  # noqa: S101
        synced, first = self.captured.synced, self._micro_batches
        yield
        synced[first : self._micro_batches] = [False] * (self._micro_batches - first)

    @property
    def _micro_batches(self) -> int:
        """The number of micro-batches whose backward pass has begun."""
        if self.captured is None or self._tracer is None:
            return 0
        return len(self.captured.synced) - (not self._tracer.backward_began)

    def _before_forward(self, model: nn.Module, *_: Any) -> None:
        captured = self.captured
        assert captured is not None  # noqa: S101
        if torch._C._current_graph_task_id() >= 0 or not torch.is_grad_enabled():  # it recomputes, or evaluates
            return
        if self._tracer is not None and model.training and not self._training:
            self._recording.close()  # what was recorded was an evaluation
            self._tracer = None
            captured.synced = [True]
        self._training = model.training
        if self._tracer is None:
            self._tracer = Tracer(model, captured.blocks, self._gpu)
            captured.autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
            self._recording.enter_context(_as_trained(captured))
            self._recording.enter_context(self._tracer.recording())
        elif self._tracer.backward_began:
            self._tracer.begin_micro_batch()
            captured.synced.append(True)

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        captured = self.captured
        if captured is None:
            raise SetupError(_NOT_CALLED)
        if not captured.optimizers and _trains(optimizer, self._trained):
            captured.optimizers = [optimizer]
        closure = next((each for each in (*args[1:], *kwargs.values()) if callable(each)), None)
        if optimizer in captured.optimizers and closure:  # it makes the passes of the step
            with torch.enable_grad():
                closure()
        if optimizer in captured.optimizers and self._tracer is not None:
            self._recording.close()
            self._hook.remove()
            captured.trace = self._tracer.result()
            raise _StepDone


def _trains(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> bool:
    """Whether an optimizer that was not given to `parallelize` has these. Raises SetupError if it has only a part."""
    held = set(map(id, parameters_in(optimizer)))
    trained = {id(parameter) for parameter in parameters}
    if held & trained and not trained <= held:
        raise SetupError("several optimizers train the model: pass them to run.parallelize, so that plan knows them")
    return bool(held & trained)


@contextlib.contextmanager
def _as_trained(captured: CapturedModel) -> Iterator[None]:
    """Give the model the dtypes and the recomputation that `run.parallelize` would give it."""
    model, blocks, precision = captured.model, captured.blocks, captured.options.precision
    with contextlib.ExitStack() as stack:
        for each in blocks if captured.options.recompute else ():
            recompute_activations(each)
            stack.callback(each.__dict__.pop, "forward")
        if precision:
            stack.enter_context(_parameters_in(model, precision))
            units = sharded_units(model, blocks, precision, ends=captured.options.blocks is None)
            for module in (*units, model):  # FSDP casts at the border of each unit
                output = precision.output_dtype(module, root=module is model)
                for hook in _casts(module, precision.param_dtype(module), output):
                    stack.callback(hook.remove)
        yield


@contextlib.contextmanager
def _parameters_in(model: nn.Module, precision: Precision) -> Iterator[None]:
    """Give the model parameters of other dtypes, as FSDP does in its passes."""
    changed: list[tuple[nn.Module, str, nn.Parameter]] = []
    replaced: dict[int, nn.Parameter] = {}
    exact = {id(inner) for each in model.modules() if precision.computes_in_float32(each) for inner in each.modules()}
    for module in model.modules():
        dtype = torch.float32 if id(module) in exact else precision.param
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


def _casts(
    module: nn.Module, inputs: torch.dtype, outputs: torch.dtype | None
) -> tuple[RemovableHandle, RemovableHandle]:
    """Hooks that cast the floating-point tensors which go into ``module`` and come out of it."""

    def cast(leaf: Any, dtype: torch.dtype | None) -> Any:
        return leaf.to(dtype) if dtype and isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return pytree.map_leaves((args, kwargs), lambda leaf: cast(leaf, inputs))

    def after(module: nn.Module, args: Any, result: Any) -> Any:
        return pytree.map_leaves(result, lambda leaf: cast(leaf, outputs))

    return module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)


@contextlib.contextmanager
def _of_the_plan() -> Iterator[None]:
    """Have the script use the process group of the plan, and convert modules with fake parameters.

    torch 2.13 has no hook for either: no mode sees init_process_group, and a module that is converted swaps its fake
    parameters, whatever ``torch.__future__`` says.
    """
    open_real, swap_real = dist.init_process_group, torch.utils.swap_tensors

    def swap(first: torch.Tensor, second: torch.Tensor) -> None:
        if isinstance(first, FakeTensor):
            first.data = second.data  # torch refuses a swap of fake tensors, which have weak references
        else:
            swap_real(first, second)  # type: ignore[no-untyped-call]

    dist.init_process_group = lambda *args, **options: None
    torch.utils.swap_tensors = swap
    try:
        yield
    finally:
        dist.init_process_group, torch.utils.swap_tensors = open_real, swap_real


@contextlib.contextmanager
def _kernels_of_gpus() -> Iterator[None]:
    """Have dropout and RMSNorm keep the same tensors as on a GPU.

    Dropout keeps a mask of one byte for each element. Attention's kernels draw the mask again in the backward pass,
    while torch's attention on a CPU takes a slow path for dropout, which keeps all scores. Since torch 2.9 RMSNorm has
    a kernel on GPUs, which a weight of another dtype than the input does not get. On a CPU it is several operations,
    which keep tensors in float32 (rms_norm in aten/src/ATen/native/layer_norm.cpp).
    """
    drop, attention, norm = F.dropout, F.scaled_dot_product_attention, F.rms_norm

    def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return torch.native_dropout(input, p, training)[0] if training and p else input

    def attend(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *rest: Any, **options: Any
    ) -> Any:
        return attention(query, key, value, attn_mask, 0.0, *rest, **options)

    def rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
        if not _HAS_RMS_NORM or (weight is not None and weight.dtype != input.dtype):
            return norm(input, normalized_shape, weight, eps)
        return cast(Any, _RMSNorm.apply)(input, weight, len(normalized_shape))

    # A TorchFunctionMode does not see the calls that torch's own functions make, as multi_head_attention_forward does.
    F.dropout, F.scaled_dot_product_attention, F.rms_norm = dropout, attend, rms_norm
    try:
        yield
    finally:
        F.dropout, F.scaled_dot_product_attention, F.rms_norm = drop, attention, norm


class _RMSNorm(torch.autograd.Function):
    """Operations as many, as long and with the same tensors as the kernels of RMSNorm on a GPU, for tensors without
    data.
    """

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor | None, dimensions: int) -> torch.Tensor:
        output = input.neg() if weight is None else input * weight  # without data, also where only the weight is
        scale = output.new_empty(input.shape[:-dimensions], dtype=torch.float32)  # one for each row
        ctx.save_for_backward(input, weight, scale)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        input, weight, _ = ctx.saved_tensors
        return torch.mul(gradients[0], input), None if weight is None else torch.empty_like(weight), None


_HAS_RMS_NORM = hasattr(torch.ops.aten, "_fused_rms_norm_backward")
