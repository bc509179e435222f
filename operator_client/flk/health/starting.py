"""Start of containers: images that cannot be pulled, programs that do not start, and those that end again and again."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from flk.health.cause import (
    Cause,
    Found,
    Locate,
    Match,
    container_path,
    event_evidence,
    found_by,
    match_of,
    names,
    pod_evidence,
    subject,
    tell,
    waiting,
)
from flk.health.cluster import Cluster, Level, Pods, Result, Unreadable, is_allowed
from flk.kube import Object
from flk.observe.model import Evidence, PodPhase, PodState
from flk.observe.observation import event_time, involved
from flk.observe.pods import INIT, SET_UP, failed_init, one_line
from flk.observe.view import JobView, Recreation, pod_spec
from flk.spec.units import timestamp
from flk_runtime.contract import ExitCode
from flk_runtime.contract.quantities import plural

_PULL: Final = (
    *("ErrImagePull", "ImagePullBackOff", "RegistryUnavailable"),
    *("ImageInspectError", "InvalidImageName", "ErrImageNeverPull"),
)
_NAME: Final = r'[Ii]mage "([^"]+)"'
_NOT_FOUND: Final = ("not found", "manifest unknown", "does not exist", "no such manifest", "404")
_DENIED: Final = (
    "authorization failed",
    "unauthorized",
    "denied",
    "forbidden",
    "401",
    "403",
    "no basic auth credentials",
)
# The registry answers too late, or with a status that asks to try again.
_BUSY: Final = (
    r"toomanyrequests|429 Too Many Requests|50[234] (?:Bad Gateway|Service Unavailable|Gateway Time-?out)|i/o timeout"
    r"|deadline exceeded|TLS handshake timeout|[Cc]lient\.Timeout|connection reset by peer|unexpected EOF"
    r"|pull QPS exceeded"
)
_LONG_PULL: Final = 20.0  # seconds: a pull that lasts longer has got further than a refusal
_LONGEST_PULL: Final = 1800.0
_PLATFORM: Final = ("no match for platform", "no matching manifest", "does not match the specified platform")
# Names of images and addresses in a message, which may hold any word: localhost:27404/denied:1.
_NAMES: Final = r'"[^"]*"|(?<![\w-])[\w-]+(?:[:/@.]+[\w-]+)+'
_OTHER_IMAGE: Final = "--image, image: in the job file, or $FLK_IMAGE names an image that the nodes can pull"
_QUOTED: Final = (
    r"(?:dial tcp: )?lookup \S+(?: on \S+)?: (?:no such host|.*connection refused)"
    r"|(?:dial tcp )?[^\s\"]\S*: (?:connect: )?connection refused|x509: .*"
)


def before(cluster: Cluster, pods: Pods) -> Iterator[Result]:
    """Say on which nodes the image is, and whether pods that wait now cannot pull it. Nothing is pulled for the check.

    A kubelet tells of its 50 largest images.
    """
    image = _whole_name(str(pods.containers[0].get("image") or ""))
    if isinstance(cluster.nodes, Unreadable):
        yield Result("image", Level.UNKNOWN, f"cannot list the nodes, which tell their images: {cluster.nodes.reason}")
        return
    for pod in [] if isinstance(cluster.pending, Unreadable) else cluster.pending:
        for status in (pod.get("status") or {}).get("containerStatuses") or []:
            state = (status.get("state") or {}).get("waiting") or {}
            if state.get("reason") in _PULL and _whole_name(str(status.get("image"))) == image:
                said = one_line(state.get("message")) or state["reason"]
                found = f"pod {pod['metadata'].get('name')} cannot pull {image}: {said}"
                yield Result("image", Level.WARNING, found, _OTHER_IMAGE)
                return
    nodes = [node for node in cluster.nodes if is_allowed(node, pods.spec)]
    if not nodes:
        return  # which the check of the capacity tells
    having = [node for node in nodes if image in _images_on(node)]
    registry = image.partition("/")[0]
    pull = "" if len(having) == len(nodes) else f"; the others pull it from {registry}, which is not tried here"
    yield Result("image", Level.OK, f"{image} is on {len(having)} of {plural(len(nodes), 'node')}{pull}")


def _whole_name(image: str) -> str:
    """Return the name of an image with its registry and its tag, as nodes tell it: ``docker.io/library/img:1``."""
    registry = image.partition("/")[0]
    if registry == image:
        image = f"docker.io/library/{image}"
    elif registry != "localhost" and not {".", ":"} & set(registry):
        image = f"docker.io/{image}"
    name, at, digest = image.partition("@")
    folder, slash, last = name.rpartition("/")
    if at:  # the digest counts, and nodes tell no tag with it
        return f"{folder}{slash}{last.partition(':')[0]}@{digest}"
    return image if ":" in last else f"{image}:latest"


def _images_on(node: Object) -> set[str]:
    images = (node.get("status") or {}).get("images") or []
    return {str(name) for image in images for name in image.get("names") or []}


def _pulling(words: tuple[str, ...] = ("",), *, without: tuple[str, ...] = ()) -> Locate:
    """Return a Locate for pods that cannot pull their image, where the messages contain one of ``words``.

    The kubelet alternates between ErrImagePull, which says why, and ImagePullBackOff, which need not. The event Failed
    has the reason too. The messages must contain none of ``without``. The texts of the match are the messages in one
    string, and the image.
    """

    def locate(view: JobView) -> Match | None:
        pods = [pod for pod in view.pods if pod.stuck and pod.reason in _PULL]
        events = [event for pod in pods for event in view.events_of(pod.name) if _is_pull_event(event)]
        said = " ".join([*(pod.message for pod in pods), *(str(event.get("message", "")) for event in events)])
        reasons = re.sub(_NAMES, "", said)
        if not pods or not any(word in reasons for word in words) or any(word in reasons for word in without):
            return None
        found = match_of(view, pods, container_path(view), said, _image_of(view, pods[0].message), pods[0].reason)
        since = [_failing_since(view, pod) for pod in pods]
        if None in since:
            return None
        told = [*found.evidence, *map(event_evidence, events[-1:])]
        return Match(found.pods, told, found.texts, min(time or 0.0 for time in since))

    return locate


def _failing_since(view: JobView, pod: PodState) -> float | None:
    """Return since when a pod's pulls fail, and not before the last pull that got further; None while one does.

    0 if no event tells it.
    """
    events = view.events_of(pod.name)
    begun, pulled = (_last([e for e in events if e.get("reason") == reason]) for reason in ("Pulling", "Pulled"))
    failures = [event for event in events if _is_pull_event(event)]
    first = min((event_time(event, first=True) for event in failures), default=0.0)
    # The kubelet leaves out events of a pod that has many. It waits between two pulls (BackOff).
    ended = _last([*failures, *(event for event in events if event.get("reason") == "BackOff")])
    if begun > ended and _LONG_PULL < view.now - begun < _LONGEST_PULL:
        return None
    failed = _last(failures)
    return failed if begun and failed - begun > _LONG_PULL else max(first, pulled)


def _last(events: Sequence[Object]) -> float:
    return max(map(event_time, events), default=0.0)


def _busy(view: JobView) -> Match | None:
    """Find pods whose last pull failed in a way in which the next one need not."""
    found = _pulling()(view)
    events = [e for name in found.pods for e in view.events_of(name) if _is_pull_event(e)] if found else []
    last = one_line(max(events, key=event_time).get("message")) if events else found[0] if found else ""
    match = re.search(_BUSY, last)
    return replace(found, texts=(match[0], found[1])) if found and match else None


def _is_pull_event(event: Object) -> bool:
    """Return whether an event says why an image could not be pulled."""
    return event.get("reason") == "Failed" and str(event.get("message", "")).startswith("Failed to pull image")


def _image_of(view: JobView, message: str) -> str:
    """Return the image that a pod cannot use: the one that its message names, else the training container's."""
    named = re.search(_NAME, message)
    return named[1] if named else view.image


def _access_denied(view: JobView, match: Match) -> Found:
    listed = pod_spec(view.objects[match.pods[0]]).get("imagePullSecrets") or []
    secrets = [str(secret.get("name")) for secret in listed]
    events = [event for name in match.pods for event in view.events_of(name)]
    missing = [event for event in events if event.get("reason") == "FailedToRetrieveImagePullSecret"]
    if missing and secrets:
        why = f"the pull secret {' or '.join(secrets)} does not exist"
        remedy = view.kubectl(f"create secret docker-registry {secrets[0]} --docker-server=… --docker-username=…")
    elif secrets:
        why = f"the registry refuses the credentials of {plural(len(secrets), 'pull secret')} ({', '.join(secrets)})"
        shown = view.kubectl(f"get secret {secrets[0]}")
        remedy = f"{shown} shows its age; create it again with credentials that may pull"
    else:
        why = "the registry demands credentials, and the pods have no pull secret"
        remedy = f"{view.kubectl('create secret docker-registry NAME --docker-server=…')}, and name it in the job"
    sentence = f"{match} cannot start: the image {match[1]} may not be pulled: {why}"
    return match.found(sentence, remedy, *map(event_evidence, missing[-1:]))


def _reason_of(match: Match) -> str:
    """Return why an image cannot be pulled: that its registry cannot be reached, or the kubelet's word for it."""
    detail = re.search(_QUOTED, match[0])
    return detail[0].removeprefix("dial tcp: ") if detail else match[2]


CONFIG_ERRORS: Final = ("CreateContainerConfigError", "CreateContainerError")
_NO_PROGRAM: Final = r"(?:executable file not found|stat [^:]+: no such file|no such file)"
_EXECUTABLE: Final = rf'exec: "([^"]+)": {_NO_PROGRAM}'
_FORMAT: Final = r"exec format error"
_PROCESS: Final = r"(?:.*unable to start container process: )?(.+)"
_ENDED: Final = r"(?s)(?:Error )?[Pp]od (\S+) container \S+ exitCode: (\d+) terminated message: (.*)"
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
        match = re.search(_ENDED, str(event.get("message", "")))
        if match and any(word in match[3] for word in ("runc create", "OCI runtime", "containerd task")):
            found.append((match[1], one_line(match[3]), event_evidence(event)))
    for name, events in view.pod_events.items():
        for event in events:
            text = one_line(event.get("message"))
            if event.get("reason") == "Failed" and "failed to create containerd " in text:  # container or task
                found.append((name, text, event_evidence(event)))
    return found


def _states(view: JobView, name: str) -> list[tuple[str, Object]]:
    """Return the states of the containers of a pod, those before their last restarts too, each with its path."""
    of_pod = (view.objects.get(name) or {}).get("status") or {}
    return [
        (f"status.{key}[{status.get('name')}].{which}.{kind}", status[which][kind])
        for key in ("initContainerStatuses", "containerStatuses")
        for status in of_pod.get(key) or []
        for which in ("state", "lastState")
        for kind in ("waiting", "terminated")
        if (status.get(which) or {}).get(kind)
    ]


def _failed_start(pattern: str) -> Locate:
    """Return a Locate for failed starts whose message matches ``pattern``, with the time of the first one."""

    def locate(view: JobView) -> Match | None:
        found = [(name, match, item) for name, text, item in _starts(view) if (match := re.search(pattern, text))]
        if not found:
            return None
        _, match, item = found[0]
        since = min((each.time for _, _, each in found if each.time), default=0.0)
        pods = list(dict.fromkeys(name for name, _, _ in found))
        return Match(pods, [replace(item, time=since)], (match[0], *match.groups("")))

    return locate


def _wrong_format(view: JobView) -> Match | None:
    """Find images without a variant for the node, and programs that the kernel refuses to execute."""
    found = _pulling(_PLATFORM)(view) or _failed_start(_FORMAT)(view)
    if found is not None:
        return found
    for name in view.seen.logs:  # of a program that a shell or a launcher starts
        for line in view.recent_lines(name):
            if re.search(_FORMAT, line):
                ended = next((pod.ended or 0.0 for pod in view.pods if pod.name == name), 0.0)
                return Match([name], [Evidence(f"log of {name}", line, time=ended)])
    return None


# Events of the kubelet about a pod that it cannot set up: its network, or its devices of dynamic allocation.
_SETUP_FAILURES: Final = ("FailedCreatePodSandBox", "FailedPrepareDynamicResources", "NetworkNotReady")


def _not_set_up(view: JobView) -> Match | None:
    """Find the first pod that its node cannot set up, so that its containers do not start."""
    for pod in view.pods:
        events = view.events_of(pod.name) if pod.phase == PodPhase.STARTING else []
        set_up = _last([event for event in events if event.get("reason") in SET_UP])
        failed = [event for event in events if event.get("reason") in _SETUP_FAILURES and event_time(event) > set_up]
        if failed:  # their messages differ, so that each is an event of its own
            since = max(set_up, min(event_time(event, first=True) for event in failed))
            said = one_line(failed[-1].get("message"))
            return Match([pod.name], [event_evidence(failed[-1])], (said, pod.node), since)
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
    of_init = re.match(r"status\.init\w+\[(.*)\]", path)
    which, option, restarts = (
        (f"init container {of_init[1]}", f" -c {of_init[1]}", "")
        if of_init
        else ("the container", "", f", {plural(pod.restarts, 'restart')}")
    )
    code = last.get("exitCode")
    ended = f" with exit code {code}" if code is not None else ""
    evidence = [pod_evidence(view, pod, container_path(view))]
    if last:
        text = f"exit code {code}, {last.get('reason', '')}"
        evidence.append(Evidence(f"pod {pod.name}", text + restarts, path, timestamp(last.get("finishedAt"))))
    lines = [line for line in view.seen.logs.get(pod.name, []) if line.strip()]
    if lines:
        evidence.append(Evidence(f"log of {pod.name}", lines[-1].strip()))
    return Found(
        f"{subject(looping)}: {which} ends again and again{ended}" + (f": {lines[-1].strip()}" if lines else ""),
        f"{view.kubectl(f'logs {pod.name}{option} --previous')} shows what it printed before it ended",
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
    ended = [state for path, state in _states(view, pod.name) if re.match(r"status\.c.+\.lastState\.terminated", path)]
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


def _init_failed(view: JobView) -> Found | None:
    """Find a pod that its controller creates again because an init container has failed, now or in each life."""
    for pod in view.pods:
        failed = pod.reason.startswith(INIT) and not pod.failed_permanently
        name = failed_init(view.objects[pod.name])["name"] if failed else _init_of_each_life(view, pod.name)
        if name:
            text = pod.message if failed else f"its init container {name} ends, and no container after it starts"
            return Found(
                f"{pod.name}: {text}" + ("" if view.failed else ", and the pod is created again"),
                f"{view.kubectl(f'logs {pod.name} -c {name}')} shows what it prints; correct it in the job's patch",
                [
                    Evidence(
                        f"pod {pod.name}",
                        f"{name}: {pod.reason or 'started again and again'}",
                        "status.initContainerStatuses",
                        pod.ended or 0.0,
                    )
                ],
                [pod.name],
            )
    return None


def _init_of_each_life(view: JobView, pod_name: str) -> str:
    """Return the last init container that pods of a name have started, if LOOP of them ended there; else empty.

    A pod that its controller replaces at once is seldom there to be read, and the kubelet's events stay.
    """
    events = [involved(each) for each in view.pod_events.get(pod_name, ()) if each.get("reason") == "Started"]
    paths = [*dict.fromkeys(str(each.get("fieldPath")) for each in events)]  # in the order of their first starts
    if (
        not paths
        or any(path.startswith("spec.containers") for path in paths)
        or len(view.lives_in_events(pod_name)) < LOOP
    ):
        return ""
    return paths[-1].partition("{")[2].removesuffix("}")


PULLS: Final = (
    Cause(
        "RegistryBusy",
        tell(
            _busy,
            lambda view, match: (
                f"{match} cannot start yet: the pull of {match[1]} failed ({match[0]}), and the kubelet tries again"
            ),
            lambda view, match: (
                f"{view.flk('wait')} waits; a pull secret raises the limit of a public registry, and a mirror avoids it"
            ),
        ),
        cured_by="the kubelet, which tries again",
        patience=21_600,  # a registry that limits pulls counts those of some hours
        awaits="the registry",
    ),
    Cause(
        "ImageNotFound",
        tell(
            _pulling(_NOT_FOUND, without=_PLATFORM),
            lambda view, match: f"{match} cannot start: the image {match[1]} does not exist in its registry",
            lambda view, match: f"correct --image, or push the image; then {view.flk('delete')} and submit again",
        ),
        grace=45,
        awaits="the registry",
    ),
    Cause(
        "ImageAccessDenied",
        found_by(_pulling(_DENIED), _access_denied),
        grace=45,
        awaits="the registry",
    ),
    Cause(
        "ImagePullFailed",
        tell(
            _pulling(without=_PLATFORM),
            lambda view, match: f"{match} cannot start: the image {match[1]} cannot be pulled ({_reason_of(match)})",
            lambda view, match: (
                f"correct --image, or have the registry or the way to it repaired; "
                f"{view.kubectl(f'describe pod {match.pods[0]}')} shows all that the node says"
            ),
        ),
        grace=90,
        awaits="the registry, or the way to it",
    ),
)
CAUSES: Final = (
    Cause(
        "PodNotSetUp",
        tell(
            _not_set_up,
            lambda view, match: f"{match} cannot start: its node {match[1]} cannot set it up: {match[0]}",
            lambda view, match: (
                f"{view.kubectl(f'delete pod {match.pods[0]}')} has it start again, perhaps on another node; have the "
                f"network plugin or the driver of the node repaired: {view.kubectl_of_cluster(f'cordon {match[1]}')} "
                "keeps pods off it"
            ),
        ),
        grace=180,
        awaits="the network plugin, or the driver of devices, of a node",
    ),
    Cause(
        "WrongArchitecture",
        tell(
            _wrong_format,
            lambda view, match: (
                f"{match} cannot start: the image {view.image} is for another processor architecture than the node's"
            ),
            lambda view, match: (
                "build the image for the architecture of the nodes (docker buildx build --platform), or choose nodes "
                "with --node-selector kubernetes.io/arch=…"
            ),
        ),
        grace=30,
    ),
    Cause(
        "CommandNotFound",
        tell(
            _failed_start(_EXECUTABLE),
            lambda view, match: f"{match} cannot start: the image {view.image} has no program {match[1]}",
            lambda view, match: (
                "correct the command, or choose an image that has the program, and torch (--image): a script needs "
                "Python 3.10 or newer"
            ),
        ),
        ExitCode.USAGE,
        grace=10,
    ),
    Cause(
        "ContainerStartFailed",
        tell(
            lambda view: _failed_start(_PROCESS)(view) or waiting(CONFIG_ERRORS, _PROCESS)(view),
            lambda view, match: f"{match} cannot start: {match[1]}",
            lambda view, match: (
                "correct what the message names in the image, the command or the job's patch; "
                f"{view.kubectl(f'describe pod {match.pods[0]}')} shows the pod's events"
            ),
        ),
        grace=30,
    ),
    Cause(
        "CrashLoop",
        lambda view: _crash_loop(view) or _recreated_again_and_again(view) or _init_failed(view),
        ExitCode.TRAINING,
        grace=60,
    ),
)
