"""Cause Deadlocked: several jobs each hold nodes for a part of their pods, and block each other's remaining pods."""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from flk import labels
from flk.health.cause import Cause, Found, names, pod_evidence
from flk.kube import Object
from flk.observe.model import Evidence, PodPhase
from flk.observe.pods import conditions
from flk.observe.view import JobView

_UNFINISHED: Final = ("Pending", "Running")  # phases of pods
_HOLDING: Final = (PodPhase.STARTING, PodPhase.RUNNING)


def _deadlocked(view: JobView) -> Found | None:
    waiting = [pod for pod in view.pods if pod.phase == PodPhase.PENDING and pod.reason == "Unschedulable"]
    holding = [pod for pod in view.pods if pod.phase in _HOLDING]
    rival = next(iter(_half_started(view)), None) if waiting and holding else None
    if rival is None:
        return None
    namespace, job = rival
    here = f" in namespace {namespace}" if namespace != view.namespace else ""
    other = view.flk("suspend", job=job, namespace=namespace)
    return Found(
        f"{len(holding)} of its {len(view.pods)} pods hold nodes and wait for the others, for which there is no "
        f"room, and job {job}{here} does the same: each keeps the other from starting",
        f"{other} gives its nodes back; a job submitted with --gang takes nodes for all of its pods or for none",
        [
            pod_evidence(view, waiting[0], "status.conditions[PodScheduled]"),
            Evidence(
                f"job {job}{here}", "some of its pods have a node, and others are unschedulable", "status of pods"
            ),
        ],
        names(waiting),
    )


def _half_started(view: JobView) -> list[tuple[str, str]]:
    """Return namespace and name of the other jobs of which some pods have a node and others find none."""
    found: dict[tuple[str, str], set[bool]] = defaultdict(set)
    for pod in view.around.other_pods:
        meta = pod["metadata"]
        key = str(meta.get("namespace") or ""), str((meta.get("labels") or {}).get(labels.JOB) or "")
        if key == (view.namespace, view.name) or (pod.get("status") or {}).get("phase") not in _UNFINISHED:
            continue
        if (pod.get("spec") or {}).get("nodeName") or _is_unschedulable(pod):
            found[key].add(bool((pod.get("spec") or {}).get("nodeName")))
    return sorted(key for key, held in found.items() if held == {True, False})


def _is_unschedulable(pod: Object) -> bool:
    return (conditions(pod).get("PodScheduled") or {}).get("reason") == "Unschedulable"


CAUSES: Final = (
    Cause(
        "Deadlocked",
        "The job and another one keep each other from starting",
        "Some pods of each of the two jobs have a node, and no node has room for the others. The pods that run wait "
        "for those. flk reads the pods of other jobs in the cluster, or in the namespace if you may not read more.",
        "Suspend one of the jobs: `flk suspend JOB`. Submit with `--gang auto` where the cluster can schedule gangs: "
        "then a job gets nodes for all of its pods or for none.",
        _deadlocked,
        grace=30,
    ),
)
