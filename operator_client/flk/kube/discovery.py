"""Discovery: which kinds of objects an API server serves, and in which versions, from its aggregated discovery.

As kubectl does, flk keeps the answer on disk, for a minute, so that a command asks for the kinds that are there and
does not learn from a 404 for each of the others, in every run, that they are not.
"""

from __future__ import annotations

import contextlib
import copy
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from flk.errors import ApiError
from flk.kube.connection import cluster_key
from flk.kube.errors import missing_api
from flk.kube.kubeconfig import Context
from flk.kube.resources import Document, Object, RequestTarget, Resource
from flk.user.files import cache_folder, write_whole
from flk_runtime.contract import foreign

KEPT: Final = 60.0  # seconds for which an answer counts
RECENT: Final = 10.0  # seconds for which it counts after a request whose kind the server does not know
LIMIT: Final = 8 << 20  # bytes of the file
GROUPS: Final = "/apis"
Groups = Mapping[str, Mapping[str, "list[str]"]]  # by group and version: the plurals
_Known = tuple[float, Groups]  # an answer of the server, and when it was given


class Discovery:
    """The kinds that one API server serves. Many threads may use it; one of them asks."""

    def __init__(self, answer: Callable[[str, RequestTarget], Object], context: Context) -> None:
        self._answer, self._context = answer, context
        self._lock = threading.RLock()
        self._asked: _Known | None = None  # by this process
        self._kept: _Known | None = None  # by an earlier one

    def asked_by(self, answer: Callable[[str, RequestTarget], Object]) -> Discovery:
        """Return the same answers, with another way to ask the API server."""
        discovery = copy.copy(self)
        discovery._answer = answer
        return discovery

    def serves(self, resource: Resource) -> bool:
        """Return whether a kind of objects is served in a version that flk knows; True if the server does not tell.

        It may have been installed since the answer was given, within the last minute.
        """
        groups = self._groups()
        return not groups or self._version(resource, groups) is not None

    def names(self, resource: Resource) -> bool:
        """Return whether the server has told a moment ago that it serves a kind; False if it does not tell."""
        return self._version(resource, self._groups(kept=RECENT)) is not None

    def ask(self) -> None:
        """Ask the server, unless it has told this process at most `RECENT` seconds ago."""
        self._groups(kept=RECENT if self._asked else 0.0)

    def chosen(self, target: RequestTarget) -> RequestTarget:
        """Return the target of a request in the version that is known to be served, without asking the API server."""
        resource = target.resource
        if isinstance(target, Document) or not resource.others:
            return target
        with self._lock:
            known = self._asked or self._kept_answer()
        version = self._version(resource, known[1]) if known else None
        return replace(target, resource=replace(resource, version=version)) if version else target

    def look_up(self, target: RequestTarget, kept: float = 0.0) -> RequestTarget:
        """Return the target of a request in the best version that flk knows and the API server serves now.

        An answer of the server counts for ``kept`` seconds.
        Raises MissingApiError if there is none; it names the versions that are served. A Document is
        returned unchanged.
        """
        resource = target.resource
        if isinstance(target, Document) or not resource.group:
            return target
        groups = self._groups(kept=kept)
        if not groups:
            return target
        if version := self._version(resource, groups):
            return replace(target, resource=replace(resource, version=version))
        versions = groups.get(resource.group, {})
        raise missing_api(resource, self._context, [name for name in versions if _has(versions, name, resource)])

    def _version(self, resource: Resource, groups: Groups) -> str | None:
        versions = groups.get(resource.group, {})
        known = (resource.version, *resource.others)
        return next((version for version in known if _has(versions, version, resource)), None)

    def _groups(self, *, kept: float | None = None) -> Groups:
        """Return what the server serves, as it has told within the last ``kept`` seconds (default: a minute)."""
        with self._lock:
            known = self._asked or self._kept_answer()
            if known is None or time.time() - known[0] >= (KEPT if kept is None else kept):
                known = self._asked = time.time(), self._ask()
                self._write_file(known)
            return known[1]

    def _kept_answer(self) -> _Known | None:
        self._kept = self._kept or self._read_file()
        return self._kept

    def _ask(self) -> Groups:
        """Return what the server serves; nothing if it does not tell."""
        try:
            return _parsed(self._answer("get", Document(Resource("", "", "apis"), document=GROUPS)))
        except (ApiError, *foreign.ERRORS) as error:
            if isinstance(error, ApiError) and error.is_outage:
                raise
            return {}

    @property
    def _path(self) -> Any:
        return cache_folder() / "discovery" / f"{cluster_key(self._context)}.json"

    def _read_file(self) -> _Known | None:
        try:
            with open(self._path, "rb") as file:
                data = foreign.parse_object(file.read(LIMIT + 1), LIMIT)
            when, groups = float(data["time"]), data["groups"]
            whole = all(isinstance(versions, dict) for versions in groups.values())
        except (*foreign.ERRORS, OSError):
            return None
        return (when, groups) if whole and 0 <= time.time() - when <= KEPT else None

    def _write_file(self, known: _Known) -> None:
        with contextlib.suppress(OSError):
            write_whole(self._path, json.dumps({"time": known[0], "groups": known[1]}).encode())


def _has(versions: Mapping[str, list[str]], version: str, resource: Resource) -> bool:
    """Return whether a version of a group has the kind of objects: a group may have others in it."""
    return resource.plural in versions.get(version, [])


def _parsed(document: Object) -> Groups:
    """Return the groups of an aggregated discovery."""
    return {
        str(group["metadata"]["name"]): {
            str(version["version"]): [str(each["resource"]) for each in version.get("resources") or []]
            for version in group.get("versions") or []
        }
        for group in document.get("items") or []
    }


def in_version(body: Any, target: RequestTarget) -> Any:
    """Return the body of a request with the version of its target, where it is an object of the target's group."""
    resource = target.resource
    if isinstance(body, dict) and str(body.get("apiVersion", "")).startswith(f"{resource.group}/"):
        return {**body, "apiVersion": resource.api_version}
    return body
