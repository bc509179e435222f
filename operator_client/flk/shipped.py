"""Module paths without the part of flk_runtime that a pod has got with its job, for flk commands in that pod.

This part has the modules that the job uses (`flk_runtime.bootstrap` unpacks them). It precedes the installed
flk_runtime on the module path, and the client needs all modules. A rank has imported this part, so the client cannot
work in it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path


def without_shipped(folders: Iterable[str]) -> list[str]:
    """Return the folders of a module path but those with a runtime that came with a job.

    An entry without a name stays: it is the current folder.
    """
    return [folder for folder in folders if not _is_shipped(folder)]


def module_path(first: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return PYTHONPATH for a process with the client's runtime: the folders ``first``, then ``environ``'s.

    It is empty if there are none.
    """
    given = environ.get("PYTHONPATH")  # Python takes one that is empty for one that is not set
    path = os.pathsep.join([*filter(None, first), *without_shipped(given.split(os.pathsep) if given else [])])
    return {"PYTHONPATH": path} if path else {}


def refuse_in_rank(what: str) -> None:
    """Raise UsageError if this process has imported a runtime that came with a job. ``what`` needs a whole one."""
    from flk.errors import UsageError  # which imports that runtime
    from flk_runtime import contract

    if _is_shipped(str(Path(contract.__file__).parents[2])):
        raise UsageError(
            f"{what} needs all modules of flk_runtime, and this process has only those that its job uses",
            hint="start another process for it, as subprocess.run([sys.executable, ...]) or the command flk",
        )


def _is_shipped(folder: str) -> bool:
    return os.path.basename(os.path.dirname(folder)) == ".flk" and os.path.isdir(f"{folder}/flk_runtime")
