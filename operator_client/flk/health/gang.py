"""Gangs: pods that the scheduler starts together or not at all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from flk import labels
from flk.health.autoscaling import is_adding
from flk.health.cause import Cause, Found, condition_evidence, names, pod_evidence
from flk.health.cluster import Cluster, Level, Result, Unreadable
from flk.health.resources import is_allowed, requests
from flk.health.scheduling import is_short_of_resources, parse
from flk.kube import Object
from flk.observe.model import Evidence, PodPhase, PodState
from flk.observe.pods import conditions, job_of, one_line, phase_of, training_container
from flk.observe.view import JobView, number_in, pod_spec
from flk.targets.gang import GANGS
from flk_runtime.contract.pod_env import MIN_PODS, PODS, SPARES


def before(cluster: Cluster) -> Iterator[Result]:
    """Check that the cluster serves the PodGroups of the job's gang scheduler: they come with the scheduler."""
    gang, api = cluster.gang, cluster.gang_api
    if gang is None or api is None:
        return
    if not isinstance(api, Unreadable):
        yield Result("gang", Level.OK, f"the cluster serves PodGroups ({api.api_version})")
    else:
        name = next(name for name, each in GANGS.items() if each is gang)
        unread = f"the API {gang.api_version} cannot be read"
        yield api.result("gang", f"gang {name}: {api.reason}", api.remedy, unread=unread)


def _unscheduled(group: Object) -> Object:
    """Return the condition of a PodGroup that says that its pods do not fit; empty if there is none."""
    # Volcano's, and Kubernetes' own of 1.37 and of 1.36.
    known = {"Unschedulable": "True", "PodGroupInitiallyScheduled": "False", "PodGroupScheduled": "False"}
    said = conditions(group)
    return next((said[kind] for kind, status in known.items() if (said.get(kind) or {}).get("status") == status), {})


def _waiting_for_gang(view: JobView) -> Found | None:
    waiting = [pod for pod in view.pods if pod.phase in (PodPhase.MISSING, PodPhase.PENDING)]
    for group in view.seen.pod_groups if waiting else ():
        phase = str((group.get("status") or {}).get("phase") or "")
        unscheduled = _unscheduled(group)
        if phase in ("Pending", "Inqueue", "Unknown") or unscheduled:
            name = f"PodGroup {group['metadata']['name']}"
            message = str(unscheduled.get("message") or f"its pod group is {phase}")
            spec = group.get("spec") or {}
            gang = (spec.get("schedulingPolicy") or {}).get("gang") or {}
            need = spec.get("minMember") or gang.get("minCount")
            # The scheduler says of each pod but one that it waits for the group, and of that one what is missing.
            unfit = next((pod for pod in waiting if pod.message.partition("/")[0].isdigit()), None)
            lacks = f": {unfit.message.partition('. ')[0]}" if unfit else f": {message}"
            return Found(
                f"the scheduler starts {need} pods together or none, and there is no room for all{lacks}",
                f"{view.kubectl(f'describe podgroup {view.name}')} shows what is missing",
                [
                    condition_evidence(name, unscheduled, message)
                    if unscheduled
                    else Evidence(name, message, "status.phase"),
                    *([pod_evidence(view, unfit, "status.conditions[PodScheduled]")] if unfit else []),
                ],
                names(waiting),
            )
    return None


CAUSES: Final = (
    Cause(
        "WaitingForGang",
        _waiting_for_gang,
        cured_by="other jobs that end",
    ),
)


_UNFINISHED: Final = ("Pending", "Running")  # phases of pods
_HOLDING: Final = (PodPhase.STARTING, PodPhase.RUNNING)
# Kinds whose pods run until somebody deletes them. The kubelet makes its own node the owner of static pods.
_SERVICES: Final = ("DaemonSet", "Node", "ReplicaSet", "ReplicationController", "StatefulSet")


def _deadlocked(view: JobView) -> Found | None:
    waiting = view.unschedulable
    holding = [pod for pod in view.pods if pod.phase in _HOLDING]
    if not waiting or not holding or is_adding(view) or not is_short_of_resources(waiting[0].message):
        return None
    others = _jobs(view)
    if (view.resizable and len(holding) >= view.sizes[0]) or any(map(_trains, others.values())):
        return None  # a job that trains will end and free its nodes
    if _may_get_room(view, waiting[0]):
        return None
    rival = next((key for key, pods in sorted(others.items()) if _is_half_started(pods)), None)
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


def _jobs(view: JobView) -> dict[tuple[str, str], list[Object]]:
    """Return the unfinished pods of the other jobs of flk that were read, by namespace and name of the job."""
    found: dict[tuple[str, str], list[Object]] = defaultdict(list)
    for pod in view.seen.other_pods:
        key = job_of(pod)
        if key[1] and key != (view.namespace, view.name) and phase_of(pod) in _UNFINISHED:
            found[key].append(pod)
    return found


def _may_get_room(view: JobView, waiting: PodState) -> bool:
    """Return whether a pod that is not of flk may end, and its end gives back some of what a waiting pod lacks."""
    own = {each["metadata"].get("uid") for each in view.objects.values()}  # those of a job of another tool
    lacks = {reason.detail for reason in parse(waiting.message) if reason.kind == "resource"}
    for pod in view.seen.other_pods:
        meta, spec = pod["metadata"], pod_spec(pod)
        if labels.JOB in (meta.get("labels") or {}) or meta.get("uid") in own or not _may_end(pod):
            continue
        node = view.seen.nodes.get(spec["nodeName"])
        if node is not None and not is_allowed(node, pod_spec(view.objects[waiting.name]), when_back=True):
            continue
        if any(amount > 0 for name, amount in {**requests(spec), "pods": 1.0}.items() if name in lacks):
            return True
    return False


def _may_end(pod: Object) -> bool:
    """Return whether a pod has a node, has not ended, and is not one of a service."""
    if phase_of(pod) not in _UNFINISHED or not _has_node(pod):
        return False
    owners = {owner.get("kind") for owner in pod["metadata"].get("ownerReferences") or []}
    return pod_spec(pod).get("restartPolicy", "Always") != "Always" or owners.isdisjoint(_SERVICES)


def _trains(pods: list[Object]) -> bool:
    """Return whether a job has as many pods with a node as it needs to train: an elastic one need not have them all."""
    container = training_container(pods[0])
    most = number_in(container, PODS)
    least = number_in(container, MIN_PODS) or (most or len(pods)) - number_in(container, SPARES)
    return sum(map(_has_node, pods)) >= least


def _is_half_started(pods: list[Object]) -> bool:
    """Return whether some of the pods have a node, and the scheduler finds no room for others."""
    scheduled = [conditions(pod).get("PodScheduled") or {} for pod in pods if not _has_node(pod)]
    waits = [one for one in scheduled if one.get("reason") == "Unschedulable"]
    return any(map(_has_node, pods)) and any(is_short_of_resources(one_line(one.get("message"))) for one in waits)


def _has_node(pod: Object) -> bool:
    return bool(pod_spec(pod).get("nodeName"))


DEADLOCK: Final = (
    Cause(
        "Deadlocked",
        _deadlocked,
        grace=30,
    ),
)
