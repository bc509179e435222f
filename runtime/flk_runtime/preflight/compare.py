"""compare(): the faults in the reports of all ranks, as sentences that name rank, node and cure.

Pure functions of the reports. A sentence names at most a few nodes, however many ranks there are.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any

from flk_runtime.contract.pod_layout import SHM
from flk_runtime.contract.quantities import numbered, often, plural, size_text
from flk_runtime.preflight.report import RankReport

DOCKER_SHM = 64 << 20  # bytes of /dev/shm in a container by default
_SHOWN = 3  # nodes that a sentence names

# Fields that must be the same on all ranks: their name, the noun of the sentence, and the cure. A check of
# contract.PREFLIGHT_CHECKS has the name of its field, with a hyphen.
_EQUAL = (
    ("world_size", "world sizes", "start every node with the same number of nodes and of processes per node"),
    ("torch", "versions of torch", "use one image or one environment on all nodes"),
    ("flk", "versions of flk_runtime", "use one image or one environment on all nodes"),
    ("code", "versions of the code", "copy the same files to all nodes"),
    ("backend", "backends", "check these nodes' GPUs (nvidia-smi), or pass the same device= on all ranks"),
    ("strategy", "strategies", "set the same FLK_STRATEGY, or strategy=, on all ranks"),
    ("seed", "seeds", "set the same FLK_SEED, or seed=, on all ranks"),
)  # fmt: skip


def compare(reports: Sequence[RankReport], skipped: Collection[str] = ()) -> list[str]:
    """The faults in the reports of the ranks that have joined; an empty list if there are none.

    ``skipped`` are checks of contract.PREFLIGHT_CHECKS that are not made. A rank that joined twice, and what a rank
    says itself, are always faults.
    """
    problems = _groups((report for report in reports if report.problem), lambda report: report.problem)
    faults = [f"{_describe_ranks(same)}: {problem}" for problem, same in problems[:_SHOWN]]
    for rank, same in _groups(reports, lambda report: report.rank):
        if len(same) > 1:
            faults.append(
                f"rank {rank} joined {often(len(same))}: {' and '.join(map(describe_process, same[:_SHOWN]))}; give "
                "every process a rank of its own (RANK, or torchrun's --node-rank for each node)"
            )
    del faults[2 * _SHOWN :]
    for name, noun, cure in _EQUAL:
        if name.replace("_", "-") in skipped:
            continue
        values = _groups((report for report in reports if not report.problem), operator.attrgetter(name))
        if len(values) > 1:
            shown = ", ".join(
                f"{'none' if value == '' else value} on {_describe_ranks(same)}" for value, same in values[:_SHOWN]
            )
            faults.append(f"{len(values)} {noun}: {shown}; {cure}")
    for check, find in _CHECKS.items():
        if check not in skipped:
            faults += find(reports)
    return faults


def missing(reports: Sequence[RankReport]) -> str:
    """The ranks that have not joined, as ``ranks 2-5 of 6 (on nodes 1-2, numbered from 0)``; empty if all have.

    Launchers number ranks node by node by default, and the ranks that have joined know how many a node has.
    """
    world_size = next((one.world_size for one in reports if one.rank == 0), max(one.world_size for one in reports))
    size = max(report.local_world_size for report in reports)
    absent = sorted(set(range(world_size)) - {report.rank for report in reports})
    where = (
        "" if size == world_size else f" (on {numbered('node', {rank // size for rank in absent})}, numbered from 0)"
    )
    return f"{numbered('rank', absent)} of {world_size}{where}" if absent else ""


def warning(reports: Sequence[RankReport]) -> str:
    """A sentence about shared memory that will be too small later and does not prevent the start; empty without one."""
    small = [report for report in reports if 0 <= report.shm < DOCKER_SHM and not _uses_shm(report)]
    if not small:
        return ""
    return (
        f"{SHM} has only {size_text(min(report.shm for report in small))} on {_describe_ranks(small)}: DataLoader "
        "workers will fail with a bus error once their batches are larger"
    )


def describe_process(report: RankReport) -> str:
    """``process 7 on node a``."""
    return f"process {report.pid} on node {report.node}"


def _gpu_faults(reports: Sequence[RankReport]) -> list[str]:
    """GPUs that several ranks share under NCCL."""
    faults = []
    for gpu, same in _groups((one for one in reports if one.gpu and "nccl" in one.backend), lambda one: one.gpu):
        if len({report.rank for report in same}) > 1:
            faults.append(
                f"{_describe_ranks(same)} share one GPU ({gpu}), and NCCL needs one for each rank: start as many "
                "processes on a node as it has GPUs, and give each its own local rank or CUDA_VISIBLE_DEVICES"
            )
    return faults[:_SHOWN]


def _local_rank_faults(reports: Sequence[RankReport]) -> list[str]:
    """Local ranks that several ranks of a node have."""
    faults = []
    for (*_, local), same in _groups(reports, lambda one: (one.network, one.node_rank, one.gpu, one.local_rank)):
        if len({report.rank for report in same}) > 1:
            faults.append(
                f"{_describe_ranks(same)} are all local rank {local} of one node: give each process on a node a local "
                "rank of its own (LOCAL_RANK)"
            )
    return faults[:_SHOWN]


def _shm_faults(reports: Sequence[RankReport]) -> list[str]:
    """Shared memory that is too small for NCCL."""
    small = [report for report in reports if _uses_shm(report) and 0 <= report.shm <= DOCKER_SHM]
    return [
        f"{SHM} has {size_text(shm)} on {_describe_ranks(same)}, and NCCL needs more for {same[0].local_world_size} "
        "ranks on a node: give the container more "
        "(docker --shm-size=1g; in Kubernetes a memory-backed emptyDir at /dev/shm)"
        for shm, same in _groups(small, lambda report: report.shm)
    ]


# By their names in contract.PREFLIGHT_CHECKS.
_CHECKS: dict[str, Callable[[Sequence[RankReport]], list[str]]] = {
    "gpu": _gpu_faults,
    "local-rank": _local_rank_faults,
    "shm": _shm_faults,
}


def _uses_shm(report: RankReport) -> bool:
    """Whether NCCL uses shared memory there: between ranks of a node, unless NCCL_SHM_DISABLE is set."""
    return "nccl" in report.backend and report.local_world_size > 1 and report.nccl_shm


def _groups(reports: Iterable[RankReport], key: Callable[[RankReport], Any]) -> list[tuple[Any, list[RankReport]]]:
    """The reports by their keys; each group and the list of groups are in the order of ranks."""
    groups: dict[Hashable, list[RankReport]] = defaultdict(list)
    for report in sorted(reports, key=lambda report: report.rank):
        groups[key(report)].append(report)
    return list(groups.items())


def _describe_ranks(reports: Sequence[RankReport]) -> str:
    """``ranks 0-3 on node a, ranks 4-7 on node b and 2 more nodes``."""
    nodes = _groups(reports, lambda report: report.node)
    texts = [f"{numbered('rank', (report.rank for report in same))} on node {node}" for node, same in nodes[:_SHOWN]]
    more = len(nodes) - len(texts)
    return ", ".join(texts) + (f" and {plural(more, 'more node')}" if more else "")
