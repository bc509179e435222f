"""LostChanges: finds changes in place of a part of a sharded tensor, where the part is a copy and the change is lost.

``weight[0]`` of a sharded weight has been gathered from the rank that holds the row. It can be read, as in a loss, but
``weight.grad[0] = 0`` changes the copy only, without a word.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from flk_runtime.errors import SetupError
from flk_runtime.parallel.model import local
from flk_runtime.system.bits import bit_sum

_LIMIT: Final = 1 << 26  # bytes of copies that are kept
_LIBRARIES: Final = ("torch.", "flk_runtime.")
_TRACED: Final = (FakeTensor, FunctionalTensor)  # with which a compiler traces a call


class LostChanges:
    """The copies that operations have made where one process would have had views, with the sums of their bits."""

    def __init__(self) -> None:
        self._copies: list[tuple[torch.Tensor, int, torch.Tensor, str]] = []
        self._bytes = 0

    def add(self, results: Any, argument: torch.Tensor) -> None:
        """Keep ``results``, a tensor or several that an operation has made of ``argument``, until the next `check`.

        Of many, until further ones come. Those that share the memory of the argument are no copies.
        """
        if isinstance(local(argument), _TRACED):  # without memory
            return
        memory = _memory(argument)
        for each in results if isinstance(results, (list, tuple)) else [results]:
            if isinstance(each, torch.Tensor) and _memory(each) != memory:
                self._copies.append((each, each._version, bit_sum(each.detach()), _line_of_script()))
                self._bytes += each.numel() * each.element_size()
        if self._bytes > _LIMIT:
            self.check()

    def check(self) -> None:
        """Forget all copies. Raises SetupError if one of them has been changed."""
        # torch counts no change by way of a DTensor, but one of the plain tensor, which full_tensor() gives.
        copies = [each for each in self._copies if each[0]._version == each[1]]
        self._copies, self._bytes = [], 0
        if not copies:
            return
        now = torch.stack([bit_sum(copy.detach()) for copy, *_ in copies])
        changed = (now != torch.stack([before for _, _, before, _ in copies])).tolist()
        if any(changed):
            line = copies[changed.index(True)][-1]
            raise SetupError(
                f"{line} changes a part of a sharded tensor in place, and the part is a copy: multiply the tensor by a "
                "mask, or use strategy ddp without precision="
            )


def _memory(tensor: torch.Tensor) -> int:
    """The address of the memory of a tensor, or of its part on this rank."""
    return local(tensor).untyped_storage().data_ptr()


def _line_of_script() -> str:
    """Where the script or another library uses torch now, as ``file:line``."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(_LIBRARIES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
