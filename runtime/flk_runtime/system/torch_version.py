"""The oldest torch that flk works with, 2.6, the first whose fully_shard is public, and what needs a newer one."""

from __future__ import annotations

from typing import Final

import torch

from flk_runtime.errors import SetupError

OLDEST: Final = (2, 6)


def check_torch(version: str = torch.__version__) -> None:
    """Raise SetupError if ``version``, by default the version of the torch in use, is older than OLDEST."""
    if _numbers(version) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise SetupError(f"torch {version} is too old: flk needs torch {oldest} or newer; use an image that has it")


def require_torch(oldest: str, what: str) -> None:
    """Raise SetupError if the torch in use is too old for ``what``, which strategy ddp does without."""
    if _numbers(version := torch.__version__) < _numbers(oldest):
        raise SetupError(
            f"{what} needs torch {oldest} or newer, and this is torch {version}: update torch, or use strategy ddp "
            "without precision="
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
