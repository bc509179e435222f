"""List-and-watch of one collection of objects (what client-go calls a reflector).

A collection is listed, then watched from the version of the list. If a watch ends, stalls, is cut in the middle of a
line or asks for a version that has expired, a new watch or a new list follows. No change is lost.

Why a watch alone is not enough: API servers and proxies end each one after some minutes, connections die without a
word, and the server forgets versions after a while (410). A command that waits for hours meets all of these. So every
end leads back to the top of one loop, whose only memory is the version from which to go on; an empty one means a list.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from flk.errors import ApiError, UnreachableError
from flk.kube.client import ApiClient
from flk.kube.resources import Object, RequestTarget
from flk_runtime.contract import foreign
from flk_runtime.contract.values import dataclass

IDLE: Final = 90.0  # seconds without a change or a bookmark (the server sends one a minute) before a new watch
OUTAGE: Final = 300.0  # seconds that the API server or a credentials plugin may fail
# An API server that has just started may answer with these statuses to what it allowed before, for so many seconds: it
# reads roles and definitions after it has begun to answer.
WHILE_STARTING: Final = frozenset({401, 403, 404})
STARTING: Final = 30.0
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
    closed: Callable[[], bool] = lambda: False,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Listed | Changed]:
    """Yield the collection and then its changes, until ``closed`` says so when the server sends something.

    Raises the error of the first list at once, unless the server has answered to ``client`` before. Other errors are
    raised after ``outage`` seconds without an answer in between that can be read. A request that is refused is tried
    again for a shorter time. Where a watch is not allowed, lists follow one another.
    """
    version, listed = "", False  # no version: the next turn lists
    failures = 0  # turns in a row that brought nothing: they choose the pause
    failing_since: float | None = None  # since when nothing was answered: it decides when to give up
    was_starting = False  # the latest failure was a refusal of a server that starts: its time begins with its first one
    while not closed():
        opened = False  # whether the server has answered to this watch, so that an end of it is no outage
        try:
            if not version:
                items, version = client.list_all(target, query)
                listed, failing_since = True, None
                yield Listed(items)
            with client.watch(target, query, version, idle) as lines:
                opened = True
                for line in lines:
                    if closed():
                        return
                    kind, item = _parsed(line, target)
                    if kind == "ERROR":
                        version = ""  # it has expired: changes in between would be lost
                        break
                    failures, failing_since = 0, None
                    # Bookmarks bring only this: where nothing changes, the version would expire.
                    version = str((item.get("metadata") or {}).get("resourceVersion") or version)
                    if kind in ("ADDED", "MODIFIED", "DELETED"):
                        yield Changed(item, kind == "DELETED")
            failing_since = None  # it has ended by itself, as each does
        except ApiError as error:
            starting = error.status in WHILE_STARTING
            refused = 400 <= error.status < 500 and error.status != 429
            # Whoever has seen nothing yet wants to know at once, unless the server has answered before.
            known = listed or (error.is_outage and client.may_wait())
            if opened and isinstance(error, UnreachableError):
                failing_since = None  # the server did answer
            silent = failures > 1 and isinstance(error, UnreachableError)  # a proxy may hold the watch back
            # The version has expired; or a list tells what a watch does not, which is refused or stays silent.
            if error.status == 410 or (version and (error.status == 403 or silent)):
                version = ""
            elif not known or (refused and not starting):  # a refusal lasts, but that of a server that starts
                raise
            if failing_since is None or starting != was_starting:
                failing_since, was_starting = clock(), starting
            if clock() - failing_since > (STARTING if starting else outage):
                raise
        sleep(_BACKOFFS[min(failures, len(_BACKOFFS) - 1)])
        failures += 1


def _parsed(line: bytes, target: RequestTarget) -> tuple[str, Object]:
    """Return kind and object of an event; ERROR only if the version has expired.

    Raises ApiError for other errors, and for a line that is cut or garbled: the rest of its stream cannot be trusted.
    """
    try:
        event = json.loads(line)
        kind, item = str(event["type"]), dict(event["object"])
    except foreign.ERRORS:
        start = line[:80].decode(errors="replace")
        raise ApiError(f"the watch of {target.resource.plural} gets what is no event: {start!r}") from None
    if kind == "ERROR" and item.get("code") != 410 and item.get("reason") not in ("Expired", "Gone"):
        raise ApiError(f"the watch of {target.resource.plural} fails: {item.get('message') or item}")
    return kind, item
