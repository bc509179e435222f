"""Requests to the API server: what is tried again, for how long, and what an error is called."""

from __future__ import annotations

import contextlib
import gzip
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from flk.errors import (
    ApiError,
    FlkError,
    ForbiddenError,
    JobNotFoundError,
    MissingApiError,
    NoConfigError,
    UnreachableError,
)
from flk.kube.client import ApiClient, RetryPolicy, UnendedLine
from flk.kube.credentials import connect
from flk.kube.errors import RETRIED
from flk.kube.resources import RequestTarget
from flk.observe.resources import LOGS, PODS, RESOURCES
from tests.support.api_server import FakeApiServer

ALL = RequestTarget(RESOURCES["pytorchjob"], "team")
ONE = RequestTarget(RESOURCES["pytorchjob"], "team", "gpt")
BACKOFFS = RetryPolicy().backoffs


@pytest.fixture
def pauses() -> list[float]:
    return []


@pytest.fixture
def client(kubeconfig: Any, pauses: list[float]) -> ApiClient:
    return ApiClient(connect(), sleep=pauses.append)


@pytest.mark.parametrize("status", sorted(RETRIED))
@pytest.mark.parametrize("times", [1, len(BACKOFFS)])
def test_busy_server_is_asked_again(fake: Any, client: ApiClient, pauses: list[float], status: int, times: int) -> None:
    fake.fail(status, times=times)
    assert client.call("list", ALL)["items"] == []
    assert pauses == list(BACKOFFS[:times])


@pytest.mark.parametrize("status", sorted(RETRIED))
def test_last_attempt_says_so(fake: Any, client: ApiClient, status: int) -> None:
    fake.fail(status, times=20)
    with pytest.raises(ApiError, match=rf"tried {len(BACKOFFS) + 1} times") as caught:
        client.call("list", ALL)
    assert caught.value.status == status
    assert len(fake.requests) == len(BACKOFFS) + 1


@pytest.mark.parametrize("status", [400, 403, 422])
def test_other_refusals_are_final(fake: Any, client: ApiClient, pauses: list[float], status: int) -> None:
    fake.fail(status)
    with pytest.raises(FlkError):
        client.call("list", ALL)
    assert fake.asked("GET").count(ALL.path) == 1
    assert pauses == []


def test_a_kind_that_discovery_names_is_asked_for_once_more(fake: Any, client: ApiClient, pauses: list[float]) -> None:
    fake.fail(404)
    client.call("list", ALL)
    assert (fake.asked("GET").count(ALL.path), pauses) == (2, [BACKOFFS[0]])
    fake.fail(404, times=2)
    with pytest.raises(MissingApiError):
        client.call("list", ALL)


def test_retry_after_is_obeyed(fake: Any, client: ApiClient, pauses: list[float]) -> None:
    fake.fail(429, headers={"Retry-After": "7"})
    fake.fail(429, fake.status(429, retryAfterSeconds=3))
    client.call("list", ALL)
    assert pauses == [7, 3]


def test_a_connection_that_is_closed_in_the_tls_handshake_is_tried_again(
    kubeconfig: Any, monkeypatch: pytest.MonkeyPatch, pauses: list[float], tmp_path: Path
) -> None:
    """A load balancer does so while the API server behind it is away."""
    config = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text())
    with socket.create_server(("127.0.0.1", 0)) as server:
        config["clusters"][0]["cluster"] = {"server": f"https://127.0.0.1:{server.getsockname()[1]}"}
        (tmp_path / "tls").write_text(yaml.safe_dump(config))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "tls"))

        def close_each() -> None:
            with contextlib.suppress(OSError):
                while True:
                    accepted, _ = server.accept()
                    accepted.recv(1)
                    accepted.shutdown(socket.SHUT_WR)
                    while accepted.recv(4096):
                        pass
                    accepted.close()

        threading.Thread(target=close_each, daemon=True).start()
        with pytest.raises(UnreachableError, match="cannot be reached") as caught:
            ApiClient(connect(), sleep=pauses.append).call("list", ALL)
        server.shutdown(socket.SHUT_RDWR)
    assert pauses == list(BACKOFFS[: len(pauses)])
    assert len(pauses) > 1
    assert "VPN or proxy" in caught.value.hint


def test_server_that_hangs(fake: Any, kubeconfig: Any, pauses: list[float]) -> None:
    impatient = RetryPolicy(list_timeout=0.5, unreachable_budget=0.5)
    fake.fail(hang=True)
    with pytest.raises(UnreachableError, match="does not answer") as caught:
        ApiClient(connect(), retries=impatient, sleep=pauses.append).call("list", ALL)
    assert fake.url in str(caught.value)
    assert "--request-timeout 2m waits longer" in caught.value.hint


def test_a_list_may_take_longer_than_all_attempts_of_another_read(fake: Any, kubeconfig: Any) -> None:
    waits: list[float] = []
    client = ApiClient(connect())
    request = client.access.pool.request

    def slow(*words: Any, timeout: Any, **how: Any) -> Any:
        waits.append(timeout.read_timeout)
        return request(*words, timeout=timeout, **how)

    client.access.pool.request = slow  # type: ignore[method-assign]
    client.call("list", ALL)
    client.call("list", RequestTarget(PODS, "team"))
    with pytest.raises(JobNotFoundError):
        client.call("get", ONE)
    assert [round(seconds) for seconds in waits] == [30, 30, 5]


@pytest.mark.parametrize(("seconds", "longest"), [(5.0, 5.0), (1e-9, 2.0), (0, 30.0), (None, 30.0)])
def test_requests_end_soon_after_the_time_that_a_client_has(
    fake: Any, kubeconfig: Any, pauses: list[float], seconds: float | None, longest: float
) -> None:
    access = connect()
    request, waits = access.pool.request, []

    def told(*words: Any, timeout: Any, **how: Any) -> Any:
        waits.append(timeout.read_timeout)
        return request(*words, timeout=timeout, **how)

    access.pool.request = told  # type: ignore[method-assign]
    every = ApiClient(access, sleep=pauses.append)
    fake.fail(503, times=20)
    with pytest.raises(ApiError, match="tried"):
        every.with_deadline(seconds).call("list", ALL)
    assert longest - 2 < waits[0] <= longest
    assert pauses == [pause for pause in BACKOFFS if not seconds or pause < seconds]
    fake.faults.clear()
    every.call("list", ALL)
    assert waits[-1] > 29


def test_what_is_asked_to_find_a_version_ends_in_the_time_that_a_client_has(
    fake: Any, client: ApiClient, pauses: list[float]
) -> None:
    del fake.objects[ALL.path]
    fake.refused["/apis"] = (503, "busy")
    with pytest.raises(ApiError, match="tried"):
        client.with_deadline(5.0).call("list", ALL)
    assert pauses == [pause for pause in BACKOFFS if pause < 5]


def test_lists_are_asked_for_compressed(fake: Any, client: ApiClient) -> None:
    heard: list[Any] = []
    fake.heard = lambda headers: heard.append(headers["Accept-Encoding"])
    fake.fail(200, gzip.compress(b'{"items": [{"a": 1}]}'), headers={"Content-Encoding": "gzip"})
    assert client.call("list", ALL)["items"] == [{"a": 1}]
    with client.stream("watch", ALL, query={}, idle=5) as lines:
        list(lines)
    assert heard[0] == "gzip"
    assert heard[1] != "gzip"  # an API server would hold lines back to compress them


def test_a_line_without_end_is_cut(fake: Any, client: ApiClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flk.kube.client.LINE_LIMIT", 5)
    fake.fail(200, b"abc\n" + b"x" * 200_000 + b"\ndef\n")
    with client.stream("watch", ALL, query={}, idle=5) as lines:
        assert list(lines) == [b"abc", b"xxxxx", b"def"]


def test_a_last_line_without_an_end_is_marked_and_no_part_of_a_watch(fake: Any, client: ApiClient) -> None:
    log = RequestTarget(LOGS, "team", "gpt-worker-0")
    fake.fail(200, b"abc\nde", times=2)
    with client.stream("get", log, query={}, idle=5) as lines:
        found = list(lines)
    assert found == [b"abc", b"de"]
    assert [isinstance(line, UnendedLine) for line in found] == [False, True]
    with client.stream("watch", ALL, query={}, idle=5) as lines:
        assert list(lines) == [b"abc"]


def test_a_line_in_which_the_stream_breaks_is_dropped(fake: Any, client: ApiClient) -> None:
    log, found = RequestTarget(LOGS, "team", "gpt-worker-0"), list[bytes]()
    fake.fail(200, b"6\r\nabc\nde\r\n", headers={"Transfer-Encoding": "chunked", "Connection": "close"})
    with pytest.raises(UnreachableError), client.stream("get", log, query={}, idle=5) as lines:
        found.extend(lines)
    assert found == [b"abc"]


def test_nobody_listens(fake: Any, client: ApiClient) -> None:
    fake.close()
    with pytest.raises(UnreachableError, match="Connection refused"):
        client.call("list", ALL)


def test_refused_token_is_renewed_once(
    fake: Any, client: ApiClient, secure: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[Any] = []
    monkeypatch.setattr(client.access, "renew", refused.append)
    fake.fail(401)
    assert client.call("list", ALL)["items"] == []
    fake.fail(401)
    with client.stream("list", ALL, query={}, idle=5) as lines:
        list(lines)
    assert len(refused) == 2
    fake.fail(401, times=2)
    with pytest.raises(NoConfigError, match="does not accept the credentials of context fake"):
        client.call("list", ALL)


def test_a_server_without_tls_that_wants_credentials_gets_none(fake: Any, client: ApiClient) -> None:
    heard: list[Any] = []
    fake.heard = lambda headers: heard.append(headers["Authorization"])
    fake.fail(401, times=2)
    with pytest.raises(NoConfigError, match="wants credentials, and as kubectl, flk sends none without TLS"):
        client.call("list", ALL)
    assert set(heard) == {None}


@pytest.mark.parametrize(
    "answer",
    [
        *[b'{"items": 5}', b'{"items": [5]}', b'{"items": [{"metadata": 5}]}', b'{"metadata": []}', b"[" * 100_000],
        *[b"<html>Denied</html>", b'{"items": ' + b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}", b"\xff", b"5"],
    ],
)
@pytest.mark.parametrize("status", [200, 403, 404])
def test_an_answer_that_is_none_is_one_line(fake: Any, client: ApiClient, answer: bytes, status: int) -> None:
    fake.fail(status, answer)
    with pytest.raises(ApiError, match=f"did not answer as a Kubernetes API server does .HTTP status {status}"):
        client.list_all(ALL)


REFUSED = (
    'pytorchjobs.kubeflow.org is forbidden: User "eve" cannot create resource "pytorchjobs" in API group "kubeflow.org"'
)
FORBIDDEN = "no permission to create pytorchjobs.kubeflow.org in namespace team (as eve)"


@pytest.mark.parametrize(
    ("said", "problem", "hint"),
    [
        (REFUSED, FORBIDDEN, "kubectl auth can-i create pytorchjobs.kubeflow.org -n team"),
        (REFUSED, FORBIDDEN, "or choose another kind of objects with --target"),
        (f'{REFUSED} in the namespace "team": role "a" not found', f'{FORBIDDEN}: role "a" not found', "can-i"),
        (
            'User "eve" cannot impersonate resource "users" in API group "" at the cluster scope',
            "no permission to impersonate users in all namespaces (as eve)",
            "kubectl auth can-i impersonate users -A",
        ),
    ],
)
def test_forbidden_names_verb_resource_namespace(
    fake: Any, client: ApiClient, said: str, problem: str, hint: str
) -> None:
    fake.fail(403, fake.status(403, said))
    with pytest.raises(ForbiddenError) as caught:
        client.call("create", ALL, body={})
    assert str(caught.value) == problem
    assert hint in caught.value.hint


@pytest.mark.parametrize("said", ["exceeded quota: jobs, used: 5", 'denied by policy "a": you cannot use so many GPUs'])
def test_what_a_quota_or_a_policy_refuses_is_no_lack_of_permission(fake: Any, client: ApiClient, said: str) -> None:
    fake.fail(403, fake.status(403, said))
    with pytest.raises(ApiError, match=said) as caught:
        client.call("create", ALL, body={})
    assert not isinstance(caught.value, ForbiddenError)


@pytest.mark.parametrize(("target", "kinds"), [("pytorchjob", "PyTorchJobs"), ("jobset", "JobSets")])
def test_cluster_without_a_kind_of_jobs(fake: Any, client: ApiClient, target: str, kinds: str) -> None:
    where = RequestTarget(RESOURCES[target], "team", "gpt")
    fake.fail(404, b"404 page not found\n", times=2)
    with pytest.raises(MissingApiError, match=f"does not serve {kinds}") as caught:
        client.call("create", where, body={})
    assert "install" in caught.value.hint
    fake.faults.clear()
    fake.fail(404, fake.status(404, f'{target}s "gpt" not found', kind=f"{target}s", name="gpt"))
    with pytest.raises(JobNotFoundError, match="there is no job gpt in namespace team"):
        client.call("patch", where, body={})


def test_a_webhook_that_does_not_answer_has_a_hint_with_cluster_and_namespace(fake: Any, client: ApiClient) -> None:
    fake.fail(500, fake.status(500, 'failed calling webhook "validator.example.com": no endpoints available'), times=9)
    with pytest.raises(ApiError) as caught:
        client.call("create", ALL, body={})
    assert "flk doctor -n team --context fake says more" in caught.value.hint


def test_missing_namespace(fake: Any, client: ApiClient) -> None:
    fake.fail(404, fake.status(404, 'namespaces "team" not found', kind="namespaces", name="team"))
    with pytest.raises(ApiError, match="there is no namespace team"):
        client.call("create", ALL, body={})


def test_invalid_object_lists_its_causes_in_one_line(fake: Any, client: ApiClient) -> None:
    causes = [{"field": "spec.a", "message": "must be\n positive"}, {"field": "spec.b", "message": "unknown"}]
    fake.fail(422, fake.status(422, "is invalid", causes=causes))
    with pytest.raises(ApiError) as caught:
        client.call("create", ALL, body={})
    assert "is invalid; spec.a: must be positive; spec.b: unknown" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.promise("Clusters: The client authenticates as kubectl does, and its credentials go nowhere else")
@pytest.mark.parametrize("status", [302, 307])
def test_a_redirect_is_an_error_and_gets_no_credentials(fake: Any, client: ApiClient, status: int) -> None:
    other = FakeApiServer()
    heard: list[Any] = []
    other.heard = heard.append
    logs = RequestTarget(LOGS, "team", "gpt-worker-0")
    fake.fail(status, {"items": []}, times=3, headers={"Location": f"{other.url}{ALL.path}"})
    said = f"redirects to another address .HTTP status {status}., and flk sends no credentials there"
    for verb, target, body in (("list", ALL, None), ("create", ALL, {"metadata": {"name": "gpt"}})):
        with pytest.raises(ApiError, match=said):
            client.call(verb, target, body=body)
    with pytest.raises(ApiError, match=said), client.stream("get", logs, query={}, idle=5):
        pass
    other.close()
    assert (heard, len(fake.requests)) == ([], 3)


def test_deletion_whose_answer_was_lost_is_done(fake: Any, client: ApiClient) -> None:
    fake.add("pytorchjobs", {"metadata": {"name": "gpt"}})
    fake.fail(0, done=True)
    client.call("delete", ONE)
    assert fake.asked("DELETE") == [ONE.resource.path("team", "gpt")] * 2


def test_clock_is_the_servers(fake: Any, client: ApiClient) -> None:
    fake.fail(200, {}, headers={"Date": "Thu, 01 Jan 2032 00:00:00 GMT"})
    client.call("list", ALL)
    assert client.now() == pytest.approx(1956528000, abs=60)
