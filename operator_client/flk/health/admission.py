"""Admission of pods by the API server: whether all pods of a job fit into a quota, and pods that it refuses.

What quotas, limit ranges, policies and webhooks say to a single pod, the API server says to the pod that it checks
without creating it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from flk.health.cause import Cause, Find, Found, Locate, Match, Tell, event_evidence, tell
from flk.health.cluster import Amounts, Cluster, Level, Pods, Result, Unreadable, amount_text, quantity
from flk.kube import Object
from flk.observe.model import PodPhase
from flk.observe.pods import one_line
from flk.observe.view import SERVICE_REFUSED, JobView
from flk.targets import DEFAULT
from flk_runtime.contract.quantities import plural

EXCEEDED: Final = "QuotaExceeded"
_QUOTA: Final = re.compile(r"exceeded quota: (\S+), requested: (\S+), used: (\S+), limited: (\S+?),?(?:\s|$)")
_WEBHOOKS: Final = "validatingwebhookconfigurations,mutatingwebhookconfigurations"
_WEBHOOK_DOWN: Final = re.compile(r'failed calling webhook "([^"]+)": (.*)')
REFUSED: Final = "PodRefused"
_ANY: Final = re.compile(r"(?:.*?(?:is forbidden|is invalid): )?(.+)")


def _refusal(pattern: re.Pattern[str]) -> Locate:
    """Return a Locate for the last refusal whose message matches ``pattern``."""

    def locate(view: JobView) -> Match | None:
        for event in reversed(view.refusals):
            match = pattern.search(one_line(event.get("message")))
            if match:
                absent = [
                    pod.name for pod in view.pods if pod.phase == PodPhase.MISSING or event in view.refused_services
                ]
                return Match(absent, [event_evidence(event)], (match[0], *match.groups("")))
        return None

    return locate


def _refused(pattern: re.Pattern[str], sentence: Tell, remedy: Tell) -> Find:
    """Return a Find for a cause of refusals whose message matches ``pattern``."""
    return tell(_refusal(pattern), lambda view, trace: f"{_not_created(view, trace)}: {sentence(view, trace)}", remedy)


def _not_created(view: JobView, trace: Match) -> str:
    """Return the beginning of a sentence that says how many pods are refused, or that a service of theirs is."""
    if trace.evidence[0].text.startswith(SERVICE_REFUSED):
        return "a service by which the pods find each other cannot be created"
    return f"{plural(len(trace.pods), 'pod')} of {len(view.pods)} cannot be created"


def before(cluster: Cluster, pods: Pods) -> Iterator[Result]:
    """Check that all pods together fit into each quota, and report what the API server says about one of them."""
    yield from _check_quotas(cluster, pods)
    yield from _check_pod(cluster)


def lacks_dry_run(message: str) -> bool:
    """Whether the API server says that a webhook supports no dry run, so that each one is refused."""
    return "does not support dry run" in message


def _check_pod(cluster: Cluster) -> Iterator[Result]:
    refusal = cluster.admission.reason if isinstance(cluster.admission, Unreadable) else ""
    if cluster.admission is None or lacks_dry_run(refusal):
        why = refusal or "you may not create pods"
        found = f"whether Pod Security, policies and webhooks would admit the pods was not checked: {why}"
        yield Result("admission", Level.UNKNOWN, found)
    elif not refusal:
        yield Result("admission", Level.OK, "the API server would admit a pod of the job")
    else:
        found = f"the API server refuses a pod of the job: {refusal}"
        remedy = "the message names the policy or the object; `flk render` shows the manifest"
        yield Result("admission", Level.FAILED, found, remedy, REFUSED)


def _check_quotas(cluster: Cluster, pods: Pods) -> Iterator[Result]:
    if isinstance(cluster.quotas, Unreadable):
        yield Result("quota", Level.UNKNOWN, f"the quotas cannot be read: {cluster.quotas.reason}")
        return
    problems = []
    for quota in cluster.quotas:
        if quota["spec"].get("scopes") or quota["spec"].get("scopeSelector"):
            continue  # it counts some kinds of pods only
        status = quota.get("status") or {}
        hard, used = status.get("hard") or quota["spec"].get("hard") or {}, status.get("used") or {}
        name = quota["metadata"]["name"]
        for key, limit in sorted(hard.items()):
            needed = _needed(key, pods, cluster)
            left = quantity(limit) - quantity(used.get(key, 0))
            shown = cluster.commands.kubectl(f"describe quota {name}")
            remedy = f"{shown} shows it; ask the administrator for more, or use less"
            if needed is None:
                flag = key.rpartition(".")[2]
                found = f"quota {name} demands {key} of every pod, and the job sets none: its pods are refused"
                remedy = f"set --{flag}" if flag in ("cpu", "memory") else remedy
                problems.append(Result("quota", Level.FAILED, found, remedy, REFUSED))
            elif needed > left:
                possible = needed <= quantity(limit)
                found = _shortage(key, needed, name, f"{amount_text(key, max(0.0, left))} left of {limit}", possible)
                level = Level.WARNING if possible else Level.FAILED
                problems.append(Result("quota", level, found, remedy, EXCEEDED))
    fits = f"the job fits into {plural(len(cluster.quotas), 'quota')}" if cluster.quotas else "none"
    yield from problems or [Result("quota", Level.OK, fits)]


def _shortage(key: str, needed: float, quota: str, has: str, possible: bool) -> str:
    end = "it must wait" if possible else "it can never run"
    return f"the job needs {amount_text(key, needed)} {key}, and quota {quota} has {has}: {end}"


def _needed(key: str, pods: Pods, cluster: Cluster) -> float | None:
    """Return how much of a quota the job needs; None if the quota demands a value that the pods do not set."""
    if key in ("pods", "count/pods"):
        return float(pods.count)
    if key in ("services", "count/services"):  # the training operator makes one for each pod
        return float(pods.count if pods.target is DEFAULT else 1)
    if key in (f"count/{pods.target.plural}.{pods.target.group}", "secrets", "count/secrets"):
        return 1.0
    resource = key.removeprefix("requests.").removeprefix("limits.")
    if resource == key and key not in ("cpu", "memory", "ephemeral-storage"):
        return 0.0
    total = 0.0
    for container in pods.containers:
        requests, limits = _with_defaults(container, cluster)
        amounts = limits if key.startswith("limits.") else requests
        if resource not in amounts and resource in ("cpu", "memory"):
            return None
        total += amounts.get(resource, 0.0)
    return total * pods.count


def _with_defaults(container: Object, cluster: Cluster) -> tuple[Amounts, Amounts]:
    """Return requests and limits of a container after the defaults of limit ranges, as LimitRanger sets them."""
    resources = container.get("resources") or {}
    limits = {name: quantity(value) for name, value in (resources.get("limits") or {}).items()}
    requests = {name: quantity(value) for name, value in (resources.get("requests") or {}).items()}
    for name, value in limits.items():
        requests.setdefault(name, value)
    for item in _items(cluster, "Container"):
        default_limits = {**(item.get("max") or {}), **(item.get("default") or {})}
        for name, value in default_limits.items():
            limits.setdefault(name, quantity(value))
        for name, value in {**default_limits, **(item.get("defaultRequest") or {})}.items():
            requests.setdefault(name, quantity(value))
    return requests, limits


def _items(cluster: Cluster, kind: str) -> list[Object]:
    ranges = [] if isinstance(cluster.limit_ranges, Unreadable) else cluster.limit_ranges
    return [i for limit_range in ranges for i in limit_range["spec"].get("limits") or [] if i.get("type") == kind]


def _exceeded(view: JobView) -> Found | None:
    trace = _refusal(_QUOTA)(view)
    if trace is None:
        return None
    _, quota, requested, used, limited = trace.texts
    limits = dict(part.split("=", 1) for part in limited.split(",") if "=" in part)
    shown = view.kubectl(f"describe resourcequota {quota}")
    alike = view.sizes[0] if len(view.roles) == 1 else 1  # fewer cannot train; pods of another role may ask for less
    for key, each in (part.split("=", 1) for part in requested.split(",") if "=" in part):
        needed = quantity(each) * alike
        if key in limits and needed > quantity(limits[key]):
            return trace.found(
                f"{_not_created(view, trace)}: {_shortage(key, needed, quota, f'{limits[key]} in all', False)}",
                f"ask for less, or have the quota raised; {shown} shows it",
            )
    return trace.found(
        f"{_not_created(view, trace)}: the namespace's quota {quota} is used up ({requested} requested, {used} of "
        f"{limited} used)",
        f"{shown} shows who uses it; delete jobs that have ended with {view.flk('list', job='')}, ask for less, or "
        "have the quota raised",
        resolves_itself=True,  # other jobs may free it
    )


CAUSES: Final = (
    Cause(
        EXCEEDED,
        _exceeded,
        grace=60,
    ),
    Cause(
        "WebhookUnavailable",
        _refused(
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
        _refused(
            _ANY,
            lambda view, trace: trace[1],
            lambda view, trace: f"change what the API server refuses; {view.describe} shows all events",
        ),
        grace=30,
    ),
)
