"""kubectl's global options, before and after the subcommand: the cluster and the user.

`takes_global_options` gives them to `flk` itself, `with_global_options` to each subcommand that talks to a cluster.
Options after the subcommand win.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Final, get_args

import typer

from flk.cli.options import Context, Namespace, seconds, with_signature


def _connection(  # its signature is what the decorators add
    kubeconfig: Annotated[
        str, typer.Option("--kubeconfig", metavar="FILE", help="Kubeconfig to use instead of $KUBECONFIG.")
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
        if added:
            _connect(**{name: given.pop(name) or _before.get(name) for name in added})
        return function(**given)

    return with_signature(function, command, [*own.values(), *map(_hidden, added.values())])


def _hidden(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return the option, hidden in the subcommand's help: the help of `flk` lists it."""
    kind, option = get_args(parameter.annotation)
    hidden = copy.copy(option)
    hidden.hidden = True
    return parameter.replace(annotation=Annotated[kind, hidden])


def _connect(*, kubeconfig: str | None, request_timeout: str | None, as_user: str | None) -> None:
    """Set the options of connections."""
    from flk.kube import ConnectionOptions, set_connection_options
    from flk.user.commands import Connection

    connection = Connection(kubeconfig=kubeconfig or "", user=as_user or "")
    set_connection_options(ConnectionOptions(connection, seconds(request_timeout, "--request-timeout")))
