"""Queues and gangs: jobs that are suspended or wait for their queue, and pods that start together or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from flk.health.cause import Cause, Found, changed_at, condition_evidence, names, pod_evidence
from flk.health.cluster import Cluster, Level, Pods, Result, Unreadable
from flk.kube import Object
from flk.observe.model import Evidence, PodPhase
from flk.observe.observation import What
from flk.observe.pods import conditions, one_line
from flk.observe.view import MULTIKUEUE, JobView
from flk.spec import labels
from flk.spec.units import short_duration, timestamp
from flk.targets.gang import GANGS
from flk_runtime.contract import ExitCode
from flk_runtime.contract.quantities import plural
from flk_runtime.contract.values import dataclass

SUSPENDED: Final = "Suspended"
UNMANAGED_AFTER: Final = 60.0  # seconds after which Kueue, which needs one or two, has made no Workload of a job
AHEAD: Final = 3  # jobs that are named before one in the queue
LISTED: Final = 1000  # jobs of a queue that Kueue's Visibility API lists at most
_MANAGED: Final = ("job", "jobset", "trainjob")  # targets whose jobs Kueue manages by default


@dataclass(frozen=True)
class Reason:
    """What Kueue means by the reason of a condition of a Workload, and what to do."""

    meaning: str
    remedy: str
    lasts: bool = False  # until somebody changes the job or the queue


_ROOM: Final = Reason("it waits for its turn", "wait, or ask for less")
# Reasons of QuotaReserved and Admitted that are False, as Kueue has them from 0.19 on, and those of before.
PENDING: Final[Mapping[str, Reason]] = {
    "WaitingForQuota": Reason("other jobs use the quota", "wait until they end, or ask for less"),
    "ExceedsMaxQuota": Reason(
        "it asks for more than the queue ever has", "ask for less, or have the quota of the queue raised", lasts=True
    ),
    "NoMatchingFlavor": Reason(
        "no flavor of the queue has nodes for it",
        "correct --node-selector, --gpu or --toleration, or name another --queue",
        lasts=True,
    ),
    "TopologyPlacementFailed": Reason(
        "its pods do not fit together in the topology that it asks for",
        "wait until nodes there are free, ask for fewer pods, or for a wider topology",
    ),
    "WaitingForPreemptedWorkloads": Reason("jobs that were preempted for it end", "wait until they have"),
    "WaitingForPodsReady": Reason("jobs that were admitted before it still start", "wait until their pods are ready"),
    "PendingEvaluation": _ROOM,
    "Misconfigured": Reason(
        "its queue, or something that this names, does not exist or is wrong",
        "correct --queue, or what the message names",
        lasts=True,
    ),
    "Suspended": Reason("somebody has stopped the queue", "ask the administrator, or name another --queue"),
    "AdmissionGated": Reason(
        "an annotation holds it back", "remove kueue.x-k8s.io/admission-gated-by, or ask who has set it"
    ),
    "PendingDelayedTopologyRequests": Reason("nodes for its topology are being made", "wait until they are there"),
    "Inadmissible": Reason("its queue does not exist, or takes no jobs", "correct --queue, or ask the administrator"),
    "Pending": _ROOM,
    "Waiting": Reason("jobs that were admitted before it still start", "wait until their pods are ready"),
}
# Reasons of Evicted that is True.
EVICTED: Final[Mapping[str, Reason]] = {
    "Preempted": Reason("for another job", "a higher --queue-priority is preempted less"),
    "PodsReadyTimeout": Reason(
        "its pods were not ready in time (waitForPodsReady)",
        "find out why they do not start, with `flk why` while they exist",
    ),
    "AdmissionCheck": Reason("an admission check is not ready any more", "the message names the check"),
    "NodeFailures": Reason("a node of it has failed", "have the node that the message names repaired"),
    "ClusterQueueStopped": Reason("the queue was stopped", "ask the administrator who has stopped it"),
    "LocalQueueStopped": Reason("the queue was stopped", "ask the administrator who has stopped it"),
}
_LASTING_GRACE: Final = 60.0  # seconds in which somebody may correct a queue


def before(cluster: Cluster, pods: Pods) -> Iterator[Result]:
    """Check that the Kueue queue exists and admits jobs."""
    name = pods.queue
    found = cluster.named.get(("localqueues", name))
    if isinstance(found, Unreadable):
        if found.missing and found.remedy:  # the API, and not the queue
            yield Result("queue", Level.FAILED, f"queue {name}: {found.reason}", found.remedy, "WaitingInQueue")
            return
        remedy = cluster.commands.kubectl("get localqueues") + " lists those that exist"
        sentence = f"there is no queue {name} (a LocalQueue of Kueue) in namespace {cluster.namespace}"
        yield found.result("queue", sentence, remedy, "WaitingInQueue", unread=f"queue {name} cannot be read")
    elif found is not None:
        active = conditions(found).get("Active") or {}
        if active.get("status") == "False":
            remedy = cluster.commands.kubectl(f"describe localqueue {name}")
            why = active.get("message") or active.get("reason") or "not active"
            sentence = f"queue {name} admits no jobs now: {why}"
            yield Result("queue", Level.FAILED, sentence, remedy, "WaitingInQueue")
        else:
            waiting = (found.get("status") or {}).get("pendingWorkloads", 0)
            yield Result("queue", Level.OK, f"queue {name} exists; {plural(int(waiting or 0), 'job')} wait in it")


def _workload_evidence(workload: Object, condition: Object) -> Evidence:
    text = ": ".join(filter(None, (str(condition.get("reason") or ""), str(condition.get("message") or ""))))
    return condition_evidence(f"Workload {workload['metadata']['name']}", condition, text)


def _suspend_evidence(view: JobView) -> Evidence:
    condition = view.conditions.get("Suspended") or {}
    since = timestamp(condition.get("lastTransitionTime")) or view.created
    return Evidence(view.subject, "true", view.target.suspend_path, since)


def _preempted(view: JobView) -> Found | None:
    waits = _waits(view, "QuotaReserved", "", [])
    if waits is not None and waits.resolves_itself is False:  # the queue cannot start it again
        return None
    for workload in view.seen.workloads if view.suspended else ():
        evicted = conditions(workload).get("Evicted") or {}
        if evicted.get("status") == "True":
            known = EVICTED.get(str(evicted.get("reason")))
            advice = f"; {known.remedy}" if known else ""
            return Found(
                f"queue {view.queue} has taken the job's place back ({evicted.get('reason', 'Evicted')}): "
                f"{evicted.get('message', 'it gives no reason')}",
                f"{view.flk('wait')} waits; the queue starts the job again when there is room{advice}",
                [_workload_evidence(workload, evicted), _suspend_evidence(view)],
            )
    return None


def _deactivated(view: JobView) -> Found | None:
    """Return that a job's Workload is inactive: Kueue, or (without DueTo in the reason) somebody has set that."""
    for workload in view.seen.workloads if view.suspended else ():
        evicted = conditions(workload).get("Evicted") or {}
        if evicted.get("status") == "True" and (workload.get("spec") or {}).get("active") is False:
            reason, change = str(evicted.get("reason")), '{"spec": {"active": true}}'
            activate = view.kubectl(f"patch workload {workload['metadata']['name']} --type merge -p '{change}'")
            return Found(
                f"the job's Workload is deactivated, and queue {view.queue} does not start it ({reason}): "
                f"{evicted.get('message', 'it gives no reason')}",
                f"{activate} has the queue start it again; {view.flk('delete')} gives it up",
                [_workload_evidence(workload, evicted), _suspend_evidence(view)],
                resolves_itself="DueTo" not in reason,
            )
    return None


def _held_by_check(view: JobView) -> Found | None:
    """Return what an admission check of the queue says of a job whose quota is reserved, such as that nodes come."""
    for workload in view.seen.workloads:
        for check in (workload.get("status") or {}).get("admissionChecks") or []:
            state, said = str(check.get("state")), one_line(check.get("message"))
            if state != "Ready":
                name = str(check.get("name"))
                field = f"status.admissionChecks[{name}]"
                source = f"Workload {workload['metadata']['name']}"
                text = f"{state}: {said}" if said else state
                return Found(
                    f"queue {view.queue} has a place for it, and the admission check {name} holds it back ({text})",
                    f"{view.kubectl('describe ' + source.lower().replace(' ', '/'))} shows the check, and, if it is "
                    f"one for nodes, {view.kubectl('get provisioningrequests')} those that Kueue has asked for",
                    [Evidence(source, text, field, timestamp(check.get("lastTransitionTime")))],
                    resolves_itself=state != "Rejected",
                )
    return None


def _place(view: JobView) -> tuple[str, list[Evidence]]:
    """Return where a job stands in its queue and who is ahead, for a sentence, with the evidence; empty if unknown."""
    own = {workload["metadata"]["name"] for workload in view.seen.workloads}
    pending = sorted(view.seen.pending_workloads, key=lambda each: int(each.get("positionInClusterQueue") or 0))
    index = next((index for index, each in enumerate(pending) if each["metadata"]["name"] in own), None)
    if index is None:
        return "", []
    ahead = [_job_of(each) for each in pending[:index]]
    elsewhere = int(pending[index].get("positionInClusterQueue") or 0) - index
    named = ", ".join(ahead[:AHEAD]) + (f" and {len(ahead) - AHEAD} more" if len(ahead) > AHEAD else "")
    others = f"{plural(elsewhere, 'job')} of other queues" if elsewhere > 0 else ""
    behind = " and ".join(filter(None, (named, others)))
    more = " or more" if len(pending) == LISTED else ""
    text = f"place {index + 1} of {len(pending)}{more}" + (f", behind {behind}" if behind else "")
    return f" at {text}", [Evidence(f"queue {view.queue}", text, "pendingworkloads")]


def _job_of(pending: Object) -> str:
    """Return the name of the job that a pending Workload stands for; its own name if it does not tell."""
    owners = pending["metadata"].get("ownerReferences") or [pending["metadata"]]
    return str(owners[0]["name"])


def _waits(view: JobView, kind: str, place: str, evidence: list[Evidence]) -> Found | None:
    """Return what a condition says that is False of the job's Workload, with the remedy for its reason."""
    for workload in view.seen.workloads:
        condition = conditions(workload).get(kind) or {}
        said = str(condition.get("message") or "")
        if condition.get("status") == "False" and said:
            code = str(condition.get("reason"))
            if code == "Inadmissible" and "doesn't exist" in said:  # before Kueue 0.19
                code = "Misconfigured"
            reason = PENDING.get(code, _ROOM)
            told = _workload_evidence(workload, condition)
            return Found(
                f"it waits in queue {view.queue}{place}: {said}",
                f"{reason.remedy}; {view.kubectl('get localqueues,workloads')} shows the queue",
                [told, *evidence],
                # The time of the condition is that of its status, which its reason has not changed.
                since=max(told.time, changed_at(workload)) if reason.lasts else 0.0,
                resolves_itself=not reason.lasts,
                grace=_LASTING_GRACE if reason.lasts else 0.0,
            )
    return None


def _queued(view: JobView) -> Found | None:
    if not view.suspended or not view.queue:
        return None
    place, told = _place(view)
    evidence = [
        *told,
        Evidence(view.subject, view.queue, "metadata.labels[kueue.x-k8s.io/queue-name]"),
        _suspend_evidence(view),
    ]
    if waits := _waits(view, "QuotaReserved", place, evidence):
        return waits
    if held := _held_by_check(view) or _waits(view, "Admitted", place, evidence):
        return held
    if unserved := view.seen.not_served.get("workloads"):
        return Found(
            f"it waits in queue {view.queue}, and nobody starts it: {unserved}",
            f"install Kueue, or delete the job ({view.flk('delete')}) and submit it again without --queue",
            evidence,
            resolves_itself=False,
        )
    unknown = "" if view.seen.workloads else "; Kueue has no Workload for it yet"
    if other := view.seen.other_versions.get("workloads"):
        unknown = f", and flk cannot read why: {other}"
    return Found(
        f"it waits in queue {view.queue}{place}{unknown}",
        f"{view.flk('wait')} waits; {view.kubectl(f'get localqueue {view.queue}')} shows whether the queue exists",
        evidence,
    )


def _ignored(view: JobView) -> Found | None:
    """Return that Kueue has made no Workload of a job in one of its queues, so that nobody starts it."""
    around, queue = view.seen, view.labels.get(labels.QUEUE)
    if not view.suspended or not queue or around.workloads or not around.has_read(What.WORKLOADS):
        return None
    evidence = _suspend_evidence(view)
    unknown = around.unreadable | around.not_served.keys() | around.other_versions.keys()
    if "workloads" in unknown or view.now - evidence.time < UNMANAGED_AFTER:
        return None
    shown = view.kubectl_of_cluster("get configmap kueue-manager-config -n kueue-system -o yaml")
    others = " or ".join(f"--target {name}" for name in _MANAGED if name != view.target.name)
    return Found(
        f"it is in queue {queue}, and Kueue has made no Workload for it in {short_duration(view.now - evidence.time)}: "
        f"Kueue does not manage {view.kind}s here, or does not run",
        f"submit it with {others}, or have {view.target.framework} added to integrations.frameworks of Kueue's "
        f"configuration ({shown} shows it)",
        [Evidence(f"queue {queue}", "none of them belongs to the job", "workloads"), evidence],
        since=evidence.time,
    )


def _sent_elsewhere(view: JobView) -> Found | None:
    """Return that another cluster runs the job, to which MultiKueue has sent the object of the job and nothing else."""
    if not view.sent_away or view.suspended or not all(pod.absent for pod in view.pods):
        return None
    named = [str((each.get("status") or {}).get("clusterName") or "") for each in view.seen.workloads]
    where = f"cluster {named[0]}" if any(named) else "another cluster"
    lacking = view.from_flk and not view.runs_elsewhere and not view.failed
    lacks = ", but not the ConfigMaps and the Secret that they need" if lacking else ""
    admitted = [conditions(each).get("Admitted") or {} for each in view.seen.workloads]
    return Found(
        f"Kueue (MultiKueue) has {where} run the job: its pods and their logs are there{lacks}",
        f"{'submit it there' if lacking else 'give commands'}, with the --context of {where}",
        [Evidence(view.subject, MULTIKUEUE, view.target.suspend_path.replace("suspend", "managedBy"), view.created)],
        since=max([view.created, *(timestamp(each.get("lastTransitionTime")) for each in admitted)]),
        resolves_itself=not lacking,
        exit_code=ExitCode.INFRASTRUCTURE if view.failed else None,
    )


def _suspended(view: JobView) -> Found | None:
    if not view.suspended or view.queue:
        return None
    return Found(
        f"the job is suspended: {view.target.suspend_path} is true, and no queue has set it",
        f"{view.flk('resume')} starts it",
        [_suspend_evidence(view)],
    )


def gang(cluster: Cluster) -> Iterator[Result]:
    """Check that the cluster serves the PodGroups of the job's gang scheduler: they come with the scheduler."""
    chosen, api = cluster.gang, cluster.gang_api
    if chosen is None or api is None:
        return
    if not isinstance(api, Unreadable):
        yield Result("gang", Level.OK, f"the cluster serves PodGroups ({api.api_version})")
    else:
        name = next(name for name, each in GANGS.items() if each is chosen)
        unread = f"the API {chosen.api_version} cannot be read"
        yield api.result("gang", f"gang {name}: {api.reason}", api.remedy, unread=unread)


def _unscheduled(group: Object) -> Object:
    """Return the condition of a PodGroup that says that its pods do not fit; empty if there is none."""
    # Volcano's, and Kubernetes' own of 1.37 and of 1.36.
    known = {"Unschedulable": "True", "PodGroupInitiallyScheduled": "False", "PodGroupScheduled": "False"}
    said = conditions(group)
    return next((said[kind] for kind, status in known.items() if (said.get(kind) or {}).get("status") == status), {})


def awaits_room(group: Object) -> bool:
    """Return whether the pods of a PodGroup, or their creation, wait until all of them fit."""
    phase = (group.get("status") or {}).get("phase")
    return phase in ("Pending", "Inqueue", "Unknown") or bool(_unscheduled(group))


def _waiting_for_gang(view: JobView) -> Found | None:
    waiting = [pod for pod in view.pods if pod.phase in (PodPhase.MISSING, PodPhase.PENDING)]
    for group in view.seen.pod_groups if waiting else ():
        if awaits_room(group):
            unscheduled = _unscheduled(group)
            name = f"PodGroup {group['metadata']['name']}"
            message = str(unscheduled.get("message") or f"its pod group is {group['status'].get('phase')}")
            spec = group.get("spec") or {}
            gang = (spec.get("schedulingPolicy") or {}).get("gang") or {}
            need = spec.get("minMember") or gang.get("minCount")
            # The scheduler says of each pod but one that it waits for the group, and of that one what is missing.
            unfit = next((pod for pod in waiting if pod.message.partition("/")[0].isdigit()), None)
            lacks, evidence = message, [Evidence(name, message, "status.phase")]
            if unscheduled:
                evidence = [condition_evidence(name, unscheduled, message)]
            if unfit:
                lacks = unfit.message.partition(". ")[0]
                evidence.append(pod_evidence(view, unfit, "status.conditions[PodScheduled]"))
            return Found(
                f"the scheduler starts {need} pods together or none, and there is no room for all: {lacks}",
                f"{view.kubectl(f'describe podgroup {view.name}')} shows what is missing",
                evidence,
                names(waiting),
            )
    return None


CAUSES: Final = (
    Cause(
        "WorkloadDeactivated",
        _deactivated,
        cured_by="somebody who activates the Workload",
        awaits="whoever activates the Workload",
    ),
    Cause(
        "PreemptedByQueue",
        _preempted,
        cured_by="the queue",
        awaits="the queue",
    ),
    Cause(
        "QueueIgnoresJobs",
        _ignored,
        awaits="Kueue, which does not manage the job or does not run",
    ),
    Cause(
        "WaitingInQueue",
        _queued,
        cured_by="the queue",
        awaits="the queue",
    ),
    Cause(
        "SentToAnotherCluster",
        _sent_elsewhere,
        grace=60,
        cured_by="the other cluster",
        awaits="the cluster to which MultiKueue has sent the job",
    ),
    Cause(
        SUSPENDED,
        _suspended,
        ExitCode.RUNNING,
        cured_by="somebody who resumes the job",
        awaits="somebody who has suspended the job",
    ),
    Cause(
        "WaitingForGang",
        _waiting_for_gang,
        cured_by="other jobs that end",
        awaits="a gang scheduler",
    ),
)
