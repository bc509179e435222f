"""The hub as a program: the service of the job (`flk_runtime.launcher.processes.service`).

It runs beside the ranks of the first pod, and serves at the port of the address where the workers meet.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from flk_diloco.server import Hub
from flk_runtime.contract import ExitCode, pod_env
from flk_runtime.errors import SetupError
from flk_runtime.system import host

_POLL = 1.0  # seconds


def main() -> int:
    """Serve until all workers have finished, or SIGTERM."""
    if parent := os.environ.get(pod_env.PARENT):
        host.die_with_parent(int(parent), signal.SIGTERM)
    given = os.environ.get(pod_env.SERVICE_SECRET, "")
    # Workers may come though this hub has met none: workers of other sites, or of the hub that ran before it.
    others = bool(given) or "--again" in sys.argv
    address, _, port = os.environ.get(pod_env.SERVICE_ADDRESS, "").rpartition(":")
    if not port.isdigit():
        print(f"hub: {pod_env.SERVICE_ADDRESS} is no HOST:PORT", file=sys.stderr)
        return int(ExitCode.USAGE)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    launcher_ended = threading.Event()
    if given or not address.startswith("127."):  # else its workers are all on this machine
        address = ""
    threading.Thread(target=_wait_for_end, args=(launcher_ended,), daemon=True).start()
    try:
        secret = given or os.environ.get(pod_env.SERVICE_KEY, "")
        hub = Hub(address, int(port), secret, log=lambda text: print(f"hub: {text}", file=sys.stderr, flush=True))
    except (OSError, SetupError) as error:
        print(f"hub: {error}", file=sys.stderr)
        return int(ExitCode.USAGE)
    hub.start()
    while not stop.wait(_POLL):
        if hub.is_done(launcher_ended=launcher_ended.is_set(), others=others):
            break
    hub.close()
    return 0


def _wait_for_end(ended: threading.Event) -> None:
    sys.stdin.read()
    ended.set()


if __name__ == "__main__":
    sys.exit(main())
