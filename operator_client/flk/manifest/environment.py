"""The environment variables that all ranks of a job share, in every pod and under `flk run`.

`flk.manifest.pod` adds the variables of a pod, and the launcher those of torchrun.
"""

from __future__ import annotations

import re
from typing import Final

from flk.spec.fabric import fabrics
from flk.spec.job import Job
from flk_runtime import contract

# Parts of the name of a variable whose value should not be readable in a manifest.
_SECRET: Final = re.compile(
    r"(^|_)(TOKEN|SECRET|SECRETS|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|CREDENTIALS"
    r"|(API|ACCESS|PRIVATE|SECRET|AUTH)_?KEY)(_|$)",
    re.IGNORECASE,
)


def environment(job: Job) -> dict[str, str]:
    """Return the variables of ``job``, which has a name. The user's win over the fabric's, and these over flk's."""
    if job.name is None:
        raise ValueError("the job has no name yet")
    own = {
        contract.JOB: job.name,
        contract.PODS: str(job.replicas),
        contract.PROCESSES: str(job.processes_per_pod),
        contract.RESTARTS: str(job.restarts),
        contract.DISRUPTIONS: str(job.disruptions),
        contract.GRACE: str(job.grace),
        contract.STRATEGY: job.strategy,
        contract.FABRIC: job.fabric,
        contract.CHECKPOINT: checkpoint_folder(job),
    }
    if job.deadline is not None:
        own[contract.DEADLINE] = str(job.deadline)
    if job.hang_timeout is not None:
        own[contract.HANG_TIMEOUT] = str(job.hang_timeout)
    if job.save_every is not None:
        own[contract.SAVE_EVERY] = str(job.save_every)
    return own | fabrics()[job.fabric].env | job.env


def checkpoint_folder(job: Job) -> str:
    """Return the folder of the job's checkpoints in a pod. It has the job's name, so that jobs can share a volume."""
    if job.checkpoint is None:
        return contract.CHECKPOINT_FOLDER
    return f"{job.checkpoint.path}/{job.name}"


def warnings(job: Job) -> list[str]:
    """Return one sentence for each setting that is allowed but probably a mistake."""
    return [
        f"env.{name} looks like a secret, but everybody who reads the job can read it: use --secret {name}=SECRET:KEY"
        for name in job.env
        if _SECRET.search(name)
    ]
