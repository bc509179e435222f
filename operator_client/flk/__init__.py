"""flk: train PyTorch on Kubernetes, from a script to a PyTorchJob and the truth about it until it ends.

The Python API has the power of the command line: ``flk.Job(command=["train.py"], replicas=4).submit().wait()``.
Its names are loaded when they are first used, so that importing flk costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from flk_runtime.contract import VERSION as __version__

if TYPE_CHECKING:
    from flk.errors import FlkError
    from flk.jobs.handle import JobHandle
    from flk.spec.job import Job

_HOMES: Final = {"Job": "flk.spec.job", "JobHandle": "flk.jobs.handle", "FlkError": "flk.errors"}
__all__ = ["FlkError", "Job", "JobHandle", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'flk' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
