"""Start of containers: commands, users, architectures, and containers that end again and again."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from flk.health.cause import (
    FOR_NODES,
    Cause,
    Found,
    Locate,
    Match,
    container_path,
    event_evidence,
    names,
    pod_evidence,
    subject,
    tell,
    waiting,
)
from flk.health.references import CONFIG_ERRORS
from flk.kube import Object
from flk.observe.model import Evidence, PodPhase, PodState
from flk.observe.observation import event_time
from flk.observe.pods import one_line
from flk.observe.view import JobView, Recreation
from flk.units import short_duration, timestamp
from flk_runtime.contract import user_env
from flk_runtime.contract.failure import ExitCode
from flk_runtime.contract.quantities import plural

_ROOT: Final = re.compile(
    r"runAsNonRoot and image (?:will run as root|has non-numeric user)|runAsUser breaks non-root policy"
)
_NO_PROGRAM: Final = r"(?:executable file not found|stat [^:]+: no such file|no such file)"
_PYTHON: Final = re.compile(rf'exec: "((?:[^"]*/)?python[\d.]*)": {_NO_PROGRAM}')
_EXECUTABLE: Final = re.compile(rf'exec: "([^"]+)": {_NO_PROGRAM}')
_FORMAT: Final = re.compile(r"exec format error")
_DENIED: Final = re.compile(r'exec: "([^"]+)": permission denied|exec (\S+): permission denied')
# runc makes a folder that is missing, so that only a place where none can be made is refused.
_WORK: Final = re.compile(r'(?:chdir to cwd \("|container init: mkdir )([^":]+)(?:"\)[^:]*)?: ([a-z][a-z -]+)')
_PROCESS: Final = re.compile(r"(?:.*unable to start container process: )?(.+)")
_ENDED: Final = re.compile(r"(?:Error )?[Pp]od (\S+) container \S+ exitCode: (\d+) terminated message: (.*)", re.DOTALL)
_START_REASONS: Final = ("StartError", "RunContainerError", "ContainerCannotRun", "CreateContainerError")
BACKOFF_RESET: Final = 600.0  # seconds that a container runs before the kubelet forgets its restarts
LOOP: Final = 3  # starts of a container that end at once before flk calls it a loop
LOOP_GRACE: Final = 60.0  # seconds after these in which a record may tell of attempts, which a new pod 0 has to hear of


def _starts(view: JobView) -> list[tuple[str, str, Evidence]]:
    """Return the failed starts of containers: pod name, message and evidence. Events outlive the pods."""
    found = []
    for pod in view.pods:
        for field, state in _states(view, pod.name):
            if state.get("reason") in _START_REASONS:
                text = one_line(state.get("message"))
                time = timestamp(state.get("finishedAt") or state.get("startedAt"))
                found.append((pod.name, text, Evidence(f"pod {pod.name}", f"{state['reason']}: {text}", field, time)))
                break
    for event in reversed(view.job_events):
        match = _ENDED.search(str(event.get("message", "")))
        if match and any(word in match[3] for word in ("runc create", "OCI runtime", "containerd task")):
            found.append((match[1], one_line(match[3]), event_evidence(event)))
    for name, events in view.pod_events.items():
        for event in events:
            text = one_line(event.get("message"))
            if event.get("reason") == "Failed" and "failed to create containerd " in text:  # container or task
                found.append((name, text, event_evidence(event)))
    return found


def _states(view: JobView, name: str) -> list[tuple[str, Object]]:
    statuses = ((view.objects.get(name) or {}).get("status") or {}).get("containerStatuses") or []
    return [
        (f"status.containerStatuses[{status.get('name')}].{which}.{kind}", status[which][kind])
        for status in statuses
        for which in ("state", "lastState")
        for kind in ("waiting", "terminated")
        if (status.get(which) or {}).get(kind)
    ]


def _failed_start(pattern: re.Pattern[str]) -> Locate:
    """Return a Locate for failed starts whose message matches ``pattern``, with the time of the first one."""

    def locate(view: JobView) -> Match | None:
        found = [(name, match, item) for name, text, item in _starts(view) if (match := pattern.search(text))]
        if not found:
            return None
        _, match, item = found[0]
        since = min((each.time for _, _, each in found if each.time), default=0.0)
        pods = list(dict.fromkeys(name for name, _, _ in found))
        return Match(pods, [replace(item, time=since)], (match[0], *match.groups("")))

    return locate


def _wrong_format(view: JobView) -> Match | None:
    """Find programs that the kernel refuses to execute, also those that a shell or a launcher starts."""
    found = _failed_start(_FORMAT)(view)
    if found is not None:
        return found
    for name in view.seen.logs:
        for line in view.recent_lines(name):
            if _FORMAT.search(line):
                ended = next((pod.ended or 0.0 for pod in view.pods if pod.name == name), 0.0)
                return Match([name], [Evidence(f"log of {name}", line, time=ended)])
    for pod in view.pods:
        if _FORMAT.search(pod.message):
            return Match([pod.name], [pod_evidence(view, pod, container_path(view, "state.terminated"))])
    return None


def _crash_loop(view: JobView) -> Found | None:
    attempts = view.from_flk and view.record is not None and view.record.attempts  # which tell more
    looping = [
        pod
        for pod in view.pods
        if pod.reason == "CrashLoopBackOff"
        or (pod.restarts >= LOOP and pod.phase == PodPhase.STARTING)
        or (pod.restarts >= LOOP and pod.phase == PodPhase.RUNNING and not attempts and _ran_briefly(view, pod))
    ]
    if not looping:
        return None
    pod = looping[0]
    path, last = next(
        (found for found in reversed(_states(view, pod.name)) if found[0].endswith("terminated")), ("", {})
    )
    code = last.get("exitCode")
    ended = f" with exit code {code}" if code is not None else ""
    evidence = [pod_evidence(view, pod, container_path(view))]
    if last:
        text = f"exit code {code}, {last.get('reason', '')}, {plural(pod.restarts, 'restart')}"
        evidence.append(Evidence(f"pod {pod.name}", text, path, timestamp(last.get("finishedAt"))))
    lines = [line for line in view.seen.logs.get(pod.name, []) if line.strip()]
    if lines:
        evidence.append(Evidence(f"log of {pod.name}", lines[-1].strip()))
    return Found(
        f"{subject(looping)}: the container ends again and again{ended}" + (f": {lines[-1].strip()}" if lines else ""),
        f"{view.kubectl(f'logs {pod.name} --previous')} shows what it printed before it ended",
        evidence,
        names(looping),
        since=_loop_began(view, pod, last),
    )


def _loop_began(view: JobView, pod: PodState, last: Object) -> float:
    """Return when a container began to end again and again: not before its last long run; 0 if nothing tells it."""
    ended = timestamp(last.get("finishedAt"))
    if ended - timestamp(last.get("startedAt")) >= BACKOFF_RESET:
        return ended
    backoffs = [e for e in view.events_of(pod.name) if "restarting failed container" in str(e.get("message"))]
    return min((event_time(event, first=True) for event in backoffs), default=0.0)


def _ran_briefly(view: JobView, pod: PodState) -> bool:
    """Return whether a container's last run and its present one are so short that the kubelet still counts restarts."""
    ended = [state for field, state in _states(view, pod.name) if field.endswith("lastState.terminated")]
    brief = [timestamp(end.get("finishedAt")) - timestamp(end.get("startedAt")) < BACKOFF_RESET for end in ended]
    return any(brief) and view.now - (pod.started or 0.0) < BACKOFF_RESET


def loop(view: JobView) -> tuple[str, Recreation] | None:
    """Return the pod that ended most often soon after its start, and how; None if attempts are known, which tell more.

    A container that has run for long since then is out of the loop.
    """
    if view.from_flk and view.record and view.record.attempts:
        return None
    runs = {pod.name: view.now - pod.started for pod in view.pods if pod.phase == PodPhase.RUNNING and pod.started}
    found = {}
    for name, last in view.recreations.items():
        lives = [(began, end) for began, end in last.lives if end - began < BACKOFF_RESET]
        if lives and runs.get(name, 0.0) < BACKOFF_RESET:
            found[name] = replace(last, lives=lives)
    return max(found.items(), key=lambda item: len(item[1].lives), default=None)


def _recreated_again_and_again(view: JobView) -> Found | None:
    """Find pods that are created again without end, as after exit codes of 128 and more."""
    found = loop(view)
    if found is None or len(found[1].lives) < LOOP or found[1].out_of_memory:
        return None
    name, last = found
    return Found(
        f"{name} ends with exit code {last.code} and is created again and again ({len(last.lives)} times); it never "
        "gets further",
        f"{view.kubectl(f'logs {name} -f')} shows what it prints next time; then {view.flk('delete')}",
        [last.evidence],
        [name],
        since=last.lives[LOOP - 1][1],
    )


_START: Final = (
    "flk reads how the container ended (StartError), and the operator's events, because the operator deletes such a "
    "pod and creates it again, without end."
)
CAUSES: Final = (
    Cause(
        "RunsAsRoot",
        tell(
            waiting(CONFIG_ERRORS, _ROOT),
            lambda view, trace: f"{trace} cannot start: the image {view.image} runs as root, and the pods must not",
            lambda view, trace: (
                "choose an image with a numeric USER, or set securityContext.runAsUser in the job's patch"
            ),
        ),
        grace=10,
    ),
    Cause(
        "PythonMissing",
        tell(
            _failed_start(_PYTHON),
            lambda view, trace: f"{trace} cannot start: the image {view.image} has no Python ({trace[1]} is not in it)",
            lambda view, trace: "choose an image with Python 3.10 or newer and torch: --image",
        ),
        grace=10,
    ),
    Cause(
        "CommandNotFound",
        tell(
            _failed_start(_EXECUTABLE),
            lambda view, trace: f"{trace} cannot start: the image {view.image} has no program {trace[1]}",
            lambda view, trace: "correct the command, or choose an image that has the program: --image",
        ),
        ExitCode.USAGE,
        grace=10,
    ),
    Cause(
        "CommandNotExecutable",
        tell(
            _failed_start(_DENIED),
            lambda view, trace: f"{trace} cannot start: {trace[1] or trace[2]} may not be executed",
            lambda view, trace: "make the file executable (chmod +x) in the image, or call it through its interpreter",
        ),
        ExitCode.USAGE,
        grace=10,
    ),
    Cause(
        "WorkingFolderMissing",
        tell(
            _failed_start(_WORK),
            lambda view, trace: (
                f"{trace} cannot start: the image has no working folder {trace[1]}, and none can be made ({trace[2]})"
            ),
            lambda view, trace: "correct workingDir in the job's patch",
        ),
        ExitCode.USAGE,
        grace=10,
    ),
    Cause(
        "WrongArchitecture",
        tell(
            _wrong_format,
            lambda view, trace: (
                f"{trace} cannot start: the program in the image {view.image} is for another processor architecture "
                "than the node's"
            ),
            lambda view, trace: FOR_NODES,
        ),
        grace=10,
    ),
    Cause(
        "ContainerStartFailed",
        tell(
            _failed_start(_PROCESS),
            lambda view, trace: f"{trace} cannot start: {trace[1]}",
            lambda view, trace: "correct what the message names in the image, the command or the job's patch",
        ),
        grace=30,
    ),
    Cause(
        "ContainerConfigInvalid",
        tell(
            waiting(CONFIG_ERRORS, re.compile(r".+")),
            lambda view, trace: f"{trace} cannot start: {trace[0]}",
            lambda view, trace: f"{view.kubectl(f'describe pod {trace.pods[0]}')} shows the pod's events",
        ),
        grace=30,
    ),
    Cause(
        "CrashLoop",
        _crash_loop,
        ExitCode.TRAINING,
        grace=60,
    ),
    Cause(
        "RestartLoop",
        _recreated_again_and_again,
        ExitCode.TRAINING,
        grace=LOOP_GRACE,
    ),
)


JOIN_TIMEOUT: Final = f"{user_env.JOIN_TIMEOUT} ({short_duration(user_env.JOIN_TIMEOUT.default)})"

# The lines of flk_runtime.launcher.processes.preparation.
_PIP: Final = re.compile(r"\[pod \d+\] (?:installing packages: |pip: )(.*)")
_SETUP: Final = re.compile(r"\[pod \d+\] (?:running the setup command: |setup: )(.*)")


def _prepares(view: JobView) -> Found | None:
    """Find a pod whose launcher's last line is of its preparation."""
    for pod in view.pods:
        lines = view.recent_lines(pod.name)
        last = lines[-1].strip() if lines and pod.phase == PodPhase.RUNNING else ""
        for pattern, what in ((_PIP, "installs packages"), (_SETUP, "runs the setup command")):
            match = pattern.fullmatch(last)
            if match:
                since = pod.started or 0.0
                taken = f" for {short_duration(view.now - since)}" if since else ""
                return Found(
                    f"{pod.name} {what}{taken}; its last line: {match[1]}",
                    f"{view.kubectl(f'logs {pod.name}')} shows what it does; the ranks start afterwards",
                    [Evidence(f"log of {pod.name}", last, time=since)],
                    [pod.name],
                    since=since,
                )
    return None


PREPARATION: Final = (
    Cause(
        "Preparing",
        _prepares,
        cured_by="the end of the preparation",
    ),
)
