"""The numbers of ranks that an elastic job may have, and what cannot be trained in one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from flk_runtime.checkpoint.stateful import DistributedStateful, is_replicated
from flk_runtime.contract import pod_env, user_env
from flk_runtime.errors import SetupError


def numbers_of_ranks(environ: Mapping[str, str]) -> list[int]:
    """The numbers of ranks that attempts of this job may have; empty if it is not elastic, as flk's launcher says."""
    least, processes = pod_env.MIN_PODS.read(environ), pod_env.PROCESSES.read(environ)
    most = pod_env.PODS.read(environ) // user_env.WORKERS.read(environ) - pod_env.SPARES.read(environ)
    return [pods * processes for pods in range(least, most + 1)] if 0 < least < most else []


def refuse_elastic(call: str, why: str, cure: str = "") -> None:
    """Raise SetupError if this job is elastic: ``why`` says what goes wrong at another number of ranks."""
    if numbers := numbers_of_ranks(os.environ):
        raise SetupError(
            f"{call}: this job is elastic, with {numbers[0]} to {numbers[-1]} ranks, and {why}: {cure}leave --elastic "
            "out (--spares 1 has a pod wait to take the place of a lost one)"
        )


def refuse_per_rank(call: str, adapted: Mapping[str, Any]) -> None:
    """Raise SetupError if this job is elastic, and one of the objects has a state on each rank."""
    for name, thing in adapted.items():
        if not (isinstance(thing, DistributedStateful) or is_replicated(thing)):
            refuse_elastic(
                call,
                f"{name!r} has a state on each rank, which another number of ranks cannot take",
                "pass flk.replicated(…) if rank 0's state is right for all ranks, or ",
            )
