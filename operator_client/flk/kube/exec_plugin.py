"""Run the credentials plugin of a kubeconfig (`exec:`), as the client.authentication.k8s.io API describes it.

The plugin gets a request in $KUBERNETES_EXEC_INFO and prints an ExecCredential: a token or a client certificate, and
the time until which it is valid.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Final

from flk.errors import NoConfigError
from flk.kube.connection import data_or_file
from flk.kube.kubeconfig import Context
from flk_runtime.contract import foreign

_VERSIONS: Final = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")
_CONFIG: Final = "client.authentication.k8s.io/exec"  # name of the cluster's extension that is handed to the plugin
TIME_LIMIT: Final = 60.0  # seconds for a plugin that asks no questions
ANSWER_LIMIT: Final = 600.0  # seconds for one that may ask, such as to log in with a browser
_LONGEST: Final = 300  # characters of a plugin's stderr that are shown


def run(context: Context) -> dict[str, Any]:
    """Run the plugin of the context's user and return the ``status`` of the ExecCredential that it prints.

    Raises NoConfigError if the plugin is missing, fails, takes too long, or prints something else. On a terminal the
    plugin may ask questions; what it writes to stderr is shown there, and elsewhere becomes a part of the error.
    """
    plugin = context.user["exec"]
    command, version = str(plugin.get("command") or ""), str(plugin.get("apiVersion") or "")

    def failure(reason: str, stderr: str | bytes | None = "") -> NoConfigError:
        text = stderr.decode(errors="replace") if isinstance(stderr, bytes) else stderr or ""
        said = " ".join(text.split())[:_LONGEST]
        return NoConfigError(
            f"the credentials plugin {command} of context {context.name} failed: {reason}"
            + (f": {said}" if said else ""),
            hint=str(plugin.get("installHint") or f"run it by hand to see why: {command}"),
        )

    if not command or version not in _VERSIONS:
        raise failure(f"its entry in the kubeconfig needs a command and an apiVersion of {' or '.join(_VERSIONS)}")
    mode = plugin.get("interactiveMode", "IfAvailable")
    interactive = mode != "Never" and sys.stdin is not None and sys.stdin.isatty()
    spec: dict[str, Any] = {"interactive": interactive}
    limit = ANSWER_LIMIT if interactive else TIME_LIMIT
    # Whoever may answer has to see the question, also where stderr is a file or `tee`.
    shown = interactive or (sys.stderr is not None and sys.stderr.isatty())
    try:
        if plugin.get("provideClusterInfo"):
            spec["cluster"] = _cluster_info(context.cluster)
        request = {"apiVersion": version, "kind": "ExecCredential", "spec": spec}
        variables = {
            str(v.get("name")): "" if v.get("value") is None else str(v["value"])
            for v in plugin.get("env") or []
            if isinstance(v, dict)
        }
        done = subprocess.run(
            [command, *map(str, plugin.get("args") or [])],
            env={**os.environ, **variables, "KUBERNETES_EXEC_INFO": json.dumps(request)},
            stdin=None if interactive else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=None if shown else subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=limit,
        )
    except subprocess.TimeoutExpired as late:
        raise failure(f"it did not end within {limit:g} seconds", late.stderr) from None
    except (OSError, ValueError, TypeError) as error:
        raise failure(f"it cannot be run: {getattr(error, 'strerror', None) or error}") from None
    if done.returncode:
        raise failure(f"it ended with exit code {done.returncode}", done.stderr)
    try:
        reply = foreign.parse(done.stdout)
    except foreign.ForeignError:
        raise failure("it printed something that is not JSON") from None
    status = reply.get("status") if isinstance(reply, dict) else None
    if not isinstance(status, dict) or reply.get("kind") != "ExecCredential":
        raise failure("it printed no ExecCredential with a status")
    if not status.get("token") and not (status.get("clientCertificateData") and status.get("clientKeyData")):
        raise failure("it gave neither a token nor a client certificate with its key")
    return status


def _cluster_info(cluster: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cluster of a kubeconfig as the plugin expects it."""
    info = {
        key: cluster[key]
        for key in ("server", "tls-server-name", "insecure-skip-tls-verify", "proxy-url", "disable-compression")
        if cluster.get(key)
    }
    if authority := data_or_file(cluster, "certificate-authority"):
        info["certificate-authority-data"] = base64.b64encode(authority).decode("ascii")
    extensions = [e for e in cluster.get("extensions") or [] if isinstance(e, dict) and e.get("name") == _CONFIG]
    return {**info, **({"config": extensions[0].get("extension")} if extensions else {})}
