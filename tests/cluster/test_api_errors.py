"""Requests that a cluster refuses: one clear line, exit code 1 in bounded time, and nothing is created."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

LIMIT = 60  # seconds after which a command counts as hanging; without other load each takes less than ten


@pytest.fixture
def submit(flk: Any, tmp_path: Path) -> Any:
    """Submits a script with another kubeconfig and gives code and stderr, having checked what every error has."""
    (tmp_path / "train.py").write_text("print('hello')\n")

    def run(config: Path | None, *args: str) -> Any:
        env = {"KUBECONFIG": str(config)} if config else {}
        result = flk("submit", "train.py", "--name", "refused", *args, cwd=tmp_path, env=env, timeout=LIMIT)
        assert result.stdout == ""
        lines = result.stderr.strip().splitlines()
        assert lines[0].startswith("error: "), result.stderr
        assert len(lines) <= 2
        assert "Traceback" not in result.stderr
        return result

    return run


@pytest.fixture
def altered(kubeconfig: Path, tmp_path: Path) -> Any:
    """A copy of the test's kubeconfig with another server, another user or an impersonation."""

    def write(*, server: str = "", user: dict[str, Any] | None = None, **impersonation: Any) -> Path:
        config = yaml.safe_load(kubeconfig.read_text())
        if server:
            config["clusters"][0]["cluster"] = {"server": server}
        if user:
            config["users"][0]["user"] = user
        config["users"][0]["user"] |= impersonation
        path = tmp_path / "altered"
        path.write_text(yaml.safe_dump(config))
        return path

    return write


@pytest.fixture
def silent_server() -> Iterator[str]:
    """Takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def bare_server() -> Iterator[str]:
    """An API server without PyTorchJobs: it knows the core API only."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            core = self.path.startswith("/api/v1/")
            data = json.dumps({"items": [], "metadata": {}}).encode() if core else b"404 page not found\n"
            self.send_response(200 if core else 404)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = answer

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_no_kubeconfig(submit: Any, tmp_path: Path) -> None:
    result = submit(tmp_path / "nowhere")
    assert result.code == 1
    assert "there is no kubeconfig" in result.stderr
    assert str(tmp_path / "nowhere") in result.stderr


def test_unknown_context(submit: Any, cluster: Any) -> None:
    name = cluster.config["contexts"][0]["name"]
    result = submit(None, "--context", name + "x")
    assert result.code == 1
    assert f"did you mean {name}?" in result.stderr


def test_nobody_listens(submit: Any, altered: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"https://127.0.0.1:{server.getsockname()[1]}"
    result = submit(altered(server=address))
    assert result.code == 1
    assert address in result.stderr
    assert "Connection refused" in result.stderr


def test_server_that_does_not_answer(submit: Any, altered: Any, silent_server: str) -> None:
    result = submit(altered(server=silent_server), "--request-timeout", "5s")
    assert result.code == 1
    assert silent_server in result.stderr
    assert "does not answer" in result.stderr


def test_server_that_cannot_be_trusted(submit: Any, altered: Any, cluster: Any) -> None:
    result = submit(altered(server=cluster.config["clusters"][0]["cluster"]["server"]))
    assert result.code == 1
    assert "cannot trust the API server" in result.stderr


def test_cluster_without_pytorchjobs(submit: Any, altered: Any, bare_server: str) -> None:
    result = submit(altered(server=bare_server))
    assert result.code == 1
    assert "does not serve PyTorchJobs" in result.stderr
    assert "training operator" in result.stderr


def test_no_permission_is_told_with_verb_and_resource(submit: Any, altered: Any, kubectl: Any, namespace: str) -> None:
    kubectl("create", "serviceaccount", "nobody")
    token = kubectl("create", "token", "nobody").strip()
    result = submit(altered(user={"token": token}))
    assert result.code == 1
    assert f"no permission to create pytorchjobs.kubeflow.org in namespace {namespace}" in result.stderr
    assert f"kubectl auth can-i create pytorchjobs.kubeflow.org -n {namespace}" in result.stderr
    assert token not in result.stderr
    assert kubectl("get", "pytorchjobs,configmaps", "-l", "flk.dev/job", "-o", "name") == ""


@pytest.fixture
def restricted_user(altered: Any, kubectl: Any, namespace: str) -> Any:
    """The kubeconfig of a service account that has only the given rights: ``(["create", "get"], "configmaps")``."""

    def write(*rights: tuple[list[str], str]) -> Path:
        rules = [
            {
                "apiGroups": [resource.partition(".")[2]],
                "resources": [resource.partition(".")[0]],
                "verbs": verbs,
            }
            for verbs, resource in rights
        ]
        role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "half"}}
        kubectl("create", "-f", "-", stdin={**role, "rules": rules})
        kubectl("create", "serviceaccount", "half")
        kubectl("create", "rolebinding", "half", "--role=half", f"--serviceaccount={namespace}:half")
        result: Path = altered(user={"token": kubectl("create", "token", "half").strip()})
        return result

    return write


def test_code_that_may_not_be_stored_is_refused_before_anything_exists(
    submit: Any, restricted_user: Any, kubectl: Any
) -> None:
    result = submit(restricted_user((["create", "get", "list", "patch", "delete"], "pytorchjobs.kubeflow.org")))
    assert result.code == 1
    assert "no permission to patch configmaps" in result.stderr
    assert "deleted again" not in result.stderr
    assert kubectl("get", "pytorchjobs", "-o", "name") == ""


def test_job_that_may_not_be_started_is_deleted_again(submit: Any, restricted_user: Any, kubectl: Any) -> None:
    rights = [
        (["create", "get", "list", "delete"], "pytorchjobs.kubeflow.org"),
        (["create", "get", "list", "patch"], "configmaps"),
        (["create"], "secrets"),
    ]
    result = submit(restricted_user(*rights))
    assert result.code == 1
    assert "no permission to patch pytorchjobs" in result.stderr
    assert "the job refused was deleted again" in result.stderr
    kubectl("wait", "--for=delete", "pytorchjob/refused", "--timeout=60s")


def test_impersonated_service_account_is_the_one_that_asks(
    submit: Any, flk: Any, altered: Any, kubectl: Any, namespace: str
) -> None:
    kubectl("create", "serviceaccount", "reader")
    kubectl("create", "role", "reader", "--verb=get,list", "--resource=pytorchjobs.kubeflow.org,pods")
    kubectl("create", "rolebinding", "reader", "--role=reader", f"--serviceaccount={namespace}:reader")
    user = f"system:serviceaccount:{namespace}:reader"
    config = altered(**{"as": user, "as-groups": ["system:authenticated", f"system:serviceaccounts:{namespace}"]})
    result = submit(config)
    assert result.code == 1
    assert f"no permission to create pytorchjobs.kubeflow.org in namespace {namespace} (as {user})" in result.stderr
    listed = flk("list", env={"KUBECONFIG": str(config)})
    assert (listed.code, listed.stderr) == (0, f"flk: there are no jobs in namespace {namespace}\n")


def test_expired_credentials(submit: Any, altered: Any) -> None:
    result = submit(altered(user={"token": "expired-and-secret"}))
    assert result.code == 1
    assert "does not accept the credentials" in result.stderr
    assert "expired-and-secret" not in result.stderr


def test_missing_namespace(submit: Any) -> None:
    result = submit(None, "--namespace", "flk-test-nowhere")
    assert result.code == 1
    assert "there is no namespace flk-test-nowhere" in result.stderr


@pytest.mark.parametrize("command", [["status"], ["logs"], ["logs", "--no-follow"], ["wait"], ["delete"]])
def test_job_that_is_not_there(flk: Any, namespace: str, command: list[str]) -> None:
    result = flk(*command, "nowhere")
    assert result.code == 102
    assert f"there is no job nowhere in namespace {namespace}" in result.stderr
    assert result.stdout == ""
