"""The cause of a job that was deleted before it had ended. It is found in the archive of the job."""

from __future__ import annotations

from typing import Final

from flk.health.cause import Cause, Found
from flk.observe.model import Evidence
from flk.observe.view import JobView
from flk_runtime.contract.exit_codes import ExitCode


def _deleted(view: JobView) -> Found | None:
    if view.gone is None or view.failed or view.succeeded:
        return None
    return Found(
        "the job was deleted before it had ended",
        "submit it again; with the same name and --checkpoint it goes on from its newest checkpoint. The API server's "
        "audit log says who deleted it",
        [Evidence(view.subject, "it does not exist any more", "metadata", view.gone)],
    )


CAUSES: Final = (
    Cause(
        "Deleted",
        "Somebody has deleted the job",
        "The object of the job does not exist any more, and had neither succeeded nor failed when it was seen last. "
        "flk reads what it has kept of the job. Kubernetes does not keep who deletes an object, except in its audit "
        "log.",
        "Submit the job again. With the same name and --checkpoint it goes on from its newest checkpoint.",
        _deleted,
        ExitCode.CANCELLED,
    ),
)
