"""TrainerStatus: what clients of Kubeflow Trainer tell of their progress, as lines of metrics of rank 0.

A client in the script, as that of Transformers, posts percent, remaining time and metrics to the address in
KUBEFLOW_TRAINER_SERVER_URL. Where the cluster sets it, they go there. Elsewhere the launcher of rank 0 listens.
"""

from __future__ import annotations

import hmac
import json
import math
import secrets
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Final

from flk_runtime.contract import foreign, pod_env
from flk_runtime.launcher.web.http import PodServer

_BODY_LIMIT: Final = 1 << 18  # bytes; the protocol allows 256 metrics


class TrainerStatus:
    """Listens at a port of this machine's loopback until the launcher ends."""

    def __init__(self, folder: str, write: Callable[[bytes], None], step: Callable[[], int]) -> None:
        """``write`` gets the lines. ``step`` returns how far rank 0 is, or -1, for clients that do not tell it.

        The file with the token is made in ``folder``. Raises OSError.
        """
        token = secrets.token_hex(16)
        path = Path(folder, "trainer-token")
        path.write_text(token)
        path.chmod(0o600)
        expected = f"Bearer {token}".encode()

        class Handler(BaseHTTPRequestHandler):
            timeout = 10.0  # seconds for which a client may say nothing

            def do_POST(self) -> None:
                given = self.headers.get("Authorization", "").encode()
                size = self.headers.get("Content-Length", "")
                code = 401
                if hmac.compare_digest(given, expected):
                    code, line = 400, ""
                    if size.isdecimal() and len(size) < 10 and int(size) <= _BODY_LIMIT:
                        line = line_of(self.rfile.read(int(size)), step())
                    if line:
                        code = 200
                        write(f"{line}\n".encode())
                self.send_response(code)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                """Print nothing: the log is for the training."""

        server = PodServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, name="flk-trainer-status", daemon=True).start()
        self.variables: Final = {
            pod_env.TRAINER_URL: f"http://127.0.0.1:{server.server_port}/",
            pod_env.TRAINER_TOKEN: str(path),
        }
        """What rank 0 gets."""


def line_of(body: bytes, step: int) -> str:
    """The line of metrics of a status; empty if it is none. ``step`` is used where the status has no step."""
    try:
        status = foreign.parse_object(body)["trainerStatus"]
        metrics = {str(each["name"]): _number(each["value"]) for each in status.get("metrics") or []}
        percent, remaining = status.get("progressPercentage"), status.get("estimatedRemainingSeconds")
    except foreign.ERRORS:
        return ""
    at, total = metrics.pop("current_step", None), metrics.pop("total_steps", None)
    values: dict[str, Any] = {"step": step if at is None else at, "total_steps": total}
    values |= {"progress": percent, "eta_s": remaining, **metrics}
    if values["step"] == -1:
        del values["step"]
    return json.dumps({name: value for name, value in values.items() if value is not None})


def _number(text: Any) -> int | float | None:
    try:
        value = float(text)
    except foreign.ERRORS:
        return None
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() else value
