"""Causes of containers that cannot be created or started: references, commands, architectures, crash loops."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from flk.health.cause import Cause, Found, event_evidence, names, pod_evidence, subject, waiting_path
from flk.kube import Object
from flk.observe.model import Evidence, PodPhase, PodState
from flk.observe.view import JobView, event_time
from flk.units import plural, timestamp
from flk_runtime.contract.exit_codes import ExitCode

_CONFIG: Final = ("CreateContainerConfigError", "CreateContainerError")
_KEY: Final = re.compile(r"couldn't find key (\S+) in (Secret|ConfigMap) (\S+)")
_REFERENCE: Final = re.compile(r'(secret|configmap) "([^"]+)" not found')
_ROOT: Final = re.compile(
    r"runAsNonRoot and image (?:will run as root|has non-numeric user)|runAsUser breaks non-root policy"
)
_EXECUTABLE: Final = re.compile(r'exec: "([^"]+)": (?:executable file not found|stat [^:]+: no such file|no such file)')
_NO_FILE: Final = re.compile(r"exec (\S+): no such file or directory")
_FORMAT: Final = re.compile(r"(?:exec )?\"?([^\s\":]+)\"?: exec format error|exec format error")
_DENIED: Final = re.compile(r'exec: "([^"]+)": permission denied|exec (\S+): permission denied')
_WORK: Final = re.compile(r'chdir to cwd \("([^"]+)"\)[^:]*: no such file')
_ENDED: Final = re.compile(r"(?:Error )?[Pp]od (\S+) container \S+ exitCode: (\d+) terminated message: (.*)", re.DOTALL)
_PYTHON: Final = re.compile(r"(?:^|/)python[\d.]*$")
_START_REASONS: Final = ("StartError", "RunContainerError", "ContainerCannotRun", "CreateContainerError")
LOOP: Final = 3  # starts of a container that end at once before flk calls it a loop


def _waiting(
    view: JobView, reasons: tuple[str, ...], pattern: re.Pattern[str]
) -> tuple[list[PodState], re.Match[str]] | None:
    pods = [pod for pod in view.pods if pod.stuck and pod.reason in reasons and pattern.search(pod.message)]
    match = pattern.search(pods[0].message) if pods else None
    return (pods, match) if match else None


def _key_missing(view: JobView) -> Found | None:
    found = _waiting(view, _CONFIG, _KEY)
    if found is None:
        return None
    pods, match = found
    key, kind, name = match[1], match[2], match[3].rpartition("/")[2]
    return Found(
        f"{subject(pods)} cannot start: the {kind} {name} has no key {key}",
        f"{view.kubectl(f'describe {kind.lower()} {name}')} shows its keys; the pods start once it has the key",
        [pod_evidence(view, pods[0], waiting_path())],
        names(pods),
    )


def _reference_missing(kind: str, create: str) -> object:
    def find(view: JobView) -> Found | None:
        pattern = re.compile(rf'({kind.lower()}) "([^"]+)" not found')
        found = _waiting(view, _CONFIG, pattern)
        if found is None:
            return None
        pods, match = found
        return Found(
            f"{subject(pods)} cannot start: the {kind} {match[2]} does not exist in namespace {view.namespace}",
            f"{view.kubectl(f'create {create} {match[2]} --from-literal=KEY=VALUE')} creates it; the pods start then",
            [pod_evidence(view, pods[0], waiting_path())],
            names(pods),
        )

    return find


def _runs_as_root(view: JobView) -> Found | None:
    found = _waiting(view, _CONFIG, _ROOT)
    if found is None:
        return None
    pods, _ = found
    return Found(
        f"{subject(pods)} cannot start: the image {view.image} runs as root, and the pods must not",
        "choose an image with a numeric USER, or set securityContext.runAsUser in the job's patch",
        [pod_evidence(view, pods[0], waiting_path())],
        names(pods),
    )


def starts(view: JobView) -> list[tuple[str, str, Evidence]]:
    """Return the failed starts of containers: pod name, message and evidence. Events outlive the pods."""
    found = []
    for pod in view.pods:
        for field, state in _states(view, pod.name):
            if state.get("reason") in _START_REASONS:
                text = " ".join(str(state.get("message", "")).split())
                time = timestamp(state.get("finishedAt") or state.get("startedAt"))
                found.append((pod.name, text, Evidence(f"pod {pod.name}", f"{state['reason']}: {text}", field, time)))
                break
    for event in reversed(view.job_events):
        match = _ENDED.search(str(event.get("message", "")))
        if match and any(word in match[3] for word in ("runc create", "OCI runtime", "containerd task")):
            found.append((match[1], " ".join(match[3].split()), event_evidence(event)))
    for name, events in view.pod_events.items():
        for event in events:
            text = " ".join(str(event.get("message", "")).split())
            if event.get("reason") == "Failed" and "failed to create containerd task" in text:
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


def _start_failed(view: JobView, pattern: re.Pattern[str]) -> tuple[str, re.Match[str], Evidence, list[str]] | None:
    """Return the pods in words, the match, the evidence (with the time of the first such start) and the pods' names."""
    matching = [(name, match, item) for name, text, item in starts(view) if (match := pattern.search(text))]
    if not matching:
        return None
    pods = list(dict.fromkeys(name for name, _, _ in matching))
    others = len(pods) - 1
    words = pods[0] + (f" and {plural(others, 'other pod')}" if others else "")
    since = min((item.time for _, _, item in matching if item.time), default=0.0)
    return words, matching[0][1], replace(matching[0][2], time=since), pods


def _executable(view: JobView, *, python: bool) -> Found | None:
    found = _start_failed(view, _EXECUTABLE)
    if found is None:
        return None
    words, match, evidence, pods = found
    if bool(_PYTHON.search(match[1])) != python:
        return None
    if python:
        return Found(
            f"{words} cannot start: the image {view.image} has no Python ({match[1]} is not in it)",
            "choose an image with Python 3.10 or newer and torch: --image",
            [evidence],
            pods,
        )
    return Found(
        f"{words} cannot start: the image {view.image} has no program {match[1]}",
        "correct the command, or choose an image that has the program: --image",
        [evidence],
        pods,
    )


def _permission(view: JobView) -> Found | None:
    found = _start_failed(view, _DENIED)
    if found is None:
        return None
    words, match, evidence, pods = found
    return Found(
        f"{words} cannot start: {match[1] or match[2]} may not be executed",
        "make the file executable (chmod +x) in the image, or call it through its interpreter",
        [evidence],
        pods,
    )


def _work_folder(view: JobView) -> Found | None:
    found = _start_failed(view, _WORK)
    if found is None:
        return None
    words, match, evidence, pods = found
    return Found(
        f"{words} cannot start: the working folder {match[1]} does not exist in the image",
        "correct workingDir in the job's patch",
        [evidence],
        pods,
    )


def _architecture(view: JobView) -> Found | None:
    found = _start_failed(view, _FORMAT)
    if found is not None:
        words, _, evidence, pods = found
        return _wrong_architecture(view, words, evidence, pods)
    for name, lines in view.around.logs.items():
        for line in lines:
            if "exec format error" in line:
                ended = next((pod.ended or 0.0 for pod in view.pods if pod.name == name), 0.0)
                return _wrong_architecture(view, name, Evidence(f"log of {name}", line, time=ended), [name])
    for pod in view.pods:
        if "exec format error" in pod.message:
            evidence = pod_evidence(view, pod, "status.containerStatuses[pytorch].state.terminated")
            return _wrong_architecture(view, pod.name, evidence, [pod.name])
    return None


def _wrong_architecture(view: JobView, words: str, evidence: Evidence, pods: list[str]) -> Found:
    return Found(
        f"{words} cannot start: the program in the image {view.image} is for another processor architecture than "
        "the "
        "node's",
        "build the image for the architecture of the nodes (docker buildx build --platform), or choose nodes with "
        "--node-selector kubernetes.io/arch=…",
        [evidence],
        pods,
    )


def _other_start_error(view: JobView) -> Found | None:
    found = _start_failed(view, re.compile(r"(.+)"))
    if found is None:
        return None
    words, match, evidence, pods = found
    return Found(
        f"{words} cannot start: {match[1].rpartition('unable to start container process: ')[2] or match[1]}",
        "correct what the message names in the image, the command or the job's patch",
        [evidence],
        pods,
    )


def _container_config(view: JobView) -> Found | None:
    found = _waiting(view, _CONFIG, re.compile(r"(.+)"))
    if found is None:
        return None
    pods, match = found
    return Found(
        f"{subject(pods)} cannot start: {match[1]}",
        f"{view.kubectl(f'describe pod {pods[0].name}')} shows the pod's events",
        [pod_evidence(view, pods[0], waiting_path())],
        names(pods),
    )


def _crash_loop(view: JobView) -> Found | None:
    looping = [
        pod
        for pod in view.pods
        if pod.reason == "CrashLoopBackOff" or (pod.restarts >= LOOP and pod.phase == PodPhase.STARTING)
    ]
    if not looping:
        return None
    pod = looping[0]
    last: Object = {}
    for field, state in _states(view, pod.name):
        if field.endswith("terminated"):
            last = state
    code = last.get("exitCode")
    ended = f" with exit code {code}" if code is not None else ""
    evidence = [pod_evidence(view, pod, waiting_path())]
    if last:
        path = "status.containerStatuses[pytorch].lastState.terminated"
        text = f"exit code {code}, {last.get('reason', '')}, {plural(pod.restarts, 'restart')}"
        evidence.append(Evidence(f"pod {pod.name}", text, path, timestamp(last.get("finishedAt"))))
    lines = [line for line in view.around.logs.get(pod.name, []) if line.strip()]
    if lines:
        evidence.append(Evidence(f"log of {pod.name}", lines[-1].strip()))
    return Found(
        f"{subject(looping)}: the container ends again and again{ended}" + (f": {lines[-1].strip()}" if lines else ""),
        f"{view.kubectl(f'logs {pod.name} --previous')} shows what it printed before it ended",
        evidence,
        names(looping),
    )


def _recreated_again_and_again(view: JobView) -> Found | None:
    """Find pods that are created again without end, as the operator does after exit codes of 128 and more."""
    counts: dict[str, int] = {}
    last: dict[str, tuple[str, Object]] = {}
    for event in view.job_events:
        match = re.search(r"[Pp]od:? (?:\S+?\.)?(\S+) exited with code (\d+)", str(event.get("message", "")))
        if event.get("reason") == "ExitedWithCode" and match and int(match[2]) >= 128:
            counts[match[1]] = counts.get(match[1], 0) + int(event.get("count") or 1)
            last[match[1]] = match[2], event
    name = max(counts, key=lambda pod: counts[pod], default="")
    if not name or counts[name] < LOOP or (view.from_flk and view.record and view.record.attempts):
        return None
    code, event = last[name]
    text = f"{event.get('message')} ({counts[name]} times)"
    return Found(
        f"{name} ends with exit code {code} and is created again and again; it never gets further",
        f"{view.kubectl(f'logs {name} -f')} shows what it prints next time; then {view.flk('delete')}",
        [Evidence(f"event of {view.subject}", text, time=event_time(event))],
        [name],
    )


_READ: Final = "flk reads why the container waits (CreateContainerConfigError)."
_START: Final = (
    "flk reads how the container ended (StartError), and the operator's events, because the operator deletes such a "
    "pod "
    "and creates it again, without end."
)
STARTING: Final = (
    Cause(
        "KeyMissing",
        "A Secret or ConfigMap has no such key",
        f"A variable of the container comes from a key that the object does not have. {_READ}",
        "Add the key to the object. The pods start then.",
        _key_missing,
        grace=30,
    ),
    Cause(
        "SecretMissing",
        "A Secret does not exist",
        f"A variable of the container comes from a Secret that the namespace does not have. {_READ}",
        "Create the Secret, or correct --secret. The pods start once it exists.",
        _reference_missing("Secret", "secret generic"),  # type: ignore[arg-type]
        grace=30,
    ),
    Cause(
        "ConfigMapMissing",
        "A ConfigMap does not exist",
        f"A variable of the container comes from a ConfigMap that the namespace does not have. {_READ}",
        "Create the ConfigMap. The pods start once it exists.",
        _reference_missing("ConfigMap", "configmap"),  # type: ignore[arg-type]
        grace=30,
    ),
    Cause(
        "RunsAsRoot",
        "The image runs as root, and the pods must not",
        f"The pods set runAsNonRoot, and the image has no numeric user. {_READ}",
        "Choose an image with a numeric USER, or set runAsUser in the job's patch.",
        _runs_as_root,
        grace=10,
    ),
    Cause(
        "PythonMissing",
        "The image has no Python",
        f"The container's command is Python, and the image does not have it. {_START}",
        "Choose an image with Python 3.10 or newer and torch.",
        lambda view: _executable(view, python=True),
        grace=10,
    ),
    Cause(
        "CommandNotFound",
        "The image does not have the program of the command",
        f"The container's command names a program that the image does not have. {_START}",
        "Correct the command, or choose another image.",
        lambda view: _executable(view, python=False),
        ExitCode.USAGE,
        grace=10,
    ),
    Cause(
        "CommandNotExecutable",
        "The program of the command may not be executed",
        f"The file exists in the image and has no execute permission. {_START}",
        "Make the file executable, or call it through its interpreter.",
        _permission,
        ExitCode.USAGE,
        grace=10,
    ),
    Cause(
        "WorkingFolderMissing",
        "The working folder does not exist in the image",
        f"workingDir names a folder that the image does not have. {_START}",
        "Correct workingDir in the job's patch.",
        _work_folder,
        ExitCode.USAGE,
        grace=10,
    ),
    Cause(
        "WrongArchitecture",
        "The program in the image is for another processor architecture",
        f"The kernel refuses to execute the program (exec format error). {_START}",
        "Build the image for the architecture of the nodes, or choose other nodes.",
        _architecture,
        grace=10,
    ),
    Cause(
        "ContainerStartFailed",
        "The container cannot be started",
        f"The container runtime gives a reason that flk does not know more about. {_START}",
        "Correct what the message names.",
        _other_start_error,
        grace=30,
    ),
    Cause(
        "ContainerConfigInvalid",
        "The container cannot be created",
        f"The kubelet gives a reason that flk does not know more about. {_READ}",
        "Correct what the message names.",
        _container_config,
        grace=30,
    ),
    Cause(
        "CrashLoop",
        "A container ends again and again",
        "The kubelet restarts the container, and it ends each time (CrashLoopBackOff). The job's condition says "
        "Running all "
        "the while.",
        "Read the log of the previous container, correct the script, delete the job and submit it again.",
        _crash_loop,
        ExitCode.TRAINING,
        grace=60,
    ),
    Cause(
        "RestartLoop",
        "A pod is created again and again and never gets further",
        "The operator creates a pod again after each exit code of 128 and more, without a limit. flk counts the events "
        "ExitedWithCode.",
        "Read what the pod prints, correct it, delete the job and submit it again.",
        _recreated_again_and_again,
        ExitCode.TRAINING,
        grace=60,
    ),
)
