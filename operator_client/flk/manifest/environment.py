"""The variables that every rank of a job gets: the same in each pod, and the same for `flk run`.

The manifest adds what differs from pod to pod; the launcher adds torchrun's variables.
"""

from __future__ import annotations

import re
from typing import Final

from flk.spec.fabric import fabrics
from flk.spec.job import Job
from flk_runtime import contract

# Parts of a name that say its value should not be on record in a manifest.
_SECRET: Final = re.compile(
    r"(^|_)(TOKEN|SECRET|SECRETS|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|CREDENTIALS"
    r"|(API|ACCESS|PRIVATE|SECRET|AUTH)_?KEY)(_|$)",
    re.IGNORECASE,
)


def environment(job: Job) -> dict[str, str]:
    """Variables and values of ``job``, which has a name. The user's win over the fabric's, and those over flk's."""
    if job.name is None:
        raise ValueError("the job has no name yet")
    own = {
        contract.JOB: job.name,
        contract.PODS: str(job.replicas),
        contract.PROCESSES: str(job.processes_per_pod),
        contract.RESTARTS: str(job.restarts),
        contract.STRATEGY: job.strategy,
        contract.FABRIC: job.fabric,
        contract.CHECKPOINT: checkpoint_folder(job),
    }
    if job.deadline is not None:
        own[contract.DEADLINE] = str(job.deadline)
    if job.save_every is not None:
        own[contract.SAVE_EVERY] = str(job.save_every)
    return own | fabrics()[job.fabric].env | job.env


def checkpoint_folder(job: Job) -> str:
    """Where the job's snapshots go in a pod: a folder of the job's own, so that jobs can share a claim."""
    if job.checkpoint is None:
        return contract.CHECKPOINT_FOLDER
    return f"{job.checkpoint.path}/{job.name}"


def warnings(job: Job) -> list[str]:
    """What is allowed but probably not meant."""
    return [
        f"env.{name} looks like a secret, and who can read the job can read it: better --secret {name}=SECRET:KEY"
        for name in job.env
        if _SECRET.search(name)
    ]
