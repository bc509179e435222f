"""Fake: tensors that have a shape and no data, and what a script and torch get that read their values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

META: Final = "_flk_meta"  # attribute of a parameter without data: it stands for one on the meta device
_GROUPED: Any = getattr(getattr(torch.ops.aten, "_grouped_mm", None), "default", None)  # of a mixture of experts


class FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Makes tensors without data. Where torch itself reads the value of one, the answer is ``value``."""

    def __init__(self, value: int) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._value = value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            if not isinstance(args[0], FakeTensor):
                return func(*args)
            with contextlib.suppress(DataDependentOutputException):  # torch knows the values of constants
                return super().__torch_dispatch__(func, types, args, kwargs)
            return torch.full((), self._value, dtype=args[0].dtype).item()
        if func is _GROUPED and args[0].dtype != torch.bfloat16:  # the only dtype of which torch knows the shapes
            given = [each.to(torch.bfloat16) for each in args[:2]]
            result: Any = super().__torch_dispatch__(func, types, (*given, *args[2:]), kwargs)
            return result.to(args[0].dtype)
        return super().__torch_dispatch__(func, types, args, kwargs)


class WithoutData(TorchFunctionMode):
    """Answers 0 where a script reads the value of a fake tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], FakeTensor):
            if func in _READS:
                return _READS[func]
            if func in _CHECKS:
                return torch.ones((), dtype=torch.bool).expand(args[0].shape)
            if func in _COPIES:
                return _COPIES[func](torch.zeros(args[0].shape, dtype=args[0].dtype))
            if func == torch.Tensor.data.__set__ and args[1].device.type != "meta":  # type: ignore[attr-defined]
                setattr(args[0], META, False)  # as Module.to_empty does
        return func(*args, **(kwargs or {}))


_READS: dict[Callable[..., Any], Any] = {
    torch.Tensor.item: 0.0,
    torch.Tensor.__float__: 0.0,
    torch.Tensor.__int__: 0,
    torch.Tensor.__bool__: False,
}
_CHECKS = (torch.isfinite, torch.Tensor.isfinite)  # 0 is finite
_COPIES: dict[Callable[..., Any], Callable[[torch.Tensor], Any]] = {
    torch.Tensor.numpy: torch.Tensor.numpy,
    torch.Tensor.tolist: torch.Tensor.tolist,
    torch.Tensor.__format__: lambda zeros: "0",
}
