"""Makes Python processes with this folder in PYTHONPATH lack what Linux has and macOS has not, as flk uses it."""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import Any

from flk_runtime.contract import platform

MISSING: dict[Any, tuple[str, ...]] = {
    os: ("memfd_create", "posix_fallocate", "sched_getaffinity", "waitid", "O_PATH", "pidfd_open", "eventfd"),
    signal: ("SIGRTMIN", "SIGRTMAX", "sigtimedwait", "sigwaitinfo"),
    socket: ("SOCK_SEQPACKET", "TCP_KEEPIDLE", "TCP_USER_TIMEOUT", "SO_PEERCRED", "SOCK_CLOEXEC", "SOCK_NONBLOCK"),
}
FOLDERS = ("/proc/", "/sys/", "/dev/shm/")


def is_missing(path: object) -> bool:
    return isinstance(path, str | os.PathLike) and f"{os.fspath(path)!s}/".startswith(FOLDERS)


def refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """Have files of Linux not be there for whoever opens or lists them."""
    if event in ("open", "os.listdir", "os.scandir") and is_missing(arguments[0]):
        raise FileNotFoundError(2, "No such file or directory", arguments[0])


def access(path: Any, *arguments: Any, before: Any = os.access, **options: Any) -> bool:
    return not is_missing(path) and bool(before(path, *arguments, **options))


platform.LINUX = False  # type: ignore[misc]
for module, names in MISSING.items():
    for name in names:
        vars(module).pop(name, None)
os.access = access
sys.addaudithook(refuse)
