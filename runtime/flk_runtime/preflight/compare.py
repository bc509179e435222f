"""compare(): the faults in the reports of all ranks, as sentences that name rank, node and cure.

Pure functions of the reports. A sentence names at most a few nodes, however many ranks there are.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from flk_runtime.contract.quantities import numbered, often, plural
from flk_runtime.preflight.report import RankReport

_SHOWN = 3  # nodes that a sentence names

# Fields that must be the same on all ranks: their name, the noun of the sentence, and the cure.
_EQUAL = (
    ("world_size", "world sizes", "start every node with the same number of nodes and of processes per node"),
    ("torch", "versions of torch", "use one image or one environment on all nodes"),
    ("flk", "versions of flk_runtime", "use one image or one environment on all nodes"),
    ("code", "versions of the code", "copy the same files to all nodes"),
    ("backend", "backends", "check these nodes' GPUs (nvidia-smi), or pass the same device= on all ranks"),
    ("strategy", "strategies", "set the same FLK_STRATEGY, or strategy=, on all ranks"),
    ("seed", "seeds", "set the same FLK_SEED, or seed=, on all ranks"),
)  # fmt: skip


def compare(reports: Sequence[RankReport]) -> list[str]:
    """The faults in the reports of the ranks that have joined; an empty list if there are none."""
    faults = [
        f"rank {rank} joined {often(len(same))}: "
        f"{' and '.join(f'process {report.pid} on node {report.node}' for report in same[:_SHOWN])}; give every "
        "process a rank of its own (RANK, or torchrun's --node-rank for each node)"
        for rank, same in _groups(reports, lambda report: report.rank)
        if len(same) > 1
    ][:_SHOWN]
    for name, noun, cure in _EQUAL:
        values = _groups(reports, operator.attrgetter(name))
        if len(values) > 1:
            shown = ", ".join(
                f"{'none' if value == '' else value} on {_describe_ranks(same)}" for value, same in values[:_SHOWN]
            )
            faults.append(f"{len(values)} {noun}: {shown}; {cure}")
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


def _groups(reports: Sequence[RankReport], key: Callable[[RankReport], Any]) -> list[tuple[Any, list[RankReport]]]:
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
