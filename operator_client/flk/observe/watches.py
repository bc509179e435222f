"""Watches: watches collections in threads, and hands their changes to the thread that asks for them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from flk.errors import FlkError
from flk.kube import ApiClient, Changed, Listed, RequestTarget, list_and_watch

_SETTLE: Final = 0.05  # seconds without a change after which those that arrived together are shown
_LONGEST: Final = 0.5  # seconds for which changes are collected at most
Take = Callable[[str, "Listed | Changed | FlkError"], None]


class Watches:
    """Collections that are watched under names, each in a thread of its own."""

    def __init__(self, api: ApiClient) -> None:
        self._api = api
        self._changes: queue.SimpleQueue[tuple[str, Listed | Changed | Exception]] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._not_listed: set[str] = set()

    @property
    def are_listed(self) -> bool:
        """Whether all collections were listed once."""
        return not self._not_listed

    def start(self, source: str, target: RequestTarget, query: Mapping[str, Any]) -> None:
        """Watch a collection under the name ``source``."""
        self._not_listed.add(source)
        arguments = (source, target, query)
        threading.Thread(target=self._watch, args=arguments, daemon=True, name=f"flk-{source}").start()

    def close(self) -> None:
        """End the threads when the server sends them something: a change, or a bookmark each minute."""
        self._closed.set()

    def apply(self, interval: float, take: Take) -> None:
        """Wait up to ``interval`` seconds for a change, hand it and those that follow at once to ``take``.

        The time is bounded: of many pods, changes may come without a pause. Nothing is waited for after the first list
        of the last collection. An error of a watch is its last change; one that is no FlkError is raised.
        """
        wait, until = interval, None
        while until is None or time.monotonic() < until:
            try:
                source, change = self._changes.get(timeout=wait)
            except queue.Empty:
                return
            if isinstance(change, Exception) and not isinstance(change, FlkError):
                raise change
            take(source, change)
            if self._not_listed == {source}:
                self._not_listed.clear()
                return
            self._not_listed.discard(source)
            wait = _SETTLE
            until = until or time.monotonic() + _LONGEST

    def _watch(self, source: str, target: RequestTarget, query: Mapping[str, Any]) -> None:
        try:
            for change in list_and_watch(self._api, target, query, closed=self._closed.is_set):
                self._changes.put((source, change))
        except Exception as error:  # of any kind: the thread that reads the queue gets it
            self._changes.put((source, error))
