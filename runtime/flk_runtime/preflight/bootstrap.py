"""connect_store(): one store that all ranks of an attempt reach, with a key prefix that no earlier attempt used.

Where only Horovod can tell its address, Horovod broadcasts it. `compare_options` compares the options of the script on
all ranks, before they exchange a model or data.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from flk_runtime.contract import user_env
from flk_runtime.discovery import RankInfo
from flk_runtime.distributed.consistency import check_consistent
from flk_runtime.errors import RendezvousError, setting
from flk_runtime.preflight import store
from flk_runtime.preflight.report import node_name

_POLL_MIN = 0.002  # seconds: rank 0's first poll interval, doubled up to _POLL_MAX
_POLL_MAX = 0.05
_ROSTER = "flk/roster"  # key in a store shared by attempts: append-only "<rank> <nonce>" lines

_calls = itertools.count()  # of connect_store in this process; equal on all ranks, since it is collective


def connect_store(info: RankInfo, timeout: float) -> Any:
    """The store of this attempt's ranks, as a torch Store with a prefix of its own for this call. Collective.

    There are several ranks. Rank 0 opens the store, unless the launcher hosts it. ``timeout`` is in seconds. Raises
    RendezvousError, which says why the master was not reached, and SetupError where rank 0 cannot open the store.
    """
    deadline = time.monotonic() + timeout
    number = next(_calls)
    master = info.master
    if master is None:
        made, master = _meet_by_horovod(info, deadline)
    else:
        opens = info.rank == 0 and not info.agent_store
        made = (store.open_store if opens else store.connect)(info, *master, deadline)
    # Only flk's launcher gives each attempt a store of its own; torchrun's store outlives its ranks.
    shared = info.agent_store and info.launcher != "flk"
    prefix = _attempt_prefix(made, info, master, deadline) if shared else f"flk/{number}"
    return distributed_c10d.PrefixStore(prefix, made)


def _attempt_prefix(shared: Any, info: RankInfo, master: tuple[str, int], deadline: float) -> str:
    """A prefix for this attempt's keys in a store that outlives attempts, as torchrun's does.

    No variable numbers the attempts: TORCHELASTIC_RESTART_COUNT counts the restarts of one agent. So rank 0 makes a new
    prefix, and every other rank appends a line with its rank and a nonce; rank 0 answers each nonce with the prefix.
    Lines of ranks of earlier attempts are answered too, and nobody reads the answers.
    """
    nonce = uuid.uuid4().hex
    if info.rank != 0:
        shared.append(_ROSTER, f"{info.rank} {nonce}\n")
        try:
            shared.wait([f"flk/call/{nonce}"], timedelta(seconds=max(0.1, deadline - time.monotonic())))
        except RuntimeError as error:
            raise RendezvousError(
                f"rank 0 did not answer rank {info.rank} on node {node_name()} in the launcher's store at "
                f"{master[0]}:{master[1]}: check that rank 0 runs, and that no other process has rank {info.rank}"
            ) from error
        prefix: str = shared.get(f"flk/call/{nonce}").decode()
        shared.add(f"{prefix}/answered", 1)
        return prefix
    prefix = f"flk/{nonce}"
    answered: set[str] = set()
    interval = _POLL_MIN
    while shared.add(f"{prefix}/answered", 0) < info.world_size - 1 and time.monotonic() < deadline:
        lines = shared.get(_ROSTER).decode().splitlines() if shared.check([_ROSTER]) else []
        nonces = [line.partition(" ")[2] for line in lines if int(line.partition(" ")[0]) < info.world_size]
        new = [nonce for nonce in nonces if nonce not in answered]
        if new:
            shared.multi_set([f"flk/call/{nonce}" for nonce in new], [prefix] * len(new))
            answered.update(new)
            interval = _POLL_MIN
        time.sleep(interval)
        interval = min(_POLL_MAX, interval * 2)
    return prefix


def _meet_by_horovod(info: RankInfo, deadline: float) -> tuple[Any, tuple[str, int]]:
    """The store and its address, which rank 0 broadcasts: no variable of horovodrun names its node. Collective."""
    import horovod.torch as hvd

    hvd.init()
    made = store.serve(deadline) if info.rank == 0 else None
    master: tuple[str, int] = hvd.broadcast_object((store.own_address(), int(made.port)) if made else None, root_rank=0)
    return made or store.connect(info, *master, deadline), master


def compares() -> bool:
    """Whether ranks compare what the script gives them: not one rank, nor where FLK_PREFLIGHT is off."""
    return dist.get_world_size() > 1 and setting(user_env.PREFLIGHT) == "on"


def compare_options(call: str, options: Mapping[str, Any]) -> None:
    """Check that all ranks make the same ``call`` with the same ``options``. Collective: one all-reduce of 16 bytes.

    Nothing is compared in a world of one rank, or where FLK_PREFLIGHT is off. Raises
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
