"""Placement: which nodes the pods of a job that exists avoid when they are made anew.

Nodes that a user names become a required affinity. Nodes in quarantine become a preferred one, so that a job is never
left without nodes because pods have failed on some: the scheduler uses them when there is no other place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NoReturn

from flk.errors import ApiError, UsageError
from flk.kube import Object, RequestTarget
from flk.observe.client import JobClient
from flk.observe.resources import NODES, resource_of
from flk.observe.view import JobView
from flk.targets import target_of

_REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED: Final = "preferredDuringSchedulingIgnoredDuringExecution"


def avoiding(job: Object, nodes: Sequence[str], quarantined: Iterable[str]) -> Object:
    """Return a job whose pods avoid ``nodes``, and nodes in quarantine where others have room."""
    placed = copy.deepcopy(job)
    for spec in target_of(placed).pod_specs(placed):
        affinity = copy.deepcopy(spec.get("affinity") or {})
        of_nodes = affinity.pop("nodeAffinity", None) or {}
        required = _required((of_nodes.pop(_REQUIRED, None) or {}).get("nodeSelectorTerms") or [], nodes)
        # What an earlier quarantine has added is forgotten with it.
        preferred = [term for term in of_nodes.pop(_PREFERRED, None) or [] if not _is_ours(term)]
        preferred += [{"weight": 100, "preference": {"matchFields": [_not_on(node)]}} for node in quarantined]
        of_nodes |= ({_REQUIRED: {"nodeSelectorTerms": required}} if required else {}) | (
            {_PREFERRED: preferred} if preferred else {}
        )
        affinity |= {"nodeAffinity": of_nodes} if of_nodes else {}
        if affinity != (spec.get("affinity") or {}):
            spec["affinity"] = affinity
    return placed


def report_absent(client: JobClient, nodes: Sequence[str], report: Callable[[str], None]) -> None:
    """``report`` each of the nodes that is not in the cluster: its name may be wrong."""
    for name in nodes:
        try:
            client.api.call("get", RequestTarget(NODES, None, name))
        except ApiError as error:
            if error.status == 404:
                report(f"there is no node {name} in the cluster now")


def place(client: JobClient, job: Object, placed: Object) -> None:
    """Write the affinity of ``placed`` into exactly this job; only for targets that are ``placeable``."""
    if change := _difference(job, placed):
        change_job(client, job, change)


def change_job(client: JobClient, job: Object, change: Object) -> Object:
    """Change exactly this job by a merge patch, and return it. Raises ConflictError if another has its name now."""
    meta, body = job["metadata"], {"metadata": {}, **change}
    body["metadata"] = {"uid": meta["uid"], **body["metadata"]}
    return client.api.call("patch", client.target(resource_of(job), meta["name"]), body=body)


def refuse_other_nodes(client: JobClient, job: Object, nodes: Sequence[str]) -> NoReturn:
    """Raise UsageError: the pods of this job would not follow a change of its template."""
    again = " ".join([job["metadata"]["name"], *(f"--avoid-node {node}" for node in nodes)])
    raise UsageError(
        f"the pods of a {job['kind']} cannot be given other nodes while it exists",
        hint=f"this deletes it and creates it anew: {client.commands.flk('restart', again)}",
    )


def quarantined(view: JobView, report: Callable[[str], None]) -> list[str]:
    """Return the nodes that a job has in quarantine, and ``report`` each of them."""
    for each in view.quarantine:
        report(f"node {each.node} is in quarantine, and avoided where others have room: {each.reason}")
    return [each.node for each in view.quarantine]


def _required(terms: Sequence[Object], nodes: Sequence[str]) -> list[Object]:
    """Return the terms, of which a node must fulfil one, with the nodes to avoid in each."""
    added = [_not_on(node) for node in nodes]
    if not added:
        return list(terms)
    found = []
    for term in terms or [{}]:
        fields = term.get("matchFields") or []
        found.append({**term, "matchFields": [*fields, *(each for each in added if each not in fields)]})
    return found


def _not_on(node: str) -> Object:
    return {"key": "metadata.name", "operator": "NotIn", "values": [node]}


def _is_ours(term: Object) -> bool:
    """Return whether a preferred term does nothing but avoid one node by its name."""
    preference = dict(term.get("preference") or {})
    fields = preference.pop("matchFields", None) or []
    return not preference and [(each.get("key"), each.get("operator")) for each in fields] == [
        ("metadata.name", "NotIn")
    ]


def _difference(before: Object, after: Object) -> Object:
    """Return the merge patch that makes ``after`` of ``before``."""
    found: dict[str, Any] = {key: None for key in before if key not in after}
    for key, value in after.items():
        if isinstance(value, dict) and isinstance(before.get(key), dict):
            if part := _difference(before[key], value):
                found[key] = part
        elif key not in before or before[key] != value:
            found[key] = value
    return found
