"""Presets of the network between GPUs: NCCL's variables and the devices a pod asks for, as data with their sources.

The data is ``data/fabrics.json``, which the chart reads too. Presets do not carry over from one cloud to another, so
each names where its values were published; any value can be overridden by the job's own environment or its patch.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Fabric:
    """One preset: ``env`` of every rank, ``limits`` (extended resources) of every pod, and what else it ``needs``."""

    name: str
    description: str
    source: str
    env: dict[str, str]
    limits: dict[str, str] = field(default_factory=dict)
    needs: str = ""


@functools.cache
def fabrics() -> dict[str, Fabric]:
    """All presets by name."""
    data = json.loads((Path(__file__).parent / "data" / "fabrics.json").read_text(encoding="utf-8"))
    return {name: Fabric(name, **preset) for name, preset in data.items()}
