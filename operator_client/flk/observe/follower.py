"""Follower and Followers: list-and-watch caches (informers) of one job and its pods, and of many jobs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from flk import targets
from flk.errors import FlkError, JobNotFoundError
from flk.kube import Changed, Listed, Object
from flk.observe.cache import JobCache
from flk.observe.client import JobClient, JobRef
from flk.observe.observation import Observation
from flk.observe.resources import PODS, RESOURCES
from flk.observe.watches import Watches
from flk.targets import DEFAULT, TARGETS

_OFTEN: Final = 50.0  # observations in a second of many jobs that do not change


class Follower:
    """Watches a job and its pods in two threads and shows them together."""

    def __init__(self, client: JobClient, name: str, uid: str | None = None) -> None:
        self.client = client
        self.name = name
        self._cache = JobCache(client, name, uid, DEFAULT)  # until the job is looked up
        self._watches = Watches(client.api)

    def __enter__(self) -> Follower:
        try:
            kind = self._look_up()
        except FlkError as error:  # `updates` raises it
            self._watches.fail(error)
            return self
        self._cache = JobCache(self.client, self.name, self._cache.uid, kind)
        job, pods = self.client.target(RESOURCES[kind.name]), self.client.target(PODS)
        self._watches.start("job", job, {"fieldSelector": f"metadata.name={self.name}"})
        self._watches.start("pods", pods, {"labelSelector": kind.pod_selector(self.name)})
        return self

    def __exit__(self, *_: object) -> None:
        self._watches.close()

    def updates(self, interval: float = 1.0) -> Iterator[Observation]:
        """Yield the job after every change and at least every ``interval`` seconds.

        Ends when the job was deleted and none of its pods is left. Raises JobNotFoundError if there is no such job at
        the beginning, and passes on the errors of the watches.
        """
        while True:
            changed = self._watches.apply(interval, self._take)
            if not self._watches.are_listed:
                continue
            if self._cache.uid is None:
                raise self.client.no_job(JobRef(self.name), explained=True)
            seen = self._cache.observed()
            yield seen
            if seen.gone is not None and changed and not seen.pods:
                return

    def _look_up(self) -> targets.Target:
        try:
            return self.client.target_of(self.name)
        except JobNotFoundError:
            if self._cache.uid is None:
                raise
            return self.client.ref(self.name).target or DEFAULT  # it is gone

    def _take(self, source: str, change: Listed | Changed | FlkError) -> None:
        if isinstance(change, FlkError):
            raise change
        if source == "job":
            self._cache.take_job(change)
        else:
            self._cache.take_pods(change)


class Followers:
    """Watches jobs of one namespace and their pods: two watches for each kind of job, however many jobs there are."""

    def __init__(self, client: JobClient, jobs: Sequence[JobRef]) -> None:
        self._client, self._jobs = client, jobs
        self._errors: dict[JobRef, FlkError] = {}
        self._caches: dict[JobRef, JobCache] = {}
        self._named: dict[tuple[str, str], list[JobRef]] = defaultdict(list)  # by name of the target and of the job
        self._watches = Watches(client.api)
        self._changed: set[JobRef] = set()

    def __enter__(self) -> Followers:
        found: list[Object] = []
        if not all(job.target and job.uid for job in self._jobs):
            found = self._client.list_jobs(metadata_only=True)
        by_name: dict[str, list[Object]] = defaultdict(list)
        for each in found:
            by_name[each["metadata"]["name"]].append(each)
        for job in self._jobs:
            named = next((each for each in by_name[job.name] if job.means(each)), None)
            if named is None and not (job.target and job.uid):
                try:
                    named = self._client.of(job).get_job(job.name)  # the user may not list the jobs of its kind
                except FlkError as error:
                    self._errors[job] = error
                    continue
            target = job.target or targets.target_of(named or {})
            uid = job.uid or (named or {})["metadata"]["uid"]
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

    def updates(self, until: float | None = None) -> Iterator[dict[JobRef, Observation]]:
        """Yield the jobs that have changed, in their order, and all of them now and then, until none is followed.

        Yields at least every second, and soon after time.monotonic() has reached ``until``. `take_errors` has the
        jobs whose watch has failed. Many jobs that do not change are yielded more rarely, for each of them takes time.
        """
        due = 0.0
        while self._caches:
            left = 1.0 if until is None else min(1.0, max(0.0, until - time.monotonic()))
            self._watches.apply(left, self._take)
            if not self._watches.are_listed:
                continue
            if time.monotonic() >= due:
                self._changed.update(self._caches)
                due = time.monotonic() + max(1.0, len(self._caches) / _OFTEN)
            chosen, self._changed = [job for job in self._caches if job in self._changed], set()
            yield {job: self._caches[job].observed() for job in chosen}

    def _take(self, source: str, change: Listed | Changed | FlkError) -> None:
        what, _, kind = source.partition(" ")
        if isinstance(change, FlkError):
            for job in [job for (target, _), jobs in self._named.items() if target == kind for job in jobs]:
                if self._caches.pop(job, None) is not None:
                    self._errors[job] = change
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
