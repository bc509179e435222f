"""The table of launchers that flk knows: the variables of each. docs/concepts/how-ranks-meet.md describes it."""

from __future__ import annotations

from flk_runtime.contract import user_env
from flk_runtime.discovery.readers import (
    is_deepspeed,
    is_pytorchjob,
    is_set_by_hand,
    is_srun,
    is_trainjob,
    read_numbers,
    read_pod,
    read_slurm,
    read_torchrun,
)
from flk_runtime.discovery.variables import Launcher

# From the innermost to the outermost: a launcher is started inside those below it. flk's sets torchrun's variables too.
LAUNCHERS = (
    Launcher(
        "flk", user_env.ATTEMPT, read_numbers, node_rank="GROUP_RANK", nodes="GROUP_WORLD_SIZE",
        attempt=user_env.ATTEMPT, full_world_size=user_env.FULL_WORLD_SIZE, agent_store=True, final=True,
    ),
    Launcher(
        "torchrun", "TORCHELASTIC_RUN_ID", read_torchrun, node_rank="GROUP_RANK", nodes="GROUP_WORLD_SIZE",
        attempt="TORCHELASTIC_RESTART_COUNT", agent_store=True, final=True,
    ),
    Launcher(  # DeepSpeed's launcher, which has its own name for torchrun's LOCAL_WORLD_SIZE
        "deepspeed", "LOCAL_SIZE", read_numbers, local_world_size="LOCAL_SIZE", node_rank="CROSS_RANK",
        nodes="CROSS_SIZE", recognise=is_deepspeed,
    ),
    Launcher(  # by hand, or by a launcher like torchrun
        "env", "LOCAL_RANK", read_numbers, node_rank="GROUP_RANK", nodes="GROUP_WORLD_SIZE",
        attempt="TORCHELASTIC_RESTART_COUNT", agent_store=True, recognise=is_set_by_hand,
    ),
    Launcher(
        "horovod", "HOROVOD_RANK", read_numbers, "HOROVOD_RANK", "HOROVOD_LOCAL_RANK", "HOROVOD_SIZE",
        "HOROVOD_LOCAL_SIZE", start_id=("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    ),
    Launcher(
        "openmpi", "OMPI_COMM_WORLD_RANK", read_numbers, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", start_id=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    Launcher(  # MVAPICH2
        "mpich", "MV2_COMM_WORLD_RANK", read_numbers, "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", start_id=("PMI_JOBID",),
    ),
    Launcher(  # MPICH, Intel MPI
        "mpich", "PMI_RANK", read_numbers, "PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS",
        start_id=("PMI_JOBID",),
    ),
    Launcher(
        "slurm", "SLURM_STEP_ID", read_slurm, "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_TASKS_PER_NODE",
        node_rank="SLURM_NODEID", attempt="SLURM_RESTART_COUNT", hosts=("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
        start_id=("SLURM_JOB_ID", "SLURM_STEP_ID"), recognise=is_srun,
    ),
    Launcher(
        "pytorchjob", "PET_NODE_RANK", read_pod, "RANK", "", "WORLD_SIZE", "", node_rank="PET_NODE_RANK",
        nodes="PET_NNODES", recognise=is_pytorchjob,
    ),
    Launcher(
        "trainer", "PET_NODE_RANK", read_pod, "PET_NODE_RANK", "", "PET_NNODES", "", node_rank="PET_NODE_RANK",
        nodes="PET_NNODES", address="PET_MASTER_ADDR", port="PET_MASTER_PORT", recognise=is_trainjob,
    ),
)  # fmt: skip
