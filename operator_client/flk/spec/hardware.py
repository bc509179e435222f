"""What flk knows of hardware: presets for the network between GPUs, and the labels of nodes that say their GPUs' type.

The data is ``hardware.json`` beside this module. A preset for one cloud does not fit another, so each names the source
of its values. The environment and the patch of a job override every value.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

from flk_runtime.contract.values import dataclass, field


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


_DATA: Final = json.loads(Path(__file__).with_name("hardware.json").read_text("utf-8"))
FABRICS: Final[dict[str, Fabric]] = {name: Fabric(name, **preset) for name, preset in _DATA["fabrics"].items()}
GPU_TYPES: Final[dict[str, dict[str, list[str]]]] = _DATA["gpus"]  # values of the labels of nodes, by type and label
TYPED: Final = re.compile(r"[A-Za-z][A-Za-z0-9]*:[1-9][0-9]{0,3}")


def split_gpus(value: str) -> tuple[str, int]:
    """Split ``TYPE:N`` into the type and the number. Raises ValueError for anything else."""
    if not TYPED.fullmatch(value):
        raise ValueError(f"must be a number of GPUs, or TYPE:N like H100:8 (is {value!r})")
    name, _, number = value.partition(":")
    return gpu_type(name), int(number)


def gpu_type(name: str) -> str:
    """Return the name of a type in upper case. Raises ValueError for a type that flk does not know."""
    if name.upper() not in GPU_TYPES:
        raise ValueError(
            f"flk knows no GPUs of type {name}, only {', '.join(GPU_TYPES)}: "
            "choose nodes of others by their labels (--node-selector, nodes.selector)"
        )
    return name.upper()


def gpu_terms(name: str) -> list[dict[str, Any]]:
    """Return the terms of a node affinity of which a node with GPUs of this type fulfils one: one label says so."""
    return [
        {"matchExpressions": [{"key": label, "operator": "In", "values": values}]}
        for label, values in sorted(GPU_TYPES[name].items())
    ]
