"""Types of GPUs: the labels by which the nodes of a cluster say which GPUs they have.

The data is ``gpus.json`` beside this module; the chart reads it too. For each type it has the values of each label: of
NVIDIA's feature discovery, GKE, Karpenter and EKS.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any, Final

TYPED: Final = re.compile(r"[A-Za-z][A-Za-z0-9]*:[1-9][0-9]{0,3}")


@functools.cache
def gpu_types() -> dict[str, dict[str, list[str]]]:
    """Return the values of the labels of nodes, by type and label."""
    data: dict[str, dict[str, list[str]]] = json.loads(Path(__file__).with_name("gpus.json").read_text("utf-8"))
    return data


def split_gpus(value: str) -> tuple[str, int]:
    """Split ``TYPE:N`` into the type and the number. Raises ValueError for anything else."""
    if not TYPED.fullmatch(value):
        raise ValueError(f"must be a number of GPUs, or TYPE:N like H100:8 (is {value!r})")
    name, _, number = value.partition(":")
    return gpu_type(name), int(number)


def gpu_type(name: str) -> str:
    """Return the name of a type in upper case. Raises ValueError for a type that flk does not know."""
    if name.upper() not in gpu_types():
        raise ValueError(
            f"flk knows no GPUs of type {name}, only {', '.join(gpu_types())}: "
            "choose nodes of others by their labels (--node-selector, nodes.selector)"
        )
    return name.upper()


def gpu_terms(name: str) -> list[dict[str, Any]]:
    """Return the terms of a node affinity of which a node with GPUs of this type fulfils one: one label says so."""
    return [
        {"matchExpressions": [{"key": label, "operator": "In", "values": values}]}
        for label, values in sorted(gpu_types()[name].items())
    ]
