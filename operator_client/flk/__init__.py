"""flk trains PyTorch on Kubernetes: it submits a script as a PyTorchJob, follows the job and reports its state.

The Python API does what the command line does::

    job = flk.Job(command=["train.py"], replicas=4)
    flk.submit(job).wait()

`submit`, `get` and `list` talk to a cluster; `render` and `Job` do not. Each name is imported when it is first
used, so ``import flk`` alone imports no library. Everybody may import this package; it never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from flk_runtime.contract import VERSION as __version__

if TYPE_CHECKING:
    from flk.errors import (
        ApiError,
        ConflictError,
        FlkError,
        ForbiddenError,
        JobDeletedError,
        JobFailedError,
        JobNotFoundError,
        JobRunningError,
        JobStuckError,
        MissingApiError,
        NoConfigError,
        NoKubeconfigError,
        UnreachableError,
        UnreadableError,
        UsageError,
        WaitTimeoutError,
    )
    from flk.jobs.handle import JobHandle, get
    from flk.jobs.handle import list as list
    from flk.jobs.state import State
    from flk.jobs.submission import render, submit
    from flk.spec.job import Job

__all__ = [
    "ApiError",
    "ConflictError",
    "FlkError",
    "ForbiddenError",
    "Job",
    "JobDeletedError",
    "JobFailedError",
    "JobHandle",
    "JobNotFoundError",
    "JobRunningError",
    "JobStuckError",
    "MissingApiError",
    "NoConfigError",
    "NoKubeconfigError",
    "State",
    "UnreachableError",
    "UnreadableError",
    "UsageError",
    "WaitTimeoutError",
    "__version__",
    "get",
    "render",
    "submit",
]

_MODULES: Final = {
    "Job": "flk.spec.job",
    "JobHandle": "flk.jobs.handle",
    "State": "flk.jobs.state",
    "get": "flk.jobs.handle",
    "list": "flk.jobs.handle",
    "render": "flk.jobs.submission",
    "submit": "flk.jobs.submission",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES or name in __all__:
        return getattr(import_module(_MODULES.get(name, "flk.errors")), name)
    raise AttributeError(f"module 'flk' has no attribute {name!r}")


def __dir__() -> Iterable[str]:
    return sorted([*__all__, "list"])  # `from flk import *` brings no list, which would hide Python's own
