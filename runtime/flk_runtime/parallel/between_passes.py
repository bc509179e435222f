"""BetweenPasses: what a script reads and sets of sharded parameters between two passes is as in one process.

After a forward pass full parameters are in the place of shards, which have the gradients. After a backward pass in
no_sync full parameters have them. So ``parameter.grad = None`` would drop nothing, and what is read would be wrong.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from flk_runtime.distributed import is_settled
from flk_runtime.errors import SetupError
from flk_runtime.parallel.model import local
from flk_runtime.parallel.records import GRAD, drop_unreduced, is_unreduced, sharded_parameters, stand_ins
from flk_runtime.system.bits import bit_sum

_KINDS: Final[tuple[Any, ...]] = (nn.Parameter, DTensor)  # the classes of sharded and of full parameters
_REQUIRES_GRAD: Final[Any] = torch.Tensor.requires_grad
_DATA: Final[Any] = torch.Tensor.data


class BetweenPasses:
    """Gives the classes of parameters attributes that know of shards as long as a script may use them.

    The attributes stay and are torch's own in a pass: Python 3.13 no longer caches the attributes of a class that is
    changed a thousand times.
    """

    def __init__(self) -> None:
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._is_active, self._is_paused = False, False
        self._records: dict[int, Any] = {}  # FSDP2's, by the ids of the shard and of its stand-ins
        self._sums = WeakIdKeyDictionary()  # of the bits of data that the script has read, by stand-in
        plain = torch.Tensor.requires_grad_

        def requires_grad_(parameter: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:
            if not self._is_active:
                return plain(parameter, requires_grad)
            self._train(parameter, requires_grad)
            return parameter

        self._attributes: dict[str, Any] = {
            "grad": property(self._read, self._set, lambda parameter: self._set(parameter, None)),
            "requires_grad": property(_REQUIRES_GRAD.__get__, self._train),
            "requires_grad_": requires_grad_,
            "data": property(self._read_data, self._set_data),
        }

    def watch(self, model: nn.Module) -> None:
        """Know the parameters of ``model``, which is sharded."""
        if not self._models:
            for kind in _KINDS:
                for name, value in self._attributes.items():
                    setattr(kind, name, value)
        self._models.add(model)

    def begin(self) -> None:
        """From now on the script may use parameters, unless this is inside of a backward pass, which may call units."""
        if not (self._is_active or self._is_paused) and torch._C._current_graph_task_id() == -1:
            self._is_active = True

    def end(self) -> None:
        """A pass begins, in which FSDP2 uses parameters."""
        self._is_active, self._records = False, {}

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, the attributes do what torch's own do, which is faster."""
        was_active, was_paused = self._is_active, self._is_paused
        self.end()
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = was_paused
            if was_active:
                self.begin()

    def changed(self, parameters: Iterable[torch.Tensor]) -> list[bool]:
        """Which of ``parameters``, stand-ins of shards, have other data than when the script read them; forget it."""
        if not self._sums:
            return []
        read = [(each, self._sums.pop(each, None)) for each in parameters]  # type: ignore[no-untyped-call]
        return [before is not None and bool(before != bit_sum(local(each))) for each, before in read]

    def _record_of(self, parameter: torch.Tensor) -> Any:
        """FSDP2's record of a parameter; None for another one, and in a pass."""
        if not self._is_active:
            return None
        if not self._records:
            for model in self._models:
                for record in sharded_parameters(model):
                    for each in (record.sharded_param, *stand_ins(record)):
                        self._records[id(each)] = record
        return self._records.get(id(parameter))

    def _read(self, parameter: torch.Tensor) -> torch.Tensor | None:
        own: torch.Tensor | None = GRAD.__get__(parameter)
        record = self._record_of(parameter)
        if record is None:
            return own
        reduced: torch.Tensor | None = GRAD.__get__(record.sharded_param)
        if not is_unreduced(record):
            return reduced
        if own is None or own is reduced or reduced is not None:
            raise SetupError(
                "the gradient of a sharded parameter is used after a backward pass in no_sync, and the ranks have not "
                "averaged it: use it after the last backward pass of a step, which is outside of no_sync"
            )
        return own  # of a full parameter

    def _set(self, parameter: torch.Tensor, value: torch.Tensor | None) -> None:
        record = self._record_of(parameter)
        if record is None:
            GRAD.__set__(parameter, value)
        elif value is None:
            drop_unreduced(record)
            GRAD.__set__(record.sharded_param, None)
        else:
            self._read(parameter)
            GRAD.__set__(parameter if is_unreduced(record) else record.sharded_param, value)

    def _read_data(self, parameter: torch.Tensor) -> torch.Tensor:
        """The data of a parameter. A change of a stand-in's would be lost, and torch does not count it."""
        data: torch.Tensor = _DATA.__get__(parameter)
        record = self._record_of(parameter)
        if record is not None and parameter is not record.sharded_param and parameter not in self._sums:
            values = local(data)
            if values.untyped_storage().size():  # not freed
                self._sums[parameter] = bit_sum(values)
        return data

    def _set_data(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        is_shard = isinstance(parameter, DTensor) and is_settled(parameter)
        if is_shard or self._record_of(parameter) is not None:
            raise SetupError(
                "an assignment to .data of a sharded parameter would be lost: change it in place, as in "
                "parameter.data.copy_(values)"
            )
        _DATA.__set__(parameter, value)

    def _train(self, parameter: torch.Tensor, requires_grad: bool) -> None:
        record = self._record_of(parameter)
        for each in (record.sharded_param, *stand_ins(record)) if record else (parameter,):
            _REQUIRES_GRAD.__set__(each, requires_grad)


BETWEEN_PASSES: Final = BetweenPasses()
"""Of the sharded models of this process."""
