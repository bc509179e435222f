"""The hub as a program: `python -m flk_diloco --listen 0.0.0.0:29401`.

The launcher of the workers' first pod starts it too, without ``--listen``: it is the service of the job
(`flk_runtime.launcher.processes.service`), and serves at the port of the address where the workers meet.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from typing import Any

from flk_diloco.server import Hub
from flk_runtime.contract import pod_env
from flk_runtime.contract.failure import ExitCode
from flk_runtime.errors import SetupError
from flk_runtime.system import host

_POLL = 1.0  # seconds
_FAREWELL = 60.0  # seconds without workers after which a hub whose launcher has finished ends, if there were any


def main() -> int:
    """Serve until all workers have finished, or SIGTERM."""
    if parent := os.environ.get(pod_env.PARENT):
        host.die_with_parent(int(parent), signal.SIGTERM)
    arguments = _arguments()
    is_service = not arguments.listen
    given = os.environ.get(pod_env.SERVICE_SECRET, "")
    # Workers may come though this hub has met none: workers of other sites, or of the hub that ran before it.
    others = is_service and bool(given or arguments.again)
    listen = arguments.listen or os.environ.get(pod_env.SERVICE_ADDRESS, "")
    address, colon, port = listen.rpartition(":")
    if not colon or not port.isdigit():
        print(f"hub: --listen {listen}: expected HOST:PORT", file=sys.stderr)
        return int(ExitCode.USAGE)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    launcher_ended = threading.Event()
    if is_service:
        if given or not address.startswith("127."):  # else its workers are all on this machine
            address = ""
        threading.Thread(target=_wait_for_end, args=(launcher_ended,), daemon=True).start()
    try:
        secret = given or os.environ.get(pod_env.SERVICE_KEY, "")
        hub = Hub(address.strip("[]"), int(port), secret, log=_log)
    except (OSError, SetupError) as error:
        print(f"hub: {error}", file=sys.stderr)
        return int(ExitCode.USAGE)
    hub.start()
    if not is_service:
        _log(f"listening on port {hub.port}")
    while not stop.wait(_POLL):
        farewell = _FAREWELL if hub.met or others else 0.0
        if hub.finished or (launcher_ended.is_set() and hub.idle_for > farewell):
            break
    _log(f"ends; {hub.wire_bytes / 1e6:.3f} MB on the wire")
    hub.close()
    return 0


def _arguments() -> Any:
    parser = argparse.ArgumentParser(
        prog="python -m flk_diloco",
        description="Serve the workers of strategy diloco. They need the secret in "
        f"${pod_env.SERVICE_SECRET}, which this program reads too.",
    )
    parser.add_argument("--listen", metavar="HOST:PORT")
    parser.add_argument("--again", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _wait_for_end(ended: threading.Event) -> None:
    sys.stdin.read()
    ended.set()


def _log(text: str) -> None:
    print(f"hub: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
