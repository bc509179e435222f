"""`flk port-forward`: make a port of a rank's pod reachable on this machine."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Annotated, Final

import typer

from flk.cli.exec import Rank
from flk.cli.options import Context, JobName, Namespace, note, open_job
from flk.errors import FlkError, UsageError
from flk_runtime.contract.exit_codes import ExitCode

if TYPE_CHECKING:
    from flk.kube.sockets import PodConnection

ANSWER: Final = 30.0  # seconds without an answer after which a connection is closed that its client will not write to


def port_forward(
    job: JobName,
    port: Annotated[
        str, typer.Argument(metavar="[LOCAL:]REMOTE", help="Port on this machine and in the pod.", show_default=False)
    ],
    context: Context = None,
    namespace: Namespace = None,
    rank: Rank = 0,
) -> int:
    """Forward connections to a port of this machine to the pod of a rank, until Ctrl-C.

    For TensorBoard or a profiler that runs in the pod. LOCAL is REMOTE by default; 0 is a free port.
    """
    local, remote = _ports(port)
    from flk.kube.sockets import PodConnection
    from flk.observe.client import PORT_FORWARD
    from flk.observe.reader import pod_of_rank

    client, job = open_job(job, context, namespace)
    target = client.target(PORT_FORWARD, pod_of_rank(client, job, rank).name)
    try:
        server = socket.create_server(("127.0.0.1", local))
    except OSError as error:
        reason = f"port {local} of this machine cannot be used: {error.strerror}"
        raise UsageError(reason, hint=f"name another one: {local + 1}:{remote}") from None
    with server, contextlib.suppress(KeyboardInterrupt):
        note(f"forwarding 127.0.0.1:{server.getsockname()[1]} to port {remote} of {target.name}; Ctrl-C ends it")
        while True:
            connection = server.accept()[0]
            try:
                pod = PodConnection(client.api.access, target, remote)
            except FlkError as error:
                connection.close()
                note(str(error))
                continue
            forwarding = Forwarding(connection, pod)
            threading.Thread(target=forwarding.send, daemon=True).start()
            threading.Thread(target=forwarding.receive, daemon=True).start()
    return int(ExitCode.INTERRUPTED)


def _ports(text: str) -> tuple[int, int]:
    local, _, remote = text.rpartition(":")
    numbers = [int(part) if part.isascii() and part.isdigit() else -1 for part in (local or remote, remote)]
    if not (0 <= numbers[0] < 65536 and 0 < numbers[1] < 65536):
        raise UsageError(f"PORT: must be [LOCAL:]REMOTE, two numbers below 65536 (is {text!r})")
    return numbers[0], numbers[1]


class Forwarding:
    """One connection to this machine's port, and its connection to the pod. Each direction has a thread."""

    def __init__(self, connection: socket.socket, pod: PodConnection) -> None:
        self._connection, self._pod = connection, pod
        self._received = 0  # bytes from the pod
        self._ended = threading.Event()  # the pod sends no more

    def send(self) -> None:
        """Send the client's bytes to the pod, and close the connection to the pod when neither end needs it.

        A client may end its own direction and wait for the answer, which the protocol cannot tell the pod.
        """
        with contextlib.suppress(Exception):  # either side may end at any time
            while data := self._connection.recv(1 << 16):
                self._pod.send(data)
            before = -1
            while before != self._received and not self._ended.wait(ANSWER):
                before = self._received
        self._pod.close()

    def receive(self) -> None:
        """Send the pod's bytes to the client."""
        try:
            while data := self._pod.receive():
                self._received += len(data)
                self._connection.sendall(data)
        except FlkError as error:
            note(str(error))
        except OSError:
            pass  # the program on this machine has closed its connection
        finally:
            self._ended.set()
            self._connection.close()
