"""Before the process group opens: all ranks tell rank 0 what they see, and rank 0 tells all what does not fit.

What is wrong here would otherwise show as a job that hangs. Every rank appends one line to one key and waits for the
result, so the cost is a few messages for each rank; `compare` is a pure function of the lines.
"""

from __future__ import annotations

import contextlib
import json
import operator
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from flk_runtime.errors import RendezvousError, SetupError
from flk_runtime.preflight.report import SHM, RankReport

TIMEOUT = 30.0
DOCKER_SHM = 64 << 20  # bytes that containers get where nobody asks for more
GOOD_SHM = 1 << 30  # what NVIDIA's containers ask for (NCCL user guide, troubleshooting: shared memory)

_LOOK_EVERY = 1.0  # seconds between two comparisons of those who are there already
_POLL_MIN = 0.001  # seconds between two looks into the store, doubled up to _POLL_MAX
_POLL_MAX = 0.05
_GRACE = 5.0
_LINGER = 5.0  # seconds that ranks stay for the others to read what is wrong
_SHOWN = 3  # nodes that a sentence names

# What has to be the same on all ranks, and what to do where it is not.
_SAME = (
    ("world_size", "world sizes", "start every node with the same number of nodes and of processes per node"),
    ("torch", "versions of torch", "use one image or one environment on all nodes"),
    ("flk", "versions of flk_runtime", "use one image or one environment on all nodes"),
    ("code", "versions of the code", "copy the same files to all nodes"),
    ("backend", "backends", "check these nodes' GPUs (nvidia-smi), or pass device= and backend= alike on all ranks"),
    ("strategy", "strategies", "set FLK_STRATEGY, or strategy=, alike on all ranks"),
    ("seed", "seeds", "set FLK_SEED, or seed=, alike on all ranks"),
)  # fmt: skip


@dataclass(frozen=True)
class PreflightResult:
    """What rank 0 found: the same on every rank."""

    faults: list[str]
    warnings: list[str]
    again: bool = False  # whether another attempt may do: only that somebody did not come is wrong

    @property
    def error(self) -> SetupError:
        """The faults as what is raised."""
        error = (RendezvousError if self.again else SetupError)("\n".join(self.faults))
        error.everywhere = True
        return error


def exchange(store: Any, mine: RankReport, timeout: float, began: float) -> tuple[PreflightResult, list[RankReport]]:
    """Meet in ``store`` until ``timeout`` seconds after ``began``: the result, and on rank 0 the facts of all there.

    Raises RendezvousError where rank 0 does not come, and SetupError on a rank that comes when the others have met.
    Collective.
    """
    # Who reached the store at the last moment must still hear from rank 0, which may have come then too.
    deadline = max(began + timeout, time.monotonic() + min(timeout, _GRACE))
    store.append("roster", mine.dump() + "\n")
    came = store.add("came", 1)
    if came >= mine.world_size:
        store.set("all", "")
    if mine.rank == 0 and store.add("leader", 1) == 1:
        return _lead(store, mine, timeout, deadline)
    result = _follow(store, mine, timeout, deadline)
    if came > mine.world_size and not result.faults:  # rank 0 had counted before this one came
        raise SetupError(_late(mine, _roster(store)))
    return result, []


def _lead(store: Any, mine: RankReport, timeout: float, deadline: float) -> tuple[PreflightResult, list[RankReport]]:
    pause, look = _POLL_MIN, time.monotonic() + _LOOK_EVERY
    faults: list[str] = []
    while not store.check(["all"]) and time.monotonic() < deadline and not faults:
        time.sleep(pause)
        pause = min(_POLL_MAX, pause * 2)
        if time.monotonic() >= look:
            before = time.monotonic()
            faults = compare(_roster(store))  # why wait for the others if two of those who are here don't fit
            look = time.monotonic() + max(_LOOK_EVERY, 10 * (time.monotonic() - before))
    everybody = _roster(store)
    faults = compare(everybody)
    absent = missing(everybody, timeout) if time.monotonic() >= deadline or not faults else ""
    result = PreflightResult(faults + [absent] * bool(absent), warnings(everybody), again=not faults and bool(absent))
    store.set("result", json.dumps([result.faults, result.warnings, result.again, len(everybody)]))
    if result.faults:
        _all_have_read(store, len(everybody))
    return result, everybody


def _follow(store: Any, mine: RankReport, timeout: float, deadline: float) -> PreflightResult:
    me = f"rank {mine.rank} on node {mine.node}"
    try:
        if not _wait(store, "result", deadline - time.monotonic()):
            # Rank 0 may have come last; then its time is not yet over.
            here = _roster(store)
            leader = next((facts for facts in here if facts.rank == 0), None)
            if leader is None:
                raise RendezvousError(
                    f"rank 0 did not come within {timeout:g} s; {len(here)} of {mine.world_size} ranks are here, "
                    f"{me} too: look at what rank 0 says, or raise FLK_PREFLIGHT_TIMEOUT if ranks start slowly"
                )
            if not _wait(store, "result", timeout + _LINGER):
                raise RendezvousError(f"{me} did not hear again from rank 0 on node {leader.node}, which had come")
        faults, warned, again, here_then = json.loads(store.get("result"))
    except RuntimeError as error:
        raise RendezvousError(f"{me}: rank 0 ended while the ranks met ({str(error).splitlines()[0]})") from error
    if faults:
        _all_have_read(store, here_then)
    return PreflightResult(faults, warned, again)


def _all_have_read(store: Any, ranks: int) -> None:
    """Wait for the others to read what is wrong: the first that ends may take the store and all other ranks along."""
    with contextlib.suppress(RuntimeError):
        if store.add("read", 1) >= ranks:
            store.set("all read", "")
        store.wait(["all read"], timedelta(seconds=_LINGER))


def _wait(store: Any, key: str, seconds: float) -> bool:
    try:
        store.wait([key], timedelta(seconds=max(0.1, seconds)))
    except RuntimeError:
        return bool(store.check([key]))  # where the store is gone this raises as well
    return True


def _roster(store: Any) -> list[RankReport]:
    return [RankReport.load(line) for line in store.get("roster").splitlines()] if store.check(["roster"]) else []


def _late(mine: RankReport, roster: Sequence[RankReport]) -> str:
    others = [facts for facts in roster if facts.rank == mine.rank and (facts.pid, facts.node) != (mine.pid, mine.node)]
    taken = f"rank {mine.rank} is {_process(others[0])}" if others else f"{mine.world_size} ranks are complete"
    return (
        f"rank {mine.rank} on node {mine.node} (process {mine.pid}) came when all ranks had met, and {taken}: give "
        "every process a rank of its own, or end the earlier run that still uses this master's port"
    )


def compare(facts: Sequence[RankReport]) -> list[str]:
    """What does not fit among the ranks that came: sentences that name rank, node and cure. Any number of ranks."""
    problems = _groups((one for one in facts if one.problem), lambda one: one.problem)
    faults = [f"{_who(same)}: {problem}" for problem, same in problems[:_SHOWN]]
    for rank, same in _groups(facts, lambda one: one.rank):
        if len(same) > 1:
            faults.append(
                f"rank {rank} came {_times(len(same))}: {' and '.join(map(_process, same[:_SHOWN]))}; give every "
                "process a rank of its own (RANK, or torchrun's --node-rank for each node)"
            )
    del faults[2 * _SHOWN :]
    for name, noun, cure in _SAME:
        values = _groups((one for one in facts if not one.problem), operator.attrgetter(name))
        if len(values) > 1:
            said = ", ".join(f"{'none' if value == '' else value} on {_who(same)}" for value, same in values[:_SHOWN])
            faults.append(f"{len(values)} {noun}: {said}; {cure}")
    return faults + _of_networks(facts) + _of_nodes(facts)


def _of_networks(facts: Sequence[RankReport]) -> list[str]:
    faults = []
    for absent, same in _groups((one for one in facts if one.absent), lambda one: one.absent):
        variable, _, name = absent.partition("=")
        way = next((one.way for one in same if one.way), "")
        faults.append(
            f"{absent} names a network interface that is not there on {_who(same)}: set {variable} to one that is"
            + (
                f" ({way} leads to the master)"
                if way
                else f" (`ip link` shows them), or unset it: {name} is no default"
            )
        )
    if len({one.network for one in facts}) > 1:
        for (why, way), same in _groups((one for one in facts if one.loopback), lambda one: (one.loopback, one.way)):
            variable = why.partition("=")[0] if "_IFNAME=" in why else "GLOO_SOCKET_IFNAME"
            faults.append(
                f"{_who(same)} would talk to other nodes through the loopback interface, which leads nowhere ({why}): "
                f"set {variable} to the interface that leads to them" + (f" ({way})" if way and way != "lo" else "")
            )
    return faults


def _of_nodes(facts: Sequence[RankReport]) -> list[str]:
    faults = []
    for gpu, same in _groups((one for one in facts if one.gpu and "nccl" in one.backend), lambda one: one.gpu):
        if len({one.rank for one in same}) > 1:
            faults.append(
                f"{_who(same)} have one GPU between them ({gpu}), and NCCL needs one for each rank: start as many "
                "processes on a node as it has GPUs, and give each its own local rank or CUDA_VISIBLE_DEVICES"
            )
    del faults[_SHOWN:]
    for (*_, local), same in _groups(facts, lambda one: (one.network, one.node_rank, one.gpu, one.local_rank)):
        if len({one.rank for one in same}) > 1:
            faults.append(
                f"{_who(same)} are all local rank {local} of one node: give each process on a node a local rank of its "
                "own (LOCAL_RANK)"
            )
    del faults[2 * _SHOWN :]
    small = [one for one in facts if _nccl_peers(one) and 0 <= one.shm <= DOCKER_SHM]
    for shm, same in _groups(small, lambda one: one.shm):
        faults.append(
            f"{SHM} has {_mib(shm)} on {_who(same)}, and NCCL needs more for {same[0].local_world_size} ranks on a "
            "node: give the container more (docker --shm-size=1g; in Kubernetes a memory-backed emptyDir at /dev/shm)"
        )
    return faults


def missing(facts: Sequence[RankReport], waited: float) -> str:
    """Who did not come, after ``waited`` seconds; empty where all came."""
    world_size = next((one.world_size for one in facts if one.rank == 0), max(one.world_size for one in facts))
    here = {one.rank: one for one in facts}
    absent = [rank for rank in range(world_size) if rank not in here]
    if not absent:
        return ""
    # Ranks are numbered node by node, as all launchers do by default; those who are here know how many a node has.
    size = max(one.local_world_size for one in facts)
    nodes = sorted({rank // size for rank in absent})
    silent = [node for node in nodes if not any(node * size <= rank < (node + 1) * size for rank in here)]
    where = "" if size == world_size else f" (of node {_ranges(nodes)}, from 0)"
    cure = (
        f"no rank of node {_ranges(silent)} came, so check that it was started, with the right node rank and master"
        if silent and size < world_size
        else "look at what these ranks themselves say"
    )
    return (
        f"{_ranks(absent)} of {world_size}{where} did not come within {waited:g} s, {len(here)} came: {cure}; where "
        "ranks start slowly, raise FLK_PREFLIGHT_TIMEOUT"
    )


def warnings(facts: Sequence[RankReport]) -> list[str]:
    """What is only worth a line."""
    lines = []
    small = [one for one in facts if 0 <= one.shm < DOCKER_SHM and not _nccl_peers(one)]
    if small:
        lines.append(
            f"{SHM} has only {_mib(min(one.shm for one in small))} on {_who(small)}: workers of a DataLoader will "
            "fail with a bus error once their batches are larger"
        )
    tight = [one for one in facts if DOCKER_SHM < one.shm < GOOD_SHM and _nccl_peers(one)]
    if tight:
        lines.append(
            f"{SHM} has {_mib(min(one.shm for one in tight))} on {_who(tight)}: NCCL may need up to 1 GiB for the "
            "ranks of a node"
        )
    return lines


def _nccl_peers(one: RankReport) -> bool:
    return "nccl" in one.backend and one.local_world_size > 1


def _groups(facts: Iterable[RankReport], key: Callable[[RankReport], Any]) -> list[tuple[Any, list[RankReport]]]:
    """Those with equal keys together, each group and all groups by rank."""
    groups: dict[Hashable, list[RankReport]] = defaultdict(list)
    for one in sorted(facts, key=lambda one: one.rank):
        groups[key(one)].append(one)
    return list(groups.items())


def _who(facts: Sequence[RankReport]) -> str:
    """``ranks 0-3 on node a, ranks 4-7 on node b and 2 more nodes``."""
    nodes = _groups(facts, lambda one: one.node)
    texts = [f"{_ranks(one.rank for one in same)} on node {node}" for node, same in nodes[:_SHOWN]]
    more = len(nodes) - len(texts)
    return ", ".join(texts) + (f" and {more} more node{'s' * (more > 1)}" if more else "")


def _ranks(ranks: Iterable[int]) -> str:
    several = sorted(set(ranks))
    return f"rank{'s' * (len(several) > 1)} {_ranges(several)}"


def _ranges(numbers: Iterable[int]) -> str:
    """``0-3, 7``; long lists are cut."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return ", ".join(texts[:8]) + (", …" if len(texts) > 8 else "")


def _process(one: RankReport) -> str:
    return f"process {one.pid} on node {one.node}"


def _times(count: int) -> str:
    return "twice" if count == 2 else f"{count} times"


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.3g} MiB"
