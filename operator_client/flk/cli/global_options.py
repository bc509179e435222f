"""kubectl's global options, before and after the subcommand: the cluster, the user, and the display of requests.

`takes_global_options` gives them to `flk` itself, `with_global_options` to each subcommand that talks to a cluster.
Options after the subcommand win.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final, get_args

import typer

from flk.cli.options import Context, Namespace, seconds, with_signature
from flk.commands import program_name

if TYPE_CHECKING:
    from flk.kube import Exchange


def _connection(  # its signature is what the decorators add
    kubeconfig: Annotated[
        str, typer.Option("--kubeconfig", metavar="FILE", help="Kubeconfig to use instead of $KUBECONFIG.")
    ] = "",
    cluster: Annotated[str, typer.Option("--cluster", metavar="NAME", help="Cluster of the kubeconfig.")] = "",
    server: Annotated[str, typer.Option("--server", metavar="URL", help="Address of the API server.")] = "",
    account: Annotated[str, typer.Option("--user", metavar="NAME", help="User of the kubeconfig.")] = "",
    token: Annotated[
        str, typer.Option("--token", metavar="TOKEN", help="Bearer token, in place of the user's credentials.")
    ] = "",
    request_timeout: Annotated[
        str | None,
        typer.Option(
            "--request-timeout",
            metavar="DURATION",
            help="Time for one request with all its attempts: 10s, 1m; 0 for no limit. Default: 5s to 35s, by the "
            "request.",
        ),
    ] = None,
    as_user: Annotated[str, typer.Option("--as", metavar="USER", help="User to impersonate.")] = "",
    as_group: Annotated[
        list[str] | None, typer.Option("--as-group", metavar="GROUP", help="Group to impersonate. Repeatable.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show each request on stderr.")] = False,
) -> None: ...


def _place(context: Context = None, namespace: Namespace = None) -> None: ...


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function, eval_str=True).parameters)


_CONNECTION: Final = _parameters(_connection)
_PLACE: Final = _parameters(_place)
_before: dict[str, Any] = {}  # values of the options that stand before the subcommand


def takes_global_options(root: Callable[..., None]) -> Callable[..., None]:
    """Give the function of `flk` itself all global options, and keep their values for the subcommand."""

    def command(**given: Any) -> None:
        _before.clear()
        _before.update({name: given.pop(name) for name in (*_PLACE, *_CONNECTION)})
        root(**given)

    return with_signature(root, command, (_parameters(root) | _PLACE | _CONNECTION).values())


def with_global_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command that has ``context`` the options of connections, and those that stand before the subcommand."""
    own = _parameters(function)
    added = _CONNECTION if "context" in own else {}
    if not own.keys() & _PLACE.keys():
        return function

    def command(**given: Any) -> Any:
        for name in own.keys() & _PLACE.keys():
            given[name] = given[name] if given[name] is not None else _before.get(name)
        values = {name: given.pop(name) or _before.get(name) for name in added}
        if not added:
            return function(**given)
        observer = _connect(caller=f"{program_name()} {function.__name__.strip('_').replace('_', '-')}", **values)
        try:
            return function(**given)
        finally:
            if observer:
                observer.close()

    return with_signature(function, command, [*own.values(), *map(_hidden, added.values())])


def _hidden(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return the option, hidden in the subcommand's help: the help of `flk` lists it."""
    kind, option = get_args(parameter.annotation)
    hidden = copy.copy(option)
    hidden.hidden = True
    return parameter.replace(annotation=Annotated[kind, hidden])


def _connect(
    *,
    caller: str,
    server: str | None,
    request_timeout: str | None,
    as_user: str | None,
    as_group: list[str] | None,
    verbose: bool | None,
    **chosen: str | None,
) -> _Observer | None:
    """Set the options of connections. ``chosen`` are fields of Connection."""
    from flk.commands import Connection
    from flk.errors import UsageError
    from flk.kube import ConnectionOptions, set_connection_options

    if server and not server.startswith(("https://", "http://")):
        raise UsageError("--server: must be an address such as https://api.example.com:6443")
    limit = seconds(request_timeout, "--request-timeout")
    observe = _Observer() if verbose else None
    named = {name: value or "" for name, value in chosen.items()}
    connection = Connection(
        server=server or "", user=as_user or "", groups=tuple(as_group or ()), caller=caller, **named
    )
    set_connection_options(ConnectionOptions(connection, limit, observe))
    return observe


class _Observer:
    """Prints requests as they are answered."""

    def __init__(self) -> None:
        self._closed = False

    def close(self) -> None:
        """Stop printing: threads of a command that has ended may still be sending a request."""
        self._closed = True

    def __call__(self, exchange: Exchange) -> None:
        from flk.terminal import one_line

        if not self._closed:
            line = f"{exchange.method} {exchange.url}: {exchange.outcome} after {exchange.seconds * 1000:.0f} ms"
            sys.stderr.write(f"flk: {one_line(line)}\n")  # in one piece: threads send requests at once
