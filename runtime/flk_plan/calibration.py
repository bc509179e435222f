"""Calibration: figures that `flk bench` has measured on some hardware, in place of published figures.

Where the device was the bound of a step without communication, the computation is scaled so that the step takes as long
as it was measured to take. The host has a time of its own for each operation that it launches. The time of a
collective is a latency and a bandwidth that are fitted to measured times of several sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final


@dataclass(frozen=True)
class Link:
    """Time of a collective: ``latency`` seconds, and ``per_byte`` seconds for each byte of the whole tensor."""

    latency: float
    per_byte: float

    def seconds(self, size: float) -> float:
        """Time of a collective on a tensor of ``size`` bytes."""
        return self.latency + size * self.per_byte

    @classmethod
    def fit(cls, sizes: Sequence[tuple[float, float]]) -> Link:
        """Fit to (bytes, seconds), in increasing order of bytes. The error is relative, so that all sizes count.

        Raises ValueError if there are no sizes.
        """
        if not sizes:
            raise ValueError("a fit needs at least one size")
        # Weighted least squares for latency + per_byte * size, with weights 1/seconds².
        weight = [1 / max(seconds, 1e-9) ** 2 for _, seconds in sizes]
        total = sum(weight)
        x = sum(w * size for w, (size, _) in zip(weight, sizes, strict=True)) / total
        y = sum(w * seconds for w, (_, seconds) in zip(weight, sizes, strict=True)) / total
        spread = sum(w * (size - x) ** 2 for w, (size, _) in zip(weight, sizes, strict=True))
        both = sum(w * (size - x) * (seconds - y) for w, (size, seconds) in zip(weight, sizes, strict=True))
        per_byte = max(0.0, both / spread) if spread else y / x
        latency = y - per_byte * x
        return cls(latency, per_byte) if latency > 0 else cls(0.0, y / x)


@dataclass(frozen=True)
class Calibration:
    """Measured figures of some hardware."""

    compute: float = 1.0  # measured time of a computation over the predicted one
    launch: float | None = None  # seconds that the host takes to launch an operation; None: not measured
    links: Mapping[tuple[str, int, int], Link] = field(default_factory=dict)  # by kind, ranks and stride

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Calibration:
        """The calibration that ``to_dict`` has written, or collectives as `flk_plan.bench` measures them."""
        links = {}
        for each in data.get("collectives", ()):
            link = Link.fit(each["sizes"]) if "sizes" in each else Link(each["latency"], each["per_byte"])
            links[each["kind"], each["ranks"], each["stride"]] = link
        return cls(data.get("compute", 1.0), data.get("launch"), links)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `parse`."""
        links = [
            {"kind": kind, "ranks": ranks, "stride": stride, "latency": link.latency, "per_byte": link.per_byte}
            for (kind, ranks, stride), link in self.links.items()
        ]
        return {"compute": self.compute, "launch": self.launch, "collectives": links}


UNMEASURED: Final = Calibration()
