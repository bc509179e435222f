"""Checks of a job against the nodes: how many of its pods fit now, and how many an empty cluster could hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from flk.health.facts import Amounts, Facts, Level, Pods, Result, Unreadable, amount_text, quantity
from flk.kube import Object
from flk.units import plural

GPU: Final = "nvidia.com/gpu"
_BLOCKING: Final = ("NoSchedule", "NoExecute")


def check_gpus(facts: Facts) -> Iterator[Result]:
    """Say how many GPUs the nodes offer, and how many are free."""
    if isinstance(facts.nodes, Unreadable):
        yield Result("gpus", Level.UNKNOWN, f"the nodes cannot be read: {facts.nodes.reason}")
        return
    offered: dict[str, float] = {}
    for node in facts.nodes:
        for name, amount in _allocatable(node).items():
            if _is_accelerator(name):
                offered[name] = offered.get(name, 0.0) + amount
    used = _used_by_node(facts.running)
    texts = []
    for name, total in sorted(offered.items()):
        taken = None if used is None else sum(amounts.get(name, 0.0) for amounts in used.values())
        texts.append(f"{total:.0f} {name}" + ("" if taken is None else f", {max(0.0, total - taken):.0f} free"))
    yield Result("gpus", Level.OK, "; ".join(texts) if texts else "no node offers GPUs")


def check_capacity(facts: Facts, pods: Pods) -> Iterator[Result]:
    """Compare the job with what fits on the nodes that its selector and tolerations allow."""
    if isinstance(facts.nodes, Unreadable):
        yield Result("capacity", Level.UNKNOWN, f"the nodes cannot be read: {facts.nodes.reason}")
        return
    remedy = "use fewer or smaller pods, or add nodes; a cluster that adds nodes by itself may still run the job"
    for name in sorted(pods.requests):
        if "/" in name and not any(_allocatable(node).get(name) for node in facts.nodes):
            found = f"the job requests {name}, and no node offers any"
            yield Result("capacity", Level.FAILED, found, f"install the device plugin for {name}, or request none")
            return
    allowed = [node for node in facts.nodes if _selected(node, pods) and not _untolerated(node, pods)]
    if not allowed:
        yield Result(
            "capacity", Level.FAILED, _nobody_allowed(facts.nodes, pods), "change nodes.selector or nodes.tolerations"
        )
        return
    empty = sum(_fitting(_allocatable(node), pods) for node in allowed)
    each = ", ".join(f"{amount_text(name, amount)} {name}" for name, amount in sorted(pods.requests.items()))
    size = f"pods of {each}" if each else "pods"
    if empty < pods.count:
        found = (
            f"{plural(len(allowed), 'node')} could hold {empty} {size} if they were empty, and the job has {pods.count}"
        )
        yield Result("capacity", Level.FAILED, found, remedy)
        return
    used = _used_by_node(facts.running)
    if used is None:
        found = f"{plural(len(allowed), 'node')} can hold the job when they are empty; what is in use cannot be read"
        yield Result("capacity", Level.UNKNOWN, found)
        return
    now = sum(_fitting(_free(node, used), pods) for node in allowed)
    if now < pods.count:
        found = f"{now} {size} fit now, and the job has {pods.count}: it must wait until others end"
        yield Result("capacity", Level.WARNING, found, f"--replicas {now} would start now" if now else "")
    else:
        yield Result(
            "capacity",
            Level.OK,
            f"the largest job of {size} that fits now has {plural(now, 'pod')}; this one has {pods.count}",
        )


def _is_accelerator(name: str) -> bool:
    return "/" in name and name.rpartition("/")[2].partition("-")[0] in ("gpu", "tpu", "npu", "neuron", "mig", "gaudi")


def _allocatable(node: Object) -> Amounts:
    return {name: quantity(value) for name, value in ((node.get("status") or {}).get("allocatable") or {}).items()}


def _used_by_node(running: Sequence[Object] | Unreadable) -> dict[str, Amounts] | None:
    """Return what the pods of each node request; None if the pods of all namespaces cannot be read."""
    if isinstance(running, Unreadable):
        return None
    used: dict[str, Amounts] = {}
    for pod in running:
        node = pod["spec"].get("nodeName")
        if not node or (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            continue
        amounts = used.setdefault(node, {})
        amounts["pods"] = amounts.get("pods", 0.0) + 1
        for container in pod["spec"].get("containers") or []:
            for name, value in ((container.get("resources") or {}).get("requests") or {}).items():
                amounts[name] = amounts.get(name, 0.0) + quantity(value)
    return used


def _free(node: Object, used: dict[str, Amounts]) -> Amounts:
    taken = used.get(node["metadata"]["name"], {})
    return {name: amount - taken.get(name, 0.0) for name, amount in _allocatable(node).items()}


def _fitting(free: Amounts, pods: Pods) -> int:
    """Return how many pods of the job fit into free amounts."""
    needed = {**{name: amount for name, amount in pods.requests.items() if amount > 0}, "pods": 1.0}
    # Memory in bytes and thousandths of cores are whole numbers; a small margin covers the division of others.
    return max(0, min(math.floor(free.get(name, 0.0) / amount + 1e-9) for name, amount in needed.items()))


def _selected(node: Object, pods: Pods) -> bool:
    has = node["metadata"].get("labels") or {}
    return all(has.get(key) == value for key, value in (pods.spec.get("nodeSelector") or {}).items())


def _untolerated(node: Object, pods: Pods) -> str:
    """Return the first taint (or cordon) of a node that keeps the job's pods away; empty for none."""
    if node["spec"].get("unschedulable"):
        return "it is cordoned"
    for taint in node["spec"].get("taints") or []:
        if taint.get("effect") in _BLOCKING and not any(
            _tolerates(t, taint) for t in pods.spec.get("tolerations") or []
        ):
            return f"taint {taint.get('key')}:{taint.get('effect')}"
    return ""


def _tolerates(toleration: Object, taint: Object) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", taint.get("key"))
    return toleration.get("key") == taint.get("key") and (toleration.get("value") or "") == (taint.get("value") or "")


def _nobody_allowed(nodes: Sequence[Object], pods: Pods) -> str:
    selected = [node for node in nodes if _selected(node, pods)]
    if not selected:
        labels = ", ".join(f"{key}={value}" for key, value in (pods.spec.get("nodeSelector") or {}).items())
        return f"no node has the labels {labels}" if labels else "the cluster has no nodes"
    reasons = sorted({_untolerated(node, pods) for node in selected})
    return f"no node accepts the job's pods: {'; '.join(reasons)}"
