"""The rights that flk's commands need in a namespace, as a table, and the check that the user has them.

charts/flk and k8s/rbac.yaml give exactly those that are not optional. A test compares them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flk.doctor.model import Facts, Level, Result, Unreadable

JOBS: Final = "pytorchjobs.kubeflow.org"
_FOLLOW: Final = [("list", JOBS), ("watch", JOBS), ("list", "pods"), ("watch", "pods"), ("get", "pods/log")]
_STATE: Final = [("get", JOBS), ("list", "pods"), ("list", "events"), ("get", "pods/log")]

RIGHTS: Final[dict[str, list[tuple[str, str]]]] = {
    "submit": [
        *(("create", resource) for resource in (JOBS, "configmaps", "secrets")),
        *((verb, JOBS) for verb in ("get", "patch", "delete")),
        *((verb, "configmaps") for verb in ("get", "list")),
    ],
    "doctor": [
        *(("list", resource) for resource in ("resourcequotas", "limitranges")),
        *(("get", resource) for resource in ("persistentvolumeclaims", "serviceaccounts")),
        ("get", "localqueues.kueue.x-k8s.io"),
    ],
    "status": _STATE,
    "why": [*_STATE, ("get", "persistentvolumeclaims"), ("list", "workloads.kueue.x-k8s.io")],
    "list": [("list", JOBS), ("list", "pods")],
    "logs": [*_FOLLOW, ("get", "pods")],
    "wait": [*_FOLLOW, *_STATE],
    "suspend": [("get", JOBS), ("patch", JOBS), *_FOLLOW],
    "resume": [("get", JOBS), ("patch", JOBS)],
    "restart": [
        *((verb, JOBS) for verb in ("get", "patch", "create", "delete")),
        *((verb, "configmaps") for verb in ("list", "create")),
        ("create", "secrets"),
        *_FOLLOW,
    ],
    "delete": [("get", JOBS), ("delete", JOBS), *_FOLLOW],
}
# Commands that people work without. The chart gives these rights only where its values ask for them.
OPTIONAL: Final[dict[str, list[tuple[str, str]]]] = {
    "exec": [("create", "pods/exec")],
    "port-forward": [("create", "pods/portforward")],
}


def all_rights() -> list[tuple[str, str]]:
    """Return every verb and resource that a command needs, each once."""
    return sorted({right for table in (RIGHTS, OPTIONAL) for rights in table.values() for right in rights})


def check_rights(facts: Facts) -> Iterator[Result]:
    """Say which commands the user has no right for."""
    if isinstance(facts.rights, Unreadable):
        yield Result("rights", Level.UNKNOWN, f"the API server does not say what you may do: {facts.rights.reason}")
        return
    allowed = facts.rights
    denied = sorted({r for rights in RIGHTS.values() for r in rights if not allowed.get(r)})
    optional = [verb for verb, rights in OPTIONAL.items() if not all(allowed.get(right) for right in rights)]
    remedy = "ask the administrator for a Role like that of flk's k8s/rbac.yaml or of its chart"
    for verb, resource in denied:
        commands = [command for command, rights in RIGHTS.items() if (verb, resource) in rights]
        found = f"you may not {verb} {resource} in namespace {facts.namespace}, which flk {', '.join(commands)} needs"
        yield Result("rights", Level.FAILED if "submit" in commands else Level.WARNING, found, remedy)
    if not denied:
        without = f"; not for {' and '.join(optional)}" if optional else ""
        yield Result("rights", Level.OK, f"you have the rights for all commands of flk{without}")
