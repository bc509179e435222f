"""The owner of a job: ``user@host``, which flk stores with a job when it is submitted."""

from __future__ import annotations

import getpass
import socket


def user_name() -> str:
    """Return the name of the user of this process; empty if the user has none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


def current_owner() -> str:
    """Return the owner of the jobs that this process submits."""
    return f"{user_name() or 'unknown'}@{socket.gethostname()}"


def is_user(user: str, owner: str) -> bool:
    """Return whether the owner of a job is this user, on whichever machine."""
    return owner.partition("@")[0] == user
