"""UnusedParameters: under FSDP2, a parameter that no rank has used has no gradient, as in one process and under DDP.

FSDP2 gives a gradient of 0 to each parameter of a block that some rank has not used. An optimizer with momentum or
weight decay moves a parameter with that gradient, and leaves one that has none.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from flk_runtime.distributed import comm_device, parameters_in


class UnusedParameters:
    """Takes the gradients of a sharded model's parameters away where no rank has used them."""

    def __init__(self, units: Iterable[nn.Module], *, communicates: bool) -> None:
        """``units``: the modules that fully_shard has sharded. ``communicates``: over all ranks, not on this alone."""
        self._communicates = communicates
        self._passed: set[nn.Parameter] = set()  # got a gradient on this rank since they were reduced
        self._used: set[nn.Parameter] = set()  # used on this rank since they had no gradient
        self._gradients: dict[nn.Parameter, weakref.ref[torch.Tensor]] = {}  # as they were last reduced
        self._full: WeakIdKeyDictionary = WeakIdKeyDictionary()  # gathered parameters that are watched
        for unit in units:
            places = [
                (module, name, each)
                for module in unit.modules()
                for name, each in module._parameters.items()
                if each is not None and each.requires_grad
            ]
            unit.register_forward_pre_hook(lambda *_, places=places: self._watch(places))  # after it has gathered them
            for parameter in {each for _, _, each in places} - self._gradients.keys():
                self._gradients[parameter] = weakref.ref(torch.empty(0))
                parameter.register_post_accumulate_grad_hook(self._note_reduced)  # type: ignore[no-untyped-call]

    def remove(self, optimizer: Optimizer) -> None:
        """Set gradients of parameters that no rank has used to None, before a step of ``optimizer``. Collective."""
        parameters = [each for each in parameters_in(optimizer) if each in self._gradients]
        # A gradient that the script has made is no 0, and stays.
        used = [int(each in self._used or _is_not_zero(each.grad)) for each in parameters]
        if self._communicates:
            total = torch.tensor(used, device=comm_device(torch.device("cpu")))
            dist.all_reduce(total)
            used = total.tolist()
        for parameter, count in zip(parameters, used, strict=True):
            if not count:
                parameter.grad = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _watch(self, places: Iterable[tuple[nn.Module, str, nn.Parameter]]) -> None:
        for module, name, parameter in places:
            full = module._parameters[name]
            if full is not None and full.requires_grad and full is not parameter and full not in self._full:
                self._full[full] = True
                full.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda _, each=parameter: self._passed.add(each)
                )

    def _note_reduced(self, parameter: nn.Parameter) -> None:
        """The gradient of a shard was reduced: it is the earlier one, to which has been added, or a new one."""
        if self._gradients[parameter]() is not parameter.grad:
            self._used.discard(parameter)
            self._gradients[parameter] = weakref.ref(parameter.grad)  # type: ignore[arg-type]
        if parameter in self._passed:
            self._passed.remove(parameter)
            self._used.add(parameter)


def _is_not_zero(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and bool(gradient.detach().to_local().any())  # type: ignore[attr-defined]
