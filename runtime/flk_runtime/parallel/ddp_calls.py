"""adapt_calls(): calls of a model in DDP inside of torch.func, and calls whose output hides tensors in objects."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from flk_runtime.parallel.reachable import hidden_tensors


def adapt_calls(module: DistributedDataParallel) -> None:
    """Have ``module``, which has not been called yet, do what torch's DDP fails at."""
    module.register_forward_pre_hook(_prepare)
    if module.find_unused_parameters:
        _HiddenOutputs(module)


def _prepare(module: Any, *_: Any) -> None:
    """Make buckets and send buffers outside of a transformation of torch.func, such as jvp, where DDP cannot."""
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None:
        return
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with temporarily_clear_interpreter_stack():
        if torch.is_grad_enabled() and module.reducer._rebuild_buckets():
            module._has_rebuilt_buckets = True
        if module._check_sync_bufs_pre_fwd():
            module._sync_buffers()
            module.require_forward_param_sync = False  # until the end of the forward pass


class _HiddenOutputs:
    """Shows DDP the tensors that an output has in attributes of objects: it would take their parameters for unused."""

    def __init__(self, module: DistributedDataParallel) -> None:
        self._is_called = False  # by DDP, not by the script itself
        self._has_hidden = False
        module.register_forward_pre_hook(self._begin)
        module.module.register_forward_hook(self._show)
        module.register_forward_hook(self._restore, always_call=True)

    def _begin(self, *_: Any) -> None:
        self._is_called = torch.is_grad_enabled()

    def _show(self, _: nn.Module, arguments: Any, output: Any) -> Any:
        if not self._is_called:
            return None
        self._is_called = False
        hidden = hidden_tensors(output, _find_tensors(output))  # type: ignore[no-untyped-call]
        self._has_hidden = bool(hidden)
        return (output, hidden) if hidden else None

    def _restore(self, _: nn.Module, arguments: Any, output: Any) -> Any:
        has_hidden, self._has_hidden, self._is_called = self._has_hidden, False, False
        return output[0] if has_hidden and output is not None else None
