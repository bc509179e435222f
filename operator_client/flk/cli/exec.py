"""`flk exec` and `flk cp`: run a command beside a rank, in its container, and copy files from there."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from flk.cli.options import Context, JobName, Namespace, note, open_job
from flk.errors import UsageError
from flk.user.terminal import exit_on_signal, handled_signals

if TYPE_CHECKING:
    from flk.kube.sockets import RemoteCommand

Rank = Annotated[int | None, typer.Option("--rank", min=0, metavar="RANK", help="Rank whose pod is used. Default: 0.")]
PodName = Annotated[
    str | None, typer.Option("--pod", metavar="POD", help="Pod, by its index or name, in place of a rank.")
]
ContainerName = Annotated[
    str, typer.Option("--container", "-c", metavar="NAME", help="Container of the pod. Default: the ranks'.")
]


def exec_(
    job: JobName,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- COMMAND]", help="The command. Default: sh.", show_default=False)
    ] = None,
    context: Context = None,
    namespace: Namespace = None,
    rank: Rank = None,
    pod: PodName = None,
    container: ContainerName = "",
) -> int:
    """Run a command in the container of a rank, or in another one of its pod, and exit with its exit code.

    On a terminal the command gets one too, so `flk exec JOB` opens a shell. Elsewhere it shares
    flk's input, output and errors.
    """
    from flk.kube.sockets import STDERR, RemoteCommand
    from flk.observe.pods import with_packages
    from flk.observe.reader import container_in, pod_of
    from flk.observe.resources import EXEC

    client, job = open_job(job, context, namespace)
    name = pod_of(client, job, rank, pod).name
    tty = sys.stdin.isatty() and sys.stdout.isatty()
    chosen = container_in(client, job, name, container)
    words = with_packages(client.get_pod(name, job), chosen, command or ["sh"])
    remote = RemoteCommand(client.api.access, client.target(EXEC, name), words, container=chosen, tty=tty)

    def write(channel: int, data: bytes) -> None:
        stream = sys.stderr if channel == STDERR else sys.stdout
        stream.buffer.write(data)
        stream.buffer.flush()

    with contextlib.closing(remote), _raw_terminal(remote) if tty else contextlib.nullcontext():
        threading.Thread(target=_forward_input, args=(remote,), daemon=True).start()
        return remote.run(write)


def _forward_input(remote: RemoteCommand) -> None:
    with contextlib.suppress(Exception):  # the connection has ended, which the main thread reports
        while data := os.read(sys.stdin.fileno(), 1 << 16):
            remote.send(data)
        remote.end_input()


@contextlib.contextmanager
def _raw_terminal(remote: RemoteCommand) -> Iterator[None]:
    """Hand every key to the command, and the terminal's size whenever it changes."""
    import termios
    import tty

    def resize(*_: object) -> None:
        remote.resize(*os.get_terminal_size(sys.stdin.fileno()))  # not $COLUMNS, which does not follow the terminal

    before = termios.tcgetattr(sys.stdin.fileno())
    with handled_signals({signal.SIGWINCH: resize, signal.SIGTERM: exit_on_signal, signal.SIGHUP: exit_on_signal}):
        try:
            tty.setraw(sys.stdin.fileno())
            resize()
            yield
        finally:
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, before)


def cp(
    source: Annotated[str, typer.Argument(metavar="JOB:PATH", help="A path in a pod.", show_default=False)],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A path here.", show_default=False)],
    context: Context = None,
    namespace: Namespace = None,
    rank: Rank = None,
) -> None:
    """Copy a file or a folder from the pod of a rank to this machine.

    JOB:PATH is in the pod of rank 0, or of the rank that --rank names. A path without a slash at its beginning is below
    the container's working folder. As with `cp -r`, a target that is a folder gets the source inside; a folder is not
    copied over another one. The copy is whole or there is none. `kubectl cp` copies the other way.
    """
    job, colon, path = source.partition(":")
    if not colon or not path:
        raise UsageError(f"{source}: must be JOB:PATH", hint="as in gpt:/tmp/trace.json; kubectl cp copies to a pod")
    from flk.jobs.copying import Container
    from flk.observe.reader import container_in, pod_of

    client, job = open_job(job, context, namespace)
    name = pod_of(client, job, rank).name
    place = Container(client, name, container_in(client, job, name, ""))
    note(f"copied {name}:{path} to {place.read(path, target, note)}")
