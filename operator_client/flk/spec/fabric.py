"""Presets for the network between GPUs: NCCL's variables and the devices that a pod requests, with their sources.

The data is ``fabrics.json`` beside this module; the chart has a copy of it. A preset for one cloud does not fit
another, so each names the source of its values. The environment and the patch of a job override every value.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Fabric:
    """One preset: ``env`` of every rank, ``limits`` of every pod (by resource name), and what else it ``needs``."""

    name: str
    description: str
    source: str
    env: dict[str, str]
    limits: dict[str, str] = field(default_factory=dict)
    needs: str = ""


@functools.cache
def fabrics() -> dict[str, Fabric]:
    """Return all presets by name."""
    data = json.loads((Path(__file__).parent / "fabrics.json").read_text(encoding="utf-8"))
    return {name: Fabric(name, **preset) for name, preset in data.items()}
