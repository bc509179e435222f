"""compare_options(): before ranks exchange a model or data, compare the options of the script on all ranks.

Needs an open process group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from flk_runtime.contract import user_env
from flk_runtime.distributed.consistency import check_consistent
from flk_runtime.errors import setting


def compares() -> bool:
    """Whether ranks compare what the script gives them: not one rank, nor where FLK_PREFLIGHT switches it off."""
    return dist.get_world_size() > 1 and "options" not in setting(user_env.PREFLIGHT)


def compare_options(call: str, options: Mapping[str, Any]) -> None:
    """Check that all ranks make the same ``call`` with the same ``options``. Collective: one all-reduce of 16 bytes.

    Nothing is compared in a world of one rank, or where FLK_PREFLIGHT switches the check "options" off. Raises
    SetupError on every rank, with the first option that differs and the ranks on each side.
    """
    if compares():
        check_consistent(call, [(name, describe(value)) for name, value in options.items()])


def describe(value: object) -> str:
    """A text that is equal on all ranks for equal values: no address in memory, and names in place of functions."""
    if isinstance(value, type) or callable(value):
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    if isinstance(value, (list, tuple, set, frozenset)):
        texts = map(describe, value)
        return f"({', '.join(sorted(texts) if isinstance(value, (set, frozenset)) else texts)})"
    return repr(value)
