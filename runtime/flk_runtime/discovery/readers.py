"""The table of launchers that flk knows, and how the variables of each are recognised and read into a RankInfo.

docs/concepts/how-ranks-meet.md describes it.
"""

from __future__ import annotations

from dataclasses import replace

from flk_runtime.contract import pod_env, user_env
from flk_runtime.discovery.variables import (
    Environ,
    Launcher,
    RankInfo,
    checked,
    first_set,
    number,
    require,
    show,
    tasks_of,
)
from flk_runtime.errors import DiscoveryError

START_WITH_LAUNCHER = "start the script with `torchrun script.py`, or submit it with flk"
# Ids of the Slurm steps that run a job's batch script or an interactive shell, which srun did not start (slurm.h).
# None: outside of steps.
_STEPS_WITHOUT_SRUN = frozenset({"4294967290", "4294967291", None})
# In a job of Slurm, MPI starts rank 0 on the first host of the job; its daemons are a step on the other hosts.
_HOSTS = ("SLURM_JOB_NODELIST",)
# Hydra starts its daemons with srun in a job of Slurm, so each mpiexec has a step of its own.
_HYDRA = ("PMI_JOBID", "SLURM_JOB_ID", "SLURM_STEP_ID")


def read_numbers(launcher: Launcher, environ: Environ) -> RankInfo:
    """Read four numbers (rank, local rank and the two sizes), and the nodes' numbers where the launcher sets them."""
    if environ.get(launcher.world_size) == "1":  # then the other three are known
        environ = {launcher.rank: "0", launcher.local_rank: "0", launcher.local_world_size: "1", **environ}
    names = (launcher.rank, launcher.local_rank, launcher.world_size, launcher.local_world_size)
    require(launcher, environ, names, "a launcher")
    rank, local_rank, world_size, local_world_size = (number(environ, name) for name in names)
    node_rank = nodes = None
    if launcher.nodes in environ and launcher.node_rank in environ:
        node_rank, nodes = number(environ, launcher.node_rank), number(environ, launcher.nodes)
    return checked(launcher, environ, rank, local_rank, world_size, local_world_size, node_rank, nodes)


def read_slurm(launcher: Launcher, environ: Environ) -> RankInfo:
    """Read a task of srun. Nodes may have different numbers of tasks, and ranks may go to the nodes cyclically.

    In a step of all components of a heterogeneous job, Slurm's lists have all nodes by their names, and the numbers of
    nodes and tasks go from component to component.
    """
    components = sorted(name for name in environ if name.startswith("SLURM_JOB_NODELIST_"))
    if (
        len(components) > 1
        and environ.get("SLURM_JOB_ID_HET_GROUP_0") == environ.get("SLURM_JOB_ID")  # else they are of another job
        and sum(number(environ, name) for name in environ if name.startswith("SLURM_JOB_NUM_NODES_HET_GROUP_"))
        == number(environ, "SLURM_STEP_NUM_NODES", default=0)
    ):  # all of them take part, and the first one has rank 0
        launcher = replace(launcher, hosts=(components[0], *launcher.hosts))
    tasks = first_set(environ, "SLURM_STEP_TASKS_PER_NODE", launcher.local_world_size)
    launcher = replace(
        launcher, world_size=first_set(environ, "SLURM_STEP_NUM_TASKS", launcher.world_size), local_world_size=tasks
    )
    names = (launcher.rank, launcher.local_rank, launcher.world_size, launcher.node_rank)
    require(launcher, environ, (*names, tasks), "srun")
    rank, local_rank, world_size, node_rank = (number(environ, name) for name in names)
    local_world_size, nodes, total = tasks_of(tasks, environ[tasks], node_rank)
    if components and "SLURM_GTIDS" in environ:  # the ranks of this node
        local_world_size = environ["SLURM_GTIDS"].count(",") + 1
    if total != world_size:
        raise DiscoveryError(f"{tasks}={environ[tasks]} lists {total} tasks, but {launcher.world_size}={world_size}")
    return checked(launcher, environ, rank, local_rank, world_size, local_world_size, node_rank, nodes)


def read_pod(launcher: Launcher, environ: Environ) -> RankInfo:
    """Read a pod whose script is started without a launcher: with one process the pod's number is the rank."""
    shown = show(launcher, environ, "PET_NNODES", "PET_NPROC_PER_NODE")
    names = (launcher.rank, launcher.world_size, launcher.nodes)
    require(launcher, environ, names, "the operator", "PET_NNODES", "PET_NPROC_PER_NODE")
    if ":" in environ[launcher.nodes]:
        raise DiscoveryError(
            f"{shown}: in an elastic job the launchers assign the ranks, but no launcher started this process: "
            f"{START_WITH_LAUNCHER}"
        )
    pod, pods = number(environ, launcher.node_rank), number(environ, launcher.nodes)
    processes = environ.get("PET_NPROC_PER_NODE", "auto")
    # "auto" means that the launcher counts. A PyTorchJob counts it as one process in its WORLD_SIZE; a TrainJob has no
    # such variable, and only where there is one pod does no other rank wait for processes that nobody starts.
    one = processes == "1" or (processes == "auto" and (launcher.name == "pytorchjob" or pods == 1))
    if not one or number(environ, launcher.world_size) != pods or number(environ, launcher.rank) != pod:
        raise DiscoveryError(
            f"{shown}: the operator's {launcher.rank} is the number of the pod, not of the process, and no launcher "
            f"started this process: {START_WITH_LAUNCHER}, or set nprocPerNode: 1 in the job"
        )
    return checked(launcher, environ, pod, 0, pods, 1, pod, pods)


def _is_of_flk(environ: Environ) -> bool:
    """Whether flk's launcher has started this rank itself: a torchrun that a rank starts has a folder of its own."""
    folders = {environ.get(name, "").rpartition("/")[0] for name in ("TORCHELASTIC_ERROR_FILE", pod_env.PROGRESS)}
    return user_env.ATTEMPT in environ and len(folders) == 1


_LOCAL, _POD, _RANK = frozenset({"LOCAL_RANK"}), frozenset({"PET_NODE_RANK"}), frozenset({"RANK"})
_NOTHING: frozenset[str] = frozenset()
# torch.distributed's variables were set by hand, not by an operator in a pod.
_BY_HAND = ((_LOCAL, _NOTHING), (_RANK, _POD), (frozenset({"WORLD_SIZE"}), _POD))
# From the innermost to the outermost: a launcher is started inside those below it. flk's sets torchrun's variables too.
LAUNCHERS = (
    Launcher(
        "flk", user_env.ATTEMPT, read_numbers, node_rank="GROUP_RANK", nodes="GROUP_WORLD_SIZE",
        attempt=user_env.ATTEMPT, full_world_size=user_env.FULL_WORLD_SIZE, agent_store=True, final=True,
        recognise=_is_of_flk,
    ),
    Launcher(
        "torchrun", "TORCHELASTIC_RUN_ID", read_numbers, node_rank="GROUP_RANK", nodes="GROUP_WORLD_SIZE",
        attempt="TORCHELASTIC_RESTART_COUNT", agent_store=True, final=True,
    ),
    Launcher(  # by hand, or by a launcher like torchrun
        "env", "LOCAL_RANK", read_numbers, node_rank="GROUP_RANK", nodes="GROUP_WORLD_SIZE",
        attempt="TORCHELASTIC_RESTART_COUNT", agent_store=True, signs=_BY_HAND,
    ),
    Launcher(
        "horovod", "HOROVOD_RANK", read_numbers, "HOROVOD_RANK", "HOROVOD_LOCAL_RANK", "HOROVOD_SIZE",
        "HOROVOD_LOCAL_SIZE", start_id=("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    ),
    Launcher(
        "openmpi", "OMPI_COMM_WORLD_RANK", read_numbers, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", start_id=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        hosts=_HOSTS, daemons="OMPI_MCA_ess_base_num_procs",
    ),
    Launcher(  # MPICH, Intel MPI
        "mpich", "PMI_RANK", read_numbers, "PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS",
        start_id=_HYDRA, hosts=_HOSTS,
    ),
    Launcher(
        "slurm", "SLURM_STEP_ID", read_slurm, "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_TASKS_PER_NODE",
        node_rank="SLURM_NODEID", attempt="SLURM_RESTART_COUNT", hosts=("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
        start_id=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        recognise=lambda environ: environ.get("SLURM_STEP_ID") not in _STEPS_WITHOUT_SRUN,
    ),
    Launcher(
        "pytorchjob", "PET_NODE_RANK", read_pod, "RANK", "", "WORLD_SIZE", "", node_rank="PET_NODE_RANK",
        nodes="PET_NNODES", signs=((_POD | _RANK, _LOCAL),),
    ),
    Launcher(
        "trainer", "PET_NODE_RANK", read_pod, "PET_NODE_RANK", "", "PET_NNODES", "", node_rank="PET_NODE_RANK",
        nodes="PET_NNODES", address="PET_MASTER_ADDR", port="PET_MASTER_PORT", signs=((_POD, _RANK | _LOCAL),),
    ),
)  # fmt: skip
