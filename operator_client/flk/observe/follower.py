"""Follower: a list-and-watch cache (informer) of jobs and their pods."""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final

from flk.errors import FlkError, JobNotFoundError
from flk.kube import ApiClient, Changed, Listed, Object, RequestTarget, list_and_watch
from flk.observe.client import JobClient, JobRef
from flk.observe.observation import Observation
from flk.observe.resources import PODS, RESOURCES
from flk.targets import DEFAULT, Target, target_of
from flk_runtime.contract.values import dataclass


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
        # By target and by name: jobs with other UIDs may have a name, too.
        self._followed: dict[Target, dict[str, list[JobRef]]] = defaultdict(lambda: defaultdict(list))
        self._watches = Watches(client.api)
        self._changed: set[JobRef] = set()

    def __enter__(self) -> Follower:
        by_name: dict[str, list[Object]] = defaultdict(list)
        if len(self._jobs) > 1 and not all(job.target and job.uid for job in self._jobs):  # one list tells the others
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
            self._followed[target][job.name].append(job)
        for target, by_job in self._followed.items():
            only = next(iter(by_job)) if len(by_job) == 1 else ""
            key, value = ("fieldSelector", f"metadata.name={only}") if only else ("labelSelector", target.selector)
            self._watches.start(Watched(target), self._client.target(RESOURCES[target.name]), {key: value or None})
            of_jobs = {"labelSelector": target.pod_selector(only)}
            self._watches.start(Watched(target, are_pods=True), self._client.target(PODS), of_jobs)
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

    def _take(self, watched: Watched, change: Listed | Changed | FlkError) -> None:
        """Hand what a watch has brought to the jobs that it concerns: an error and a list concern all of the target."""
        jobs = self._followed[watched.target]
        if isinstance(change, FlkError):
            for job in chain.from_iterable(jobs.values()):
                self._fail(job, change)
        elif isinstance(change, Changed):
            self._hand_on(watched, jobs.get(watched.job_name(change.item), ()), change)
        else:
            by_name: dict[str, list[Object]] = defaultdict(list)
            for item in change.items:
                by_name[watched.job_name(item)].append(item)
            for name, of_name in jobs.items():
                self._hand_on(watched, of_name, Listed(by_name[name]))

    def _hand_on(self, watched: Watched, jobs: Iterable[JobRef], change: Listed | Changed) -> None:
        """Apply a change to the jobs of one name. Of a job without a UID, the first list says whether it exists."""
        for job in [job for job in jobs if job in self._caches]:
            cache = self._caches[job]
            self._changed.add(job)
            if watched.are_pods:
                cache.take_pods(change)
            else:
                cache.take_job(change)
                if cache.uid is None:
                    self._fail(job, self._client.no_job(job, explained=True))

    def _fail(self, job: JobRef, error: FlkError) -> None:
        if self._caches.pop(job, None) is not None:
            self._errors[job] = error


_SETTLE: Final = 0.05  # seconds without a change after which those that arrived together are shown
_LONGEST: Final = 0.5  # seconds for which changes are collected at most


@dataclass(frozen=True)
class Watched:
    """A collection that is watched: the jobs of one target, or their pods."""

    target: Target
    are_pods: bool = False

    def job_name(self, item: Object) -> str:
        """Return the name of the job that an object of the collection is, or belongs to."""
        return self.target.job_name(item) if self.are_pods else str(item["metadata"]["name"])


Take = Callable[[Watched, "Listed | Changed | FlkError"], None]


class Watches:
    """Watches of several collections, each in a thread of its own."""

    def __init__(self, api: ApiClient) -> None:
        self._api = api
        self._changes: queue.SimpleQueue[tuple[Watched, Listed | Changed | Exception]] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._not_listed: set[Watched] = set()

    @property
    def are_listed(self) -> bool:
        """Whether all collections were listed once."""
        return not self._not_listed

    def start(self, watched: Watched, target: RequestTarget, query: Mapping[str, Any]) -> None:
        """Watch a collection."""
        self._not_listed.add(watched)
        name = f"flk-watch-{target.resource.plural}"
        threading.Thread(target=self._watch, args=(watched, target, query), daemon=True, name=name).start()

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
                watched, change = self._changes.get(timeout=wait)
            except queue.Empty:
                return
            if isinstance(change, Exception) and not isinstance(change, FlkError):
                raise change
            take(watched, change)
            if self._not_listed == {watched}:
                self._not_listed.clear()
                return
            self._not_listed.discard(watched)
            wait = _SETTLE
            until = until or time.monotonic() + _LONGEST

    def _watch(self, watched: Watched, target: RequestTarget, query: Mapping[str, Any]) -> None:
        try:
            for change in list_and_watch(self._api, target, query, closed=self._closed.is_set):
                self._changes.put((watched, change))
        except Exception as error:  # of any kind: the thread that reads the queue gets it
            self._changes.put((watched, error))


class JobCache:
    """One job and its pods. The job has the UID, or is the first that is seen under the name."""

    def __init__(self, client: JobClient, name: str, uid: str | None, target: Target) -> None:
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
            (self._remove if change.deleted else self._store)(change.item)
            return
        listed = {item["metadata"]["name"] for item in change.items}
        for pod in [pod for name, pod in self._pods.items() if name not in listed]:
            self._remove(pod)
        for pod in change.items:
            self._store(pod)

    def observed(self) -> Observation:
        """Return the job as it is now."""
        pods = [pod for pod in self._pods.values() if self._owns(pod)]
        replaced = {name: pod for name, pod in self._replaced_pods.items() if self._owns(pod)}
        time, gone, reused = self._client.now(), self._gone, self._name_reused
        return Observation(self._job, pods, time, replaced_pods=replaced, gone=gone, name_reused=reused)

    def _store(self, pod: Object) -> None:
        """Store a pod under its name, and remember another one that had the name."""
        old = self._pods.get(pod["metadata"]["name"], pod)
        if old["metadata"]["uid"] != pod["metadata"]["uid"]:
            self._replaced_pods[pod["metadata"]["name"]] = old
        self._pods[pod["metadata"]["name"]] = _as_first_deleted(old, pod)

    def _remove(self, pod: Object) -> None:
        """Remember a pod that does not exist any more as it was seen last."""
        old = self._pods.pop(pod["metadata"]["name"], pod)
        self._replaced_pods[pod["metadata"]["name"]] = _as_first_deleted(old, pod)

    def _owns(self, pod: Object) -> bool:
        created = self._job["metadata"].get("creationTimestamp") if self._job else None
        return self.uid is None or self._target.owns(pod, self.uid, self._name, created)


def _as_first_deleted(old: Object, pod: Object) -> Object:
    """Return a pod with the time of its deletion that it had when it was ``old``, if that is the same pod.

    The kubelet writes another time when its containers have ended and its volumes are unmounted. That one does not tell
    whether the deletion has ended them.
    """
    before, now = old["metadata"], pod["metadata"]
    # The kubelet leaves no grace period. A user who deletes the pod once more may leave a shorter one.
    if before["uid"] != now["uid"] or now.get("deletionGracePeriodSeconds") or "deletionTimestamp" not in before:
        return pod
    return {**pod, "metadata": {**now, "deletionTimestamp": before["deletionTimestamp"]}}
