"""The runtime that has travelled to a pod, which a command that a rank starts has on its path before its own.

It has the modules that its job uses (`flk_runtime.bootstrap` unpacks them), and the client needs all of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable


def without_shipped(folders: Iterable[str]) -> list[str]:
    """Return the folders of a module path but those with a runtime that has travelled; nor those without a name."""
    return [folder for folder in folders if folder and not _is_shipped(folder)]


def _is_shipped(folder: str) -> bool:
    return os.path.basename(os.path.dirname(folder)) == ".flk" and os.path.isdir(f"{folder}/flk_runtime")
