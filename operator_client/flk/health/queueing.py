"""Causes of jobs that are held back: suspended, waiting in a queue, preempted by a queue, or waiting for their gang."""

from __future__ import annotations

from typing import Final

from flk.health.cause import Cause, Found, names, pod_evidence
from flk.kube import Object
from flk.observe.model import Evidence, PodPhase
from flk.observe.view import JobView
from flk.units import timestamp
from flk_runtime.contract.exit_codes import ExitCode


def _condition(item: Object, kind: str) -> Object:
    found = [c for c in (item.get("status") or {}).get("conditions") or [] if c.get("type") == kind]
    return dict(found[0]) if found else {}


def _workload_evidence(workload: Object, condition: Object) -> Evidence:
    text = ": ".join(filter(None, (str(condition.get("reason") or ""), str(condition.get("message") or ""))))
    field = f"status.conditions[{condition.get('type')}]"
    name = workload["metadata"]["name"]
    return Evidence(f"Workload {name}", text, field, timestamp(condition.get("lastTransitionTime")))


def _suspend_evidence(view: JobView) -> Evidence:
    condition = view.conditions.get("Suspended") or {}
    since = timestamp(condition.get("lastTransitionTime")) or view.created
    return Evidence(view.subject, "true", view.target.suspend_path, since)


def _preempted(view: JobView) -> Found | None:
    for workload in view.around.workloads if view.suspended else ():
        evicted = _condition(workload, "Evicted")
        if evicted.get("status") == "True":
            return Found(
                f"queue {view.queue} has taken the job's place back ({evicted.get('reason', 'Evicted')}): "
                f"{evicted.get('message', 'it gives no reason')}",
                f"{view.flk('wait')} waits; the queue starts the job again when there is room",
                [_workload_evidence(workload, evicted), _suspend_evidence(view)],
            )
    return None


def _queued(view: JobView) -> Found | None:
    if not view.suspended or not view.queue:
        return None
    evidence = [
        Evidence(view.subject, view.queue, "metadata.labels[kueue.x-k8s.io/queue-name]"),
        _suspend_evidence(view),
    ]
    for workload in view.around.workloads:
        reserved = _condition(workload, "QuotaReserved")
        if reserved.get("status") == "False" and reserved.get("message"):
            evidence.insert(0, _workload_evidence(workload, reserved))
            return Found(
                f"it waits in queue {view.queue}: {reserved['message']}",
                f"{view.flk('wait')} waits; {view.kubectl('get localqueues,workloads')} shows the queue",
                evidence,
            )
    unknown = "" if view.around.workloads else "; Kueue has no Workload for it yet"
    return Found(
        f"it waits in queue {view.queue}{unknown}",
        f"{view.flk('wait')} waits; {view.kubectl(f'get localqueue {view.queue}')} shows whether the queue exists",
        evidence,
    )


def _suspended(view: JobView) -> Found | None:
    if not view.suspended or view.queue:
        return None
    return Found(
        f"the job is suspended: {view.target.suspend_path} is true, and no queue has set it",
        f"{view.flk('resume')} starts it",
        [_suspend_evidence(view)],
    )


def _unscheduled(group: Object) -> Object:
    """Return the condition of a PodGroup that says that its pods do not fit; empty if there is none."""
    known = {"Unschedulable": "True", "PodGroupScheduled": "False"}  # Volcano's, and Kubernetes' own
    found = [
        _condition(group, kind) for kind, status in known.items() if _condition(group, kind).get("status") == status
    ]
    return found[0] if found else {}


def _waiting_for_gang(view: JobView) -> Found | None:
    waiting = [pod for pod in view.pods if pod.phase in (PodPhase.MISSING, PodPhase.PENDING)]
    for group in view.around.pod_groups if waiting else ():
        phase = str((group.get("status") or {}).get("phase") or "")
        unscheduled = _unscheduled(group)
        if phase in ("Pending", "Inqueue", "Unknown") or unscheduled:
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
                    Evidence(
                        f"PodGroup {group['metadata']['name']}",
                        message,
                        f"status.conditions[{unscheduled.get('type')}]" if unscheduled else "status.phase",
                        timestamp(unscheduled.get("lastTransitionTime")),
                    ),
                    *([pod_evidence(view, unfit, "status.conditions[PodScheduled]")] if unfit else []),
                ],
                names(waiting),
            )
    return None


QUEUEING: Final = (
    Cause(
        "PreemptedByQueue",
        "The queue has taken the job's place back",
        "Kueue has evicted the job, for example for a job of higher priority. flk reads the condition Evicted of the "
        "job's Workload. The pods were ended; the job starts again from its newest checkpoint.",
        "Wait. `flk status` shows when the job runs again.",
        _preempted,
        resolves_itself=True,
    ),
    Cause(
        "WaitingInQueue",
        "The job waits in a queue",
        "The job names a queue, and the queue has not admitted it. flk reads the condition QuotaReserved of the job's "
        "Workload, which says what is missing.",
        "Wait, or ask for less. A queue that does not exist never admits a job: check its name.",
        _queued,
        resolves_itself=True,
    ),
    Cause(
        "Suspended",
        "The job is suspended",
        "The job's field suspend is true, and the job is in no queue. Somebody has suspended it.",
        "`flk resume JOB` starts it again.",
        _suspended,
        ExitCode.RUNNING,
        resolves_itself=True,
    ),
    Cause(
        "WaitingForGang",
        "The scheduler waits until all pods of the job fit",
        "A gang scheduler starts the pods of a job together or not at all. flk reads the phase and the conditions of "
        "the "
        "job's PodGroup.",
        "Wait for other jobs to end, or ask for less.",
        _waiting_for_gang,
        resolves_itself=True,
    ),
)
