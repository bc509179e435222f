"""A list-and-watch cache (an informer) of one job and its pods."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from flk import labels
from flk.errors import FlkError, JobNotFoundError
from flk.jobs.client import JOBS, PODS, JobClient
from flk.kube.resources import Object, Target
from flk.kube.watch import Changed, Listed, list_and_watch

_SETTLE: Final = 0.05  # seconds in which changes that belong together arrive


@dataclass(frozen=True)
class Snapshot:
    """A job and its pods at one moment. ``job`` is None once it is deleted."""

    job: Object | None
    pods: list[Object]
    former: dict[str, Object] = field(default_factory=dict)  # by name: the ended pod that was there before
    replaced: bool = False  # the name is another job's now


class Follower:
    """Watches a job and its pods in threads and shows them together."""

    def __init__(self, cluster: JobClient, name: str, uid: str | None = None) -> None:
        self.cluster = cluster
        self.name = name
        self.uid = uid
        self.job: Object | None = None
        self.replaced = False
        self.pods: dict[str, Object] = {}
        self.former: dict[str, Object] = {}
        self._posts: queue.SimpleQueue[tuple[str, Listed | Changed | FlkError | None]] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._missing = {"job", "pods"}

    def __enter__(self) -> Follower:
        wanted = {
            "job": (self.cluster.target(JOBS), {"fieldSelector": f"metadata.name={self.name}"}),
            "pods": (self.cluster.target(PODS), {"labelSelector": f"{labels.OPERATOR_JOB_NAME}={self.name}"}),
        }
        for what, (target, query) in wanted.items():
            threading.Thread(target=self._pump, args=(what, target, query), daemon=True, name=f"flk-{what}").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def snapshots(self, beat: float = 1.0) -> Iterator[Snapshot]:
        """The picture after every change, and at least every ``beat`` seconds. Ends after the job's deletion.

        JobNotFoundError if there is no such job at the beginning.
        """
        while True:
            changed = self._take(beat)
            if self._missing:
                continue
            if self.uid is None:
                raise JobNotFoundError(
                    f"there is no job {self.name} in namespace {self.cluster.namespace}",
                    hint=f"flk list -n {self.cluster.namespace} lists those there are",
                )
            yield self._snapshot()
            if self.job is None and changed:
                return

    def _pump(self, what: str, target: Target, query: Mapping[str, Any]) -> None:
        try:
            for post in list_and_watch(self.cluster.api, target, query):
                if self._closed.is_set():
                    return
                self._posts.put((what, post))
        except FlkError as error:
            self._posts.put((what, error))

    def _take(self, beat: float) -> bool:
        """Apply what has been posted; wait up to ``beat`` seconds for the first, and a moment for the others."""
        patience, changed = beat, False
        while True:
            try:
                what, post = self._posts.get(timeout=patience)
            except queue.Empty:
                return changed
            if isinstance(post, FlkError):
                raise post
            if post is not None:
                self._apply(what, post)
            self._missing.discard(what)
            patience, changed = _SETTLE, True

    def _apply(self, what: str, post: Listed | Changed) -> None:
        if what == "job":
            items = post.items if isinstance(post, Listed) else [] if post.deleted else [post.item]
            if self.uid is None and items:
                self.uid = items[0]["metadata"]["uid"]
            mine = [item for item in items if item["metadata"]["uid"] == self.uid]
            self.replaced = self.replaced or (bool(items) and not mine)
            if isinstance(post, Changed) and post.deleted and post.item["metadata"]["uid"] != self.uid:
                return
            self.job = mine[0] if mine else None
        elif isinstance(post, Listed):
            fresh = {item["metadata"]["name"]: item for item in post.items}
            for name in [*self.pods]:
                self._replace(name, fresh.pop(name, None))
            for name, item in fresh.items():
                self._replace(name, item)
        else:
            self._replace(post.item["metadata"]["name"], None if post.deleted else post.item, post.item)

    def _replace(self, name: str, new: Object | None, last: Object | None = None) -> None:
        """Put ``new`` in the place of the pod of that name; remember how the one before ended."""
        old = last if new is None and last is not None else self.pods.get(name)
        if old is not None and (new is None or new["metadata"]["uid"] != old["metadata"]["uid"]):
            self.former[name] = old
        if new is None:
            self.pods.pop(name, None)
        else:
            self.pods[name] = new

    def _snapshot(self) -> Snapshot:
        mine = [pod for pod in self.pods.values() if owned_by(pod, self.uid)]
        former = {name: pod for name, pod in self.former.items() if owned_by(pod, self.uid)}
        return Snapshot(self.job, mine, former, self.replaced)


def owned_by(pod: Object, uid: str | None) -> bool:
    """Whether a pod belongs to the job with that UID, and not to an earlier one of the same name."""
    return uid is None or any(o.get("uid") == uid for o in pod["metadata"].get("ownerReferences") or [])
