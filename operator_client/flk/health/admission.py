"""Causes of pods that do not exist: the operator does not act, or the API server refuses them."""

from __future__ import annotations

import re
from typing import Final

from flk.health.cause import Cause, Found, event_evidence, names, subject
from flk.kube import Object
from flk.observe.model import Evidence, PodPhase, PodState
from flk.observe.view import JobView
from flk.targets.controllers import CONTROLLERS, trouble
from flk.units import plural, short_duration, timestamp
from flk_runtime.contract.exit_codes import ExitCode

OPERATOR_DELAY: Final = 15.0  # seconds after a job's creation in which the operator should have seen it
_QUOTA: Final = re.compile(r"exceeded quota: (\S+), requested: (\S+), used: (\S+), limited: (\S+)")
_QUOTA_NEEDS: Final = re.compile(r"failed quota: (\S+): must specify (.+?)(?: for:|$)")
_LIMIT: Final = re.compile(
    r"((?:minimum|maximum|max) .+? per (?:Container|Pod|PersistentVolumeClaim) is [^\],]+(?:, but .+?)?)(?:[\],]|\.$|$)"
)
_POD_SECURITY: Final = re.compile(r'violates PodSecurity "([^"]+)": (.*)')
_ACCOUNT: Final = re.compile(r'error looking up service account \S+: serviceaccount "([^"]+)" not found')
_INSTALL: Final = {
    "pytorchjob": "; `k8s/install-operator` installs it",
    "trainjob": "; `k8s/install-trainer` installs it",
}
_PRIORITY: Final = re.compile(r"no PriorityClass with name (\S+) was found")
_DENIED: Final = re.compile(r'admission webhook "([^"]+)" denied the request:? ?(.*)')
_POLICY: Final = re.compile(r"ValidatingAdmissionPolicy '([^']+)'(?: with binding '[^']+')? denied request: (.*)")
_WEBHOOK_DOWN: Final = re.compile(r'failed calling webhook "([^"]+)": (.*)')


def _managed_elsewhere(view: JobView) -> Found | None:
    manager = str(view.run_policy.get("managedBy") or "")
    if view.seen_by_operator or not manager or manager == "kubeflow.org/training-operator":
        return None
    return Found(
        f"the training operator leaves this job alone because its manager is {manager}, which has not acted on it",
        f"{view.describe} shows spec.runPolicy.managedBy; create the job without that field to have it run in this "
        "cluster",
        [Evidence(view.subject, manager, "spec.runPolicy.managedBy", view.created)],
    )


def awaits_controller(view: JobView) -> bool:
    """Return whether a job has lacked pods for some seconds and no event says why: its controller may be away."""
    if view.suspended or view.failed or view.succeeded or view.now - view.created < OPERATOR_DELAY:
        return False
    return bool(_lacking(view) or not view.pods) and not refusals(view)


def _lacking(view: JobView) -> list[PodState]:
    """Return the pods that the controller has to create, and those that have ended and that it has to replace."""
    return [
        pod
        for pod in view.pods
        if pod.phase == PodPhase.MISSING or (pod.phase == PodPhase.FAILED and not pod.failed_permanently)
    ]


def _operator_not_running(view: JobView) -> Found | None:
    if not awaits_controller(view):
        return None
    away = _away(view)
    untouched = not view.seen_by_operator and all(pod.phase == PodPhase.MISSING for pod in view.pods)
    if away is not None or not untouched:
        return away
    remedy = f"{view.target.controller_pods} shows the operator's pod{_INSTALL.get(view.target.name, '')}"
    return Found(
        f"{view.target.controller} has not touched the job: it does not run in this cluster, or it does not watch "
        "this namespace",
        remedy,
        [_untouched(view)],
    )


def _away(view: JobView) -> Found | None:
    """Return that the Deployment of a controller of the job has no pod that is ready, as far as it could be read."""
    for controller in CONTROLLERS[view.target.name]:
        deployments = view.around.controllers.get(controller.check, ())
        troubles = [trouble(controller, deployment) for deployment in deployments]
        if not troubles or troubles[0] is None or None in troubles:
            continue
        first, lacking = deployments[0]["metadata"], _lacking(view)
        changed = max((timestamp(entry.get("time")) for entry in first.get("managedFields") or []), default=0.0)
        where = f"Deployment {first['name']} in namespace {first['namespace']}"
        context = f"--context {view.context} " if view.context else ""
        gone = view.seen_by_operator and lacking
        return Found(
            f"{controller.name} {troubles[0].found}, so nothing creates {subject(lacking) if lacking else 'its pods'}",
            f"kubectl {context}{troubles[0].remedy}",
            [
                Evidence(where, troubles[0].value, troubles[0].field, changed),
                _absence(lacking[0]) if gone else _untouched(view),
            ],
            names(lacking),
            since=max(changed, view.created),
        )
    return None


def _untouched(view: JobView) -> Evidence:
    age = short_duration(view.now - view.created)
    return Evidence(view.subject, f"no conditions, {age} after its creation", "status", view.created)


def _absence(pod: PodState) -> Evidence:
    """Return that a pod does not exist, or has ended and is still there."""
    if pod.phase == PodPhase.MISSING:
        return Evidence(f"pod {pod.name}", "it does not exist")
    text = f"it has ended ({pod.reason or f'exit code {pod.exit_code}'}) and was not replaced"
    return Evidence(f"pod {pod.name}", text, "status.phase", pod.ended or 0.0)


def refusals(view: JobView) -> list[Object]:
    """Return the events of pods that were not created and still do not exist."""
    if all(pod.phase != PodPhase.MISSING for pod in view.pods):
        return []
    return [e for e in view.job_events if str(e.get("reason", "")).startswith("FailedCreate")]


def _refusal(view: JobView, pattern: re.Pattern[str]) -> tuple[Object, re.Match[str], str, list[str]] | None:
    """Return the last matching event, its match, the pods in words and their names."""
    for event in reversed(refusals(view)):
        match = pattern.search(" ".join(str(event.get("message", "")).split()))
        if match:
            absent = [pod.name for pod in view.pods if pod.phase == PodPhase.MISSING]
            words = f"{plural(len(absent), 'pod')} of {len(view.pods)} cannot be created"
            return event, match, words, absent
    return None


def _quota(view: JobView) -> Found | None:
    found = _refusal(view, _QUOTA)
    if found is None:
        return None
    event, match, words, absent = found
    quota, requested, used, limited = (match[n].rstrip(",") for n in (1, 2, 3, 4))
    return Found(
        f"{words}: the namespace's quota {quota} is used up ({requested} requested, {used} of {limited} used)",
        f"{view.kubectl(f'describe resourcequota {quota}')} shows who uses it; delete jobs that have ended with "
        f"{view.flk('list', job='')}, ask for less, or have the quota raised",
        [event_evidence(event)],
        absent,
        resolves_itself=used.rpartition("=")[2] not in ("0", ""),  # others may free it; nobody can if it is too small
    )


def _quota_needs_value(view: JobView) -> Found | None:
    found = _refusal(view, _QUOTA_NEEDS)
    if found is None:
        return None
    event, match, words, absent = found
    return Found(
        f"{words}: the namespace's quota {match[1]} demands that pods set {match[2]}",
        "set it in the job, for example with --cpu and --memory; "
        f"{view.kubectl(f'describe resourcequota {match[1]}')} "
        "shows what the quota counts",
        [event_evidence(event)],
        absent,
    )


def _limit_range(view: JobView) -> Found | None:
    found = _refusal(view, _LIMIT)
    if found is None:
        return None
    event, match, words, absent = found
    return Found(
        f"{words}: a LimitRange of the namespace forbids it ({match[1]})",
        f"{view.kubectl('describe limitrange')} shows the limits; choose --cpu, --memory or --gpu within them",
        [event_evidence(event)],
        absent,
    )


def _pod_security(view: JobView) -> Found | None:
    found = _refusal(view, _POD_SECURITY)
    if found is None:
        return None
    event, match, words, absent = found
    return Found(
        f"{words}: they violate the namespace's Pod Security level {match[1].partition(':')[0]} ({match[2]})",
        f"remove what it names from the pod template or from the job's patch; {view.kubectl('get namespace')} "
        f"{view.namespace} --show-labels shows the level",
        [event_evidence(event)],
        absent,
    )


def _service_account(view: JobView) -> Found | None:
    found = _refusal(view, _ACCOUNT)
    if found is None:
        return None
    event, match, words, absent = found
    return Found(
        f"{words}: the service account {match[1]} does not exist in namespace {view.namespace}",
        f"{view.kubectl(f'create serviceaccount {match[1]}')} creates it, or name another one in the job",
        [event_evidence(event)],
        absent,
    )


def _priority_class(view: JobView) -> Found | None:
    found = _refusal(view, _PRIORITY)
    if found is None:
        return None
    event, match, words, absent = found
    return Found(
        f"{words}: there is no priority class {match[1]}",
        "kubectl get priorityclasses lists those that exist; name one of them in the job",
        [event_evidence(event)],
        absent,
    )


def _webhook_refused(view: JobView) -> Found | None:
    found = _refusal(view, _DENIED) or _refusal(view, _POLICY)
    if found is None:
        return None
    event, match, words, absent = found
    return Found(
        f"{words}: the admission check {match[1]} refuses them ({match[2] or 'without a reason'})",
        "change what it objects to; kubectl get validatingwebhookconfigurations,validatingadmissionpolicies lists "
        "the checks",
        [event_evidence(event)],
        absent,
    )


def _webhook_unavailable(view: JobView) -> Found | None:
    found = _refusal(view, _WEBHOOK_DOWN)
    if found is None:
        return None
    event, match, words, absent = found
    return Found(
        f"{words}: the admission webhook {match[1]} does not answer ({match[2]})",
        "kubectl get validatingwebhookconfigurations,mutatingwebhookconfigurations -o wide names its service; have "
        "it repaired",
        [event_evidence(event)],
        absent,
    )


def _refused(view: JobView) -> Found | None:
    found = _refusal(view, re.compile(r"(?:is forbidden|is invalid): (.*)|(.+)"))
    if found is None:
        return None
    event, match, words, absent = found
    return Found(
        f"{words}: {match[1] or match[2]}",
        f"change what the API server refuses; {view.describe} shows all events",
        [event_evidence(event)],
        absent,
    )


_READ: Final = "flk reads the event FailedCreatePod (or FailedCreate) of the job."
ADMISSION: Final = (
    Cause(
        "ManagedElsewhere",
        "Another controller than the training operator manages the job",
        "spec.runPolicy.managedBy names another controller, and that one has not acted. The training operator does "
        "nothing for such a job.",
        "Install the controller that the field names, or create the job without the field.",
        _managed_elsewhere,
        grace=60,
    ),
    Cause(
        "OperatorNotRunning",
        "The operator does not act on the job",
        "The job has no conditions, no pods and no events some seconds after its creation, or pods that are gone are "
        "not replaced. The operator does not run, watches other namespaces only, or is overloaded. flk reads the "
        "operator's Deployment, if you may read it. Pods that run need no operator.",
        "`flk doctor` checks the operator. The administrator of the cluster can start or install it.",
        _operator_not_running,
        grace=120,
    ),
    Cause(
        "QuotaExceeded",
        "The namespace's quota has no room for the pods",
        f"A ResourceQuota of the namespace refuses pods. {_READ} The operator tries again when something changes.",
        "Wait for other jobs to end, delete what is not needed, ask for less, or have the quota raised.",
        _quota,
        grace=60,
    ),
    Cause(
        "QuotaNeedsRequest",
        "The namespace's quota demands a value that the pods do not set",
        f"A ResourceQuota that counts a resource refuses pods that do not say how much of it they need. {_READ}",
        "Set the resource in the job: --cpu, --memory, or limits in the job's patch.",
        _quota_needs_value,
        grace=10,
    ),
    Cause(
        "LimitRangeViolated",
        "The pods ask for more or less than a LimitRange of the namespace allows",
        f"A LimitRange bounds what one container or pod may request. {_READ}",
        "Choose --cpu, --memory and --gpu within the limits of the namespace.",
        _limit_range,
        grace=10,
    ),
    Cause(
        "PodSecurityViolated",
        "The pods violate the Pod Security level of the namespace",
        f"The namespace enforces a Pod Security level that the pod template does not meet. flk's own pods meet "
        f"`restricted`; a patch or a foreign manifest may not. {_READ}",
        "Remove the fields that the message names, or use a namespace with another level.",
        _pod_security,
        grace=10,
    ),
    Cause(
        "ServiceAccountMissing",
        "The service account of the pods does not exist",
        f"The pod template names a service account that the namespace does not have. {_READ}",
        "Create the service account, or name one that exists.",
        _service_account,
        grace=30,
    ),
    Cause(
        "PriorityClassMissing",
        "The priority class of the pods does not exist",
        f"The pod template names a priority class that the cluster does not have. {_READ}",
        "Name a priority class that exists.",
        _priority_class,
        grace=10,
    ),
    Cause(
        "WebhookRefused",
        "An admission webhook or policy refuses the pods",
        f"A check that this cluster has in front of its API server refuses the pods, with its own reason. {_READ}",
        "Change what the message names, or ask the administrator of the cluster.",
        _webhook_refused,
        ExitCode.USAGE,
        grace=10,
    ),
    Cause(
        "WebhookUnavailable",
        "An admission webhook does not answer",
        f"A webhook that must allow each pod cannot be reached or takes too long. {_READ}",
        "The administrator of the cluster has to repair the webhook. The operator creates the pods once it answers.",
        _webhook_unavailable,
        grace=120,
    ),
    Cause(
        "PodRefused",
        "The API server refuses the pods",
        f"The pods could not be created, for a reason that flk does not know more about. {_READ}",
        "Change what the message names.",
        _refused,
        grace=30,
    ),
)
