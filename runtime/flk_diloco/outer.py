"""OuterOptimizer: the parameters that all workers agree on, and the step that a round's average takes on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flk_diloco import compression
from flk_diloco.compression import ErrorFeedback
from flk_diloco.options import DiLoCo


class OuterOptimizer:
    """Nesterov SGD on outer gradients, a vector in float32 on the CPU (arXiv 2311.08105).

    All workers hold the same values, since all apply the same averages to the same start. ``version`` counts the
    rounds that the parameters have been through.
    """

    def __init__(self, start: torch.Tensor, options: DiLoCo) -> None:
        """``start`` holds the initial parameters, float32 of shape (size,)."""
        self.parameters = start.clone()
        self.version = 0
        self._feedback = ErrorFeedback(options.dtype, len(start))
        self._dtype = options.dtype
        self._sgd = torch.optim.SGD(
            [self.parameters], lr=options.lr, momentum=options.momentum, nesterov=options.momentum > 0
        )
        self._momentum = torch.zeros(len(start) if options.momentum else 0, dtype=torch.float32)
        if options.momentum:
            self._sgd.state[self.parameters]["momentum_buffer"] = self._momentum

    def outer_gradient(self, local: torch.Tensor) -> bytes:
        """The encoded outer gradient: the agreed parameters minus this worker's ``local``, float32, shape (size,)."""
        return self._feedback.encode(self.parameters - local)

    def apply(self, average: bytes | bytearray) -> None:
        """Take a step with the encoded average of a round."""
        self.parameters.grad = compression.decode(average, self._dtype, len(self.parameters))
        self._sgd.step()
        self.parameters.grad = None
        self.version += 1

    def to_bytes(self) -> bytes:
        """Parameters and momentum, for a worker that joins."""
        return compression.encode(self.parameters, "fp32") + compression.encode(self._momentum, "fp32")

    def from_bytes(self, data: bytes | bytearray, version: int) -> None:
        """Take over the result of another worker's `to_bytes`. Raises ValueError if the length does not fit."""
        tensors = (self.parameters, self._momentum)
        flat = compression.decode(data, "fp32", sum(map(len, tensors)))
        for own, received in zip(tensors, torch.split(flat, [len(values) for values in tensors]), strict=True):
            own.copy_(received)
        self.version = version
        self._feedback.residual.zero_()  # it is of steps that this worker has not contributed to what it takes over

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint: the version, and tensors of shape (size,)."""
        return {"version": self.version, **self._tensors()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a result of `state_dict`. Raises ValueError if the state is of other parameters or options."""
        for key, values in self._tensors().items():
            if len(state[key]) != len(values):
                raise ValueError(f"its {key} differs: the model, the momentum or the dtype has changed")
            values.copy_(state[key])
        self.version = state["version"]

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {"parameters": self.parameters, "momentum": self._momentum, "residual": self._feedback.residual}
