"""Pulls of images: since when they fail, and registries that ask to try again."""

from __future__ import annotations

import pytest

from flk.health import find
from flk.jobs.state import Phase, derive
from tests.support.jobs import NOW, JobBuilder

POD = "gpt-worker-1"
FAILED = 'Failed to pull image "img:1": rpc error: '
NOT_FOUND = FAILED + "docker.io/library/img:1: not found"
BUSY = FAILED + "unexpected status: 429 Too Many Requests"


def pulling(*events: tuple[str, str, int], message: str = 'Back-off pulling image "img:1"') -> JobBuilder:
    """A pod with events about its pulls: reason, message, and the second after the pod got its node."""
    said = {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    state = {"waiting": {"reason": "ImagePullBackOff", "message": message}}
    job = JobBuilder().pod(0).pod(2).pod(1, "Pending", state, conditions=[said])
    for reason, text, second in events:
        job.event(reason, text, "Pod", POD, at=f"2026-01-01T00:{second // 60:02}:{second % 60:02}Z", uid="pod-1")
    return job


def state_at(job: JobBuilder, second: int) -> tuple[Phase, str]:
    view = job.view()
    view.now = NOW - 60 + second
    found = derive(view)
    return found.phase, found.reason


def test_grace_counts_from_the_first_failure() -> None:
    job = pulling(("Pulling", "Pulling image", 1), ("Failed", NOT_FOUND, 3))
    assert find(job.view())[0].since == NOW - 57
    late = pulling(("Pulling", "Pulling image", 355), ("Failed", NOT_FOUND, 360))
    assert state_at(late, 404) == (Phase.STARTING, "ImageNotFound")
    assert state_at(late, 405) == (Phase.STUCK, "ImageNotFound")


def test_grace_counts_anew_after_a_pull_that_got_further() -> None:
    job = pulling(("Failed", NOT_FOUND, 3), ("Pulling", "Pulling image", 100), ("Failed", NOT_FOUND, 400))
    assert state_at(job, 444)[0] == Phase.STARTING
    assert state_at(job, 445)[0] == Phase.STUCK
    refused = pulling(("Failed", NOT_FOUND, 3), ("Pulling", "Pulling image", 380), ("Failed", NOT_FOUND, 400))
    assert state_at(refused, 401)[0] == Phase.STUCK


def test_a_pull_that_goes_on_is_no_failure() -> None:
    job = pulling(("Failed", NOT_FOUND, 3), ("Pulling", "Pulling image", 100))
    assert state_at(job, 120) == (Phase.STUCK, "ImageNotFound")
    assert state_at(job, 121) == (Phase.STARTING, "")
    waits = pulling(("Failed", NOT_FOUND, 3), ("Pulling", "Pulling image", 100), ("BackOff", "Back-off", 110))
    assert state_at(waits, 121) == (Phase.STUCK, "ImageNotFound")  # the event of the last failure was left out


@pytest.mark.parametrize(
    "words",
    [
        "toomanyrequests: You have reached your pull rate limit",
        "unexpected status code https://registry/v2/img/manifests/1: 429 Too Many Requests",
        "unexpected status: 503 Service Unavailable",
        'Head "https://registry/v2/": dial tcp 10.0.0.1:443: i/o timeout',
        "context deadline exceeded",
        "net/http: TLS handshake timeout",
        "read tcp 10.0.0.2:3->10.0.0.1:443: read: connection reset by peer",
    ],
)
def test_a_registry_that_asks_to_try_again_keeps_the_job_starting(words: str) -> None:
    assert state_at(pulling(("Failed", FAILED + words, 3)), 3600) == (Phase.STARTING, "RegistryBusy")


def test_the_last_answer_of_the_registry_counts() -> None:
    assert state_at(pulling(("Failed", BUSY, 3), ("Failed", NOT_FOUND, 90)), 3600)[1] == "ImageNotFound"
    assert state_at(pulling(("Failed", NOT_FOUND, 3), ("Failed", BUSY, 90)), 3600)[1] == "RegistryBusy"


def test_a_pod_that_finds_no_node_for_a_new_reason_has_its_grace() -> None:
    text = "0/3 nodes are available: 3 node(s) had untolerated taint {gpu: true}."
    said = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": text}
    said["lastTransitionTime"] = "2026-01-01T00:00:00Z"
    job = JobBuilder(1).pod(0, "Pending", {}, node="", conditions=[said])
    job.event("FailedScheduling", "0/3 nodes are available: 3 Insufficient cpu.", "Pod", "gpt-worker-0")
    job.event("FailedScheduling", text, "Pod", "gpt-worker-0", at="2026-01-01T01:00:00Z")
    assert state_at(job, 3659) == (Phase.PENDING, "TaintNotTolerated")
    assert state_at(job, 3660) == (Phase.STUCK, "TaintNotTolerated")


@pytest.mark.parametrize(
    ("image", "reason", "code", "told"),
    [
        (
            "localhost:27404/broken:1",
            "[manifests 1]: 500 Internal Server Error",
            "ImagePullFailed",
            "(ImagePullBackOff)",
        ),
        ("localhost:27404/private:1", "[manifests 1]: 401 Unauthorized", "ImageAccessDenied", "no pull secret"),
        ("example.com/denied/train@sha256:40340140", "404 Not Found", "ImageNotFound", "in its registry"),
        (
            "img:404",
            "dial tcp: lookup 404.example.com on 10.96.0.10:53: no such host",
            "ImagePullFailed",
            "(lookup 404.example.com on 10.96.0.10:53: no such host)",
        ),
        (
            "img:1",
            'Head "https://10.0.0.5:5000/v2/": dial tcp 10.0.0.5:5000: connect: connection refused',
            "ImagePullFailed",
            "(dial tcp 10.0.0.5:5000: connect: connection refused)",
        ),
    ],
)
def test_the_name_of_an_image_is_no_reason(image: str, reason: str, code: str, told: str) -> None:
    host = image.partition("/")[0]
    why = f'Failed to pull image "{image}": failed to resolve {image}: pulling from host {host} failed: {reason}'
    found = find(pulling(("Failed", why, 3), message=why).view())[0]
    assert (found.code, told in found.sentence) == (code, True), found.sentence
