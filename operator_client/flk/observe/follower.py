"""Follower: a list-and-watch cache (informer) of jobs and their pods."""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Final

from flk import targets
from flk.errors import FlkError, JobNotFoundError
from flk.kube import ApiClient, Changed, Listed, Object, RequestTarget, list_and_watch
from flk.observe.client import JobClient, JobRef
from flk.observe.observation import Observation
from flk.observe.resources import PODS, RESOURCES
from flk.targets import DEFAULT, TARGETS, Target, target_of


def follow_job(client: JobClient, name: str, interval: float = 1.0) -> Generator[Observation, None, None]:
    """Yield a job after every change and at least every ``interval`` seconds, without end.

    Raises JobNotFoundError if there is no such job at the beginning, and passes on the errors of the watches.
    """
    with Follower(client, [client.ref(name)]) as follower:
        for seen in follower.updates(interval=interval):
            yield from seen.values()
    (error,) = follower.take_errors().values()
    raise error


class Follower:
    """Watches jobs of one namespace and their pods: two watches for each kind of job, however many jobs there are."""

    def __init__(self, client: JobClient, jobs: Sequence[JobRef]) -> None:
        self._client, self._jobs = client, jobs
        self._errors: dict[JobRef, FlkError] = {}
        self._caches: dict[JobRef, JobCache] = {}
        self._named: dict[tuple[str, str], list[JobRef]] = defaultdict(list)  # by name of the target and of the job
        self._watches = Watches(client.api)
        self._changed: set[JobRef] = set()

    def __enter__(self) -> Follower:
        by_name: dict[str, list[Object]] = defaultdict(list)
        if len(self._jobs) > 1 and not all(job.target and job.uid for job in self._jobs):
            for each in self._client.list_jobs(metadata_only=True):
                by_name[each["metadata"]["name"]].append(each)
        for job in self._jobs:
            listed = next((each for each in by_name[job.name] if job.means(each)), None)
            try:
                target = target_of(listed) if listed else self._target_of(job)
            except FlkError as error:
                self._errors[job] = error
                continue
            uid = listed["metadata"]["uid"] if listed else job.uid or None
            self._caches[job] = JobCache(self._client, job.name, uid, target)
            self._named[target.name, job.name].append(job)
        for kind in dict.fromkeys(name for name, _ in self._named):
            selector = {"labelSelector": TARGETS[kind].selector} if TARGETS[kind].selector else {}
            names = [name for target, name in self._named if target == kind]
            alone = names[0] if len(names) == 1 else ""
            selector = {"fieldSelector": f"metadata.name={alone}"} if alone else selector
            self._watches.start(f"job {kind}", self._client.target(RESOURCES[kind]), selector)
            pods = {"labelSelector": TARGETS[kind].pod_selector(alone)}
            self._watches.start(f"pods {kind}", self._client.target(PODS), pods)
        return self

    def __exit__(self, *_: object) -> None:
        self._watches.close()

    def __contains__(self, job: JobRef) -> bool:
        return job in self._caches

    def drop(self, job: JobRef) -> None:
        """Follow a job no longer."""
        self._caches.pop(job, None)

    def take_errors(self) -> dict[JobRef, FlkError]:
        """Return the jobs that are followed no longer because of an error, each once.

        Those that do not exist at the beginning are among them, with JobNotFoundError.
        """
        errors, self._errors = self._errors, {}
        return errors

    def updates(self, until: float | None = None, interval: float = 1.0) -> Iterator[dict[JobRef, Observation]]:
        """Yield the jobs that have changed, in their order, and all of them now and then, until none is followed.

        Yields at least every ``interval`` seconds, and soon after time.monotonic() has reached ``until``, but not
        before all jobs were read once. `take_errors` has the jobs whose watch has failed.
        """
        due = 0.0
        while self._caches:
            left = interval
            if until is not None and self._watches.are_listed:
                left = min(interval, max(0.0, until - time.monotonic()))
            self._watches.apply(left, self._take)
            if not self._watches.are_listed:
                continue
            if time.monotonic() >= due:
                self._changed.update(self._caches)
                due = time.monotonic() + interval
            chosen, self._changed = [job for job in self._caches if job in self._changed], set()
            yield {job: self._caches[job].observed() for job in chosen}

    def _target_of(self, job: JobRef) -> Target:
        """Return the target of a job that was not listed: the only job, or one of a kind that may not be listed."""
        if job.target and job.uid:
            return job.target
        try:
            return self._client.for_job(job).target_of(job.name)
        except JobNotFoundError:
            if not job.uid:
                raise
            return job.target or DEFAULT  # it is gone

    def _take(self, source: str, change: Listed | Changed | FlkError) -> None:
        what, _, kind = source.partition(" ")
        if isinstance(change, FlkError):
            for job in [job for (target, _), jobs in self._named.items() if target == kind for job in jobs]:
                self._fail(job, change)
            return
        name_of = (lambda item: str(item["metadata"]["name"])) if what == "job" else TARGETS[kind].job_name
        by_name: dict[str, list[Object]] = defaultdict(list)
        for item in change.items if isinstance(change, Listed) else [change.item]:
            by_name[name_of(item)].append(item)
        names = [name for target, name in self._named if target == kind] if isinstance(change, Listed) else by_name
        for name in names:
            of_one = Listed(by_name[name]) if isinstance(change, Listed) else change
            for job in self._named.get((kind, name), ()):
                if (cache := self._caches.get(job)) is not None:
                    (cache.take_job if what == "job" else cache.take_pods)(of_one)
                    self._changed.add(job)
                    if what == "job" and cache.uid is None:
                        self._fail(job, self._client.no_job(job, explained=True))

    def _fail(self, job: JobRef, error: FlkError) -> None:
        if self._caches.pop(job, None) is not None:
            self._errors[job] = error


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


class JobCache:
    """One job and its pods. The job has the UID, or is the first that is seen under the name."""

    def __init__(self, client: JobClient, name: str, uid: str | None, target: targets.Target) -> None:
        self.uid = uid
        self._client, self._name, self._target = client, name, target
        self._job: Object | None = None  # as it was seen last
        self._gone: float | None = None  # when it was seen to be deleted
        self._name_reused = False
        self._pods: dict[str, Object] = {}
        self._replaced_pods: dict[str, Object] = {}

    def take_job(self, change: Listed | Changed) -> None:
        """Apply a list of the jobs of this name, or a change of one."""
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
            self._gone = self._client.now()

    def take_pods(self, change: Listed | Changed) -> None:
        """Apply a list of the pods of jobs of this name, or a change of one."""
        if isinstance(change, Changed):
            self._set_pod(change.item["metadata"]["name"], None if change.deleted else change.item, change.item)
            return
        listed = {item["metadata"]["name"]: item for item in change.items}
        for name in {**self._pods, **listed}:
            self._set_pod(name, listed.get(name))

    def observed(self) -> Observation:
        """Return the job as it is now."""
        pods = [pod for pod in self._pods.values() if self._owns(pod)]
        replaced = {name: pod for name, pod in self._replaced_pods.items() if self._owns(pod)}
        time, gone, reused = self._client.now(), self._gone, self._name_reused
        return Observation(self._job, pods, time, replaced_pods=replaced, gone=gone, name_reused=reused)

    def _set_pod(self, name: str, new: Object | None, last: Object | None = None) -> None:
        """Store a pod under its name, or remove it (``new`` is None), and remember the one that it replaces."""
        old = last if new is None and last is not None else self._pods.get(name)
        if old is not None and (new is None or new["metadata"]["uid"] != old["metadata"]["uid"]):
            self._replaced_pods[name] = old
        if new is None:
            self._pods.pop(name, None)
        else:
            self._pods[name] = new

    def _owns(self, pod: Object) -> bool:
        created = self._job["metadata"].get("creationTimestamp") if self._job else None
        return self.uid is None or self._target.owns(pod, self.uid, self._name, created)
