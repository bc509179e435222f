"""Watch: follows the steps of all optimizers of a script, by torch's hooks for all optimizers and modules."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from flk_runtime.checkpoint import CheckpointManager
from flk_runtime.distributed import parameters_in, process_group
from flk_runtime.system import pytree
from flk_verify.random_numbers import SameNumbers

_WRAPPERS: Final = re.compile(r"(^|\.)(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.)")


@dataclass
class Step:
    """What an optimizer begins a step with. The tensors are whole, on the CPU, in the order of its parameters."""

    optimizer: int  # in the order of first steps
    number: int  # of its step, from 1
    names: list[str]
    parameters: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    mean: list[torch.Tensor | None]  # over the ranks, of gradients that each rank has for itself; else None
    facts: dict[str, Any] = field(default_factory=dict)  # of the passes since the step before, of all ranks


class Done(BaseException):
    """Ends the script after the last step that is compared."""


class Watch:
    """Calls ``compare`` before and ``after`` after each step of an optimizer."""

    def __init__(self, steps: int, compare: Callable[[Step], None], after: Callable[[Optimizer, Step], None]) -> None:
        self._steps, self._compare, self._after = steps, compare, after
        self._counts: dict[Optimizer, int] = {}
        self._inside = 0  # of a call of an optimizer's step, which may call another one's
        self._depth = 0  # of calls of modules
        self._modules: list[nn.Module] = []  # which the script calls
        self._inputs: list[torch.Tensor] = []  # of their calls since the step before
        self._has_objects = False  # a module has returned something without tensors
        self._numbers: SameNumbers | None = None
        self._step: Step | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, all steps are followed. The random numbers are equal from the first pass or batch on."""
        hooks = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._behind),
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, with_kwargs=True, always_call=True),
        ]
        begin = CheckpointManager._set_rng

        @functools.wraps(begin)
        def begin_draws(manager: CheckpointManager) -> None:
            begin(manager)
            self._begin_draws()

        CheckpointManager._set_rng = begin_draws  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            CheckpointManager._set_rng = begin  # type: ignore[method-assign]
            if self._numbers:
                self._numbers.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            for each in hooks:
                each.remove()

    def _begin_draws(self) -> None:
        if self._numbers is None:
            self._numbers = SameNumbers()
            self._numbers.__enter__()  # type: ignore[no-untyped-call]

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        self._depth += 1
        if self._depth == 1 and torch.is_grad_enabled():
            self._begin_draws()
            if not any(module is each for each in self._modules):
                self._modules.append(module)

    def _leave(self, module: nn.Module, inputs: Any, named: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth or not torch.is_grad_enabled():
            return
        tensors = [each for each in pytree.leaves((inputs, named)) if isinstance(each, torch.Tensor)]
        self._inputs.extend(_sums(each) for each in tensors if each.numel() and not isinstance(each, DTensor))
        self._has_objects |= not any(isinstance(each, torch.Tensor) for each in pytree.leaves(output))

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._inside += 1
        if self._inside > 1:
            return
        number = self._counts.setdefault(optimizer, 0) + 1
        if number > self._steps:
            leave_together()
            raise Done
        self._counts[optimizer] = number
        parameters = parameters_in(optimizer)
        gradients, mean = whole_gradients(parameters)
        self._step = Step(
            list(self._counts).index(optimizer),
            number,
            self._names(parameters),
            [whole(each) for each in parameters],
            gradients,
            mean,
            self._facts(optimizer, parameters),
        )
        self._compare(self._step)

    def _behind(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._inside -= 1
        if self._inside:
            return
        assert self._step is not None  # noqa: S101
        self._after(optimizer, self._step)
        self._inputs, self._has_objects = [], False
        if self._numbers:
            self._numbers.begin_step(sum(self._counts.values()))
        if self._steps > 1 and min(self._counts.values()) >= self._steps:
            leave_together()
            raise Done

    @property
    def compared(self) -> int:
        """The number of steps that all optimizers have made."""
        return max(self._counts.values(), default=0)

    def _names(self, parameters: Sequence[torch.Tensor]) -> list[str]:
        """The names of parameters in the modules that the script calls; else their places in the optimizer."""
        named: dict[int, str] = {}
        for module in self._modules:
            for name, each in module.named_parameters():
                named.setdefault(id(each), _WRAPPERS.sub(r"\1", name).replace("..", ".").lstrip("."))
        return [named.get(id(each), f"parameter {number}") for number, each in enumerate(parameters)]

    def _facts(self, optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> dict[str, Any]:
        """What tells causes apart. Collective."""
        inside = [each for module in self._modules for each in module.modules()]
        wrappers = [each for each in inside if isinstance(each, DistributedDataParallel)]
        sums = torch.stack(self._inputs) if self._inputs else torch.zeros(0, 3, dtype=torch.float64)
        sums, counts = sums[:, :2], sums[:, 2].tolist()
        of_ranks = process_group.all_gather((len(sums), sums.sum(0).tolist(), sum(counts)))
        return {
            "eps": max((torch.finfo(each.dtype).eps for each in parameters if each.dtype.is_floating_point), default=0),
            "compute_eps": self._numbers.eps if self._numbers else 0.0,
            "inputs": [sum(each[1][place] for each in of_ranks) for place in (0, 1)],
            "calls": of_ranks[0][0],
            "uneven": len({each[2] for each in of_ranks}) > 1,
            "random": bool(self._numbers and self._numbers.has_other),
            "batch_norm": any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in inside),
            "synced": any(isinstance(each, nn.SyncBatchNorm) for each in inside),
            "held": any(not each.require_backward_grad_sync for each in wrappers),
            "wrapped": bool(wrappers),
            "sharded": any(isinstance(each, DTensor) for each in parameters),
            "objects": self._has_objects,
            "hyperparameters": _hyperparameters(optimizer),
            "clip": total_norm(whole_gradients(parameters, is_local=True)[0]),
        }


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of the elements, that of their squares, and the size of the first dimension: of all samples alike."""
    values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    values = values.cpu().double()
    size = tensor.shape[0] if tensor.ndim else 1
    return torch.stack([values.sum(), values.square().sum(), torch.tensor(float(size), dtype=torch.float64)])


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a parameter on the CPU, whole. Collective for a DTensor."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().clone()


def whole_gradients(
    parameters: Sequence[torch.Tensor], *, is_local: bool = False
) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
    """The gradients, whole, and the mean over the ranks of those that each rank has for itself. Collective."""
    gradients: list[torch.Tensor | None] = []
    means: list[torch.Tensor | None] = []
    for parameter in parameters:
        gradient = parameter.grad
        is_sharded = isinstance(parameter, DTensor)
        if is_local:
            gradients.append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
            continue
        if is_sharded and process_group.all_true(gradient is None)():
            gradient = None
        elif is_sharded or process_group.world_size() > 1:
            gradient = torch.zeros_like(parameter) if gradient is None else gradient
        if gradient is not None and gradient.is_sparse:
            gradient = gradient.to_dense()
        own = None if gradient is None else whole(gradient)
        means.append(None if is_sharded or own is None else _mean(own))
        gradients.append(own if parameter.grad is not None or is_sharded else None)
    return gradients, means


def _mean(tensor: torch.Tensor) -> torch.Tensor:
    if process_group.world_size() == 1:
        return tensor
    total = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double().to(_device())
    dist.all_reduce(total)
    mean = total.cpu() / dist.get_world_size()
    return (torch.view_as_complex(mean) if tensor.is_complex() else mean).to(tensor.dtype)


def _device() -> torch.device:
    """The device whose tensors the process group communicates."""
    is_nccl = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


def total_norm(gradients: list[torch.Tensor | None]) -> float:
    """The norm of all gradients together."""
    return math.hypot(*(float(wide(each).norm()) for each in gradients if each is not None))


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with more digits, to compute norms."""
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


def _hyperparameters(optimizer: Optimizer) -> list[str]:
    return [
        f"{name}={float(value):.12g}"
        for group in optimizer.param_groups
        for name, value in sorted(group.items())
        if isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    ]


def broadcast(text: str) -> str:
    """Rank 0's ``text`` on all ranks. Collective."""
    return process_group.on_main(lambda: text)


def set_parameters(optimizer: Optimizer, values: dict[int, torch.Tensor]) -> None:
    """Give some of an optimizer's parameters the values that they have on the ranks."""
    parameters = parameters_in(optimizer)
    with torch.no_grad():
        for place, value in values.items():
            parameter = parameters[place]
            target = parameter.to_local() if isinstance(parameter, DTensor) else parameter  # of one rank: all of it
            target.copy_(value.to(target.device))


def leave_together() -> None:
    """Wait for all ranks, so that none ends while another still communicates. Collective."""
    if dist.is_initialized():
        dist.barrier()
