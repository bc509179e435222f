"""Sources: where a `Reader` gets what it needs to know about a job.

A `Source` asks the API server for each thing. A `ListSource` reads whole lists once and answers from them, so that many
jobs together cost as many requests as one. What one of them answers, the other one answers, too.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Final

from flk.errors import ApiError, ForbiddenError, MissingApiError
from flk.kube import Object, RequestTarget
from flk.observe.client import JobClient
from flk.observe.observation import involved
from flk.observe.pods import one_line
from flk_runtime.contract.values import dataclass, field, replace

KEPT: Final = 5.0  # seconds for which lists count while jobs are followed
# Reasons of events that every job and every pod has and no cause reads: they are most of all events.
_USUAL: Final = ("Created", "Scheduled", "SuccessfulCreate", "SuccessfulCreatePod", "SuccessfulCreateService")


@dataclass(frozen=True)
class Reply:
    """What a source says to one request."""

    items: Sequence[Object] = ()
    lines: Sequence[str] = ()  # of a log
    controllers: Mapping[str, Sequence[Object]] = field(default_factory=dict)  # Deployments by name of the check
    missing: frozenset[str] = frozenset()  # as in Observation
    unreadable: frozenset[str] = frozenset()
    not_served: Mapping[str, str] = field(default_factory=dict)
    other_versions: Mapping[str, str] = field(default_factory=dict)
    error: str = ""  # why there is no answer; empty: there is one


class Source:
    """The API server, which is asked for each thing."""

    def __init__(self, client: JobClient) -> None:
        self._client = client

    def once(self, key: Hashable, read: Callable[[], Reply]) -> Reply:
        """Return what ``read`` returns, or the API server's error. A source may read only once for a key."""
        try:
            return read()
        except ApiError as error:
            return Reply(error=one_line(error))

    def get(self, target: RequestTarget) -> Reply:
        """Return an object, or that it is missing, not served, or may not be read."""
        return self.once(target, lambda: read_object(self._client, target))

    def list_all(self, target: RequestTarget, label: str = "", value: str = "") -> Reply:
        """Return the objects of a collection, or those with the value of a label; none where they may not be read."""
        query = {"labelSelector": f"{label}={value}"} if label else {}
        return self.once((target, label, value), lambda: read_list(self._client, target, **query))

    def events(self, kind: str, namespace: str, name: str) -> Reply:
        """Return the events about one object."""
        return self.once((kind, name), lambda: Reply(items=self._client.list_events(kind, name)))


class ListSource(Source):
    """Lists that are read once for many jobs. Several threads may use them; one of them asks."""

    def __init__(self, client: JobClient, *, kept: float = math.inf, all_namespaces: bool = False) -> None:
        """``kept``: seconds for which a list counts."""
        super().__init__(client)
        self._kept, self._all_namespaces = kept, all_namespaces
        self._replies: dict[Hashable, tuple[float, Reply]] = {}  # when it was read, and what
        self._events: dict[str, tuple[Reply, dict[tuple[str, str], list[Object]]]] = {}  # by kind: by object
        self._locks: dict[Hashable, threading.Lock] = defaultdict(threading.Lock)
        self._lock = threading.Lock()

    def once(self, key: Hashable, read: Callable[[], Reply]) -> Reply:
        """Return what ``read`` has returned for the key, also an error: a server that fails is asked once for all."""
        with self._lock:
            lock = self._locks[key]
        with lock:
            at, reply = self._replies.get(key, (-math.inf, Reply()))
            if time.monotonic() - at >= self._kept or at == -math.inf:
                reply = super().once(key, read)
                self._replies[key] = time.monotonic(), reply
            return reply

    def get(self, target: RequestTarget) -> Reply:
        """Return an object, from a list of all of its kind in the namespace where the user may list them.

        One that is in no namespace is asked for by itself, once: few are needed of all nodes and volumes of a cluster.
        """
        if target.resource.subresource or target.namespace is None:
            return super().get(target)
        every = self.list_all(replace(target, name=None))
        if every.unreadable:
            return super().get(target)
        metas = [(item, item["metadata"]) for item in every.items]
        wanted = target.name, target.namespace or ""
        found = [item for item, meta in metas if (meta["name"], meta.get("namespace") or "") == wanted]
        readable = not (every.not_served or every.other_versions or every.error)
        return replace(every, items=found) if found or not readable else without(target)

    def list_all(self, target: RequestTarget, label: str = "", value: str = "") -> Reply:
        """Return the objects of a collection, or those with the value of a label, from a list of all."""
        where = None if target.namespace is None or self._all_namespaces else self._client.namespace
        every = super().list_all(replace(target, namespace=where))
        if not label:
            return every
        chosen = [item for item in every.items if (item["metadata"].get("labels") or {}).get(label) == value]
        return replace(every, items=chosen)

    def events(self, kind: str, namespace: str, name: str) -> Reply:
        """Return the unusual events about one object, from a list of those about its kind."""
        client, everywhere = self._client, self._all_namespaces
        reply = self.once(
            ("events", kind),
            lambda: Reply(items=client.list_events_about(kind, without=_USUAL, all_namespaces=everywhere)),
        )
        known = self._events.get(kind)
        if known is None or known[0] is not reply:
            known = self._events[kind] = reply, _by_object(reply.items, client.namespace)
        return replace(reply, items=known[1].get((namespace, name), []))


def _by_object(events: Sequence[Object], namespace: str) -> dict[tuple[str, str], list[Object]]:
    """Return events by namespace and name of the object that each is about."""
    found: dict[tuple[str, str], list[Object]] = defaultdict(list)
    for event in events:
        about = involved(event)
        found[str(about.get("namespace") or namespace), str(about.get("name"))].append(event)
    return found


def read_list(client: JobClient, target: RequestTarget, **query: str) -> Reply:
    """Return the objects of a collection that a query chooses; none where the user may not read them.

    Raises ApiError if the API server fails: then nothing is known of them.
    """
    try:
        return Reply(items=client.api.list_all(target, query)[0])
    except ForbiddenError:
        return Reply(unreadable=frozenset({target.resource.plural}))
    except MissingApiError as error:
        return _not_served(target, error)


def read_object(client: JobClient, target: RequestTarget) -> Reply:
    """Return an object, or that it is missing, not served, or may not be read."""
    try:
        return Reply(items=[client.api.call("get", target)])
    except ForbiddenError:
        return Reply(unreadable=frozenset({target.resource.subresource or target.resource.plural}))
    except MissingApiError as error:
        return _not_served(target, error)
    except ApiError as error:
        return without(target) if error.status == 404 else Reply(error=one_line(error))


def without(target: RequestTarget) -> Reply:
    """Return the reply where there is no such object."""
    return Reply(missing=frozenset({f"{target.resource.plural}/{target.name or ''}"}))


def _not_served(target: RequestTarget, error: MissingApiError) -> Reply:
    """Return the reply where there are no such objects, and where they have versions that flk does not know."""
    said = {target.resource.plural: str(error)}
    return Reply(other_versions=said) if error.served else Reply(not_served=said)
