"""Module paths without the part of flk_runtime that a pod has got with its job, for flk commands in that pod.

This part has the modules that the job uses (`flk_runtime.bootstrap` unpacks them). It precedes the installed
flk_runtime on the module path, and the client needs all modules.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping


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


def _is_shipped(folder: str) -> bool:
    return os.path.basename(os.path.dirname(folder)) == ".flk" and os.path.isdir(f"{folder}/flk_runtime")
