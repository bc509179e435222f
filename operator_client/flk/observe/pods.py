"""Derive the state of one pod: its phase, why it does not run, and how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from flk.kube import Object
from flk.observe.model import PodPhase, PodState
from flk.spec.units import timestamp
from flk.targets import CONTAINERS, EXIT_CODE, KEPT_BY_KUBELET, REPLACED
from flk_runtime.contract import pod_env, pod_layout
from flk_runtime.contract.record import JobRecord

_NORMAL: Final = frozenset({"ContainerCreating", "PodInitializing"})  # reasons to wait that are no trouble
FIRST_SIGNAL: Final = 128  # exit codes above it are 128 + the signal
SIGKILLED: Final = 137  # the exit code of a container that SIGKILL has ended
# Executes a command that finds the programs of the job's packages first, and the packages by their Python.
_WITH_PACKAGES: Final = f'PATH="${pod_env.WORK}/{pod_layout.PACKAGES}/bin:$PATH"; exec "$@"'
SET_UP: Final = ("Pulling", "Pulled", "Created", "Started")  # reasons of events of a pod whose volumes are mounted
CLOCK_SKEW: Final = 5.0  # seconds by which the clocks of nodes may differ
INIT: Final = "Init:"  # begins the reason of a pod whose init container has failed, as kubectl writes it
OF_INIT: Final = "its init container"  # begins its message


def missing_pod(
    index: int, name: str, ranks: list[int], refusal: Object | None, phase: PodPhase = PodPhase.MISSING
) -> PodState:
    """Return the state of a pod that does not exist. ``refusal`` is the event that says why it was not created."""
    if refusal is None:
        return PodState(index, name, ranks, phase)
    return PodState(index, name, ranks, phase, reason=str(refusal["reason"]), message=one_line(refusal.get("message")))


def existing_pod(
    pod: Object, index: int, ranks: list[int], *, restart_policy: str = "", events: Sequence[Object] = ()
) -> PodState:
    """Return the state of a pod. ``restart_policy`` is the job's; ``events`` are those about this pod."""
    container = container_status(pod)
    state = container.get("state") or {}
    ended = state.get("terminated") or {}
    code = ended.get("exitCode")
    phase = _phase(pod, state)
    reason, message = _reason(pod, phase, state, events)
    shown = failed_init(pod) if reason.startswith(INIT) else ended
    # With the policy ExitCode a pod comes back that has no exit code, or one of 128 and more. The operator also brings
    # back pods of OnFailure and Always, whose containers the kubelet starts again: such a pod ended from outside.
    recreated = restart_policy in (REPLACED, *KEPT_BY_KUBELET) or (
        restart_policy == EXIT_CODE and (code is None or code >= FIRST_SIGNAL)
    )
    stopped = bool(pod["metadata"].get("deletionTimestamp"))  # the deletion ended it: it did not fail by itself
    return PodState(
        index=index,
        name=pod["metadata"]["name"],
        ranks=ranks,
        phase=phase,
        node=str((pod.get("spec") or {}).get("nodeName") or ""),
        reason=reason,
        message=message,
        restarts=int(container.get("restartCount") or 0),
        started=timestamp((state.get("running") or ended).get("startedAt")) or None,
        ended=timestamp(shown.get("finishedAt")) or None,
        exit_code=shown.get("exitCode"),
        signal=_signal(shown),
        memory_limit=memory_limit(pod),
        failed_permanently=phase == PodPhase.FAILED and not recreated and not stopped,
        record=JobRecord.from_json(str(ended.get("message"))) if ended.get("message") else None,
    )


def was_killed_by_memory_limit(pod: Object) -> bool:
    """Return whether the container, and not only one of its processes, was killed at its memory limit."""
    return any(end.get("reason") == "OOMKilled" for end in _ends(pod))


def got_sigkill(pod: Object, since: float) -> bool:
    """Return whether the container has a memory limit and got SIGKILL after ``since`` for a reason that is not shown.

    containerd reports OOMKilled only if it hears of the kernel's kill before it handles the end of the container, else
    Error.
    """
    # For a container that the kubelet cannot find it writes this exit code too, with reason ContainerStatusUnknown.
    killed = [end for end in _ends(pod) if (end.get("exitCode"), end.get("reason")) == (SIGKILLED, "Error")]
    return bool(memory_limit(pod)) and any(timestamp(end.get("finishedAt")) >= since for end in killed)


def outside_end(pod: Object, since: float, until: float) -> str:
    """Return what the pod says of an end from outside between these times; empty: nothing.

    It is a reason in its status (Evicted), a condition (DisruptionTarget), or a deletion. A deletion kills the
    container only when its grace period is over, which is the time that the pod names.
    """
    status, found = pod.get("status") or {}, conditions(pod)
    ends = [timestamp(end.get("finishedAt")) for end in _ends(pod)]
    ended = max(ends) or timestamp((found.get("Ready") or {}).get("lastTransitionTime")) or until
    if not since <= ended <= until:
        return ""
    if status.get("reason"):
        return f"{status['reason']}: {status.get('message', '')}"
    disruption, deleted = found.get("DisruptionTarget"), timestamp(pod["metadata"].get("deletionTimestamp"))
    if disruption and timestamp(disruption.get("lastTransitionTime")) <= ended + CLOCK_SKEW:
        return f"{disruption.get('reason')}: {disruption.get('message', '')}"
    return "it was deleted" if 0 < deleted <= ended + CLOCK_SKEW else ""


def last_end(pod: Object) -> Object:
    """Return how the training container of a pod that has ended did; empty if it has not."""
    return dict(_ends(pod)[0])


def _ends(pod: Object) -> list[Object]:
    """Return how the training container ended now and before; empty objects if it did not."""
    container = container_status(pod)
    return [(container.get(which) or {}).get("terminated") or {} for which in ("state", "lastState")]


def failed_init(pod: Object) -> Object:
    """Return how an init container of a pod has ended that failed, with its name; empty if none has.

    Sidecars are none: the kubelet starts them again, and ends them after another one has failed.
    """
    sidecars = [
        each.get("name")
        for each in (pod.get("spec") or {}).get("initContainers") or []
        if each.get("restartPolicy") == "Always"
    ]
    ends = (
        {**((each.get("state") or {}).get("terminated") or {}), "name": each.get("name")}
        for each in (pod.get("status") or {}).get("initContainerStatuses") or []
        if each.get("name") not in sidecars
    )
    return next((end for end in ends if end.get("exitCode")), {})


def memory_limit(pod: Object) -> str:
    """Return the memory limit of the training container as its manifest has it; empty if it has none."""
    return str(((training_container(pod).get("resources") or {}).get("limits") or {}).get("memory") or "")


def has_log(pod: Object, name: str = "") -> bool:
    """Return whether a container (by default the training container) runs or has run.

    True, too, for a container that the pod does not have: who reads its log gets the error.
    """
    status, spec = pod.get("status") or {}, pod.get("spec") or {}
    container = container_status(pod)
    if name:
        kinds = ("containers", "initContainers")
        if all(item.get("name") != name for kind in kinds for item in spec.get(kind) or []):
            return True
        every = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
        container = next((item for item in every if item.get("name") == name), {})
    state = container.get("state") or {}
    return bool(state.get("running") or state.get("terminated") or container.get("restartCount"))


def training_container(pod: Object) -> Object:
    """Return the training container of a pod, as its manifest has it; empty if it has none."""
    return _training((pod.get("spec") or {}).get("containers"))


def container_status(pod: Object) -> Object:
    """Return the status of the training container of a pod; empty before there is one."""
    return _training((pod.get("status") or {}).get("containerStatuses"))


def _training(items: Any) -> Object:
    return next((dict(item) for item in items or [] if item.get("name") in CONTAINERS), {})


def phase_of(pod: Object) -> str:
    """Return the phase that Kubernetes has written to a pod; empty before it has."""
    return str((pod.get("status") or {}).get("phase") or "")


def _phase(pod: Object, state: Object) -> PodPhase:
    spec = pod.get("spec") or {}
    phase = phase_of(pod) or PodPhase.PENDING
    if phase in (PodPhase.SUCCEEDED, PodPhase.FAILED):
        return PodPhase(phase)
    if pod["metadata"].get("deletionTimestamp"):
        return PodPhase.TERMINATING
    if phase == PodPhase.PENDING:
        return PodPhase.STARTING if spec.get("nodeName") else PodPhase.PENDING
    if phase == PodPhase.RUNNING:
        done = (state.get("terminated") or {}).get("exitCode") == 0
        if "terminated" in state and spec.get("restartPolicy") in (("Never", "OnFailure") if done else ("Never",)):
            # The kubelet sets the phase of the pod a moment after its container has ended, or after its sidecars have.
            return PodPhase.SUCCEEDED if done else PodPhase.FAILED
        if _node_is_silent(pod):
            return PodPhase.UNKNOWN
        return PodPhase.RUNNING if "running" in state or not state else PodPhase.STARTING
    return PodPhase.UNKNOWN


def _node_is_silent(pod: Object) -> bool:
    """Return whether the node controller has marked a pod: not ready without a reason, though its containers are."""
    found = conditions(pod)
    ready, containers = found.get("Ready") or {}, found.get("ContainersReady") or {}
    return ready.get("status") == "False" and not ready.get("reason") and containers.get("status") == "True"


def _reason(pod: Object, phase: PodPhase, state: Object, events: Sequence[Object]) -> tuple[str, str]:
    """Return reason and message: why the pod does not run, or how it ended."""
    status = pod.get("status") or {}
    if phase == PodPhase.FAILED:
        return _failed_reason(pod, state)
    if phase == PodPhase.PENDING:
        scheduled = conditions(pod).get("PodScheduled") or {}
        if scheduled.get("status") == "False":
            return str(scheduled.get("reason") or "Unschedulable"), one_line(scheduled.get("message"))
    if phase == PodPhase.STARTING:
        for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
            waiting = (container.get("state") or {}).get("waiting") or {}
            if waiting.get("reason") and waiting["reason"] not in _NORMAL:
                return str(waiting["reason"]), one_line(waiting.get("message"))
        warnings = [event for event in after_last(events, SET_UP) if event.get("type") == "Warning"]
        if warnings:
            return str(warnings[-1].get("reason")), one_line(warnings[-1].get("message"))
    if phase == PodPhase.UNKNOWN:
        return str(status.get("reason") or "Unknown"), one_line(status.get("message") or "its node does not answer")
    return "", ""


def _failed_reason(pod: Object, state: Object) -> tuple[str, str]:
    status, ended = pod.get("status") or {}, state.get("terminated") or {}
    evicted = conditions(pod).get("DisruptionTarget") or {}
    if status.get("reason"):  # the kubelet has ended the pod: Evicted, for example
        return str(status["reason"]), one_line(status.get("message"))
    if evicted.get("status") == "True" and ended.get("reason") != "OOMKilled":
        return str(evicted.get("reason")), one_line(evicted.get("message"))
    if not ended and (init := failed_init(pod)):
        text = f"{OF_INIT} {init['name']} ended with exit code {init['exitCode']}"
        return f"{INIT}{init.get('reason') or 'Error'}", text
    message = "" if JobRecord.from_json(str(ended.get("message"))) else str(ended.get("message") or "")
    return str(ended.get("reason") or "Error"), message


def _signal(ended: Object) -> int | None:
    if ended.get("signal"):
        return int(ended["signal"])
    code = ended.get("exitCode")
    return code - FIRST_SIGNAL if code is not None and FIRST_SIGNAL < code < 2 * FIRST_SIGNAL else None


def after_last(events: Sequence[Object], reasons: Sequence[str]) -> Sequence[Object]:
    """Return the events after the last one with one of these reasons, which says that earlier ones are over."""
    begun = max((number for number, event in enumerate(events, 1) if event.get("reason") in reasons), default=0)
    return events[begun:]


def one_line(text: Any) -> str:
    """Return the message of an object of the API in one line."""
    return " ".join(str(text or "").split())


def conditions(item: Object | None) -> dict[str, Object]:
    """Return the conditions of an object of the API by their types."""
    return {str(c.get("type")): c for c in ((item or {}).get("status") or {}).get("conditions") or []}


def claims_of(pod: Object) -> list[str]:
    """Return the names of the PersistentVolumeClaims that a pod, or one of its template, mounts."""
    volumes = (pod.get("spec") or {}).get("volumes") or []
    names = [(volume.get("persistentVolumeClaim") or {}).get("claimName") for volume in volumes]
    return [str(name) for name in names if name]


def launcher_command(pod: Object) -> list[str]:
    """The command that starts flk's launcher in this pod, without the script; empty if another program starts it."""
    command: list[str] = training_container(pod).get("command") or []
    found = next((i for i, word in enumerate(command) if word.rpartition("/")[2].startswith("flk_runtime")), None)
    if found is None:
        return []
    begin = max((i for i in range(found) if command[i].rpartition("/")[2].startswith("python")), default=found)
    return command[begin : found + 1]  # without a shell that looks for Python first


def with_packages(pod: Object, container: str, command: Sequence[str]) -> list[str]:
    """Return a command for a container that finds what the job's launcher has installed there (``--pip``).

    Without this, only the launcher and the processes that it starts find it.
    """
    containers = (pod.get("spec") or {}).get("containers") or []
    env = [each["name"] for one in containers if one["name"] == container for each in one.get("env") or []]
    if pod_env.PIP in env or pod_env.REQUIREMENTS in env:
        return ["/bin/sh", "-c", _WITH_PACKAGES, "sh", *command]
    return list(command)
