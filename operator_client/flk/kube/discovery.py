"""ServedVersions: in which versions an API server serves kinds of objects, from its discovery documents."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from flk.errors import MissingApiError
from flk.kube.errors import missing_api
from flk.kube.kubeconfig import Context
from flk.kube.resources import Document, Object, RequestTarget, Resource

_GROUPS: Final = "/apis"


class ServedVersions:
    """The versions that were chosen for kinds of objects in one cluster. It remembers them; many threads may use it."""

    def __init__(self, answer: Callable[[str, RequestTarget], Object], context: Context) -> None:
        self._answer = answer
        self._context = context
        self._chosen: dict[Resource, str] = {}

    def asked_by(self, answer: Callable[[str, RequestTarget], Object]) -> ServedVersions:
        """Return the same versions, with another way to ask the API server."""
        versions = copy.copy(self)
        versions._answer = answer
        return versions

    def chosen(self, target: RequestTarget) -> RequestTarget:
        """Return the target of a request in the version that was found before, without asking the API server."""
        version = self._chosen.get(target.resource)
        return replace(target, resource=replace(target.resource, version=version)) if version else target

    def look_up(self, target: RequestTarget) -> RequestTarget:
        """Return the target of a request in the best version that flk knows and the API server serves.

        Raises MissingApiError if there is none; it names the versions that are served. A document has no other version.
        """
        resource = target.resource
        if isinstance(target, Document) or not resource.group:
            return target
        served = self._served(resource)
        for version in (resource.version, *resource.others):
            if version in served and self._has(resource, version):
                self._chosen[resource] = version
                return self.chosen(target)
        raise missing_api(resource, self._context, [version for version in served if self._has(resource, version)])

    def _served(self, resource: Resource) -> list[str]:
        """Return the versions of a group."""
        group = self._read(resource, resource.group)
        return [str(each.get("version")) for each in group.get("versions") or []]

    def _has(self, resource: Resource, version: str) -> bool:
        """Return whether a version of a group has the kind of objects: a group may have others in it."""
        kinds = self._read(resource, f"{resource.group}/{version}")
        names = [str(each.get("name")) for each in kinds.get("resources") or []]
        return resource.plural in [name.partition("/")[0] for name in names]

    def _read(self, resource: Resource, path: str) -> Object:
        try:
            return self._answer("get", Document(resource, document=f"{_GROUPS}/{path}"))
        except MissingApiError:
            return {}


def in_version(body: Any, target: RequestTarget) -> Any:
    """Return the body of a request with the version of its target, where it is an object of the target's group."""
    resource = target.resource
    if isinstance(body, dict) and str(body.get("apiVersion", "")).startswith(f"{resource.group}/"):
        return {**body, "apiVersion": resource.api_version}
    return body
