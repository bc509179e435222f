"""JobView: the interpretation of a job's objects at one moment."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

from flk.errors import UnreadableError
from flk.kube import Object
from flk.observe.model import Evidence, PodPhase, PodState
from flk.observe.observation import Observation, What, event_time, involved, unnamed_pod
from flk.observe.pods import (
    CLOCK_SKEW,
    FIRST_SIGNAL,
    SIGKILLED,
    existing_pod,
    got_sigkill,
    has_log,
    last_end,
    memory_limit,
    missing_pod,
    outside_end,
    was_killed_by_memory_limit,
)
from flk.spec import labels
from flk.spec.units import created_at, timestamp
from flk.targets import DEFAULT, MOST_PODS, WORKER, Target, target_of
from flk.user.commands import Commands
from flk_runtime.contract import foreign, pod_env, user_env
from flk_runtime.contract.failure import Failure
from flk_runtime.contract.quantities import parse_ranges
from flk_runtime.contract.record import (
    ArchivedRecord,
    Attempt,
    Goodput,
    JobRecord,
    QuarantinedNode,
    SlowRank,
    Standstill,
)
from flk_runtime.contract.values import dataclass, replace

_MOST_RANKS: Final = 1_000_000
MULTIKUEUE: Final = "kueue.x-k8s.io/multikueue"  # ``managedBy`` of a job that Kueue has sent to another cluster
CONTROLLER_DELAY: Final = 15.0  # seconds after a job's creation in which its controller should have seen it
# Reasons of events about pods whose containers get SIGKILL, if they do not end before.
_OUTSIDE_ENDS: Final = ("Killing", "Evicted", "Preempted", "TaintManagerEviction")
# Reasons of events about services that could not be created, of the training operator and of JobSet.
SERVICE_REFUSED: Final = ("FailedCreateService", "HeadlessServiceCreationFailed")
WAITS: Final = r"pods have joined; waiting for pods? (?P<pod>\d+)|waiting for the launcher of pod 0 at "
_POD_NAME: Final = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_EXITED: Final = r"[Pp]od:? (?:\S+?\.)?(\S+) exited with code (\d+)"  # the operator's event ExitedWithCode


@dataclass(frozen=True)
class Recreation:
    """How the pods of one place in a job have ended by themselves, and others took their place."""

    code: int  # the last exit code
    evidence: Evidence  # of the last end
    lives: Sequence[tuple[float, float]]  # start and end of each container, in seconds since the epoch
    out_of_memory: bool


class JobView:
    """The interpretation of an observation: the job's pods, its events, the launchers' records and related objects."""

    def __init__(self, seen: Observation, commands: Commands | None = None) -> None:
        """``commands`` makes the commands that are suggested; by default, commands for the job's namespace.

        Raises UnreadableError for numbers of pods and ranks that no job has.
        """
        self.seen = seen
        self.job: Object = seen.job or {}  # empty if only the launchers' record is left
        self.name, self.uid = seen.name, seen.uid
        self.events, self.now, self.gone = seen.events, seen.time, seen.gone
        self._meta: Object = self.job.get("metadata") or {}
        self.labels: Object = self._meta.get("labels") or {}
        self.annotations: Object = self._meta.get("annotations") or {}
        self.commands = commands or Commands(str(self._meta.get("namespace") or ""))
        self.namespace = str(self._meta.get("namespace") or self.commands.namespace)
        self.target = target_of(self.job) if seen.job else DEFAULT
        self.kind = self.target.kind if self.job else ""  # of the job's object; empty: only the record is left
        self.subject = f"{self.kind or 'job'} {self.name}"  # of sentences of evidence
        self.objects, ended = _newest(seen.pods, self.target)
        self.replaced_pods = {**seen.replaced_pods, **ended}
        self.status: Object = self.job.get("status") or {}
        self.run_policy: Object = (self.job.get("spec") or {}).get("runPolicy") or {}
        self.roles = self.target.replicas(self.job) if seen.job else {}
        self.processes = seen.entry.processes if seen.entry else self.target.processes(self.job)
        pods = seen.entry.pods if seen.entry else sum(role.count for role in self.roles.values())
        if pods > MOST_PODS or pods * self.processes > _MOST_RANKS:
            raise UnreadableError(f"job {self.name} says that it has {pods} pods with {self.processes} ranks each")
        self.conditions = self.target.conditions(self.job)
        touched = self.target.is_seen(self.job) or bool(self.job_events) or seen.record is not None
        self.seen_by_operator = seen.job is None or touched
        self.pods = self._pods() if seen.entry is None else _unnamed_pods(seen.entry)
        self.records = [*(pod.record for pod in self.pods if pod.record), *([seen.record] if seen.record else [])]
        if self.resizable:
            self.pods = self._with_ranks(self.pods)
        ended_in_record = seen.entry is not None and seen.entry.record.outcome in ("succeeded", "failed")
        recorded = seen.entry.updated if seen.entry and ended_in_record else None
        self.completed = timestamp(self.status.get("completionTime")) or recorded

    @property
    def deletion_began(self) -> float:
        """When somebody deleted the job, which exists until its pods are gone; 0 if nobody has."""
        return timestamp(self._meta.get("deletionTimestamp"))

    @property
    def created(self) -> float:
        """When the job was created, in seconds since the epoch."""
        entry = self.seen.entry
        return entry.created if entry else timestamp(self._meta.get("creationTimestamp"))

    @cached_property
    def from_flk(self) -> bool:
        """Whether flk's launcher starts the ranks: the manifest is flk's."""
        environment = {variable.get("name") for variable in self.container.get("env") or []}
        return self.seen.entry is not None or labels.JOB in self.labels or user_env.JOB in environment

    @cached_property
    def workers(self) -> int:
        """How many groups of pods make steps of their own, as the workers of strategy diloco; 1 in other jobs."""
        workers = self._setting(user_env.WORKERS) or 1
        return workers if len(self.pods) % workers == 0 else 1

    @cached_property
    def resizable(self) -> bool:
        """Whether pods without the lowest indexes may train: the job is elastic or has spares."""
        return bool(self._setting(pod_env.MIN_PODS) or self.spares)

    @cached_property
    def spares(self) -> int:
        """Number of pods that wait to take the place of a lost one."""
        return self._setting(pod_env.SPARES)

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """How few and how many pods may train."""
        most = self._setting(pod_env.PODS) or len(self.pods)
        return self._setting(pod_env.MIN_PODS) or most - self.spares, most - self.spares

    @property
    def members(self) -> list[int]:
        """The pods of the latest attempt by their indexes, in the order of their ranks; empty if they are not known."""
        return parse_ranges(self.latest_attempt.pods) if self.latest_attempt else []

    @property
    def record(self) -> JobRecord | None:
        """The record with the most attempts, and among equal ones a record that has the job's end."""
        return max(
            self.records,
            key=lambda r: (r.attempts[-1].number if r.attempts else -1, r.outcome in ("failed", "succeeded")),
            default=None,
        )

    @property
    def latest_attempt(self) -> Attempt | None:
        """The latest attempt in the record; None if there is none, as before the launchers have met."""
        return self.record.attempts[-1] if self.record and self.record.attempts else None

    @property
    def unread_record(self) -> str:
        """Why the log of pod 0, which has the record, could not be read; empty: it was, or it was not asked for."""
        failed = [error for need, error in self.seen.unread.items() if need.what is What.RECORD]
        first = self.objects.get(self.pods[0].name) if failed else None
        return failed[0] if first is not None and has_log(first) else ""

    def recent_lines(self, pod_name: str) -> list[str]:
        """Return the last lines of a pod's log, without those from before the attempt that runs now."""
        last = self.latest_attempt
        began = last.started if last is not None and last.ended is None and last.failure is None else 0.0
        return [text for time, text in self.seen.lines_of(pod_name) if not time or timestamp(time) >= began]

    @property
    def goodput(self) -> Goodput | None:
        """What the time of the job has gone into, as the launcher of pod 0 told last; None: it has told nothing."""
        return max((r.goodput for r in self.records if r.goodput), key=lambda each: each.until, default=None)

    @property
    def started(self) -> float | None:
        """When the first pod started, as far as pods and records tell; None if none did."""
        earlier = [*self.replaced_pods.values(), *(self.objects[pod.name] for pod in self.pods if pod.restarts)]
        starts = [timestamp((pod.get("status") or {}).get("startTime")) for pod in earlier]
        told = [record.started for record in self.records]
        return min(filter(None, [*starts, *(pod.started for pod in self.pods), *told]), default=None)

    @property
    def ended(self) -> float | None:
        """When the last pod ended, or when the operator says that the job did."""
        return max((pod.ended for pod in self.pods if pod.ended), default=None) or self.completed

    @property
    def has_end_condition(self) -> bool:
        """Whether the controller of the job says that it has ended."""
        return not self.conditions.keys().isdisjoint(("Succeeded", "Failed"))

    @property
    def has_lost_pods(self) -> bool:
        """Whether the job has ended, and pods of it do not exist any more."""
        return self.has_end_condition and any(pod.phase == PodPhase.MISSING for pod in self.pods)

    @cached_property
    def failed(self) -> bool:
        """Whether the job has failed: its operator, a pod or a launcher's record says so."""
        if "Succeeded" in self.conditions:
            return False  # a worker may fail after its Master has succeeded
        return (
            "Failed" in self.conditions
            or any(pod.failed_permanently for pod in self.pods)
            or any(record.outcome == "failed" for record in self.records)
        )

    @property
    def succeeded(self) -> bool:
        """Whether the job has succeeded: its operator says so, or all its workers have."""
        if "Succeeded" in self.conditions:
            return True
        if self.seen.entry is not None:
            return self.seen.entry.record.outcome == "succeeded"
        all_succeeded = bool(self.pods) and all(pod.phase == PodPhase.SUCCEEDED for pod in self.pods)
        return all_succeeded and list(self.roles) == [WORKER]

    @property
    def suspended(self) -> bool:
        """Whether the job is suspended, by its user or until a queue admits it."""
        return self.target.suspended(self.job)

    @property
    def queue(self) -> str:
        """The queue that the job is submitted to; empty if there is none."""
        scheduling = self.run_policy.get("schedulingPolicy") or {}
        return str(self.labels.get(labels.QUEUE) or scheduling.get("queue") or "")

    @property
    def began(self) -> bool:
        """Whether an attempt has run before."""
        recreated = any(pod.restarts for pod in self.pods) or bool(self.replaced_pods)
        return recreated or "Restarting" in self.conditions or self.latest_attempt is not None

    @cached_property
    def job_events(self) -> list[Object]:
        """The events about the job itself."""
        kinds = [kind for kind, _ in self.target.event_objects(self.name)]
        return [event for event in self.events if _involved(event, "kind") in (None, *kinds)]

    @cached_property
    def pod_events(self) -> Mapping[str, list[Object]]:
        """The events about each pod, by the pod's name."""
        found: dict[str, list[Object]] = defaultdict(list)
        for event in self.events:
            if _involved(event, "kind") == "Pod":
                found[str(_involved(event, "name"))].append(event)
        return found

    def events_of(self, pod_name: str) -> list[Object]:
        """Return the events about the pod that has a name now, and not about earlier pods of the name."""
        uid = self.objects[pod_name]["metadata"].get("uid") if pod_name in self.objects else None
        return [event for event in self.pod_events.get(pod_name, []) if _involved(event, "uid") in (None, uid)]

    @property
    def stuck_after(self) -> float | None:
        """Seconds after which a job whose pods wait for nodes counts as stuck; None: when nothing can cure it."""
        text = str(self.labels.get(labels.STUCK_AFTER) or "")
        return float(text) if text.isdecimal() else None

    @cached_property
    def recreations(self) -> Mapping[str, Recreation]:
        """How earlier pods ended by themselves with a code of 128 or more, by the name of the pod in their place.

        The training operator deletes such a pod: its events tell of it. A Job keeps the pods themselves.
        """
        found = {}
        for event in self.job_events:
            match = re.search(_EXITED, str(event.get("message", "")))
            if match and event.get("reason") == "ExitedWithCode" and int(match[2]) >= FIRST_SIGNAL:
                item = Evidence(f"event of {self.subject}", str(event.get("message")), time=event_time(event))
                lives = self.lives_in_events(match[1])
                found[match[1]] = Recreation(int(match[2]), item, lives, self._out_of_memory(match[1]))
        present = {self.target.position(pod): name for name, pod in self.objects.items()}
        for name, pod in self.replaced_pods.items():
            kept, ended = present.get(self.target.position(pod)), last_end(pod)
            code = int(ended.get("exitCode") or 0)
            if name in self.objects or kept is None or code < FIRST_SIGNAL or outside_end(pod, 0.0, math.inf):
                continue
            began, end = timestamp(ended.get("startedAt")), timestamp(ended.get("finishedAt"))
            text = f"{ended.get('reason') or 'Error'}: exit code {code}"
            item = Evidence(f"pod {name}", text, "status.containerStatuses", end)
            lives = [*(found[kept].lives if kept in found else ()), (began, end)]
            found[kept] = Recreation(code, item, lives, self._out_of_memory(name))
        return found

    def lives_in_events(self, pod_name: str) -> list[tuple[float, float]]:
        """Return when pods of a name started that then ended by themselves, and when the next one started.

        They are told apart by their UIDs in the events about pods: the operator may send several events for one end.
        """
        events = self.pod_events.get(pod_name, ())
        started = {_involved(event, "uid"): event_time(event) for event in events if event.get("reason") == "Started"}
        outside = {_involved(event, "uid") for event in events if event.get("reason") in _OUTSIDE_ENDS}
        runs = any(pod.name == pod_name and pod.exit_code is None for pod in self.pods)
        present = {self.objects[pod_name]["metadata"].get("uid")} if runs and pod_name in self.objects else set()
        ends = [*list(started.values())[1:], self.now]
        lives = zip(started.items(), ends, strict=False)
        return [(began, end) for (uid, began), end in lives if uid not in outside | present]

    def _out_of_memory(self, pod_name: str) -> bool:
        """Return whether a container of a pod of this name was killed at its memory limit, as far as is known."""
        if self.killed_by_memory_limit(pod_name, 0.0):
            return True
        return self.got_sigkill(pod_name, 0.0) and not self.outside_end(pod_name, 0.0, math.inf)

    @property
    def slow(self) -> list[SlowRank]:
        """The ranks that the others of a running job wait for."""
        record = self.record
        return record.slow if record and record.outcome == "running" and not self.failed else []

    @property
    def quarantine(self) -> list[QuarantinedNode]:
        """The nodes that the job's pods avoid now, because pods have failed there."""
        return [each for each in self.record.quarantine if not 0 < each.until <= self.now] if self.record else []

    @property
    def standstill(self) -> Standstill | None:
        """What the ranks of a running job do while none of them makes progress."""
        record = self.record
        return record.standstill if record and record.outcome == "running" and not self.failed else None

    @property
    def unschedulable(self) -> list[PodState]:
        """The pods for which the scheduler finds no node, or which a gate keeps from it."""
        reasons = ("Unschedulable", "SchedulingGated")
        return [pod for pod in self.pods if pod.phase == PodPhase.PENDING and pod.reason in reasons]

    @property
    def lacking(self) -> list[PodState]:
        """The pods that the controller has to create, and those that have ended and that it has to replace."""
        return [
            pod
            for pod in self.pods
            if pod.phase == PodPhase.MISSING or (pod.phase == PodPhase.FAILED and not pod.failed_permanently)
        ]

    @property
    def refusals(self) -> list[Object]:
        """The events of pods that still do not exist, and of services for which pods wait, which were not created."""
        absent = any(pod.phase == PodPhase.MISSING for pod in self.pods)
        return [*(self._refused if absent else ()), *(self.refused_services if absent or self.launchers_wait else ())]

    @property
    def _refused(self) -> list[Object]:
        """The events of pods that were not created.

        A pod that was created before has its name until it is gone, and is created again then.
        """
        told = [(event, str(event.get("reason")), str(event.get("message"))) for event in self.job_events]
        made = {text.rpartition(" ")[2] for _, reason, text in told if reason.startswith("SuccessfulCreate")}
        return [
            event
            for event, reason, text in told
            if reason.startswith("FailedCreate") and "Service" not in reason
            if not (text.endswith("already exists") and any(f'"{name}"' in text for name in made))
        ]

    @property
    def refused_services(self) -> list[Object]:
        """The event of a service that was not created, in a list; empty if one was created after it."""
        last = [event for event in self.job_events if "Service" in str(event.get("reason"))][-1:]
        return [event for event in last if event.get("reason") in SERVICE_REFUSED]

    @property
    def launchers_wait(self) -> bool:
        """Whether the launcher of a pod says that it waits for others."""
        return any(lines and re.search(WAITS, lines[-1]) for lines in self.seen.logs.values())

    @property
    def sent_away(self) -> bool:
        """Whether Kueue has another cluster run the job."""
        return MULTIKUEUE in ((self.job.get("spec") or {}).get("managedBy"), self.run_policy.get("managedBy"))

    @property
    def runs_elsewhere(self) -> bool:
        """Whether the job's status, which Kueue copies from the other cluster, says that pods run there."""
        listed = self.status.get("replicatedJobsStatus") or self.status.get("jobsStatus")
        jobs = [self.status, *(listed if isinstance(listed, list) else [])]
        begun = not self.conditions.keys().isdisjoint(("Running", "Restarting"))
        return self.sent_away and (begun or any(isinstance(job, dict) and job.get("ready") for job in jobs))

    @property
    def awaits_controller(self) -> bool:
        """Whether the job has lacked pods for some seconds and no event says why: its controller may be away."""
        if self.suspended or self.sent_away or self.failed or self.succeeded:
            return False
        return self.now - self.created >= CONTROLLER_DELAY and bool(self.lacking or not self.pods) and not self.refusals

    @property
    def image(self) -> str:
        """The image of the training container."""
        return str(self.container.get("image") or "")

    @cached_property
    def container(self) -> Object:
        """The training container in the job's template; empty if there is none."""
        for role in self.roles.values():
            for container in pod_spec(role.template).get("containers") or []:
                if container.get("name") == self.target.container:
                    return dict(container)
        return {}

    def flk(self, verb: str, *, job: str | None = None, namespace: str | None = None) -> str:
        """Return a command of flk about this job, or about another one, which may be in another namespace."""
        return self.commands.flk(verb, self.name if job is None else job, namespace=namespace)

    def again(self, options: str = "") -> str:
        """Return how this job runs again, with more options."""
        return self.commands.again(self.name, str(self.labels.get(labels.QUEUE) or ""), options)

    def kubectl(self, words: str) -> str:
        """Return a command of kubectl in the job's namespace."""
        return self.commands.kubectl(words)

    def kubectl_of_cluster(self, words: str) -> str:
        """Return a command of kubectl about what has no namespace."""
        return self.commands.kubectl(words, namespaced=False)

    def killed_by_memory_limit(self, pod_name: str, since: float) -> bool:
        """Return whether the container of a pod was killed at its memory limit after ``since``."""
        if any(was_killed_by_memory_limit(pod) for pod in self._pods_named(pod_name)):
            return True
        # The operator deletes such a pod at once. Only its event remains.
        return any(event.get("reason") == "OOMKilled" for event in self._ends_of(pod_name, since))

    def pod_of(self, failure: Failure) -> str:
        """Return the name of the pod of a failure; empty if it is not known."""
        return failure.pod_name or next((pod.name for pod in self.pods if pod.index == failure.pod), "")

    def got_sigkill(self, pod_name: str, since: float) -> bool:
        """Return whether a pod with a memory limit got SIGKILL after ``since`` for a reason that is not shown."""
        if any(got_sigkill(pod, since - CLOCK_SKEW) for pod in self._pods_named(pod_name)):
            return True
        ends = [event for event in self._ends_of(pod_name, since) if event.get("reason") == "Error"]
        killed = any(f" exitCode: {SIGKILLED} " in str(event["message"]) for event in ends)
        return killed and bool(self.memory_limit(pod_name))

    def outside_end(self, pod_name: str, since: float, until: float) -> str:
        """Return what explains that a pod's container got SIGKILL between these times; empty: its memory limit may.

        Every sender of SIGKILL but the kernel at the memory limit leaves a trace: an event, or one in the pod.
        """
        since, until = since - CLOCK_SKEW, until + CLOCK_SKEW
        for event in self.pod_events.get(pod_name, ()):
            if event.get("reason") in _OUTSIDE_ENDS and since <= event_time(event) <= until:
                return f"{event['reason']}: {event.get('message', '')}"
        return next(filter(None, (outside_end(pod, since, until) for pod in self._pods_named(pod_name))), "")

    def _pods_named(self, pod_name: str) -> Iterator[Object]:
        """The pod of this name, and the one that it has replaced."""
        return filter(None, (self.objects.get(pod_name), self.replaced_pods.get(pod_name)))

    def _ends_of(self, pod_name: str, since: float) -> list[Object]:
        """Return the operator's events about the ends of a pod's container after ``since``."""
        begin = f"Error pod {pod_name} "
        events = (event for event in self.job_events if str(event.get("message", "")).startswith(begin))
        return [event for event in events if event_time(event) >= since - CLOCK_SKEW]

    def memory_limit(self, pod_name: str) -> str:
        """Return the memory limit of a pod's training container; empty if it is not known."""
        pod = self.objects.get(pod_name)
        return memory_limit(pod) if pod else ""

    def _pods(self) -> list[PodState]:
        """Return the states of all pods that the job should have, in the order of their indexes."""
        found = {self.target.position(pod): pod for pod in self.objects.values()}
        refused = self._refused_pods()
        held = self.suspended and not self.has_end_condition
        states: list[PodState] = []
        for role, replicas in self.roles.items():
            for number in range(replicas.count):
                index = len(states)
                ranks = list(range(index * self.processes, (index + 1) * self.processes))
                there = found.get((role, number))
                if there is None:
                    name = self.target.pod_name(self.name, role, number)
                    phase = PodPhase.SUSPENDED if held else PodPhase.MISSING
                    states.append(missing_pod(index, name, ranks, refused.get(name), phase))
                else:
                    events = self.events_of(there["metadata"]["name"])
                    policy = replicas.restart_policy
                    states.append(existing_pod(there, index, ranks, restart_policy=policy, events=events))
        return states

    def _with_ranks(self, pods: list[PodState]) -> list[PodState]:
        """Return the pods with the ranks that they have in the latest attempt; spares have none."""
        members = self.members
        place = {pod: place for place, pod in enumerate(members)}
        found = []
        for pod in pods:
            first = place[pod.index] * self.processes if pod.index in place else 0
            ranks = list(range(first, first + self.processes)) if pod.index in place else []
            found.append(replace(pod, ranks=ranks) if members else pod)
        return found

    def _setting(self, name: str) -> int:
        """Return the number that a variable of the training container has in the manifest; 0 if it has none."""
        return number_in(self.container, name)

    def _refused_pods(self) -> dict[str, Object]:
        """Return the last event that says why a pod was not created, by the pod's name."""
        refused = {}
        for event in self._refused:
            for name in re.findall(_POD_NAME, str(event.get("message", ""))):
                refused[name] = refused[self.target.base_name(name)] = event
        return refused


def _newest(pods: Sequence[Object], target: Target) -> tuple[dict[str, Object], dict[str, Object]]:
    """Return the newest pod of each index, and the older ones, which it has replaced, both by name."""
    newest: dict[tuple[str, int], Object] = {}
    older: dict[str, Object] = {}
    for pod in sorted(pods, key=lambda pod: created_at(pod)):
        position = target.position(pod)
        if position in newest:
            older[newest[position]["metadata"]["name"]] = newest[position]
        newest[position] = pod
    return {pod["metadata"]["name"]: pod for pod in newest.values()}, older


def number_in(container: Object, name: str) -> int:
    """Return the number that a variable of a container has; 0 if it has none. Raises UnreadableError."""
    values = [str(each.get("value", "")) for each in container.get("env") or [] if each.get("name") == name]
    try:
        return foreign.whole(values[-1], 0, MOST_PODS) if values and values[-1].isdecimal() else 0
    except foreign.ForeignError as error:
        raise UnreadableError(f"the variable {name} cannot be used: {error}") from None


def _unnamed_pods(entry: ArchivedRecord) -> list[PodState]:
    """Return the pods of a job of which only the launchers' record is left."""
    per_pod = entry.processes
    return [
        missing_pod(index, unnamed_pod(index), list(range(index * per_pod, (index + 1) * per_pod)), None)
        for index in range(entry.pods)
    ]


def pod_spec(template: Any) -> Object:
    """Return the spec of a pod or of a pod template; empty if it has none."""
    return (template or {}).get("spec") or {}


def _involved(event: Object, key: str) -> Any:
    return involved(event).get(key)
