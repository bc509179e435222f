"""The kubectl command that is equivalent to a request, for people who want to repeat the request by hand."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any, Final

from flk.kube.resources import Document, RequestTarget

_LOG_FLAGS: Final = {
    "follow": "--follow",
    "previous": "--previous",
    "timestamps": "--timestamps",
    "tailLines": "--tail={}",
    "sinceSeconds": "--since={}s",
    "sinceTime": "--since-time={}",
}


def kubectl_command(verb: str, target: RequestTarget, query: Mapping[str, Any], body: Any, flags: str) -> str:
    """Return the equivalent kubectl command. ``flags`` choose the cluster: `` --context NAME``.

    The manifest of an object to create stands as FILE, since it may hold code or secrets.
    """
    return f"kubectl {' '.join(_words(verb, target, query, body))}{_scope(target, body)}{flags}"


def _words(verb: str, target: RequestTarget, query: Mapping[str, Any], body: Any) -> list[str]:
    resource, name = str(target.resource), shlex.quote(target.name or "")
    if isinstance(target, Document):
        return ["get", "--raw", target.path]
    if target.resource.plural == "selfsubjectaccessreviews":
        asked = body["spec"]["resourceAttributes"]
        of_group = f"{asked['resource']}.{asked['group']}" if asked.get("group") else asked["resource"]
        subresource = f" --subresource={asked['subresource']}" if asked.get("subresource") else ""
        return ["auth", "can-i", asked["verb"], of_group + subresource]
    if target.resource.subresource == "log":
        options = [text.format(query[key]) for key, text in _LOG_FLAGS.items() if query.get(key)]
        container = [f"-c {query['container']}"] if query.get("container") else []
        return ["logs", name, *container, *options]
    if verb == "create":
        return ["create", "-f", "FILE", *(["--dry-run=server"] if query.get("dryRun") else [])]
    if verb == "patch":
        kind = "merge" if target.resource.group else "strategic"
        return ["patch", resource, name, f"--type={kind}", "-p", shlex.quote(json.dumps(body))]
    if verb == "delete":
        policy = str((body or {}).get("propagationPolicy") or "Background").lower()
        return ["delete", resource, name, f"--cascade={policy}", "--wait=false"]
    if target.name is not None:
        return ["get", resource, name, "-o", "json"]
    selectors = [("-l", "labelSelector"), ("--field-selector", "fieldSelector")]
    chosen = [f"{flag} {shlex.quote(str(query[key]))}" for flag, key in selectors if query.get(key)]
    return ["get", resource, *chosen, *(["--watch"] if verb == "watch" else ["-o", "json"])]


def _scope(target: RequestTarget, body: Any) -> str:
    if isinstance(target, Document):
        return ""
    if target.namespace is not None:
        return f" -n {shlex.quote(target.namespace)}"
    if target.resource.plural == "selfsubjectaccessreviews":
        return f" -n {shlex.quote(body['spec']['resourceAttributes'].get('namespace', ''))}"
    return " -A" if target.resource.jobs or target.resource.plural in ("pods", "deployments", "events") else ""
