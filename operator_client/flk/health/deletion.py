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
        _deleted,
        ExitCode.CANCELLED,
    ),
)
