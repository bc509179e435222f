"""Who a job belongs to: the user of the cluster who submitted it, as the API server knows this user, and from where.

The local name tells people who may have submitted a job. It proves nothing: jovyan, root and ubuntu are everybody.
"""

from __future__ import annotations

import getpass
import socket
from typing import Final

from flk import labels
from flk.errors import ApiError
from flk.kube import Object, RequestTarget
from flk.observe.client import JobClient
from flk.observe.resources import SELF_REVIEWS

_NOBODY: Final = "system:anonymous"


def current_owner() -> str:
    """Return where this process submits jobs from: ``user@host``, by their names on this machine."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        name = "unknown"
    return f"{name}@{socket.gethostname()}"


def cluster_user(client: JobClient) -> str:
    """Return the name that the API server has for the user of this client; empty if it does not say one."""
    body = {"apiVersion": SELF_REVIEWS.api_version, "kind": "SelfSubjectReview", "metadata": {}}
    try:
        answer = client.api.call("create", RequestTarget(SELF_REVIEWS), body=body)
    except ApiError:
        return ""
    name = ((answer.get("status") or {}).get("userInfo") or {}).get("username")
    return "" if name == _NOBODY else str(name or "")


def me(client: JobClient) -> str:
    """Return the name of the user as `cluster_user` does. Raises ApiError if the API server does not say one."""
    name = cluster_user(client)
    if not name:
        raise ApiError(
            "--mine: the API server does not say who you are (SelfSubjectReview, from Kubernetes 1.28 on)",
            hint="name the jobs, or choose them by their labels with -l",
        )
    return name


def is_of(user: str, job: Object | None) -> bool:
    """Return whether this user of the cluster has submitted a job."""
    return job is not None and user != "" and labels.annotations_of(job).get(labels.USER) == user
