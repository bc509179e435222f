"""A job and its pods as they change: a picture that is always whole, however often a connection breaks.

Each collection is listed, then watched from the version of the list. What a watch may do wrong (end, stall, be cut in
the middle of a line, ask for a version that is gone) leads to a new watch or a new list, never to a lost change.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from flk.errors import ApiError, FlkError, ForbiddenError, JobNotFoundError, MissingApiError, NoConfigError
from flk.jobs.client import JOB_NAME, JOBS, PODS, Cluster, Object
from flk.kube.client import Target

IDLE: Final = 90.0  # seconds without a change or a bookmark (the server sends one every minute) until a new watch
OUTAGE: Final = 300.0  # seconds that the API server may be away while something is watched
_PAUSES: Final = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0)  # seconds between attempts to reach it again
_SETTLE: Final = 0.05  # seconds in which changes that belong together arrive


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
    cluster: Cluster,
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
                items, version = cluster.collect(target, query)
                heard = time.monotonic()
                yield Listed(items)
            with cluster.watch(target, query, version, idle) as lines:
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


@dataclass(frozen=True)
class Snapshot:
    """A job and its pods at one moment. ``job`` is None once it is deleted."""

    job: Object | None
    pods: list[Object]
    former: dict[str, Object] = field(default_factory=dict)  # by name: the ended pod that was there before
    replaced: bool = False  # the name is another job's now


class Follower:
    """Watches a job and its pods in threads and shows them together."""

    def __init__(self, cluster: Cluster, name: str, uid: str | None = None) -> None:
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
            "pods": (self.cluster.target(PODS), {"labelSelector": f"{JOB_NAME}={self.name}"}),
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
            for post in watch(self.cluster, target, query):
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
            items = post.items if isinstance(post, Listed) else [] if post.gone else [post.item]
            if self.uid is None and items:
                self.uid = items[0]["metadata"]["uid"]
            mine = [item for item in items if item["metadata"]["uid"] == self.uid]
            self.replaced = self.replaced or (bool(items) and not mine)
            if isinstance(post, Changed) and post.gone and post.item["metadata"]["uid"] != self.uid:
                return
            self.job = mine[0] if mine else None
        elif isinstance(post, Listed):
            fresh = {item["metadata"]["name"]: item for item in post.items}
            for name in [*self.pods]:
                self._replace(name, fresh.pop(name, None))
            for name, item in fresh.items():
                self._replace(name, item)
        else:
            self._replace(post.item["metadata"]["name"], None if post.gone else post.item, post.item)

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
