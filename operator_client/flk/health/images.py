"""Causes of containers whose image cannot be pulled."""

from __future__ import annotations

import re
from typing import Final

from flk.health.cause import Cause, Found, event_evidence, names, pod_evidence, subject, waiting_path
from flk.kube import Object
from flk.observe.model import Evidence, PodState
from flk.observe.view import JobView, pod_spec
from flk.units import plural

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
    "i/o timeout",
    "no route to host",
    "network is unreachable",
    "deadline exceeded",
    "TLS handshake",
    "x509",
    "server misbehaving",
    "HTTP response to HTTPS client",
)
_PLATFORM: Final = ("no match for platform", "no matching manifest", "does not match the specified platform")
_QUOTED: Final = re.compile(r"(?:dial tcp: )?(lookup \S+(?: on \S+)?: no such host|[^:]+: connection refused)|x509: .*")


def _pulling(view: JobView) -> tuple[list[PodState], str, list[Evidence]] | None:
    """Return the pods that cannot pull, everything that is said about it, and the evidence.

    The kubelet alternates between ErrImagePull, which says why, and ImagePullBackOff, which need not. The event Failed
    has the reason too.
    """
    pods = [pod for pod in view.pods if pod.stuck and pod.reason in _PULL]
    if not pods:
        return None
    events = [event for pod in pods for event in view.pod_events.get(pod.name, []) if is_pull_event(event)]
    evidence = [pod_evidence(view, pods[0], waiting_path()), *(event_evidence(event) for event in events[-1:])]
    messages = " ".join([*(pod.message for pod in pods), *(str(event.get("message", "")) for event in events)])
    return pods, messages, evidence


def is_pull_event(event: Object) -> bool:
    """Return whether an event says why an image could not be pulled."""
    return event.get("reason") == "Failed" and str(event.get("message", "")).startswith("Failed to pull image")


def image_of(view: JobView, pod: PodState) -> str:
    """Return the image that a pod cannot use: the one that its message names, else the training container's."""
    named = _NAME.search(pod.message)
    return named[1] if named else view.image


def _secrets(view: JobView, pod: PodState) -> list[str]:
    spec = pod_spec(view.objects[pod.name])
    return [str(secret.get("name")) for secret in spec.get("imagePullSecrets") or []]


def _not_found(view: JobView) -> Found | None:
    found = _pulling(view)
    if found is None or not any(word in found[1] for word in _NOT_FOUND) or any(w in found[1] for w in _PLATFORM):
        return None
    pods, _, evidence = found
    image = image_of(view, pods[0])
    return Found(
        f"{subject(pods)} cannot start: the image {image} does not exist in its registry",
        f"correct --image, or push the image; then {view.flk('delete')} and submit again",
        evidence,
        names(pods),
    )


def _access_denied(view: JobView) -> Found | None:
    found = _pulling(view)
    if found is None or not any(word in found[1] for word in _DENIED):
        return None
    pods, _, evidence = found
    image, secrets = image_of(view, pods[0]), _secrets(view, pods[0])
    pull_events = [
        event
        for pod in pods
        for event in view.pod_events.get(pod.name, [])
        if event.get("reason") == "FailedToRetrieveImagePullSecret"
    ]
    evidence += [event_evidence(event) for event in pull_events[-1:]]
    if pull_events and secrets:
        why = f"the pull secret {' or '.join(secrets)} does not exist"
        remedy = f"{view.kubectl(f'create secret docker-registry {secrets[0]} --docker-server=… --docker-username=…')}"
    elif secrets:
        why = f"the registry refuses the credentials of {plural(len(secrets), 'pull secret')} ({', '.join(secrets)})"
        shown = view.kubectl(f"get secret {secrets[0]}")
        remedy = f"{shown} shows its age; create it again with credentials that may pull"
    else:
        why = "the registry demands credentials, and the pods have no pull secret"
        remedy = f"{view.kubectl('create secret docker-registry NAME --docker-server=…')}, and name it in the job"
    return Found(
        f"{subject(pods)} cannot start: the image {image} may not be pulled: {why}", remedy, evidence, names(pods)
    )


def _platform(view: JobView) -> Found | None:
    found = _pulling(view)
    if found is None or not any(word in found[1] for word in _PLATFORM):
        return None
    pods, _, evidence = found
    return Found(
        f"{subject(pods)} cannot start: the image {image_of(view, pods[0])} has no variant for the node's architecture",
        "build the image for the architecture of the nodes (docker buildx build --platform), or choose nodes with "
        "--node-selector kubernetes.io/arch=…",
        evidence,
        names(pods),
    )


def _registry_unreachable(view: JobView) -> Found | None:
    found = _pulling(view)
    if found is None or not any(word in found[1] for word in _UNREACHABLE):
        return None
    pods, messages, evidence = found
    detail = _QUOTED.search(messages)
    reason = detail[0].removeprefix("dial tcp: ") if detail else "the node cannot connect to it"
    return Found(
        f"{subject(pods)} cannot start: the registry of {image_of(view, pods[0])} cannot be reached ({reason})",
        "correct the registry's name in --image, or have the network between nodes and registry repaired",
        evidence,
        names(pods),
    )


def _pull_failed(view: JobView) -> Found | None:
    found = _pulling(view)
    if found is None:
        return None
    pods, _, evidence = found
    return Found(
        f"{subject(pods)} cannot start: the image {image_of(view, pods[0])} cannot be pulled",
        f"{view.kubectl(f'describe pod {pods[0].name}')} shows what the node says",
        evidence,
        names(pods),
    )


def _name_invalid(view: JobView) -> Found | None:
    pods = [pod for pod in view.pods if pod.stuck and pod.reason == "InvalidImageName"]
    if not pods:
        return None
    image = view.image
    return Found(
        f"{subject(pods)} cannot start: {image!r} is not a valid name of an image",
        f"correct --image; then {view.flk('delete')} and submit again",
        [pod_evidence(view, pods[0], waiting_path())],
        names(pods),
    )


def _never_pulled(view: JobView) -> Found | None:
    pods = [pod for pod in view.pods if pod.stuck and pod.reason == "ErrImageNeverPull"]
    if not pods:
        return None
    return Found(
        f"{subject(pods)} cannot start: the image {image_of(view, pods[0])} is not on the node, and "
        "imagePullPolicy is "
        "Never",
        "load the image into the nodes, or set imagePullPolicy: IfNotPresent",
        [pod_evidence(view, pods[0], waiting_path())],
        names(pods),
    )


_READ: Final = "flk reads why the container waits (ErrImagePull, ImagePullBackOff) and the event Failed of the pod."
IMAGES: Final = (
    Cause(
        "ImageNameInvalid",
        "The name of the image is not valid",
        "The kubelet cannot parse the image's name (InvalidImageName): upper case letters, blanks or two tags, for "
        "example.",
        "Correct --image and submit again.",
        _name_invalid,
        grace=5,
    ),
    Cause(
        "ImageNotOnNode",
        "The image is not on the node and may not be pulled",
        "imagePullPolicy is Never, and the node does not have the image (ErrImageNeverPull).",
        "Load the image into the nodes, or let them pull it.",
        _never_pulled,
        grace=30,
    ),
    Cause(
        "ImageForOtherPlatform",
        "The image has no variant for the node's architecture",
        f"The registry has the image, but not for the architecture of the node. {_READ}",
        "Build the image for the architecture of the nodes, or choose other nodes.",
        _platform,
        grace=30,
    ),
    Cause(
        "ImageNotFound",
        "The image does not exist in its registry",
        f"The registry answers and has no such repository or tag. Registries may say the same of an image that needs "
        f"credentials. {_READ}",
        "Correct --image or push the image. A pull that works after that starts the pods without a new submission.",
        _not_found,
        grace=45,
    ),
    Cause(
        "ImageAccessDenied",
        "The registry demands credentials for the image",
        "The registry refuses the pull: there is no pull secret, it does not exist, or its credentials do not "
        f"suffice. {_READ}",
        "Create the pull secret that the job names, or name one in the job.",
        _access_denied,
        grace=45,
    ),
    Cause(
        "RegistryUnreachable",
        "The registry of the image cannot be reached",
        "The node gets no connection to the registry: its name does not resolve, it does not answer, or its "
        "certificate "
        f"is not trusted. {_READ}",
        "Correct the registry's name. If it is right, the network between nodes and registry is at fault.",
        _registry_unreachable,
        grace=90,
    ),
    Cause(
        "ImagePullFailed",
        "The image cannot be pulled",
        f"The pull fails for a reason that flk does not know more about. {_READ}",
        "Read the event of the pod.",
        _pull_failed,
        grace=120,
    ),
)
