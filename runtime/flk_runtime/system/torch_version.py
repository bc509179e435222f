"""The oldest torch that flk works with: 2.6 is the first whose fully_shard is public."""

from __future__ import annotations

from typing import Final

import torch

from flk_runtime.errors import SetupError

OLDEST: Final = (2, 6)


def check_torch(version: str = torch.__version__) -> None:
    """Raise SetupError if ``version``, by default the version of the torch in use, is older than OLDEST."""
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise SetupError(f"torch {version} is too old: flk needs torch {oldest} or newer; use an image that has it")
