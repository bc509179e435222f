"""Presets of the network between GPUs: NCCL's variables and the devices a pod asks for, as data with their sources.

The data is ``fabrics.json`` beside this module, which the chart reads too. Presets do not carry over from one cloud to
another, so each names the source of its values. The environment and the patch of a job override any value.
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
    data = json.loads((Path(__file__).parent / "fabrics.json").read_text(encoding="utf-8"))
    return {name: Fabric(name, **preset) for name, preset in data.items()}
