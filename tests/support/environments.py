"""Environment variables as the launchers of the field set them, and a check that an environment is refused."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from flk_runtime.contract import user_env
from flk_runtime.contract.failure import Kind
from flk_runtime.discovery import discover
from flk_runtime.errors import DiscoveryError

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "29501",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
FLK = {
    **TORCHRUN, user_env.ATTEMPT: "3", "TORCHELASTIC_RESTART_COUNT": "3", "FLK_PROGRESS": "/tmp/r/3/1/progress",
    "TORCHELASTIC_ERROR_FILE": "/tmp/r/3/1/error.json",
}  # fmt: skip
# A rank of a torchrun that a rank of flk has started.
INSIDE_FLK = {**FLK, **TORCHRUN, "TORCHELASTIC_ERROR_FILE": "/tmp/t/error.json"}
PODS = {
    "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456",
    "PET_NODE_RANK": "1", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto", "PET_MASTER_ADDR": "job-master-0",
    "PET_MASTER_PORT": "23456", "PYTHONUNBUFFERED": "1",
}  # fmt: skip
TRAINER = {
    "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29500",
}  # fmt: skip
HOROVOD = {
    "HOROVOD_RANK": "3", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1", "HOROVOD_CROSS_SIZE": "2", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "41234", "HOROVOD_CONTROLLER": "gloo",
}  # fmt: skip
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_NODE_RANK": "3", "OMPI_MCA_ess_base_jobid": "2140143617",
    "PMIX_NAMESPACE": "2140143617", "PMIX_RANK": "3",
}  # fmt: skip
MPICH = {
    "PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2",
    "HYDI_CONTROL_FD": "7", "MPIR_CVAR_CH3_INTERFACE_HOSTNAME": "n2",
}  # fmt: skip
# Seven tasks on four nodes: the third of them, and its second task.
SLURM = {
    "SLURM_JOB_ID": "812", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
    "SLURM_NTASKS": "7", "SLURM_NNODES": "4", "SLURM_TASKS_PER_NODE": "2(x3),1", "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NUM_NODES": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_STEP_NODELIST": "gpu[07-09,12]",
    "SLURM_JOB_NODELIST": "gpu[05-12]", "SLURM_JOB_NAME": "train", "SLURM_NODELIST": "gpu[05-12]",
}  # fmt: skip
# In the script of `sbatch -n 4`, which runs once, on the first node.
BATCH = {
    "SLURM_JOB_ID": "812", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "4",
    "SLURM_NNODES": "1", "SLURM_TASKS_PER_NODE": "4", "SLURM_JOB_NODELIST": "gpu07",
}  # fmt: skip
MEETING = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29501"}
KNOWN = sorted(
    {*FLK, "TORCHELASTIC_USE_AGENT_STORE", "GROUP_WORLD_SIZE", *PODS, *HOROVOD, *OPENMPI, *MPICH, *SLURM}
    | {"SLURM_RESTART_COUNT", "PMI_JOBID"}
)


def refused(environ: Mapping[str, str | None], words: list[str]) -> None:
    with pytest.raises(DiscoveryError) as caught:
        discover({name: value for name, value in environ.items() if value is not None})
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.kind is Kind.USAGE
