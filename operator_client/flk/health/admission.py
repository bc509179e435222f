"""Admission of pods by the API server: Pod Security, service account, priority class, webhooks and policies."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from flk.health.cause import Cause
from flk.health.cluster import Cluster, Level, Pods, Result, Unreadable
from flk.health.quota import refused
from flk_runtime.contract.failure import ExitCode

_POD_SECURITY: Final = re.compile(r'violates PodSecurity "([^":]+)[^"]*": (.*)')
_ACCOUNT: Final = re.compile(r'error looking up service account \S+: serviceaccount "([^"]+)" not found')
_PRIORITY: Final = re.compile(r"no PriorityClass with name (\S+) was found")
_WEBHOOK: Final = re.compile(
    r"(?:admission webhook \"([^\"]+)\" denied the request:? ?(.*)"
    r"|ValidatingAdmissionPolicy '([^']+)'(?: with binding '[^']+')? denied request: (.*))"
)
_WEBHOOKS: Final = "validatingwebhookconfigurations,mutatingwebhookconfigurations"
_WEBHOOK_DOWN: Final = re.compile(r'failed calling webhook "([^"]+)": (.*)')
REFUSED: Final = "PodRefused"
_ANY: Final = re.compile(r"(?:.*?(?:is forbidden|is invalid): )?(.+)")


def lacks_dry_run(message: str) -> bool:
    """Whether the API server says that a webhook supports no dry run, so that each one is refused."""
    return "does not support dry run" in message


def before(cluster: Cluster, _: Pods) -> Iterator[Result]:
    """Report what the API server says about a pod of the job, which it checks without creating it."""
    refusal = cluster.admission.reason if isinstance(cluster.admission, Unreadable) else ""
    if cluster.admission is None or lacks_dry_run(refusal):
        why = refusal or "you may not create pods"
        found = f"whether Pod Security, policies and webhooks would admit the pods was not checked: {why}"
        yield Result("admission", Level.UNKNOWN, found)
    elif not refusal:
        yield Result("admission", Level.OK, "the API server would admit a pod of the job")
    elif violation := _POD_SECURITY.search(refusal):
        found = f"the namespace enforces {violation[1]}, and the pods break it: {violation[2]}"
        remedy = "change `patch` in the job, or submit to another namespace"
        yield Result("admission", Level.FAILED, found, remedy, "PodSecurityViolated")
    else:
        found = f"the API server refuses a pod of the job: {refusal}"
        remedy = "the message names the policy or the object; `flk render` shows the manifest"
        yield Result("admission", Level.FAILED, found, remedy, REFUSED)


CAUSES: Final = (
    Cause(
        "PodSecurityViolated",
        refused(
            _POD_SECURITY,
            lambda view, trace: f"they violate the namespace's Pod Security level {trace[1]} ({trace[2]})",
            lambda view, trace: (
                "remove what it names from the pod template or from the job's patch; "
                f"{view.kubectl_of_cluster(f'get namespace {view.namespace} --show-labels')} shows the level"
            ),
        ),
        grace=10,
    ),
    Cause(
        "ServiceAccountMissing",
        refused(
            _ACCOUNT,
            lambda view, trace: f"the service account {trace[1]} does not exist in namespace {view.namespace}",
            lambda view, trace: (
                f"{view.kubectl(f'create serviceaccount {trace[1]}')} creates it, or name another one in the job"
            ),
        ),
        grace=30,
    ),
    Cause(
        "PriorityClassMissing",
        refused(
            _PRIORITY,
            lambda view, trace: f"there is no priority class {trace[1]}",
            lambda view, trace: (
                f"{view.kubectl_of_cluster('get priorityclasses')} lists those that exist; name one of them in the job"
            ),
        ),
        grace=10,
    ),
    Cause(
        "WebhookRefused",
        refused(
            _WEBHOOK,
            lambda view, trace: (
                f"the admission check {trace[1] or trace[3]} refuses them "
                f"({trace[2] or trace[4] or 'without a reason'})"
            ),
            lambda view, trace: (
                "change what it objects to; "
                f"{view.kubectl_of_cluster('get validatingwebhookconfigurations,validatingadmissionpolicies')} "
                "lists the checks"
            ),
        ),
        ExitCode.USAGE,
        grace=10,
    ),
    Cause(
        "WebhookUnavailable",
        refused(
            _WEBHOOK_DOWN,
            lambda view, trace: f"the admission webhook {trace[1]} does not answer ({trace[2]})",
            lambda view, trace: (
                f"{view.kubectl_of_cluster(f'get {_WEBHOOKS} -o wide')} names its service; have it repaired"
            ),
        ),
        grace=120,
    ),
    Cause(
        REFUSED,
        refused(
            _ANY,
            lambda view, trace: trace[1],
            lambda view, trace: f"change what the API server refuses; {view.describe} shows all events",
        ),
        grace=30,
    ),
)
