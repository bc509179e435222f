"""Read the view of a job: its events, its launchers' record and the objects around it, where they can add something.

A job that runs undisturbed costs no request beyond the job and its pods.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Final

from flk import labels
from flk.errors import ApiError, FlkError, ForbiddenError, JobNotFoundError, UsageError
from flk.health import awaits_controller
from flk.jobs import evidence
from flk.jobs.evidence import KeptJob
from flk.jobs.state import Phase
from flk.kube import Object, Resource, Target
from flk.observe.client import OWNED, PODS, JobClient
from flk.observe.follower import ObservedJob
from flk.observe.model import PodPhase, PodState
from flk.observe.progress import Progress, read_progress
from flk.observe.view import JobView, Kept, Surroundings, event_time, pod_spec
from flk.targets import target_of
from flk.targets.controllers import CONTROLLERS
from flk.targets.gang import gang_of
from flk.units import short_duration, timestamp
from flk_runtime.contract import log_format
from flk_runtime.contract.record import JobRecord

STUCK_AFTER: Final = 10.0  # seconds in which a pod may be pending before its events are read
STUCK_PODS: Final = 3  # pods whose events are read, so that a thousand pending ones cost three requests
# Seconds between two requests while the pods change, and the longest pause to which they double while they do not.
EVENTS_EVERY: Final = (5.0, 20.0)  # for the events of a job that does not run undisturbed
RECORD_EVERY: Final = (1.0, 10.0)  # for the record: a new attempt need not change a pod
LOG_LINES: Final = 40  # last lines of a log that are kept for the search for a cause
FOREIGN_LOGS: Final = 32  # pods of a job without flk's launcher whose logs are searched
FOREIGN_LINES: Final = 400  # last lines of each of these logs
_LOG_IDLE: Final = 5.0  # seconds without a byte of the log after which it is given up

NODES: Final = Resource("", "v1", "nodes")
CLAIMS: Final = Resource("", "v1", "persistentvolumeclaims")
WORKLOADS: Final = Resource("kueue.x-k8s.io", "v1beta1", "workloads")
POD_GROUPS: Final = Resource("scheduling.volcano.sh", "v1beta1", "podgroups")
_WAITING: Final = re.compile(r"pods have joined; waiting for pods? (\d+)")
_UNFINISHED: Final = (PodPhase.MISSING, PodPhase.PENDING, PodPhase.STARTING, PodPhase.UNKNOWN)


def read_picture(client: JobClient, name: str, note: Callable[[str], None] = lambda text: None) -> JobView:
    """Return the view of a job now, with what flk has kept of pods that are gone, or of the job itself.

    ``note`` is called if the job is gone. Raises JobNotFoundError if there is none and nothing is kept of one.
    """
    try:
        job = client.get_job(name)
    except JobNotFoundError:
        kept = evidence.find(client, name)
        if kept is None:
            raise
        ago = short_duration(client.now() - kept.updated)
        note(f"job {name} is gone; this is what flk kept of it {kept.place} {ago} ago")
        gone = kept.deleted or kept.updated
        return _with_kept(client, JobView(kept.job, [], now=kept.updated), kept, gone=gone)
    pods = [pod for pod in client.list_pods(name) if target_of(job).owns(job, pod)]
    view = PictureReader(client).view(ObservedJob(job, pods))
    ended = "Failed" in view.conditions or "Succeeded" in view.conditions
    if ended and any(pod.phase == PodPhase.MISSING for pod in view.pods):
        kept = evidence.find(client, name, job["metadata"]["uid"])
        if kept is not None:
            return _with_kept(client, view, kept)
    return view


def pod_of_rank(client: JobClient, name: str, rank: int) -> PodState:
    """Return the pod in which a rank of a job runs: that of the latest attempt, where a rank may change its pod.

    Raises UsageError if the job has fewer ranks, and ApiError if the rank has no pod now.
    """
    job = client.get_job(name)
    pods = [pod for pod in client.list_pods(name) if target_of(job).owns(job, pod)]
    view = JobView(job, pods, now=client.now())
    hint = f"{client.command('status', name)} shows the pods of the ranks"
    if rank >= view.sizes[1] * view.processes:
        raise UsageError(f"--rank: job {name} has no rank {rank}")
    if view.resizable:
        view = PictureReader(client).view(ObservedJob(job, pods))
        if not view.members and rank >= view.processes:  # those of pod 0 are known: it is never replaced
            why = f"the log of pod {view.pods[0].name} tells of no attempt"
            raise ApiError(f"which pod of job {name} has rank {rank} is not known: {why}", hint=hint)
    found = next((pod for pod in view.pods if rank in pod.ranks), None)
    if found is None:
        raise ApiError(f"rank {rank} is not in the latest attempt of job {name}, which has fewer pods", hint=hint)
    if found.phase == PodPhase.MISSING:
        raise ApiError(f"pod {found.name} does not exist", hint=f"{client.command('why', name)} says why")
    return found


def _with_kept(client: JobClient, view: JobView, kept: KeptJob, *, gone: float | None = None) -> JobView:
    """Return the view with the pods, events, lines and the record that are kept and that it lacks."""
    pods = {pod["metadata"]["name"]: pod for pod in kept.pods} | view.objects
    logs = {pod: lines[-LOG_LINES:] for pod, lines in kept.lines.items()} | dict(view.around.logs)
    known = {event["metadata"]["name"] for event in view.events}
    events = [event for event in kept.events if event["metadata"]["name"] not in known]
    # A job that has failed since flk saw it last has another cause.
    cause = kept.cause if kept.cause and (gone is not None or kept.cause.phase == Phase.FAILED) else None
    return JobView(
        view.job,
        [*pods.values()],
        now=view.now,
        events=sorted([*events, *view.events], key=event_time),
        record=view.record or kept.record,
        replaced_pods={**kept.replaced_pods, **view.replaced_pods},
        surroundings=Surroundings(**{**vars(view.around), "logs": logs}),
        context=client.chosen_context,
        kept=Kept(kept.place, cause.time if cause else kept.updated, gone=gone, cause=cause.finding if cause else None),
    )


class PictureReader:
    """Completes what a follower sees of one job to a view; reads nothing again within some seconds."""

    def __init__(self, client: JobClient) -> None:
        self.client = client
        self.last_events: list[Object] = []  # as they were read last, as `last_record`
        self._around = Surroundings()
        self._events_turn = _Turn(*EVENTS_EVERY)
        self._record_turn = _Turn(*RECORD_EVERY)
        self.last_record: JobRecord | None = None
        self._logs: dict[str, list[str]] = {}
        self._progress: list[Progress] = []

    def view(self, seen: ObservedJob) -> JobView:
        """Return the view of a job that exists."""
        assert seen.job is not None  # noqa: S101
        now, context = self.client.now(), self.client.chosen_context
        plain = JobView(seen.job, seen.pods, now=now, replaced_pods=seen.replaced_pods, context=context)
        if plain.succeeded and not plain.failed:
            return plain
        if seen.job["metadata"].get("deletionTimestamp"):
            return plain
        known_end = any(r.outcome == "failed" and r.failure and r.failure.is_cause for r in plain.records)
        if plain.failed and known_end:
            return plain
        record = None if plain.suspended or not plain.from_flk else self._read_record(plain, seen.pods)
        undisturbed = all(pod.phase == PodPhase.RUNNING for pod in plain.pods) and not plain.began
        if not undisturbed and self._events_turn.has_come(seen.pods):
            with contextlib.suppress(ApiError):  # an outage is the follower's to wait out; the last events still count
                self._read_events(plain)
        around = self._around
        around = replace(around, logs={**around.logs, **self._logs}, progress=self._progress)
        return JobView(
            seen.job,
            seen.pods,
            now=now,
            events=[] if undisturbed else self.last_events,
            record=record,
            replaced_pods=seen.replaced_pods,
            surroundings=around,
            context=context,
        )

    def _read_events(self, plain: JobView) -> None:
        """Read the events of the job and of some of its pods, and the objects that these point to."""
        events: list[Object] = []
        for kind, name in plain.target.event_objects(plain.name):
            events += [event for event in self.client.list_events(kind, name) if is_about(event, plain.job)]
        for pod in _representatives(plain):
            events += self.client.list_events("Pod", pod.name)
        events.sort(key=event_time)
        self.last_events = events
        self._around = self._surroundings(JobView(plain.job, [*plain.objects.values()], now=plain.now, events=events))

    def _surroundings(self, view: JobView) -> Surroundings:
        unreadable: set[str] = set()
        missing: set[str] = set()
        nodes: dict[str, Object] = {}
        claims: dict[str, Object] = {}
        workloads: list[Object] = []
        pod_groups: list[Object] = []
        pods = _representatives(view)
        unplaced = any(pod.reason == "Unschedulable" for pod in pods)
        if unplaced:
            found = self._list(Target(NODES), unreadable)
            nodes = {node["metadata"]["name"]: node for node in found}
        else:
            for name in sorted({pod.node for pod in view.pods if pod.phase == PodPhase.UNKNOWN and pod.node})[:3]:
                self._get(Target(NODES, None, name), nodes, missing, unreadable)
        for name in _claim_names(view, pods):
            self._get(self.client.target(CLAIMS, name), claims, missing, unreadable)
            if name in claims:
                self.last_events += self.client.list_events("PersistentVolumeClaim", name)
        uid = view.job["metadata"].get("uid", "")
        if view.suspended and view.queue:
            selector = {"labelSelector": f"{labels.KUEUE_JOB_UID}={uid}"}
            workloads = self._list(self.client.target(WORKLOADS), unreadable, selector)
        gang = gang_of(view.job)
        if gang is not None or view.run_policy.get("schedulingPolicy"):
            groups: dict[str, Object] = {}
            resource = OWNED[gang.api_version, "PodGroup"] if gang else POD_GROUPS
            self._get(self.client.target(resource, view.name), groups, missing, unreadable)
            pod_groups = [*groups.values()]
        other_pods: list[Object] = []
        if unplaced and any(pod.phase in (PodPhase.STARTING, PodPhase.RUNNING) for pod in view.pods):
            other_pods = self._pods_of_other_jobs(view, unreadable)
        controllers = self._controllers(view, unreadable) if awaits_controller(view) else {}
        logs = self._foreign_logs(view) if view.failed and not view.records else {}
        for pod in pods:
            if pod.reason == "CrashLoopBackOff":
                there = view.objects[pod.name]
                logs[pod.name] = self._log(there, LOG_LINES, previous=True) or self._log(there, LOG_LINES)
        return Surroundings(
            nodes=nodes,
            claims=claims,
            workloads=workloads,
            pod_groups=pod_groups,
            other_pods=other_pods,
            controllers=controllers,
            logs=logs,
            missing=frozenset(missing),
            unreadable=frozenset(unreadable),
        )

    def _pods_of_other_jobs(self, view: JobView, unreadable: set[str]) -> list[Object]:
        """Return the pods of flk's other jobs: of the namespace, and of others if the user may read them."""
        others = {"labelSelector": f"{labels.JOB},{labels.JOB}!={view.name}"}
        elsewhere = {"labelSelector": labels.JOB, "fieldSelector": f"metadata.namespace!={self.client.namespace}"}
        return [
            *self._list(self.client.target(PODS), unreadable, others),
            *self._list(Target(PODS), set(), elsewhere),
        ]

    def _controllers(self, view: JobView, unreadable: set[str]) -> dict[str, list[Object]]:
        """Return the Deployments of the controllers that create the pods, by the names of their checks."""
        found: dict[str, list[Object]] = {}
        for controller in CONTROLLERS[view.target.name]:
            try:
                found[controller.check] = self.client.list_deployments(controller)
            except ForbiddenError:
                unreadable.add(f"deployments of {controller.name}")
        return found

    def _get(self, target: Target, into: dict[str, Object], missing: set[str], unreadable: set[str]) -> None:
        name = str(target.name)
        try:
            found = self.client.api.call("get", target)
        except ForbiddenError:
            unreadable.add(target.resource.plural)
        except JobNotFoundError:
            missing.add(f"{target.resource.plural}/{name}")
        except ApiError as error:
            if error.status == 404:
                missing.add(f"{target.resource.plural}/{name}")
        else:
            into[name] = found

    def _list(self, target: Target, unreadable: set[str], query: Mapping[str, str] | None = None) -> list[Object]:
        try:
            return self.client.api.list_all(target, query)[0]
        except ForbiddenError:
            unreadable.add(target.resource.plural)
            return []
        except FlkError:  # the cluster does not serve this kind
            return []

    def _read_record(self, plain: JobView, pods: list[Object]) -> JobRecord | None:
        """Return the last record in the log of pod 0, read again soon after a pod has changed, and now and then."""
        if self._record_turn.has_come(pods):
            self.last_record = self._record_in_log(plain)
        return self.last_record

    def _record_in_log(self, view: JobView) -> JobRecord | None:
        first = view.objects.get(view.pods[0].name) if view.pods else None
        if first is None or not (first.get("status") or {}).get("containerStatuses"):
            return None
        name = first["metadata"]["name"]
        record = None
        timed = self._log(first, log_format.RECORD_INTERVAL + 100, timestamps=True)
        self._progress = read_progress(timed)
        lines = [line.partition(" ")[2] for line in timed]
        for line in lines:
            record = log_format.parse_record(line) or record
        self._logs = {name: [line for line in lines if not log_format.is_record(line)][-LOG_LINES:]}
        waiting = _WAITING.search(lines[-1]) if lines else None
        if waiting or not lines:  # a launcher is missing: that one, or if pod 0 is silent any other, says more
            others = [p.name for p in view.pods[1:] if waiting is None or p.index == int(waiting[1])]
            for other in [name for name in others if name in view.objects][:1]:
                self._logs[other] = self._log(view.objects[other], LOG_LINES)
        return record

    def _foreign_logs(self, view: JobView) -> dict[str, list[str]]:
        """Return the last lines of the pods that have ended, the earliest first."""
        ended = sorted((pod for pod in view.pods if pod.exit_code), key=lambda pod: pod.ended or 0.0)
        running = [pod for pod in view.pods if pod.phase == PodPhase.RUNNING]
        chosen = [pod.name for pod in [*ended, *running][:FOREIGN_LOGS]]
        return {name: self._log(view.objects[name], FOREIGN_LINES) for name in chosen}

    def _log(self, pod: Object, tail: int, *, previous: bool = False, timestamps: bool = False) -> list[str]:
        lines: list[str] = []
        try:
            with self.client.stream_log(
                pod, _LOG_IDLE, tailLines=tail, previous=previous, timestamps=timestamps
            ) as stream:
                for line in stream:
                    lines.append(line.decode(errors="replace"))
        except FlkError:
            return lines
        return lines


class _Turn:
    """When something is read again: after a pause that doubles, up to a longest one, while the pods do not change."""

    def __init__(self, shortest: float, longest: float) -> None:
        self._shortest, self._longest = shortest, longest
        self._pause = shortest
        self._pods: frozenset[tuple[str, str]] | None = None
        self._read = -longest

    def has_come(self, pods: Iterable[Object]) -> bool:
        """Return whether it is read now. ``pods`` are those of the job."""
        phases = frozenset((pod["metadata"]["uid"], (pod.get("status") or {}).get("phase", "")) for pod in pods)
        if phases != self._pods:
            self._pods, self._pause = phases, self._shortest
        now = time.monotonic()
        if now - self._read < self._pause:
            return False
        self._read, self._pause = now, min(2 * self._pause, self._longest)
        return True


def is_about(event: Object, job: Object) -> bool:
    """Return whether an event is about this job, or about an object that its controller has made for it.

    It is not if it is about an earlier job of the same name.
    """
    about = event.get("involvedObject") or {}
    if about.get("kind") == target_of(job).kind:
        return about.get("uid") in (None, job["metadata"]["uid"])
    return event_time(event) >= timestamp(job["metadata"].get("creationTimestamp"))


def _representatives(view: JobView) -> list[PodState]:
    """Return some of the pods that do not run, one for each phase and reason first."""
    troubled = [
        pod
        for pod in view.pods
        if pod.phase in _UNFINISHED
        and pod.name in view.objects
        and view.now - timestamp(view.objects[pod.name]["metadata"].get("creationTimestamp")) > STUCK_AFTER
    ]
    kinds = {(pod.phase, pod.reason): pod for pod in reversed(troubled)}
    chosen = [*kinds.values(), *(pod for pod in troubled if pod not in kinds.values())]
    return chosen[:STUCK_PODS]


def _claim_names(view: JobView, pods: Iterable[PodState]) -> list[str]:
    """Return the claims of pods that do not start because of a volume."""
    names = set()
    for pod in pods:
        events = " ".join(str(event.get("message", "")) for event in view.pod_events.get(pod.name, []))
        if any(word in pod.message + events for word in ("olume", "persistentvolumeclaim")):
            for volume in pod_spec(view.objects[pod.name]).get("volumes") or []:
                names.add(str((volume.get("persistentVolumeClaim") or {}).get("claimName") or ""))
    return sorted(names - {""})
