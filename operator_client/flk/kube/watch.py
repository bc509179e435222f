"""List-and-watch of one collection of objects (what client-go calls a reflector).

A collection is listed, then watched from the version of the list. If a watch ends, stalls, is cut in the middle of a
line or asks for a version that has expired, a new watch or a new list follows. No change is lost.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from flk.errors import ApiError
from flk.kube.client import ApiClient
from flk.kube.resources import Object, RequestTarget

IDLE: Final = 90.0  # seconds without a change or a bookmark (the server sends one a minute) before a new watch
OUTAGE: Final = 300.0  # seconds that the API server or a credentials plugin may fail
# An API server that has just started may answer with these statuses to what it allowed before, for so many seconds: it
# reads roles and definitions after it has begun to answer.
_WHILE_STARTING: Final = frozenset({401, 403, 404})
_STARTING: Final = 30.0
_BACKOFFS: Final = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0)  # seconds between attempts


@dataclass(frozen=True)
class Listed:
    """The whole collection as it is now."""

    items: list[Object]


@dataclass(frozen=True)
class Changed:
    """One object was added or modified, or (``deleted``) deleted."""

    item: Object
    deleted: bool = False


def list_and_watch(
    client: ApiClient,
    target: RequestTarget,
    query: Mapping[str, Any],
    *,
    idle: float = IDLE,
    outage: float = OUTAGE,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Listed | Changed]:
    """Yield the collection and then its changes, without end.

    Raises the error of the first list at once. Later errors are raised after ``outage`` seconds without an answer in
    between. A request that is refused is tried again for a shorter time.
    """
    version, listed, failures = "", False, 0
    failing_since: float | None = None
    while True:
        try:
            if not version:
                items, version = client.list_all(target, query)
                listed, failing_since = True, None
                yield Listed(items)
            with client.watch(target, query, version, idle) as lines:
                failing_since = None
                for line in lines:
                    event = _parsed(line)
                    if event is None:
                        break  # cut or garbled: the rest of the stream cannot be trusted
                    kind, item = event
                    if kind == "ERROR":
                        version = _version_after_error(item, version)
                        break
                    failures = 0
                    version = str((item.get("metadata") or {}).get("resourceVersion") or version)
                    if kind in ("ADDED", "MODIFIED", "DELETED"):
                        yield Changed(item, kind == "DELETED")
        except ApiError as error:
            starting = error.status in _WHILE_STARTING
            if error.status == 410:
                version = ""
            elif not listed or (400 <= error.status < 500 and error.status != 429 and not starting):
                raise
            failing_since = clock() if failing_since is None else failing_since
            if clock() - failing_since > (_STARTING if starting else outage):
                raise
        sleep(_BACKOFFS[min(failures, len(_BACKOFFS) - 1)])
        failures += 1


def _parsed(line: bytes) -> tuple[str, Object] | None:
    try:
        event = json.loads(line)
        return str(event["type"]), dict(event["object"])
    except (ValueError, KeyError, TypeError):
        return None


def _version_after_error(status: Object, version: str) -> str:
    """Return where to go on after an ERROR event: at a new list if the version has expired, else where it was."""
    return "" if status.get("code") == 410 or status.get("reason") in ("Expired", "Gone") else version
