"""Follower: a list-and-watch cache (an informer) of one job and its pods."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from flk import labels
from flk.errors import JobNotFoundError
from flk.jobs.client import JOBS, PODS, JobClient
from flk.kube import Changed, Listed, Object, Target, list_and_watch

_SETTLE: Final = 0.05  # seconds without a change after which those that arrived together are shown
_LONGEST: Final = 0.5  # seconds for which changes are collected at most


@dataclass(frozen=True)
class ObservedJob:
    """A job and its pods at one moment. ``job`` is None once it was deleted."""

    job: Object | None
    pods: list[Object]
    replaced_pods: dict[str, Object] = field(default_factory=dict)  # by name: pods that ended and were recreated
    name_reused: bool = False  # another job has the name now


class Follower:
    """Watches a job and its pods in two threads and shows them together."""

    def __init__(self, client: JobClient, name: str, uid: str | None = None) -> None:
        self.client = client
        self.name = name
        self.uid = uid
        self._job: Object | None = None
        self._pods: dict[str, Object] = {}
        self._replaced_pods: dict[str, Object] = {}
        self._name_reused = False
        self._changes: queue.SimpleQueue[tuple[str, Listed | Changed | Exception]] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._not_listed = {"job", "pods"}

    def __enter__(self) -> Follower:
        collections = {
            "job": (self.client.target(JOBS), {"fieldSelector": f"metadata.name={self.name}"}),
            "pods": (self.client.target(PODS), {"labelSelector": f"{labels.OPERATOR_JOB_NAME}={self.name}"}),
        }
        for source, (target, query) in collections.items():
            arguments = (source, target, query)
            threading.Thread(target=self._watch, args=arguments, daemon=True, name=f"flk-{source}").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def updates(self, interval: float = 1.0) -> Iterator[ObservedJob]:
        """Yield the job after every change and at least every ``interval`` seconds. Ends after the job's deletion.

        Raises JobNotFoundError if there is no such job at the beginning, and what the watches raise.
        """
        while True:
            changed = self._apply_changes(interval)
            if self._not_listed:
                continue
            if self.uid is None:
                raise JobNotFoundError(
                    f"there is no job {self.name} in namespace {self.client.namespace}",
                    hint=f"{self.client.command('list')} lists those that exist",
                )
            yield self._observed()
            if self._job is None and changed:
                return

    def _watch(self, source: str, target: Target, query: Mapping[str, Any]) -> None:
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
        self._job = own[0] if own else None

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

    def _observed(self) -> ObservedJob:
        pods = [pod for pod in self._pods.values() if is_owned_by(pod, self.uid)]
        replaced = {name: pod for name, pod in self._replaced_pods.items() if is_owned_by(pod, self.uid)}
        return ObservedJob(self._job, pods, replaced, self._name_reused)


def is_owned_by(pod: Object, uid: str | None) -> bool:
    """Return whether a pod belongs to the job with that UID, and not to an earlier one of the same name."""
    return uid is None or any(o.get("uid") == uid for o in pod["metadata"].get("ownerReferences") or [])
