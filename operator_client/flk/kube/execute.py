"""Run a command in a container of a pod, as ``kubectl exec`` does, over a WebSocket of the API server."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlencode

from flk.errors import UnreachableError
from flk.kube.credentials import Access
from flk.kube.errors import error_from_response
from flk.kube.resources import Resource, Target

EXEC: Final = Resource("", "v1", "pods", "exec")
_PROTOCOL: Final = "v4.channel.k8s.io"  # the first byte of each message is the number of its channel
_STDOUT, _STDERR, _STATUS = 1, 2, 3
_SIZE_LIMIT: Final = 1 << 26  # bytes of output


@dataclass(frozen=True)
class Executed:
    """How a command in a container ended."""

    code: int
    stdout: bytes
    stderr: bytes


def execute(access: Access, pod: Target, container: str, command: list[str], timeout: float) -> Executed:
    """Run a command without stdin and wait until it has ended, at most ``timeout`` seconds.

    ``pod`` is a Target of EXEC. Raises ForbiddenError without the right to create pods/exec, UnreachableError if the
    connection breaks or the time is over, ApiError if the container does not run.
    """
    import websocket

    query = urlencode(
        [("container", container), ("stdout", "true"), ("stderr", "true"), *(("command", word) for word in command)]
    )
    url = f"ws{access.server.removeprefix('http')}{pod.path}?{query}"
    ends = time.monotonic() + timeout
    output = {_STDOUT: b"", _STDERR: b"", _STATUS: b""}
    try:
        connection = websocket.create_connection(
            url,
            timeout=timeout,
            subprotocols=[_PROTOCOL],
            header=[f"{name}: {value}" for name, value in access.headers().items()],
            suppress_origin=True,
            **_transport(access),
        )
        try:
            while True:
                connection.settimeout(max(0.1, ends - time.monotonic()))
                message = connection.recv()
                if not message:
                    break
                data = message if isinstance(message, bytes) else message.encode()
                if data[0] in output:
                    output[data[0]] += data[1:]
                if sum(map(len, output.values())) > _SIZE_LIMIT:
                    raise UnreachableError(f"{pod} wrote more than {_SIZE_LIMIT >> 20} MiB")
        finally:
            connection.close()
    except websocket.WebSocketBadStatusException as error:
        raise error_from_response(
            int(error.status_code), error.resp_body or b"", "create", pod, access.context
        ) from None
    except websocket.WebSocketConnectionClosedException:
        pass  # the server closes the connection after the status
    except (websocket.WebSocketException, OSError) as error:
        raise UnreachableError(f"the command in {pod} did not end: {error}") from None
    return Executed(_exit_code(output[_STATUS], pod), output[_STDOUT], output[_STDERR])


def _transport(access: Access) -> dict[str, Any]:
    """TLS and proxy of the pool of connections to this API server."""
    options = access.pool.connection_pool_kw
    tls = {
        "context": options.get("ssl_context"),
        "server_hostname": options.get("server_hostname"),
    }
    proxy = access.pool.proxy
    if proxy is None:
        return {"sslopt": {k: v for k, v in tls.items() if v}, "http_no_proxy": ["*"]}
    user, _, password = (proxy.auth or "").partition(":")
    return {
        "sslopt": {k: v for k, v in tls.items() if v},
        "http_proxy_host": proxy.host,
        "http_proxy_port": proxy.port,
        "http_proxy_auth": (user, password) if user else None,
        "proxy_type": "http",
    }


def _exit_code(status: bytes, pod: Target) -> int:
    """The exit code in the status that the server sends last. Raises UnreachableError if there is none."""
    try:
        found = json.loads(status)
        if found["status"] == "Success":
            return 0
        for cause in (found.get("details") or {}).get("causes") or []:
            if cause.get("reason") == "ExitCode":
                return int(cause["message"])
        raise UnreachableError(f"the command in {pod} could not start: {found.get('message', '')}")
    except (ValueError, KeyError, TypeError):
        raise UnreachableError(f"the connection to the command in {pod} broke") from None
