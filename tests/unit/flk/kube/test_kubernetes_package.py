"""The client of the kubernetes package reads the same objects as flk's, with the same credentials."""

from __future__ import annotations

import json
import ssl
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client as kubernetes
from kubernetes.config import new_client_from_config

from flk.kube.client import ApiClient
from flk.kube.credentials import connect
from flk.kube.resources import RequestTarget
from flk.observe.resources import CONFIG_MAPS, RESOURCES
from tests.support.api_server import FakeApiServer
from tests.support.certificates import make_certificate
from tests.support.jobs import JobBuilder

VERSION = "client.authentication.k8s.io/v1"
MADE = "2026-01-01T00:00:00+00:00"  # as the kubernetes package writes it
PLUGIN = {"apiVersion": VERSION, "kind": "ExecCredential", "status": {"token": "from-a-plugin"}}
USERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "token": lambda folder: {"token": "a-token"},
    "token file": lambda folder: {"tokenFile": str(folder / "token")},
    "password": lambda folder: {"username": "ada", "password": "p:ss"},
    "plugin": lambda folder: {
        "exec": {"apiVersion": VERSION, "command": sys.executable, "args": ["-c", f"print({json.dumps(PLUGIN)!r})"]}
    },
    "certificate": lambda folder: {
        "client-certificate": str(folder / "tls.crt"),
        "client-key": str(folder / "tls.key"),
    },
    "impersonation": lambda folder: {"token": "a-token", "as": "ada"},
    "nobody": lambda folder: {},
}


def speak_tls(fake: FakeApiServer, folder: Path) -> str:
    """Have the server speak TLS, and know clients by the certificate in the folder. Returns its address."""
    made = make_certificate(folder, "ada", alternative="IP:127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.path, made.key)
    context.verify_mode = ssl.CERT_OPTIONAL
    context.load_verify_locations(made.path)
    fake.server.socket = context.wrap_socket(fake.server.socket, server_side=True)
    return fake.url.replace("http:", "https:")


@pytest.mark.promise("Clusters: The client authenticates as kubectl does, and its credentials go nowhere else")
@pytest.mark.parametrize("kind", USERS)
def test_both_clients_read_the_same(fake: Any, kubeconfig: Path, tmp_path: Path, kind: str) -> None:
    (tmp_path / "token").write_text("from-a-file")
    config = json.loads(kubeconfig.read_text())
    config["users"][0]["user"] = USERS[kind](tmp_path)
    address = speak_tls(fake, tmp_path)
    config["clusters"][0]["cluster"] = {"server": address, "certificate-authority": str(tmp_path / "tls.crt")}
    kubeconfig.write_text(json.dumps(config))
    JobBuilder().add_to(fake)
    for name in ("code", "record"):
        fake.add("configmaps", {"metadata": {"name": name, "creationTimestamp": MADE}, "data": {"a": "ä\n"}})
    heard: list[tuple[str | None, str | None]] = []
    fake.heard = lambda headers: heard.append((headers["Authorization"], headers["Impersonate-User"]))

    theirs = new_client_from_config(str(kubeconfig))
    if kind == "impersonation":  # the package does not read it from a kubeconfig
        theirs.set_default_header("Impersonate-User", "ada")
    maps = theirs.sanitize_for_serialization(kubernetes.CoreV1Api(theirs).list_namespaced_config_map("team"))
    jobs = kubernetes.CustomObjectsApi(theirs).list_namespaced_custom_object(
        "kubeflow.org", "v1", "team", "pytorchjobs"
    )

    ours = ApiClient(connect())
    assert maps["items"] == ours.list_all(RequestTarget(CONFIG_MAPS, "team"))[0]
    assert jobs["items"] == ours.list_all(RequestTarget(RESOURCES["pytorchjob"], "team"))[0]
    assert (len(maps["items"]), len(jobs["items"])) == (2, 1)
    assert len(set(heard)) == 1
    assert (heard[0][0] is None) == (kind in ("certificate", "nobody"))
    assert (heard[0][1] is None) == (kind != "impersonation")
