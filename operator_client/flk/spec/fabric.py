"""Presets for the network between GPUs: NCCL's variables and the devices that a pod requests, with their sources.

The data is ``fabrics.json`` beside this module; the chart reads it too. A preset for one cloud does not fit
another, so each names the source of its values. The environment and the patch of a job override every value.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Fabric:
    """One preset: variables, the resources that pods request, where these values come from and what else is needed."""

    name: str
    description: str
    source: str
    env: dict[str, str]  # of every rank
    limits: dict[str, str] = field(default_factory=dict)  # of every pod, by resource name
    limits_per_gpu: dict[str, str] = field(default_factory=dict)  # whole numbers, with or without a unit
    needs: str = ""

    def pod_limits(self, gpus: int) -> dict[str, str]:
        """Return the limits of a pod with ``gpus`` GPUs, by resource name."""
        scaled = {}
        for name, amount in self.limits_per_gpu.items() if gpus else ():
            number = re.match("[0-9]+", amount)
            scaled[name] = f"{int(number[0]) * gpus}{amount[number.end() :]}" if number else amount
        return self.limits | scaled


@functools.cache
def fabrics() -> dict[str, Fabric]:
    """Return all presets by name."""
    data = json.loads((Path(__file__).parent / "fabrics.json").read_text(encoding="utf-8"))
    return {name: Fabric(name, **preset) for name, preset in data.items()}
