"""The Secret with which the launchers of a job authenticate each other. It needs the UID of the job."""

from __future__ import annotations

import secrets

from flk import manifest
from flk.kube import Object
from flk.targets.rendezvous import needs_secret


def objects_with_uid(job: Object) -> list[Object]:
    """Return the manifests of objects that need the UID of the created job. The job owns them."""
    return [manifest.rendezvous_secret(job, secrets.token_urlsafe(32))] if needs_secret(job) else []
