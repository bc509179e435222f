"""Choose the requests that would tell more about a job, and add their answers to its observation: pure functions.

A job that runs undisturbed needs only the job, its pods and its launchers' record. A job in trouble needs its events
first, and then the objects that the events point to.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from flk.kube import Object
from flk.observe.model import PodPhase, PodState
from flk.observe.observation import LOG_LINES, Need, Observation, What, event_time, involved
from flk.observe.pods import SIGKILLED, claims_of
from flk.observe.progress import read_progress
from flk.observe.source import Reply
from flk.observe.view import WAITS, JobView
from flk.spec.units import created_at, timestamp
from flk.targets import target_of
from flk.targets.gang import gang_of
from flk_runtime.contract import log_format
from flk_runtime.contract.failure import Failure, Kind

# Seconds in which a pod may start before its events are read. Those of a pod that finds no node are read at once.
EVENTS_AFTER: Final = 10.0
LATE: Final = 30.0  # seconds after the job's start: a pod that was created later may have taken another one's place
STUCK_PODS: Final = 3  # pods whose events are read, so that a thousand pending ones cost three requests
SUSPECTS: Final = 3  # nodes that are read because they may be at fault
FOREIGN_LOGS: Final = 32  # pods of a job without flk's launcher whose logs are searched
FOREIGN_LINES: Final = 400  # last lines of each of these logs
RECORD_LINES: Final = log_format.RECORD_INTERVAL + 100  # last lines of pod 0's log, among which there is a record
METRICS_LINES: Final = 100  # last lines of the first pod of each further worker of strategy diloco
MOST_WORKERS: Final = 16  # workers whose metrics are read
OF_LOGS: Final = (What.RECORD, What.PEER, What.METRICS, What.LOG)  # read pod by pod
OF_LAUNCHERS: Final = (What.RECORD, What.PEER, What.METRICS)  # read for jobs that run undisturbed, too

_UNFINISHED: Final = (PodPhase.MISSING, PodPhase.PENDING, PodPhase.STARTING, PodPhase.UNKNOWN)


def needs(view: JobView) -> list[Need]:
    """Return the requests that would tell more about a job and were not made for its observation."""
    seen = view.seen
    # A connection that broke is no cause: the events may name one.
    known_end = view.failed and any(_is_cause(pod) for pod in view.pods)
    if view.gone is not None or view.deletion_began:
        return []
    killed = [Need(What.EVENTS, name, "Pod") for name in killed_pods(view)[-STUCK_PODS:]]
    ended = view.succeeded and not view.failed
    if ended or known_end:
        return [need for need in (killed if ended else [*killed, *_suspects(view)]) if need not in seen.answered]
    wanted = killed
    wanted += _of_launchers(view) if view.from_flk and not view.suspended else []
    # The service by which launchers find each other may have been refused.
    disturbed = view.launchers_wait or _was_disturbed(view)
    if disturbed or any(pod.phase != PodPhase.RUNNING for pod in view.pods):
        about_job = [Need(What.EVENTS, name, kind) for kind, name in view.target.event_objects(view.name)]
        if seen.answered.issuperset(about_job):
            wanted += _around(view)
        else:
            wanted += [*about_job, *(Need(What.EVENTS, pod.name, "Pod") for pod in _representatives(view))]
    return [need for need in wanted if need not in seen.answered]


def with_answer(seen: Observation, need: Need, reply: Reply) -> Observation:
    """Return an observation with the reply to a request."""
    seen = replace(
        seen,
        answered=seen.answered | {need},
        unread={**seen.unread, need: reply.error} if reply.error else seen.unread,
        missing=seen.missing | reply.missing,
        unreadable=seen.unreadable | reply.unreadable,
        not_served={**seen.not_served, **reply.not_served},
        other_versions={**seen.other_versions, **reply.other_versions},
    )
    match need.what:
        case What.EVENTS:
            assert seen.job is not None  # noqa: S101
            of_job = (need.kind, need.name) in target_of(seen.job).event_objects(seen.name)
            found = [event for event in reply.items if not of_job or is_about(event, seen.job)]
            return replace(seen, events=sorted([*seen.events, *found], key=event_time))
        case What.RECORD:
            records = [record for _, line in _timed(reply.lines) if (record := log_format.parse_record(line))]
            record = records[-1] if records else None
            return replace(_with_lines(seen, need, reply), record=record, progress=read_progress(reply.lines))
        case What.METRICS:
            return replace(seen, progress=[*seen.progress, *read_progress(reply.lines)])
        case What.PEER:
            return _with_lines(seen, need, reply)
        case What.LOG:
            return replace(seen, logs={**seen.logs, need.name: reply.lines})
        case What.CONTROLLERS:
            return replace(seen, controllers=reply.controllers)
        case What.NODES | What.CLAIMS:
            by_name = {item["metadata"]["name"]: item for item in reply.items}
            field = need.what.value
            changes: dict[str, Any] = {field: {**getattr(seen, field), **by_name}}
        case _:
            changes = {need.what.value: reply.items}
    return replace(seen, **changes)


def _timed(lines: Sequence[str]) -> list[tuple[str, str]]:
    """Return time and text of lines of a log, each of which begins with its time."""
    return [(time, text) for time, _, text in (line.partition(" ") for line in lines)]


def _with_lines(seen: Observation, need: Need, reply: Reply) -> Observation:
    last = [each for each in _timed(reply.lines) if not log_format.is_record(each[1])][-LOG_LINES:]
    logs = {**seen.logs, need.name: [text for _, text in last]}
    return replace(seen, logs=logs, log_times={**seen.log_times, need.name: [time for time, _ in last]})


def is_about(event: Object, job: Object) -> bool:
    """Return whether an event is about this job, or about an object that its controller has made for it.

    It is not if it is about an earlier job of the same name.
    """
    about = involved(event)
    if about.get("kind") == target_of(job).kind:
        return about.get("uid") in (None, job["metadata"]["uid"])
    return event_time(event) >= created_at(job)


def _is_cause(pod: PodState) -> bool:
    failure = pod.record.failure if pod.record and pod.record.outcome == "failed" else None
    return failure is not None and failure.is_cause


def _was_disturbed(view: JobView) -> bool:
    recreated = any(pod.restarts for pod in view.pods) or bool(view.replaced_pods)
    started = timestamp(view.status.get("startTime")) or view.now
    late = any(created_at(pod) - started > LATE for pod in view.objects.values())
    return recreated or late or "Restarting" in view.conditions


def _of_launchers(view: JobView) -> list[Need]:
    """Return the log of pod 0, which has the record, and then the log of the launcher that it waits for.

    Each worker of strategy diloco prints metrics of its own, in its first pod.
    """
    first = view.objects.get(view.pods[0].name) if view.pods else None
    if first is None or not (first.get("status") or {}).get("containerStatuses"):
        return []
    name = view.pods[0].name
    wanted = [Need(What.RECORD, name, lines=RECORD_LINES)]
    firsts = view.pods[:: len(view.pods) // view.workers][1:MOST_WORKERS]
    wanted += [Need(What.METRICS, pod.name, lines=METRICS_LINES) for pod in firsts if pod.phase == PodPhase.RUNNING]
    if view.seen.answered.issuperset(wanted):
        lines = view.seen.logs[name]
        waiting = re.search(WAITS, lines[-1]) if lines else None
        if waiting or not lines:  # a launcher is missing: that one, or if pod 0 is silent any other, says more
            others = [pod.name for pod in view.pods[1:] if waiting is None or pod.index == int(waiting["pod"] or 0)]
            wanted += [Need(What.PEER, other, lines=LOG_LINES) for other in others if other in view.objects][:1]
    return wanted


def _around(view: JobView) -> list[Need]:
    """Return the objects that explain why pods do not run."""
    pods = _representatives(view)
    wanted: list[Need] = []
    if any(pod.reason == "Unschedulable" for pod in pods):
        wanted.append(Need(What.NODES))
    else:
        wanted += _suspects(view)
    # Pods that are created again at once are never old enough for `_representatives`.
    restarting = [pod.name for pod in view.pods if pod.phase in _UNFINISHED and "Restarting" in view.conditions]
    wanted += [Need(What.EVENTS, name, "Pod") for name in [*view.recreations, *restarting][:STUCK_PODS]]
    claims = _claim_names(view, pods)
    wanted += [Need(What.CLAIMS, name) for name in claims]
    wanted += [Need(What.EVENTS, name, "PersistentVolumeClaim") for name in claims if name in view.seen.claims]
    if view.queue and (view.suspended or view.sent_away):
        wanted += [Need(What.WORKLOADS), Need(What.PENDING_WORKLOADS, view.queue)]
    if gang_of(view.job) is not None or view.run_policy.get("schedulingPolicy"):
        wanted.append(Need(What.POD_GROUPS, view.name))
    if view.awaits_controller:
        wanted.append(Need(What.CONTROLLERS))
    crashed = [pod.name for pod in pods if pod.reason == "CrashLoopBackOff"]
    wanted += [Need(What.LOG, name, lines=LOG_LINES, previous=True) for name in crashed]
    if view.failed and not view.records:
        wanted += [Need(What.LOG, name, lines=FOREIGN_LINES) for name in _foreign_logs(view)]
    return wanted


def _suspects(view: JobView) -> list[Need]:
    return [Need(What.NODES, name) for name in sorted(suspects(view))[:SUSPECTS]]


def _foreign_logs(view: JobView) -> list[str]:
    """Return pods of a job without flk's launcher whose logs may have the cause: those that have ended earliest."""
    ended = sorted((pod for pod in view.pods if pod.exit_code), key=lambda pod: pod.ended or 0.0)
    running = [pod for pod in view.pods if pod.phase == PodPhase.RUNNING]
    return [pod.name for pod in [*ended, *running][:FOREIGN_LOGS]]


def _representatives(view: JobView) -> list[PodState]:
    """Return some of the pods that do not run, one for each phase and reason first."""
    troubled = [
        pod
        for pod in view.pods
        if pod.phase in _UNFINISHED
        and pod.name in view.objects
        and (pod.reason == "Unschedulable" or view.now - created_at(view.objects[pod.name]) > EVENTS_AFTER)
    ]
    kinds = {(pod.phase, pod.reason): pod for pod in reversed(troubled)}
    return [*kinds.values(), *(pod for pod in troubled if pod not in kinds.values())][:STUCK_PODS]


def _claim_names(view: JobView, pods: Iterable[PodState]) -> list[str]:
    """Return the claims of pods that do not start because of a volume."""
    names: set[str] = set()
    for pod in pods:
        events = " ".join(str(event.get("message", "")) for event in view.pod_events.get(pod.name, []))
        if any(word in pod.message + events for word in ("olume", "persistentvolumeclaim")):
            names.update(claims_of(view.objects[pod.name]))
    return sorted(names)


# Words of exceptions. Errors of CUDA that name a mistake of the script are left out.
_WORDS: Final = (
    r"(CUDA|HIP) error(?!: (device-side assert|out of memory|invalid))|NCCL|RCCL|cuDNN|CUBLAS|NVML|uncorrectable|"
    r"Errno 5\b|Input/output error|Errno 30\b|Read-only file system"
)


EVENTS_KEPT: Final = 3600.0  # seconds for which API servers keep events by default


def may_be_of_hardware(failure: Failure | None) -> bool:
    """Return whether a node or a device may have caused a failure, and not only the script."""
    if failure is None:
        return False
    text = f"{failure.type}: {failure.message}"
    return failure.kind.may_be_of_hardware or (failure.kind is Kind.EXCEPTION and bool(re.search(_WORDS, text)))


def suspects(view: JobView) -> dict[str, str]:
    """Return the names of the nodes that may be at fault, each with the name of a pod there."""
    return {node: pod for pod, node in _places(view) if node}


def killed_pods(view: JobView) -> list[str]:
    """Return the pods that SIGKILL has ended lately, the last one last: their events may say who has sent it.

    An event that the API server has forgotten says nothing, and neither does its absence.
    """
    failures = [record.failure for record in view.records]
    failures += [attempt.failure for record in view.records for attempt in record.attempts]
    failures += [pod.failure for pod in view.pods]
    ends = {
        view.pod_of(failure): failure.time
        for failure in failures
        if failure is not None and view.now - failure.time < EVENTS_KEPT and _got_sigkill(view, failure)
    }
    return sorted(filter(None, ends), key=lambda name: ends[name])


def _got_sigkill(view: JobView, failure: Failure) -> bool:
    is_killed = failure.kind is Kind.CONTAINER_KILLED or failure.exit_code == SIGKILLED
    return is_killed or view.got_sigkill(view.pod_of(failure), 0.0)


def _places(view: JobView) -> Iterator[tuple[str, str]]:
    nodes = {pod.name: pod.node for pod in view.pods}
    failures = [record.failure for record in view.records if view.failed]
    failures += [pod.failure for pod in view.pods if pod.failed_permanently and not pod.record]
    if view.record and not view.failed:
        failures += [attempt.failure for attempt in view.record.attempts[-1:]]
    for failure in failures:
        if failure is not None and may_be_of_hardware(failure):
            name = view.pod_of(failure)
            yield name, failure.node or nodes.get(name, "")
    for pod in view.pods:
        if pod.phase == PodPhase.UNKNOWN or (pod.phase == PodPhase.STARTING and not pod.reason):
            yield pod.name, pod.node
