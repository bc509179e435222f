"""`flk port-forward`: make ports of a rank's pod reachable on this machine."""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import threading
from typing import TYPE_CHECKING, Annotated, Final

import typer

from flk.cli.exec import PodName, Rank
from flk.cli.options import Context, JobName, Namespace, note, open_job
from flk.errors import FlkError, UsageError
from flk.user.terminal import print_error
from flk_runtime.contract import ExitCode

if TYPE_CHECKING:
    from flk.kube import Access, RequestTarget
    from flk.kube.sockets import PodConnection

ADDRESS: Final = "127.0.0.1"  # ssh -L and the like bring other machines there
ANSWER: Final = 30.0  # seconds without an answer after which a connection is closed that its client will not write to


def port_forward(
    job: JobName,
    ports: Annotated[
        list[str],
        typer.Argument(metavar="[LOCAL:]REMOTE...", help="Ports on this machine and in the pod.", show_default=False),
    ],
    context: Context = None,
    namespace: Namespace = None,
    rank: Rank = None,
    pod: PodName = None,
) -> int:
    """Forward connections to ports of this machine to the pod of a rank, until Ctrl-C.

    For TensorBoard or a profiler that runs in the pod. LOCAL is REMOTE by default; :REMOTE takes a free port.
    When the pod has ended, each connection is told so.
    """
    wanted = [_ports(text) for text in ports]
    from flk.observe.reader import pod_of
    from flk.observe.resources import PORT_FORWARD

    client, job = open_job(job, context, namespace)
    target = client.target(PORT_FORWARD, pod_of(client, job, rank, pod).name)
    with contextlib.ExitStack() as stack, contextlib.suppress(KeyboardInterrupt):
        servers = [(stack.enter_context(_listen(local, remote)), remote) for local, remote in wanted]
        chosen = stack.enter_context(selectors.DefaultSelector())
        for server, remote in servers:
            server.setblocking(False)  # a client may have gone again before it is accepted
            chosen.register(server, selectors.EVENT_READ, remote)
            port = server.getsockname()[1]
            note(f"forwarding {ADDRESS}:{port} to port {remote} of {target.name}; Ctrl-C ends it")
        while True:
            for ready, _ in chosen.select():
                listening: socket.socket = ready.fileobj  # type: ignore[assignment]
                with contextlib.suppress(BlockingIOError):
                    connection = listening.accept()[0]
                    connection.setblocking(True)
                    # Opened by a thread: a slow API server must not hold up the other connections.
                    arguments = (client.api.access, target, ready.data, connection)
                    threading.Thread(target=_forward, args=arguments, daemon=True).start()
    return int(ExitCode.INTERRUPTED)


def _listen(local: int, remote: int) -> socket.socket:
    try:
        return socket.create_server((ADDRESS, local))
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while")[0]
        hint = f"name another one: {local + 1}:{remote}" if error.errno == errno.EADDRINUSE else ""
        raise UsageError(f"port {local} of {ADDRESS} cannot be used: {reason}", hint=hint) from None


def _forward(access: Access, target: RequestTarget, port: int, connection: socket.socket) -> None:
    from flk.kube.sockets import PodConnection

    with connection, contextlib.suppress(OSError):  # the program on this machine has closed its end
        try:
            forwarding = Forwarding(connection, PodConnection(access, target, port))
            threading.Thread(target=forwarding.send, daemon=True).start()
            forwarding.receive()
        except FlkError as error:
            print_error(error)


def _ports(text: str) -> tuple[int, int]:
    local, colon, remote = text.rpartition(":")
    local = local or ("0" if colon else remote)  # as in kubectl
    numbers = [int(part) if part.isascii() and part.isdigit() else -1 for part in (local, remote)]
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
        """Send the pod's bytes to the client, and end the client's connection after the last one.

        Raises FlkError if the connection to the pod fails, and OSError if the client has closed its own.
        """
        try:
            while data := self._pod.receive():
                self._received += len(data)
                self._connection.sendall(data)
        finally:
            self._ended.set()
            # Closed alone, it would stay open as long as the other thread waits for bytes of the client.
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
