"""Images: containers whose image cannot be pulled."""

from __future__ import annotations

import re
from collections.abc import Sequence
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
    tell,
    trace,
    waiting,
)
from flk.kube import Object
from flk.observe.model import PodState
from flk.observe.observation import event_time
from flk.observe.pods import one_line
from flk.observe.view import JobView, pod_spec
from flk_runtime.contract.quantities import plural

_PULL: Final = ("ErrImagePull", "ImagePullBackOff", "RegistryUnavailable", "ImageInspectError")
_NAME: Final = re.compile(r'[Ii]mage "([^"]+)"')
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
_UNREACHABLE: Final = (
    "no such host",
    "connection refused",
    "no route to host",
    "network is unreachable",
    "TLS handshake",
    "x509",
    "server misbehaving",
    "HTTP response to HTTPS client",
)
# The registry answers too late, or with a status that asks to try again.
_BUSY: Final = re.compile(
    r"toomanyrequests|429 Too Many Requests|50[234] (?:Bad Gateway|Service Unavailable|Gateway Time-?out)|i/o timeout"
    r"|deadline exceeded|TLS handshake timeout|[Cc]lient\.Timeout|connection reset by peer|unexpected EOF"
    r"|pull QPS exceeded"
)
_LONG_PULL: Final = 20.0  # seconds: a pull that lasts longer has got further than a refusal
_LONGEST_PULL: Final = 1800.0
_PLATFORM: Final = ("no match for platform", "no matching manifest", "does not match the specified platform")
# Names of images and addresses in a message, which may hold any word: localhost:27404/denied:1.
_NAMES: Final = re.compile(r'"[^"]*"|(?<![\w-])[\w-]+(?:[:/@.]+[\w-]+)+')
_QUOTED: Final = re.compile(r"(?:dial tcp: )?(lookup \S+(?: on \S+)?: no such host|[^:]+: connection refused)|x509: .*")


def _pulling(words: tuple[str, ...] = ("",), *, without: tuple[str, ...] = ()) -> Locate:
    """Return a Locate for pods that cannot pull their image, where the messages contain one of ``words``.

    The kubelet alternates between ErrImagePull, which says why, and ImagePullBackOff, which need not. The event Failed
    has the reason too. The messages must contain none of ``without``. The texts of the trace are the messages in one
    string, and the image.
    """

    def locate(view: JobView) -> Match | None:
        pods = [pod for pod in view.pods if pod.stuck and pod.reason in _PULL]
        events = [event for pod in pods for event in view.events_of(pod.name) if _is_pull_event(event)]
        said = " ".join([*(pod.message for pod in pods), *(str(event.get("message", "")) for event in events)])
        reasons = _NAMES.sub("", said)
        if not pods or not any(word in reasons for word in words) or any(word in reasons for word in without):
            return None
        found = trace(view, pods, container_path(view), said, _image_of(view, pods[0].message))
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
    match = _BUSY.search(last)
    return replace(found, texts=(match[0], found[1])) if found and match else None


def _is_pull_event(event: Object) -> bool:
    """Return whether an event says why an image could not be pulled."""
    return event.get("reason") == "Failed" and str(event.get("message", "")).startswith("Failed to pull image")


def _image_of(view: JobView, message: str) -> str:
    """Return the image that a pod cannot use: the one that its message names, else the training container's."""
    named = _NAME.search(message)
    return named[1] if named else view.image


def _access_denied(view: JobView) -> Found | None:
    found = _pulling(_DENIED)(view)
    if found is None:
        return None
    listed = pod_spec(view.objects[found.pods[0]]).get("imagePullSecrets") or []
    secrets = [str(secret.get("name")) for secret in listed]
    events = [event for name in found.pods for event in view.pod_events.get(name, [])]
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
    sentence = f"{found} cannot start: the image {found[1]} may not be pulled: {why}"
    return found.found(sentence, remedy, *map(event_evidence, missing[-1:]))


def _unreachable(said: str) -> str:
    """Return why the registry cannot be reached."""
    detail = _QUOTED.search(said)
    return detail[0].removeprefix("dial tcp: ") if detail else "the node cannot connect to it"


_READ: Final = "flk reads why the container waits (ErrImagePull, ImagePullBackOff) and the event Failed of the pod."
CAUSES: Final = (
    Cause(
        "ImageNameInvalid",
        tell(
            waiting(("InvalidImageName",)),
            lambda view, trace: f"{trace} cannot start: {view.image!r} is not a valid name of an image",
            lambda view, trace: f"correct --image; then {view.flk('delete')} and submit again",
        ),
        grace=5,
    ),
    Cause(
        "ImageNotOnNode",
        tell(
            waiting(("ErrImageNeverPull",)),
            lambda view, trace: (
                f"{trace} cannot start: the image {_image_of(view, trace[0])} is not on the node, and "
                "imagePullPolicy is Never"
            ),
            lambda view, trace: "load the image into the nodes, or set imagePullPolicy: IfNotPresent",
        ),
        grace=30,
    ),
    Cause(
        "ImageForOtherPlatform",
        tell(
            _pulling(_PLATFORM),
            lambda view, trace: (
                f"{trace} cannot start: the image {trace[1]} has no variant for the node's architecture"
            ),
            lambda view, trace: FOR_NODES,
        ),
        grace=30,
    ),
    Cause(
        "RegistryBusy",
        tell(
            _busy,
            lambda view, trace: (
                f"{trace} cannot start yet: the pull of {trace[1]} failed ({trace[0]}), and the kubelet tries again"
            ),
            lambda view, trace: (
                f"{view.flk('wait')} waits; a pull secret raises the limit of a public registry, and a mirror avoids it"
            ),
        ),
        cured_by="the kubelet, which tries again",
    ),
    Cause(
        "ImageNotFound",
        tell(
            _pulling(_NOT_FOUND, without=_PLATFORM),
            lambda view, trace: f"{trace} cannot start: the image {trace[1]} does not exist in its registry",
            lambda view, trace: f"correct --image, or push the image; then {view.flk('delete')} and submit again",
        ),
        grace=45,
    ),
    Cause(
        "ImageAccessDenied",
        _access_denied,
        grace=45,
    ),
    Cause(
        "RegistryUnreachable",
        tell(
            _pulling(_UNREACHABLE),
            lambda view, trace: (
                f"{trace} cannot start: the registry of {trace[1]} cannot be reached ({_unreachable(trace[0])})"
            ),
            lambda view, trace: (
                "correct the registry's name in --image, or have the network between nodes and registry repaired"
            ),
        ),
        grace=90,
    ),
    Cause(
        "ImagePullFailed",
        tell(
            _pulling(),
            lambda view, trace: f"{trace} cannot start: the image {trace[1]} cannot be pulled",
            lambda view, trace: f"{view.kubectl(f'describe pod {trace.pods[0]}')} shows what the node says",
        ),
        grace=120,
    ),
)
