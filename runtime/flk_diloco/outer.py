"""OuterOptimizer: the parameters that all workers agree on, and the step that a round's average takes on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flk_diloco import compression
from flk_diloco.compression import ErrorFeedback
from flk_diloco.options import DiLoCo


class OuterOptimizer:
    """Nesterov SGD on outer gradients, one vector for each fragment, in float32 on the CPU (arXiv 2311.08105).

    All workers hold the same values, since all apply the same averages to the same start. ``versions`` counts the
    rounds that each fragment has been through.
    """

    def __init__(self, start: Sequence[torch.Tensor], options: DiLoCo) -> None:
        """``start`` holds each fragment's initial parameters, float32 of shape (size,)."""
        self.parameters = [values.clone() for values in start]
        self.versions = [0] * len(start)
        self._feedback = [ErrorFeedback(options.dtype, len(values)) for values in start]
        self._dtype = options.dtype
        self._sgd = torch.optim.SGD(
            self.parameters, lr=options.lr, momentum=options.momentum, nesterov=options.momentum > 0
        )
        self._momenta = [torch.zeros_like(values) for values in start] if options.momentum else []
        for values, momentum in zip(self.parameters, self._momenta, strict=False):
            self._sgd.state[values]["momentum_buffer"] = momentum

    def outer_gradient(self, fragment: int, local: torch.Tensor) -> bytes:
        """The encoded outer gradient: the agreed parameters minus this worker's ``local``, float32, shape (size,)."""
        return self._feedback[fragment].encode(self.parameters[fragment] - local)

    def apply(self, fragment: int, average: bytes | bytearray) -> None:
        """Take a step with the encoded average of a round."""
        values = self.parameters[fragment]
        values.grad = compression.decode(average, self._dtype, len(values))
        self._sgd.step()
        values.grad = None
        self.versions[fragment] += 1

    def to_bytes(self) -> bytes:
        """Parameters and momenta of all fragments, for a worker that joins."""
        return b"".join(compression.encode(values, "fp32") for values in (*self.parameters, *self._momenta))

    def from_bytes(self, data: bytes | bytearray, versions: Sequence[int]) -> None:
        """Take over the result of another worker's `to_bytes`. Raises ValueError if the length does not fit."""
        tensors = [*self.parameters, *self._momenta]
        flat = compression.decode(data, "fp32", sum(map(len, tensors)))
        for own, received in zip(tensors, torch.split(flat, [len(values) for values in tensors]), strict=True):
            own.copy_(received)
        self.versions = list(versions)
        for feedback in self._feedback:  # it is of steps that this worker has not contributed to what it takes over
            feedback.residual.zero_()

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint: tensors of shape (size,) for each fragment."""
        return {
            "versions": list(self.versions),
            "parameters": list(self.parameters),
            "momenta": list(self._momenta),
            "residuals": [feedback.residual for feedback in self._feedback],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a result of `state_dict`. Raises ValueError if the state is of other fragments or options."""
        own = self.state_dict()
        for key in ("parameters", "momenta", "residuals"):
            if [len(values) for values in state[key]] != [len(values) for values in own[key]]:
                raise ValueError(f"its {key} differ: the fragments, the momentum or the dtype have changed")
            for values, saved in zip(own[key], state[key], strict=True):
                values.copy_(saved)
        self.versions = list(state["versions"])
