"""Agreement: that all ranks are about to do the same, asked before they do it.

A collective whose tensors differ between ranks hangs, crashes in C++ or mixes numbers up. One all-reduce of two numbers
tells beforehand; only where it says no do the ranks look for the first difference.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist

from flk_runtime.distributed.process_group import comm_device
from flk_runtime.errors import SetupError

Line = tuple[str, str]  # a path, and what is there


def check_consistent(call: str, lines: Sequence[Line]) -> None:
    """Raise SetupError on every rank, with the first difference and its ranks, unless all give the same.

    Collective. ``call`` is what the rank is about to do; another rank may be about to do something else.
    """
    lines = [("the call", call), *lines]
    digest = hashlib.blake2b(repr(lines).encode(), digest_size=8).digest()
    mine = int.from_bytes(digest, "big") >> 1
    device = comm_device(torch.device("cpu"))
    extremes = torch.tensor([mine, -mine], device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    most, least = extremes.tolist()
    if most == -least:
        return
    own = torch.tensor([mine], device=device)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    digests = [int(one) for one in every]
    usual, _ = Counter(digests).most_common(1)[0]  # of equals the first, that of the lowest rank
    first, other = digests.index(usual), next(rank for rank, one in enumerate(digests) if one != usual)
    theirs = [list(lines)], [list(lines)]
    for content, rank in zip(theirs, (first, other), strict=True):
        dist.broadcast_object_list(content, src=rank)
    what = difference(
        theirs[0][0],
        theirs[1][0],
        _ranks([rank for rank, one in enumerate(digests) if one == usual]),
        _ranks([rank for rank, one in enumerate(digests) if one == digests[other]]),
    )
    raise SetupError(f"{call}: the ranks differ, so nothing was exchanged: {what}")


def difference(here: Sequence[Line], there: Sequence[Line], these: str, those: str) -> str:
    """The first difference between two lists of lines; ``these`` and ``those`` name the ranks that have them."""
    known, other = dict(here), dict(there)
    for path, kind in here:
        if path not in other:
            return f"{path} is on {these} ({kind}), and not on {those}"
        if other[path] != kind:
            return f"{path} is {kind} on {these}, and {other[path]} on {those}"
    for path, kind in there:
        if path not in known:
            return f"{path} is on {those} ({kind}), and not on {these}"
    return "the same leaves in another order"


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:3])) + (f" and {len(ranks) - 3} more" if len(ranks) > 3 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
