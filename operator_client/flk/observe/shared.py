"""SharedAnswers: what many jobs of a namespace need to know, read once for all of them."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any, Final

from flk.errors import ApiError
from flk.kube import Object
from flk.observe.client import JobClient
from flk.observe.observation import involved
from flk.observe.resources import EVENTS

KEPT: Final = 5.0  # seconds for which an answer counts


class SharedAnswers:
    """Answers and errors that are kept for some seconds. Several threads may use them; one asks for each answer."""

    def __init__(self, client: JobClient, kept: float = KEPT) -> None:
        self._client, self._kept = client, kept
        self._answers: dict[Hashable, tuple[float, Any]] = {}  # when it was read, and what
        self._locks: dict[Hashable, threading.Lock] = defaultdict(threading.Lock)
        self._lock = threading.Lock()

    def events(self, kind: str, name: str) -> list[Object]:
        """Return the events about one object. Raises ForbiddenError where the user may not read them."""
        found: dict[tuple[str, str], list[Object]] = self.once("events", self._events)
        return found.get((kind, name), [])

    def once(self, key: Hashable, read: Callable[[], Any]) -> Any:
        """Return what ``read`` has returned for the key within the last seconds, or returns now.

        Raises the ApiError that it has raised instead: all jobs together ask a server that fails once.
        """
        with self._lock:
            lock = self._locks[key]
        with lock:
            at, answer = self._answers.get(key, (0.0, None))
            if not at or time.monotonic() - at > self._kept:
                try:
                    answer = read()
                except ApiError as error:
                    answer = error
                self._answers[key] = time.monotonic(), answer
        if isinstance(answer, ApiError):
            raise answer.with_traceback(None)  # or each raise would add frames
        return answer

    def _events(self) -> dict[tuple[str, str], list[Object]]:
        about: dict[tuple[str, str], list[Object]] = defaultdict(list)
        for event in self._client.api.list_all(self._client.target(EVENTS))[0]:
            what = involved(event)
            about[str(what.get("kind")), str(what.get("name"))].append(event)
        return about
