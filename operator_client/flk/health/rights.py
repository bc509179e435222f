"""The rights that flk's commands need in a namespace, as a table by target, and the check that the user has them.

The Role of charts/flk gives those that are not optional, for the targets and gangs of its values, and k8s/rbac.yaml for
all targets without a gang: scripts/chart/rights.py makes their rules of this table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from flk.health.cluster import Cluster, Level, Result, Unreadable
from flk.targets import Target
from flk.targets.gang import GANGS, Gang

Right = tuple[str, str]  # a verb and a resource
Rights = dict[str, list[Right]]  # by command


def rights_for(target: Target, gang: Gang | None = None) -> Rights:
    """Return the rights that each command needs for jobs of a target, whose pods a gang may start together."""
    jobs = f"{target.plural}.{target.group}"
    follow = [("list", jobs), ("watch", jobs), ("list", "pods"), ("watch", "pods"), ("get", "pods/log")]
    state = [("get", jobs), ("list", "pods"), ("list", "events"), ("get", "pods/log")]
    # The objects that a job owns beside ConfigMaps and Secrets.
    owned = ["services"] if target.name == "job" else []
    groups = [f"podgroups.{gang.api_version.partition('/')[0]}"] if gang else []
    owned += groups
    workloads, pending = "workloads.kueue.x-k8s.io", ("get", "localqueues.visibility.kueue.x-k8s.io/pendingworkloads")
    return {
        "submit": [
            *(("create", resource) for resource in (jobs, "configmaps", "secrets", *owned)),
            *((verb, jobs) for verb in ("get", "patch", "delete")),
            *((verb, "configmaps") for verb in ("get", "list", "patch")),
        ],
        "doctor": [
            *(("list", resource) for resource in ("resourcequotas", "limitranges")),
            ("get", "persistentvolumeclaims"),
            ("get", "localqueues.kueue.x-k8s.io"),
            ("get", "resourceclaimtemplates.resource.k8s.io"),
        ],
        "status": state,
        "why": [
            *state,
            ("get", "persistentvolumeclaims"),
            ("list", workloads),
            pending,
            *(("get", group) for group in groups),
        ],
        "list": [
            *(
                ("list", resource)
                for resource in (jobs, "pods", "events", "persistentvolumeclaims", workloads, *groups)
            ),
            pending,
        ],
        "logs": [*follow, ("get", "pods")],
        "wait": [*follow, *state],
        "suspend": [("get", jobs), ("patch", jobs), *follow],
        "resume": [("get", jobs), ("patch", jobs)],
        "restart": [
            *((verb, jobs) for verb in ("get", "patch", "create", "delete")),
            *((verb, "configmaps") for verb in ("get", "create", "patch")),
            *((verb, resource) for resource in owned for verb in ("list", "create")),
            ("create", "secrets"),
            *follow,
        ],
        "delete": [("get", jobs), ("delete", jobs), *follow],
    }


# Commands that people work without. The chart gives these rights only where rbac.exec asks for them. The request that
# opens a WebSocket is a "get"; newer API servers ask for "create" as well.
_EXEC: Final[list[Right]] = [("get", "pods/exec"), ("create", "pods/exec")]
OPTIONAL: Final[Rights] = {
    **dict.fromkeys(("cp", "exec", "profile", "stacks"), _EXEC),
    "port-forward": [("get", "pods/portforward"), ("create", "pods/portforward")],
}


def all_rights(target: Target, gang: Gang | None = None) -> Sequence[Right]:
    """Return every verb and resource that a command needs for jobs of a target, each once."""
    tables = (rights_for(target, gang), OPTIONAL)
    return sorted({right for table in tables for rights in table.values() for right in rights})


def resource_attributes(resource: str) -> tuple[str, str, str]:
    """Return the group of a resource of the table, its plural and its subresource, each of which may be empty."""
    name, _, subresource = resource.partition("/")
    plural, _, group = name.partition(".")
    return group, plural, subresource


def before(cluster: Cluster) -> Iterator[Result]:
    """Say which commands the user has no right for."""
    if isinstance(cluster.rights, Unreadable):
        yield Result("rights", Level.UNKNOWN, f"the API server does not say what you may do: {cluster.rights.reason}")
        return
    allowed, needed = cluster.rights, rights_for(cluster.target, cluster.gang)
    denied = sorted({r for rights in needed.values() for r in rights if not allowed.get(r)})
    optional = [verb for verb, rights in OPTIONAL.items() if not all(allowed.get(right) for right in rights)]
    remedy = "ask the administrator for a Role such as the one in flk's k8s/rbac.yaml or in its chart"
    if cluster.gang is not None:
        gang = next(name for name, known in GANGS.items() if known is cluster.gang)
        values = f"rbac.targets={{{cluster.target.name}}} and rbac.gangs={{{gang}}}"
        remedy = f"ask the administrator for the Role of flk's chart with {values}"
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}  # the resources, by the verb and the commands
    for verb, resource in denied:
        commands = tuple(f"flk {command}" for command, rights in needed.items() if (verb, resource) in rights)
        groups.setdefault((verb, commands), []).append(resource)
    for (verb, commands), resources in groups.items():
        which = f"which {_listed(commands)} {'needs' if len(commands) == 1 else 'need'}"
        found = f"you may not {verb} {_listed(resources)} in namespace {cluster.namespace}, {which}"
        yield Result("rights", Level.FAILED if "flk submit" in commands else Level.WARNING, found, remedy)
    if not denied:
        without = f"; not for {_listed(optional)}" if optional else ""
        yield Result("rights", Level.OK, f"you have the rights for all commands of flk{without}")


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
