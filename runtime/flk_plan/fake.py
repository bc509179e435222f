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
        if func is torch.ops.aten.index.Tensor:
            args = args[0], [each for index in args[1] for each in _without_mask(index)]
        if func is _GROUPED and args[0].dtype != torch.bfloat16:  # the only dtype of which torch knows the shapes
            given = [each.to(torch.bfloat16) for each in args[:2]]
            result: Any = super().__torch_dispatch__(func, types, (*given, *args[2:]), kwargs)
            return result.to(args[0].dtype)
        return super().__torch_dispatch__(func, types, args, kwargs)


def _without_mask(index: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """An index without masks: for a mask of the script's data, whose values are known, the places where it is true."""
    if index is None or index.dtype != torch.bool or isinstance(index, FakeTensor):
        return (index,)
    return index.nonzero(as_tuple=True)


class WithoutData(TorchFunctionMode):
    """Answers 0 where a script reads the value of a fake tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], FakeTensor):
            if func in _ANSWERS:
                return _ANSWERS[func](torch.zeros(args[0].shape, dtype=args[0].dtype))
            if func == torch.Tensor.data.__set__ and args[1].device.type != "meta":  # type: ignore[attr-defined]
                setattr(args[0], META, False)  # as Module.to_empty does
        return func(*args, **(kwargs or {}))


# What a function of a tensor gives, from zeros in its place, which take no memory as long as nothing reads them.
_ANSWERS: dict[Callable[..., Any], Callable[[torch.Tensor], Any]] = {
    torch.Tensor.item: torch.Tensor.item,
    torch.Tensor.__float__: torch.Tensor.__float__,
    torch.Tensor.__int__: torch.Tensor.__int__,
    torch.Tensor.__bool__: torch.Tensor.__bool__,
    torch.Tensor.numpy: torch.Tensor.numpy,
    torch.Tensor.tolist: torch.Tensor.tolist,
    **dict.fromkeys((torch.allclose, torch.Tensor.allclose, torch.equal, torch.Tensor.equal), lambda zeros: True),
    **dict.fromkeys(
        (torch.isfinite, torch.Tensor.isfinite), lambda zeros: torch.ones((), dtype=torch.bool).expand(zeros.shape)
    ),
    torch._is_all_true: lambda zeros: True,  # what a distribution asks of its arguments
    torch.Tensor.__format__: lambda zeros: "0",
}
