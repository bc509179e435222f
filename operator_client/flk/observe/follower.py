"""Follower: a list-and-watch cache (an informer) of one job and its pods."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from flk import targets
from flk.errors import FlkError, JobNotFoundError
from flk.kube import Changed, Listed, Object, RequestTarget, list_and_watch
from flk.observe.client import PODS, RESOURCES, JobClient
from flk.observe.observation import Observation
from flk.targets import DEFAULT

_SETTLE: Final = 0.05  # seconds without a change after which those that arrived together are shown
_LONGEST: Final = 0.5  # seconds for which changes are collected at most


class Follower:
    """Watches a job and its pods in two threads and shows them together."""

    def __init__(self, client: JobClient, name: str, uid: str | None = None) -> None:
        self.client = client
        self.name = name
        self.uid = uid
        self._job: Object | None = None  # as it was seen last
        self._gone: float | None = None  # when it was seen to be deleted
        self._target = DEFAULT  # until the job is looked up
        self._pods: dict[str, Object] = {}
        self._replaced_pods: dict[str, Object] = {}
        self._name_reused = False
        self._changes: queue.SimpleQueue[tuple[str, Listed | Changed | Exception]] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._not_listed = {"job", "pods"}

    def __enter__(self) -> Follower:
        try:
            kind = self._target = self._look_up()
        except FlkError as error:  # `updates` raises it
            self._changes.put(("job", error))
            return self
        collections = {
            "job": (self.client.target(RESOURCES[kind.name]), {"fieldSelector": f"metadata.name={self.name}"}),
            "pods": (self.client.target(PODS), {"labelSelector": kind.pod_selector(self.name)}),
        }
        for source, (target, query) in collections.items():
            arguments = (source, target, query)
            threading.Thread(target=self._watch, args=arguments, daemon=True, name=f"flk-{source}").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def updates(self, interval: float = 1.0) -> Iterator[Observation]:
        """Yield the job after every change and at least every ``interval`` seconds.

        Ends when the job was deleted and none of its pods is left. Raises JobNotFoundError if there is no such job at
        the beginning, and passes on the errors of the watches.
        """
        while True:
            changed = self._apply_changes(interval)
            if self._not_listed:
                continue
            if self.uid is None:
                raise JobNotFoundError(
                    f"there is no job {self.name} in namespace {self.client.namespace}",
                    hint=f"{self.client.commands.flk('list')} lists those that exist",
                )
            seen = self._observed()
            yield seen
            if seen.gone is not None and changed and not seen.pods:
                return

    def _look_up(self) -> targets.Target:
        try:
            return self.client.target_of(self.name)
        except JobNotFoundError:
            if self.uid is None:
                raise
            return DEFAULT  # it is gone

    def _watch(self, source: str, target: RequestTarget, query: Mapping[str, Any]) -> None:
        try:
            for change in list_and_watch(self.client.api, target, query):
                if self._closed.is_set():
                    return
                self._changes.put((source, change))
        except Exception as error:  # of any kind: the thread that reads the queue raises it
            self._changes.put((source, error))

    def _apply_changes(self, interval: float) -> bool:
        """Wait up to ``interval`` seconds for a change, apply it and those that follow at once; say if there were any.

        The time is bounded: in a job of many pods, changes may come without a pause.
        """
        wait, changed, until = interval, False, None
        while until is None or time.monotonic() < until:
            try:
                source, change = self._changes.get(timeout=wait)
            except queue.Empty:
                return changed
            if isinstance(change, Exception):
                raise change
            if source == "job":
                self._apply_to_job(change)
            else:
                self._apply_to_pods(change)
            self._not_listed.discard(source)
            wait, changed = _SETTLE, True
            until = until or time.monotonic() + _LONGEST
        return changed

    def _apply_to_job(self, change: Listed | Changed) -> None:
        items = change.items if isinstance(change, Listed) else [] if change.deleted else [change.item]
        if self.uid is None and items:
            self.uid = items[0]["metadata"]["uid"]
        own = [item for item in items if item["metadata"]["uid"] == self.uid]
        self._name_reused = self._name_reused or (bool(items) and not own)
        if isinstance(change, Changed) and change.deleted and change.item["metadata"]["uid"] != self.uid:
            return
        if own:
            self._job, self._gone = {**own[0], "kind": self._target.kind}, None
        elif self._gone is None:
            self._gone = self.client.now()

    def _apply_to_pods(self, change: Listed | Changed) -> None:
        if isinstance(change, Changed):
            self._set_pod(change.item["metadata"]["name"], None if change.deleted else change.item, change.item)
            return
        listed = {item["metadata"]["name"]: item for item in change.items}
        for name in {**self._pods, **listed}:
            self._set_pod(name, listed.get(name))

    def _set_pod(self, name: str, new: Object | None, last: Object | None = None) -> None:
        """Store a pod under its name, or remove it (``new`` is None), and remember the one that it replaces."""
        old = last if new is None and last is not None else self._pods.get(name)
        if old is not None and (new is None or new["metadata"]["uid"] != old["metadata"]["uid"]):
            self._replaced_pods[name] = old
        if new is None:
            self._pods.pop(name, None)
        else:
            self._pods[name] = new

    def _observed(self) -> Observation:
        pods = [pod for pod in self._pods.values() if self._owns(pod)]
        replaced = {name: pod for name, pod in self._replaced_pods.items() if self._owns(pod)}
        time, gone, reused = self.client.now(), self._gone, self._name_reused
        return Observation(self._job, pods, time, replaced_pods=replaced, gone=gone, name_reused=reused)

    def _owns(self, pod: Object) -> bool:
        created = self._job["metadata"].get("creationTimestamp") if self._job else None
        return self.uid is None or self._target.owns(pod, self.uid, self.name, created)
