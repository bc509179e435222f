"""What every command that talks to a cluster says where the cluster or the way to it is wrong."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.support.api_server import JOBS, FakeApiServer, failure, write_kubeconfig
from tests.support.ports import held_ports
from tests.unit.flk.cli.outputs.conftest import Terminal

FORBIDDEN = (
    'pytorchjobs.kubeflow.org "gpt" is forbidden: User "ada" cannot get resource "pytorchjobs" in API group '
    '"kubeflow.org" in the namespace "team"'
)
KUBECONFIGS = {
    "empty": "",
    "not YAML": "a: [",
    "a list": "- a",
    "no current context": json.dumps({"contexts": [{"name": "gpu-cluster", "context": {}}]}),
    "no such context": json.dumps({"current-context": "x", "contexts": [{"name": "gpu-cluster", "context": {}}]}),
    "no cluster": json.dumps({"current-context": "x", "contexts": [{"name": "x", "context": {"cluster": "c"}}]}),
}


@pytest.mark.parametrize("line", ["flk status gpt", "flk submit train.py", "flk list"])
def test_no_kubeconfig(terminal: Terminal, kubeconfig: Path, snapshot: SnapshotAssertion, line: str) -> None:
    kubeconfig.unlink()
    assert terminal(line) == snapshot


@pytest.mark.parametrize("mistake", KUBECONFIGS)
def test_wrong_kubeconfig(terminal: Terminal, kubeconfig: Path, snapshot: SnapshotAssertion, mistake: str) -> None:
    kubeconfig.write_text(KUBECONFIGS[mistake])
    assert terminal("flk status gpt") == snapshot


def test_context_that_is_misspelt(terminal: Terminal, snapshot: SnapshotAssertion) -> None:
    assert terminal("flk status gpt --context fkae") == snapshot


def user(kubeconfig: Path, **user: object) -> None:
    config = json.loads(kubeconfig.read_text())
    config["users"][0]["user"] = user
    kubeconfig.write_text(json.dumps(config))


@pytest.mark.parametrize("command", ["no-such-plugin", "false"])
def test_credential_plugin_that_fails(
    terminal: Terminal, kubeconfig: Path, snapshot: SnapshotAssertion, command: str
) -> None:
    hint = "brew install no-such-plugin"
    plugin = {"apiVersion": "client.authentication.k8s.io/v1", "command": command, "interactiveMode": "Never"}
    user(kubeconfig, exec=plugin | ({"installHint": hint} if command != "false" else {}))
    assert terminal("flk status gpt") == snapshot


def test_token_file_that_is_missing(terminal: Terminal, kubeconfig: Path, snapshot: SnapshotAssertion) -> None:
    user(kubeconfig, tokenFile="/nope/token")
    assert terminal("flk status gpt") == snapshot


@pytest.mark.parametrize("line", ["flk status gpt", "flk submit train.py --name gpt", "flk list", "flk wait gpt"])
def test_no_server(terminal: Terminal, kubeconfig: Path, snapshot: SnapshotAssertion, line: str) -> None:
    with held_ports() as free_port:
        url = f"http://127.0.0.1:{free_port()}"
        write_kubeconfig(kubeconfig, url)
        assert terminal(line).replace(url, "https://cluster.example:6443") == snapshot


def test_host_that_does_not_exist(
    terminal: Terminal, kubeconfig: Path, snapshot: SnapshotAssertion, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_found(*_: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", not_found)  # what a resolver says differs from machine to machine
    write_kubeconfig(kubeconfig, "https://cluster.invalid:6443")
    assert terminal("flk status gpt") == snapshot


def test_server_that_is_no_api_server(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion) -> None:
    fake.fail(200, b"<html>Welcome</html>")
    assert terminal("flk status gpt") == snapshot


def test_server_that_does_not_speak_tls(
    terminal: Terminal, fake: FakeApiServer, kubeconfig: Path, snapshot: SnapshotAssertion
) -> None:
    url = fake.url.replace("http:", "https:")
    write_kubeconfig(kubeconfig, url)
    assert terminal("flk status gpt").replace(url, "https://cluster.example:6443") == snapshot


ANSWERS = {
    401: failure(401, "Unauthorized"),
    403: failure(403, FORBIDDEN),
    429: failure(429, "too many requests"),
    500: failure(500, "etcdserver: request timed out"),
    503: b"upstream connect error",
}


@pytest.mark.parametrize("status", ANSWERS)
def test_answer(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion, status: int) -> None:
    fake.fail(status, ANSWERS[status], times=9)
    assert terminal("flk status gpt") == snapshot


@pytest.mark.parametrize("command", ["list", "list -A", "logs gpt", "wait gpt", "delete gpt"])
def test_no_permission(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion, command: str) -> None:
    for path in ("pytorchjobs", "namespaces/team/pytorchjobs", "namespaces/team/pytorchjobs/gpt"):
        fake.refused[f"/apis/kubeflow.org/v1/{path}"] = (
            403,
            FORBIDDEN if path.endswith("gpt") else FORBIDDEN.replace("cannot get", "cannot list"),
        )
    assert terminal(f"flk {command}") == snapshot


@pytest.mark.parametrize("command", ["status gpt", "list", "list -A", "logs gpt", "wait gpt", "delete gpt"])
def test_no_pytorchjobs(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion, command: str) -> None:
    del fake.objects[JOBS]
    assert terminal(f"flk {command}") == snapshot
