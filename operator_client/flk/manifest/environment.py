"""The environment variables that all ranks of a job share, in every pod and under `flk run`.

`flk.manifest.pod` adds the variables of a pod, and the launcher adds torchrun's variables.
"""

from __future__ import annotations

from flk.spec.diloco import DiLoCo
from flk.spec.fabric import fabrics
from flk.spec.job import Job
from flk.spec.options import rows
from flk_runtime.contract import pod_env, pod_layout, user_env
from flk_runtime.contract.options import DILOCO
from flk_runtime.contract.secrets import names_secret


def environment(job: Job) -> dict[str, str]:
    """Return the variables of ``job``, which has a name. The user's win over the fabric's, and these over flk's."""
    if job.name is None:
        raise ValueError("the job has no name yet")
    values = {row.option.variable: getattr(job, row.path[0]) for row in rows(Job) if row.option.variable}
    own: dict[str, str] = {variable: str(value) for variable, value in values.items() if value is not None}
    own |= {
        pod_env.PODS: str(job.most_pods),
        pod_env.PROCESSES: str(job.processes_per_pod),
        user_env.CHECKPOINT: checkpoint_place(job),
    }
    if job.pip:
        own[pod_env.PIP] = "\n".join(job.pip)
    if job.elastic is not None:
        own |= {pod_env.MIN_PODS: str(job.elastic.min), pod_env.BATCH: job.elastic.batch}
    if job.spares:
        own[pod_env.SPARES] = str(job.spares)
    if job.strategy == DILOCO:
        own |= {pod_env.DILOCO_OPTIONS: (job.diloco or DiLoCo()).options(), user_env.WORKERS: str(job.workers)}
    return own | fabrics()[job.fabric].env | job.env


def checkpoint_place(job: Job) -> str:
    """Return the folder of the job's checkpoints in a pod, or their address in S3.

    It ends with the job's name, so that jobs can share a volume or a bucket.
    """
    if job.checkpoint is None:
        return pod_layout.CHECKPOINT_FOLDER
    return f"{job.checkpoint.address or job.checkpoint.path}/{job.name}"


def warnings(job: Job) -> list[str]:
    """Return one sentence for each setting that is allowed but probably a mistake."""
    found = [
        f"env.{name} looks like a secret, but everybody who reads the job can read it: use --secret {name}=SECRET:KEY"
        for name in job.env
        if names_secret(name)
    ]
    if job.diloco and job.strategy != DILOCO:
        found.append(f"diloco has no effect under strategy {job.strategy}: use --strategy {DILOCO}")
    return found
