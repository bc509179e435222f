"""Checks of a job against its namespace: quotas, limit ranges and the admission of its pods."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flk.health.facts import Amounts, Facts, Level, Pods, Result, Unreadable, amount_text, quantity
from flk.health.pod_security import violations
from flk.kube import Object
from flk.targets import DEFAULT
from flk.units import plural

_ENFORCE: Final = "pod-security.kubernetes.io/enforce"


def check_quotas(facts: Facts, pods: Pods) -> Iterator[Result]:
    """Check that all pods of the job together fit into what is left of each quota."""
    if isinstance(facts.quotas, Unreadable):
        yield Result("quota", Level.UNKNOWN, f"the quotas cannot be read: {facts.quotas.reason}")
        return
    problems = []
    for quota in facts.quotas:
        if quota["spec"].get("scopes") or quota["spec"].get("scopeSelector"):
            continue  # it counts some kinds of pods only
        status = quota.get("status") or {}
        hard, used = status.get("hard") or quota["spec"].get("hard") or {}, status.get("used") or {}
        name = quota["metadata"]["name"]
        for key, limit in sorted(hard.items()):
            needed = _needed(key, pods, facts)
            left = quantity(limit) - quantity(used.get(key, 0))
            remedy = facts.command(f"describe quota {name}") + " shows it; ask the administrator for more, or use less"
            if needed is None:
                flag = key.rpartition(".")[2]
                found = f"quota {name} demands {key} of every pod, and the job sets none: its pods are refused"
                problems.append(
                    Result("quota", Level.FAILED, found, f"set --{flag}" if flag in ("cpu", "memory") else remedy)
                )
            elif needed > left:
                possible = needed <= quantity(limit)
                rest = amount_text(key, max(0.0, left))
                found = f"the job needs {amount_text(key, needed)} {key}, and quota {name} has {rest} left of {limit}"
                found += ": it must wait" if possible else ": it can never run"
                problems.append(Result("quota", Level.WARNING if possible else Level.FAILED, found, remedy))
    yield from problems
    if not problems:
        yield Result(
            "quota", Level.OK, f"the job fits into {plural(len(facts.quotas), 'quota')}" if facts.quotas else "none"
        )


def _needed(key: str, pods: Pods, facts: Facts) -> float | None:
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
        requests, limits = effective(container, facts.limit_ranges)
        amounts = limits if key.startswith("limits.") else requests
        if resource not in amounts and resource in ("cpu", "memory"):
            return None
        total += amounts.get(resource, 0.0)
    return total * pods.count


def effective(container: Object, limit_ranges: object) -> tuple[Amounts, Amounts]:
    """Return requests and limits of a container after the defaults of limit ranges, as LimitRanger sets them."""
    resources = container.get("resources") or {}
    limits = {name: quantity(value) for name, value in (resources.get("limits") or {}).items()}
    requests = {name: quantity(value) for name, value in (resources.get("requests") or {}).items()}
    for name, value in limits.items():
        requests.setdefault(name, value)
    for item in _items(limit_ranges, "Container"):
        default_limits = {**(item.get("max") or {}), **(item.get("default") or {})}
        for name, value in default_limits.items():
            limits.setdefault(name, quantity(value))
        for name, value in {**default_limits, **(item.get("defaultRequest") or {})}.items():
            requests.setdefault(name, quantity(value))
    return requests, limits


def _items(limit_ranges: object, kind: str) -> list[Object]:
    ranges = limit_ranges if isinstance(limit_ranges, list) else []
    return [i for limit_range in ranges for i in limit_range["spec"].get("limits") or [] if i.get("type") == kind]


def check_limit_ranges(facts: Facts, pods: Pods) -> Iterator[Result]:
    """Check each container and each pod against the bounds of the limit ranges."""
    if isinstance(facts.limit_ranges, Unreadable):
        yield Result("limit range", Level.UNKNOWN, f"the limit ranges cannot be read: {facts.limit_ranges.reason}")
        return
    problems: list[Result] = []
    remedy = facts.command("describe limitranges") + " shows them"
    total_requests: Amounts = {}
    total_limits: Amounts = {}
    for container in pods.containers:
        requests, limits = effective(container, facts.limit_ranges)
        for name, amount in requests.items():
            total_requests[name] = total_requests.get(name, 0.0) + amount
        for name, amount in limits.items():
            total_limits[name] = total_limits.get(name, 0.0) + amount
        own_limits = (container.get("resources") or {}).get("limits") or {}
        for name, limit in limits.items():
            if requests.get(name, 0.0) > limit:
                found = f"a limit range sets a limit of {amount_text(name, limit)} {name}, less than the request of "
                found += f"{amount_text(name, requests[name])}: the pods are refused"
                problems.append(Result("limit range", Level.FAILED, found, remedy))
            elif name == "cpu" and name not in own_limits:
                found = (
                    f"a limit range limits each container to {amount_text(name, limit)} cores, which slows ranks down"
                )
                problems.append(Result("limit range", Level.WARNING, found, remedy))
        for item in _items(facts.limit_ranges, "Container"):
            problems += _outside(item, requests, limits, "container", remedy)
    for item in _items(facts.limit_ranges, "Pod"):
        problems += _outside(item, total_requests, total_limits, "pod", remedy)
    yield from problems
    if not problems:
        yield Result("limit range", Level.OK, "the pods are within the limits" if facts.limit_ranges else "none")


def _outside(item: Object, requests: Amounts, limits: Amounts, what: str, remedy: str) -> Iterator[Result]:
    for name, value in (item.get("max") or {}).items():
        amount = limits.get(name, requests.get(name, 0.0))
        if amount > quantity(value):
            found = f"a {what} may have at most {value} {name}, and the job asks for {amount_text(name, amount)}"
            yield Result("limit range", Level.FAILED, found, remedy)
    for name, value in (item.get("min") or {}).items():
        if requests.get(name, 0.0) < quantity(value):
            found = f"a {what} must request at least {value} {name}, and the job's requests "
            found += amount_text(name, requests.get(name, 0.0))
            yield Result("limit range", Level.FAILED, found, remedy)


def check_pod_security(facts: Facts, pods: Pods) -> Iterator[Result]:
    """Check the pod template against the Pod Security level that the namespace enforces."""
    if isinstance(facts.space, Unreadable):
        yield Result("pod security", Level.UNKNOWN, f"the namespace cannot be read: {facts.space.reason}")
        return
    level = str((facts.space["metadata"].get("labels") or {}).get(_ENFORCE) or "privileged")
    broken = violations(pods.spec, level)
    if broken:
        found = f"the namespace enforces {level}, and the pods break it: {'; '.join(broken)}"
        yield Result("pod security", Level.FAILED, found, "change `patch` in the job, or submit to another namespace")
    else:
        yield Result("pod security", Level.OK, f"the namespace enforces {level}, and the pods comply")


def check_admission(facts: Facts, pods: Pods) -> Iterator[Result]:
    """Report what the API server says about a pod of the job, where the user may create pods."""
    if isinstance(facts.admission, Unreadable):
        remedy = "the message names the policy or the object; `flk render` shows the manifest"
        yield Result(
            "admission", Level.FAILED, f"the API server refuses a pod of the job: {facts.admission.reason}", remedy
        )
    elif facts.admission is not None:
        yield Result("admission", Level.OK, "the API server would admit a pod of the job")
