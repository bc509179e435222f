"""Reader: sends the requests that an observation needs, and repeats none of them within some seconds."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from flk.errors import ApiError, FlkError, ForbiddenError, UsageError
from flk.kube import Object, RequestTarget, Resource
from flk.observe.client import JobClient, container_of
from flk.observe.model import PodPhase, PodState
from flk.observe.needs import OF_LAUNCHERS, OF_LOGS, needs, with_answer
from flk.observe.observation import Need, Observation, What, unnamed_pod
from flk.observe.resources import CLAIMS, CONFIG_MAPS, NODES, PENDING_WORKLOADS, POD_GROUPS, WORKLOADS
from flk.observe.source import Reply, Source
from flk.observe.view import JobView
from flk.spec import labels
from flk.targets import Target
from flk.targets.gang import gang_of
from flk_runtime.contract.record import ArchivedRecord

# Seconds between two requests while the pods change, and the longest pause to which they double while they do not.
EVENTS_EVERY: Final = (5.0, 20.0)  # for the events of a job that does not run undisturbed
RECORD_EVERY: Final = (1.0, 10.0)  # for the record: a new attempt need not change a pod
_VOLCANO: Final = "scheduling.volcano.sh"  # whose PodGroups jobs have that another tool made


def view_job(client: JobClient, name: str) -> JobView:
    """Return the view of a job now. Raises JobNotFoundError if there is none."""
    return view_of(client, _observed(client, name), Reader(client))


def view_of(client: JobClient, seen: Observation, reader: Reader) -> JobView:
    """Return the view of a job that was observed. If its pods are gone, the launchers may have archived the record."""
    view = reader.view(seen)
    if view.has_lost_pods and not view.records:
        archived = find_record(client, view.name, view.uid)
        if archived is not None:
            return JobView(replace(view.seen, record=archived.record), client.commands)
    return view


def view_with_ranks(client: JobClient, name: str) -> JobView:
    """Return the view of a job now, in which pods of the latest attempt have its ranks. Raises JobNotFoundError."""
    view = JobView(_observed(client, name))
    return Reader(client).view(view.seen) if view.resizable else view


def given_pod(job: str, names: Sequence[str], target: Target, pod: str) -> int:
    """Return the index of the pod that ``--pod`` names, by its name or its index, among the names of a job's pods.

    Raises UsageError for no pod.
    """
    base = pod if pod in names else target.base_name(pod)
    index = int(pod) if pod.isascii() and pod.isdigit() and len(pod) < 10 else -1
    index = names.index(base) if base in names else index
    if not names:
        raise UsageError(f"--pod: job {job} has no pods")
    if not 0 <= index < len(names):
        last = len(names) - 1
        raise UsageError(f"--pod: job {job} has pods {names[0]} to {names[-1]} (0 to {last}), no {pod}")
    return index


def pod_of(client: JobClient, name: str, rank: int | None = None, pod: str | None = None) -> PodState:
    """Return the pod that a name or an index means, or the pod of a rank (by default of rank 0).

    Raises UsageError if there is none or both are given, and ApiError if the pod does not exist now or does not run.
    """
    if pod is None:
        return pod_of_rank(client, name, rank or 0)
    if rank is not None:
        raise UsageError("--rank and --pod exclude each other")
    seen = _observed(client, name)
    bare = JobView(Observation(seen.job))  # here all names are without random suffixes
    index = given_pod(name, [state.name for state in bare.pods], bare.target, pod.rpartition("/")[2])
    return _existing(client, name, JobView(seen).pods[index])


def pod_of_rank(client: JobClient, name: str, rank: int) -> PodState:
    """Return the pod in which a rank of a job runs: in the latest attempt, where a rank may change its pod.

    Raises UsageError if the job has fewer ranks, and ApiError if the rank has no pod now.
    """
    view = view_with_ranks(client, name)
    hint = f"{client.commands.flk('status', name)} shows the pods of the ranks"
    if rank >= view.sizes[1] * view.processes:
        raise UsageError(f"--rank: job {name} has no rank {rank}")
    # The ranks of pod 0 are known: it is never replaced.
    if view.resizable and not view.members and rank >= view.processes:
        why = f"the log of pod {view.pods[0].name} tells of no attempt"
        raise ApiError(f"which pod of job {name} has rank {rank} is not known: {why}", hint=hint)
    found = next((pod for pod in view.pods if rank in pod.ranks), None)
    if found is None:
        raise ApiError(f"rank {rank} is not in the latest attempt of job {name}, which has fewer pods", hint=hint)
    return _existing(client, name, found)


def container_in(client: JobClient, job: str, pod: str, chosen: str) -> str:
    """Return the name of the container of a pod that ``--container`` chooses, by default the training container.

    Raises UsageError if the pod has no such container, and ApiError if there is no such pod any more.
    """
    if not chosen:
        return client.target_of(job).container
    return container_of(client.get_pod(pod, job), chosen)


def _observed(client: JobClient, name: str) -> Observation:
    job = client.get_job(name)
    return Observation(job, client.pods_of(job), client.now())


def _existing(client: JobClient, name: str, pod: PodState) -> PodState:
    if pod.absent:
        raise ApiError(f"pod {pod.name} does not exist", hint=f"{client.commands.flk('why', name)} says why")
    if pod.phase in (PodPhase.PENDING, PodPhase.SUCCEEDED, PodPhase.FAILED):
        state = "has no node yet" if pod.phase == PodPhase.PENDING else f"has ended ({pod.phase})"
        raise ApiError(f"pod {pod.name} {state}", hint=f"{client.commands.flk('status', name)} shows more")
    return pod


class Reader:
    """Makes views of one job, one after the other, with the replies to the requests that each needs."""

    def __init__(self, client: JobClient, source: Source | None = None, *, logs: bool = True) -> None:
        """``source`` is the API server by default. Without ``logs``, no log is read, which takes a request for each."""
        self._client, self._source, self._logs = client, source or Source(client), logs
        self._replies: dict[Need, Reply] = {}  # as they were read last
        self._backoffs = {True: _Backoff(*RECORD_EVERY), False: _Backoff(*EVENTS_EVERY)}  # by: of the launchers

    def view(self, seen: Observation) -> JobView:
        """Return the view of a job that was observed, after the requests that it needs."""
        before, self._replies = self._replies, {}
        due: dict[bool, bool] = {}
        view = JobView(seen, self._client.commands)
        # What is read may show what else is needed: events name a volume, whose claim has events of its own.
        while wanted := [need for need in needs(view) if self._logs or need.what not in OF_LOGS]:
            for need in wanted:
                frequent = need.what in OF_LAUNCHERS
                if frequent not in due:
                    due[frequent] = self._backoffs[frequent].due(seen.pods)
                known = before.get(need)
                if known is None or due[frequent]:
                    asked = self._ask(need, view)
                    known = known if known and asked.error else asked
                self._replies[need] = known
                seen = with_answer(seen, need, known)
            view = JobView(seen, self._client.commands)
        left = {need: reply for need, reply in before.items() if not due.get(need.what in OF_LAUNCHERS)}
        self._replies = left | self._replies
        return view

    def _ask(self, need: Need, view: JobView) -> Reply:
        """Make a request. One that fails, as in an outage, is answered by its error."""
        client, source, namespace = self._client, self._source, view.namespace
        match need.what:
            case What.EVENTS:
                return source.events(need.kind, namespace, need.name)
            case What.NODES if not need.name:
                return source.list_all(RequestTarget(NODES))
            case What.NODES:
                return source.get(RequestTarget(NODES, None, need.name))
            case What.CLAIMS:
                return source.get(RequestTarget(CLAIMS, namespace, need.name))
            case What.WORKLOADS:
                return source.list_all(RequestTarget(WORKLOADS, namespace), labels.KUEUE_JOB_UID, view.uid)
            case What.PENDING_WORKLOADS:
                reply = source.get(RequestTarget(PENDING_WORKLOADS, namespace, need.name))
                return replace(reply, items=[item for found in reply.items for item in found.get("items") or []])
            case What.POD_GROUPS:
                return source.get(RequestTarget(pod_groups_of(view.job), namespace, need.name))
            case What.CONTROLLERS:
                return source.once((need, view.target.name), lambda: list_controllers(client, view.target))
            case _:
                return Source(client).once(need, lambda: Reply(lines=self._log(need, view.seen)))

    def _log(self, need: Need, seen: Observation) -> list[str]:
        pod = next(pod for pod in seen.pods if pod["metadata"]["name"] == need.name)
        read = partial(self._client.last_lines, pod, need.lines)
        if need.previous:
            return read(previous=True) or read()
        return read(timestamps=need.what in OF_LAUNCHERS)


def list_controllers(client: JobClient, target: Target) -> Reply:
    """Return the Deployments of the controllers that create the pods, by the names of their checks."""
    found: dict[str, list[Object]] = {}
    unreadable = set()
    for controller in target.controllers:
        try:
            found[controller.check] = client.list_deployments(controller)
        except ForbiddenError:
            unreadable.add(f"deployments of {controller.name}")
    return Reply(controllers=found, unreadable=frozenset(unreadable))


def pod_groups_of(job: Object) -> Resource:
    """Return the kind of the PodGroup of a job, which its scheduler of gangs reads."""
    gang = gang_of(job)
    return POD_GROUPS[gang.group if gang else _VOLCANO]


class _Backoff:
    """Says when to read something again: after a pause that doubles, up to a maximum, while the pods do not change."""

    def __init__(self, shortest: float, longest: float) -> None:
        self._shortest, self._longest = shortest, longest
        self._pause = shortest
        self._pods: frozenset[tuple[str, str]] | None = None
        self._read = -longest

    def due(self, pods: Iterable[Object]) -> bool:
        """Return whether the next read is due. ``pods`` are the pods of the job."""
        phases = frozenset((pod["metadata"]["uid"], (pod.get("status") or {}).get("phase", "")) for pod in pods)
        if phases != self._pods:
            self._pods, self._pause = phases, self._shortest
        now = time.monotonic()
        if now - self._read < self._pause:
            return False
        self._read, self._pause = now, min(2 * self._pause, self._longest)
        return True


FIRST_POD: Final = unnamed_pod(0)


def find_record(client: JobClient, name: str, uid: str | None = None) -> Observation | None:
    """Return the record that the launchers have archived of a job; None without one, and if it may not be read."""
    try:
        found = client.api.list_all(client.target(CONFIG_MAPS), {"labelSelector": f"{labels.RECORDS}=true"})[0]
    except FlkError:
        return None
    entries = [
        entry
        for config_map in found
        for text in (config_map.get("data") or {}).values()
        if (entry := ArchivedRecord.from_json(text)) and entry.job == name and uid in (None, entry.uid)
    ]
    if not entries:
        return None
    newest = max(entries, key=lambda entry: entry.updated)
    logs = {FIRST_POD: newest.lines}
    return Observation(None, time=newest.updated, record=newest.record, entry=newest, logs=logs)
