"""Where OpenFlamingo finds the same rank in an environment as flk, and where another one, with the reason.

OpenFlamingo starts under torchrun, Slurm and, with a flag, Horovod. Its rule is reimplemented here from the description
of open_flamingo/train/distributed.py: the first variable of a list that is set counts.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from flk_runtime.discovery import discover
from flk_runtime.errors import DiscoveryError

LOCAL_RANKS = ("LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
RANKS = ("RANK", "PMI_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
WORLD_SIZES = ("WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")


def open_flamingo(environ: Mapping[str, str], *, horovod: bool = False) -> tuple[int, int, int] | None:
    """Rank, local rank and world size by OpenFlamingo's rule; None where its process group can't be opened."""

    def first(names: tuple[str, ...], default: int) -> int:
        return next((int(environ[name]) for name in names if name in environ), default)

    if horovod:  # what hvd.init() says under horovodrun
        return tuple(int(environ[f"HOROVOD_{name}"]) for name in ("RANK", "LOCAL_RANK", "SIZE"))  # type: ignore[return-value]
    if "MASTER_ADDR" not in environ or "MASTER_PORT" not in environ:
        return None  # init_method is env://, for a single process too
    distributed = int(environ.get("WORLD_SIZE", environ.get("SLURM_NTASKS", "1"))) > 1
    if not distributed:
        return 0, 0, 1
    if "SLURM_PROCID" in environ:
        return first(RANKS, 0), first(LOCAL_RANKS, 0), first(WORLD_SIZES, 1)
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    return int(environ["RANK"]), first(LOCAL_RANKS, 0), int(environ["WORLD_SIZE"])


def ours(environ: Mapping[str, str]) -> tuple[int, int, int]:
    info = discover(environ)
    return info.rank, info.local_rank, info.world_size


MASTER = {"MASTER_ADDR": "n1", "MASTER_PORT": "15000"}
BY_HAND = {**MASTER, "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
TORCHRUN = {**BY_HAND, "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_JOB_NODELIST": "n[1-2]",
}  # fmt: skip
# srun -N 2 --ntasks-per-node 1, in which something else is started; the second node.
ONE_PER_NODE = {
    **SLURM, "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "1(x2)",
}  # fmt: skip
ALONE_IN_SLURM = {**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "1",
                  "SLURM_NNODES": "1", "SLURM_TASKS_PER_NODE": "1"}  # fmt: skip
BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "8",
         "SLURM_NNODES": "2", "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_JOB_NODELIST": "n[1-2]"}  # fmt: skip
OPENMPI = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "8",
           "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}  # fmt: skip
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
HOROVOD = {"HOROVOD_RANK": "5", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_SIZE": "8", "HOROVOD_LOCAL_SIZE": "4"}
PET = {"PET_NODE_RANK": "1", "PET_NNODES": "2", "PET_MASTER_ADDR": "n1", "PET_MASTER_PORT": "15000"}
PYTORCHJOB = {**MASTER, **PET, "RANK": "1", "WORLD_SIZE": "2", "PET_NPROC_PER_NODE": "auto"}

AGREED: dict[str, dict[str, str]] = {
    "torchrun": TORCHRUN,
    "torchrun in a step of Slurm": {**TORCHRUN, **ONE_PER_NODE},
    "torchrun in the script of sbatch": {**TORCHRUN, **BATCH},
    "torchrun in a pod of a PyTorchJob": {**PYTORCHJOB, **TORCHRUN},
    "all set by hand": BY_HAND,
    "srun, with an address exported by the script of sbatch": {**SLURM, **MASTER},
    "srun, and RANK and the rest exported from Slurm's": {**SLURM, **BY_HAND},
    "srun, and WORLD_SIZE exported": {**SLURM, **MASTER, "WORLD_SIZE": "8"},
    "srun --mpi=pmi2, which numbers for MPI as Slurm does": {**SLURM, **MASTER, "PMI_RANK": "5", "PMI_SIZE": "8"},
    "srun -n 1": {**ALONE_IN_SLURM, **MASTER},
    "a single process, with an address": MASTER,
    "pods of a PyTorchJob with one process each": PYTORCHJOB,
    "horovodrun, with the flag": {**HOROVOD, **MASTER},
}

# What OpenFlamingo reads (None: it fails), and what flk reads (text: words of the refusal).
DIFFERENT: dict[str, tuple[dict[str, str], tuple[int, int, int] | None, tuple[int, int, int] | str]] = {
    # A single process needs no address: its process group has no other rank.
    "nothing set": ({}, None, (0, 0, 1)),
    # The first host of the node list and a port made from the job are known to all tasks.
    "srun without an address": (SLURM, None, (5, 1, 8)),
    # Only WORLD_SIZE and SLURM_NTASKS count there, so each rank would train alone, as rank 0.
    "mpirun of Open MPI": ({**OPENMPI, **MASTER}, (0, 0, 1), (5, 1, 8)),
    # As under Open MPI.
    "mpiexec of MPICH": ({**MPICH, **MASTER}, (0, 0, 1), (5, 1, 8)),
    # Slurm's variables of the script are the same for all ranks: every one would be rank 0.
    "mpirun in the script of sbatch": ({**BATCH, **OPENMPI, **MASTER}, (0, 0, 8), (5, 1, 8)),
    # horovodrun's variables are sufficient; no flag is needed.
    "horovodrun without the flag": ({**HOROVOD, **MASTER}, (0, 0, 1), (5, 1, 8)),
    # LOCAL_RANK is 0 in all processes, and each sees one GPU as cuda:0; flk still numbers the ranks of a node.
    "torchrun --virtual-local-rank": (
        {**TORCHRUN, "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "1"},
        (5, 0, 8),
        (5, 1, 8),
    ),
    # There is no WORLD_SIZE, so each pod would train alone; PET_NNODES and PET_NODE_RANK give the numbers.
    "pods of a TrainJob with one process each": ({**MASTER, **PET, "PET_NPROC_PER_NODE": "1"}, (0, 0, 1), (1, 0, 2)),
    # PMI_RANK comes before SLURM_PROCID in its list: every task would be rank 0 of 1.
    "PMI_RANK left over beside srun": (
        {**SLURM, **MASTER, "PMI_RANK": "0", "PMI_SIZE": "1"},
        (0, 1, 1),
        "PMI_RANK=0, PMI_SIZE=1",
    ),
    # Eight ranks would wait for eight others that nobody starts.
    "WORLD_SIZE left over beside srun": ({**SLURM, **MASTER, "WORLD_SIZE": "16"}, (5, 1, 16), "WORLD_SIZE=16"),
    # All ranks of a node would share its first GPU.
    "LOCAL_RANK left over beside srun": ({**SLURM, **MASTER, "LOCAL_RANK": "0"}, (5, 0, 8), "LOCAL_RANK=0"),
    # Rank 0 would wait for seven others that nobody starts.
    "the script of sbatch without srun": ({**BATCH, **MASTER}, (0, 0, 8), "SLURM_NTASKS=8"),
    # RANK is the pod's number: two ranks would wait for six others that nobody starts.
    "pods of a PyTorchJob with several processes, without a launcher": (
        {**PYTORCHJOB, "WORLD_SIZE": "8", "PET_NPROC_PER_NODE": "4"},
        (1, 0, 8),
        "PET_NPROC_PER_NODE=4",
    ),
    # Each pod would train alone, on one of its four GPUs.
    "pods of a TrainJob with several processes, without a launcher": (
        {**MASTER, **PET, "PET_NPROC_PER_NODE": "4"},
        (0, 0, 1),
        "PET_NPROC_PER_NODE=4",
    ),
    # All ranks of a node would share its first GPU.
    "RANK and WORLD_SIZE without LOCAL_RANK": (
        {**MASTER, "RANK": "5", "WORLD_SIZE": "8"},
        (5, 0, 8),
        "LOCAL_RANK and LOCAL_WORLD_SIZE must be set",
    ),
    # Both fail; ours says it before anything is connected.
    "an address missing by hand": (
        {name: value for name, value in BY_HAND.items() if name != "MASTER_ADDR"},
        None,
        "MASTER_ADDR must be set",
    ),
}


@pytest.mark.parametrize("name", AGREED)
def test_environments_that_are_read_alike(name: str) -> None:
    theirs = open_flamingo(AGREED[name], horovod="HOROVOD_RANK" in AGREED[name])
    assert theirs is not None
    assert ours(AGREED[name]) == theirs


@pytest.mark.parametrize("name", DIFFERENT)
def test_environments_that_are_read_differently(name: str) -> None:
    environ, theirs, expected = DIFFERENT[name]
    assert open_flamingo(environ) == theirs
    if isinstance(expected, tuple):
        assert ours(environ) == expected
        assert expected != theirs
    else:
        with pytest.raises(DiscoveryError) as caught:
            discover(environ)
        assert expected in str(caught.value)
