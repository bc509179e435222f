"""The user's request as data: the job, its file and flags, and the defaults of a namespace.

This package reads files and no network. `flk.manifest`, `flk.local`, `flk.jobs` and `flk.cli` import it; of flk it
imports only `flk.labels`, `flk.units` and `flk.errors`. The names below are imported at first use, because pydantic is
slow to import and commands that only check a name do not need it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from flk.spec.defaults import NamespaceDefaults
    from flk.spec.fabric import Fabric, fabrics
    from flk.spec.fields import Checkpoint, Toleration
    from flk.spec.job import Job
    from flk.spec.parts import Nodes, Resources

__all__ = ["Checkpoint", "Fabric", "Job", "NamespaceDefaults", "Nodes", "Resources", "Toleration", "fabrics"]

_MODULES: Final = {
    "Checkpoint": "fields",
    "Fabric": "fabric",
    "Job": "job",
    "NamespaceDefaults": "defaults",
    "Nodes": "parts",
    "Resources": "parts",
    "Toleration": "fields",
    "fabrics": "fabric",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"flk.spec.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'flk.spec' has no attribute {name!r}")
