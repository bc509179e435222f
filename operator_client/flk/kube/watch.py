"""List-and-watch of one collection of objects (what client-go calls a reflector).

Each collection is listed, then watched from the version of the list. If a watch ends, stalls, is cut in the middle of a
line or asks for a version that is gone, a new watch or a new list follows. No change is lost.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from flk.errors import ApiError, ForbiddenError, MissingApiError, NoConfigError
from flk.kube.client import Api, Object, Target

IDLE: Final = 90.0  # seconds without a change or a bookmark (the server sends one every minute) until a new watch
OUTAGE: Final = 300.0  # seconds that the API server may be away while something is watched
_PAUSES: Final = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0)  # seconds between attempts to reach it again


@dataclass(frozen=True)
class Listed:
    """The whole collection as it is now."""

    items: list[Object]


@dataclass(frozen=True)
class Changed:
    """One object was added or modified, or (gone) deleted."""

    item: Object
    gone: bool = False


def watch(
    api: Api,
    target: Target,
    query: Mapping[str, Any],
    *,
    idle: float = IDLE,
    outage: float = OUTAGE,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Listed | Changed]:
    """A collection and then its changes, without end. Raises what no new attempt can mend."""
    version, heard, tries = "", time.monotonic(), 0
    while True:
        try:
            if not version:
                items, version = api.list_all(target, query)
                heard = time.monotonic()
                yield Listed(items)
            with api.watch(target, query, version, idle) as lines:
                heard = time.monotonic()
                for line in lines:
                    event = _parsed(line)
                    if event is None:
                        break  # cut or garbled: what follows cannot be trusted
                    kind, item = event
                    if kind == "ERROR":
                        version = _after_error(item, version)
                        break
                    tries = 0
                    version = str((item.get("metadata") or {}).get("resourceVersion") or version)
                    if kind in ("ADDED", "MODIFIED", "DELETED"):
                        yield Changed(item, kind == "DELETED")
        except (NoConfigError, ForbiddenError, MissingApiError):
            raise
        except ApiError as error:
            if error.status == 410:
                version = ""
            elif 400 <= error.status < 500 and error.status != 429:
                raise
            if time.monotonic() - heard > outage:
                raise
        sleep(_PAUSES[min(tries, len(_PAUSES) - 1)])
        tries += 1


def _parsed(line: bytes) -> tuple[str, Object] | None:
    try:
        event = json.loads(line)
        return str(event["type"]), dict(event["object"])
    except (ValueError, KeyError, TypeError):
        return None


def _after_error(status: Object, version: str) -> str:
    """Where to go on after an ERROR event: from a new list if the version is gone, else from where it was."""
    return "" if status.get("code") == 410 or status.get("reason") in ("Expired", "Gone") else version
