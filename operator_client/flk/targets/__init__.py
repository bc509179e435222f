"""The kinds of objects that a job can become, one adapter each: PyTorchJob, TrainJob, JobSet and Job.

An adapter knows how a job is rendered, what the object's status means, how it is suspended, scaled and created again,
and how its pods, their indexes and their restarts are found. `gang` holds what each scheduler of gangs needs. The
package has no I/O. `flk.manifest`, `flk.health`, `flk.jobs` and `flk.cli` import it; of flk it imports what
is below it: spec, labels and units.
"""

from __future__ import annotations

from typing import Final

from flk.targets.indexed import IndexedJob, JobSet
from flk.targets.model import EXIT_CODE, KEPT_BY_KUBELET, MOST_PODS, REPLACED, WORKER, Object, Parts, Replicas, Target
from flk.targets.pytorchjob import PyTorchJob
from flk.targets.trainjob import TrainJob

# By the values of --target, in the order in which `auto` tries them.
TARGETS: Final[dict[str, Target]] = {
    target.name: target for target in (PyTorchJob(), TrainJob(), JobSet(), IndexedJob())
}
DEFAULT: Final = TARGETS["pytorchjob"]
CONTAINERS: Final = tuple(dict.fromkeys(target.container for target in TARGETS.values()))
_BY_KIND: Final = {target.kind: target for target in TARGETS.values()}


def target_of(job: Object) -> Target:
    """Return the target of an object. Objects in lists of the API have no kind: they count as PyTorchJobs."""
    return _BY_KIND.get(str(job.get("kind")), DEFAULT)


__all__ = [
    "CONTAINERS",
    "DEFAULT",
    "EXIT_CODE",
    "KEPT_BY_KUBELET",
    "MOST_PODS",
    "REPLACED",
    "TARGETS",
    "WORKER",
    "Object",
    "Parts",
    "Replicas",
    "Target",
    "target_of",
]
