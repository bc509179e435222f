"""The kind of an exception: a fault of disk, GPU, address or rendezvous, a usage error, or the training code's own."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Final

from flk_runtime.contract import pod_layout, user_env
from flk_runtime.contract.failure import Kind, kind_of_text
from flk_runtime.errors import RuntimeFailure
from flk_runtime.system.text import text_of

_ERRNOS: Final = {
    errno.ENOSPC: Kind.DISK_FULL,
    errno.EDQUOT: Kind.DISK_FULL,
    errno.EROFS: Kind.READ_ONLY,
    errno.EIO: Kind.IO,
    errno.ESTALE: Kind.IO,
    errno.EADDRINUSE: Kind.ADDRESS,
}
DISK_ERRNOS: Final = frozenset(
    (
        errno.EIO,
        errno.ESTALE,
        errno.ENOTCONN,
        errno.EHOSTDOWN,
        errno.ESHUTDOWN,
        errno.ETIMEDOUT,
    )
)
"""Numbers of errors of a disk or its server, where a call names a file: some of them are of sockets, too."""


def kind_of(error: BaseException) -> Kind:
    """The kind of a `Failure` for this exception, for one in its group or for one that it was raised from."""
    links = chain(error)
    for link in links:
        if isinstance(link, OSError) and link.errno in _ERRNOS:
            return _ERRNOS[link.errno]
        if isinstance(link, OSError) and link.errno in DISK_ERRNOS and link.filename is not None:
            return Kind.IO
    told = {kind_of_text(type(link).__name__, text_of(link)) for link in links}
    for kind in (Kind.GPU, Kind.ADDRESS, Kind.IO):
        if kind in told:
            return Kind.DISK_FULL if kind is Kind.IO and full_file_system(error) else kind
    kinds = [leaf.kind if isinstance(leaf, RuntimeFailure) else Kind.EXCEPTION for leaf in leaves(error)]
    return min(kinds, key=lambda kind: kind.meaning.precedence)


def full_file_system(error: BaseException) -> str:
    """The end of an error message that names a file system without space, with its size; empty if none is found.

    It is the file system of the exception's file, else one that training writes to.
    """
    names = [link.filename for link in chain(error) if isinstance(link, OSError) and isinstance(link.filename, str)]
    for name in [*names, os.environ.get(user_env.CHECKPOINT, ""), os.getcwd(), tempfile.gettempdir(), pod_layout.SHM]:
        path = os.path.realpath(name) if name else ""
        while path and not os.path.exists(path):
            path = os.path.dirname(path)
        with contextlib.suppress(OSError):
            space = os.statvfs(path)
            if space.f_blocks and space.f_bavail <= space.f_blocks // 1000:
                while not os.path.ismount(path):
                    path = os.path.dirname(path)
                size = space.f_blocks * space.f_frsize / 2**30
                return f" (the file system at {path} is full; its size is {size:.3g} GiB)"
    return ""


def chain(error: BaseException) -> list[BaseException]:
    """The exception, the exceptions in its group, and all that these were raised from, as a traceback shows them."""
    return _reached(error, lambda link: [*members(link), *_raised_from(link)])


def causes(error: BaseException) -> list[BaseException]:
    """The exception, and the exceptions that it was raised from, without the members of groups."""
    return _reached(error, _raised_from)


def leaves(error: BaseException) -> list[BaseException]:
    """The exceptions in a group, and in the groups in it, each once; an exception that is no group is alone."""
    return [link for link in _reached(error, members) if not members(link)]


def members(error: BaseException) -> Sequence[BaseException]:
    """The exceptions in a group; empty for an exception that is none."""
    # By name, since Python 3.10 has no groups, and the package exceptiongroup has a class of its own for them.
    is_group = any(base.__name__ == "BaseExceptionGroup" for base in type(error).__mro__)
    return getattr(error, "exceptions", ()) if is_group else ()


def _raised_from(error: BaseException) -> list[BaseException]:
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return [cause] if cause is not None else []


def _reached(error: BaseException, after: Callable[[BaseException], Sequence[BaseException]]) -> list[BaseException]:
    """The exception and all exceptions that ``after`` reaches from it: each once, also where they form a circle."""
    found: dict[int, BaseException] = {}
    rest = [error]
    while rest:
        link = rest.pop()
        if id(link) not in found:
            found[id(link)] = link
            rest += reversed(after(link))
    return list(found.values())
