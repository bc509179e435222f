"""CAUSES: all causes in one table, and `find`, which applies it to a picture."""

from __future__ import annotations

from typing import Final

from flk.diagnose.causes.admission import ADMISSION
from flk.diagnose.causes.ending import ENDING
from flk.diagnose.causes.images import IMAGES
from flk.diagnose.causes.queueing import QUEUEING
from flk.diagnose.causes.row import Cause
from flk.diagnose.causes.running import RUNNING
from flk.diagnose.causes.scheduling import SCHEDULING, UNSCHEDULABLE
from flk.diagnose.causes.starting import STARTING
from flk.diagnose.causes.volumes import VOLUMES
from flk.diagnose.model import Finding
from flk.diagnose.picture import Picture

# Within each group the row that says most comes first, and the last row takes what the others do not know.
GROUPS: Final = (QUEUEING, ADMISSION, IMAGES, STARTING, VOLUMES, SCHEDULING, (UNSCHEDULABLE,), RUNNING, ENDING)
CAUSES: Final[tuple[Cause, ...]] = tuple(cause for group in GROUPS for cause in group)


def find(picture: Picture) -> list[Finding]:
    """Return the causes that are found in a picture, the one to report first.

    Of each group only the first row that matches counts, because later rows say less of the same. A job that has failed
    is explained by its end, unless the end is that a pod never came: then by what kept that pod away. In a job that has
    not ended, what does not resolve by itself comes before what does.
    """
    if picture.succeeded and not picture.failed:
        return []
    found: list[Finding] = []
    for group in GROUPS:
        for cause in group:
            finding = cause.finding(picture)
            if finding is not None:
                found.append(finding)
                break
    ended = {cause.code for cause in ENDING}
    if not picture.failed:
        return sorted(found, key=lambda finding: finding.resolves_itself)
    absent = any(finding.code in ("RendezvousTimeout", "PodLost", "FailedWithoutTrace") for finding in found)
    obstacles = [finding for finding in found if finding.code not in ended and not finding.resolves_itself]
    endings = [finding for finding in found if finding.code in ended]
    rest = [finding for finding in found if finding not in obstacles and finding not in endings]
    return [*obstacles, *endings, *rest] if absent else [*endings, *obstacles, *rest]
