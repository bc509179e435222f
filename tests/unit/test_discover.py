"""The rank and sizes of a process under each launcher of the field, and what is refused."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flk_runtime import contract
from flk_runtime.discovery import LAUNCHERS, RankInfo, discover
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
FLK = {**TORCHRUN, contract.ATTEMPT: "3", "TORCHELASTIC_RESTART_COUNT": "3"}


def test_alone() -> None:
    assert discover({}) == RankInfo(0, 0, 1, 1, 0, "alone", None, 0)
    assert discover({"PATH": "/bin", "RANK": "", "PET_NNODES": "1"}) == RankInfo()


def test_torchrun() -> None:
    assert discover(TORCHRUN) == RankInfo(5, 1, 8, 4, 1, "torchrun", ("10.0.0.7", 29501), 2, 2)


def test_flk() -> None:
    assert discover(FLK) == RankInfo(5, 1, 8, 4, 1, "flk", ("10.0.0.7", 29501), 3, 2)


def test_who_holds_the_store() -> None:
    assert discover({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}).agent_store
    assert not discover({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"}).agent_store
    assert not discover({**SLURM, "TORCHELASTIC_USE_AGENT_STORE": "True"}).agent_store


def test_a_launcher_inside_an_operators_pod_is_believed() -> None:
    assert discover({**TORCHRUN, "PET_NNODES": "2", "PET_NODE_RANK": "1"}).launcher == "torchrun"


def test_variables_set_by_hand() -> None:
    by_hand = {
        name: value for name, value in TORCHRUN.items() if not name.startswith("TORCHELASTIC") and name != "GROUP_RANK"
    }
    assert discover(by_hand) == RankInfo(5, 1, 8, 4, 1, "env", ("10.0.0.7", 29501), 0, 2)


def test_a_world_of_one_leaves_nothing_open() -> None:
    assert discover({"WORLD_SIZE": "1"}) == RankInfo(launcher="env")
    assert discover({"WORLD_SIZE": "1", "RANK": "0", "MASTER_PORT": "x"}) == RankInfo(launcher="env")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"LOCAL_RANK": None}, ["LOCAL_RANK", "RANK=5", "WORLD_SIZE=8"]),
        ({"RANK": None}, ["RANK must", "LOCAL_RANK=1"]),
        ({"WORLD_SIZE": None, "LOCAL_WORLD_SIZE": None}, ["WORLD_SIZE and LOCAL_WORLD_SIZE must"]),
        ({"WORLD_SIZE": "eight"}, ["WORLD_SIZE=eight"]),
        ({"WORLD_SIZE": "-8"}, ["WORLD_SIZE=-8"]),
        ({"WORLD_SIZE": "8.0"}, ["WORLD_SIZE=8.0"]),
        ({"WORLD_SIZE": "٨"}, ["WORLD_SIZE=٨"]),
        ({"WORLD_SIZE": "9" * 5000}, ["WORLD_SIZE=9"]),
        ({"WORLD_SIZE": "0"}, ["WORLD_SIZE=0"]),
        ({"RANK": "8"}, ["RANK=8", "WORLD_SIZE=8"]),
        ({"LOCAL_RANK": "4"}, ["LOCAL_RANK=4", "LOCAL_WORLD_SIZE=4"]),
        ({"LOCAL_WORLD_SIZE": "9"}, ["LOCAL_WORLD_SIZE=9", "WORLD_SIZE=8"]),
        ({"LOCAL_WORLD_SIZE": "3"}, ["WORLD_SIZE=8", "LOCAL_WORLD_SIZE=3", "not a multiple"]),
        (
            {"GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"},
            ["on 1 node, LOCAL_WORLD_SIZE must be the same as"],
        ),
        ({"GROUP_WORLD_SIZE": "6"}, ["LOCAL_WORLD_SIZE=4", "LOCAL_WORLD_SIZE + 5", "6 nodes"]),
        ({"GROUP_WORLD_SIZE": "2", "GROUP_RANK": "2"}, ["GROUP_RANK=2", "2 nodes"]),
        ({"MASTER_ADDR": None}, ["MASTER_ADDR"]),
        ({"MASTER_PORT": ""}, ["MASTER_PORT"]),
        ({"MASTER_PORT": "70000"}, ["MASTER_PORT=70000"]),
        ({"TORCHELASTIC_RESTART_COUNT": "x"}, ["TORCHELASTIC_RESTART_COUNT=x"]),
    ],
)
def test_contradictions_are_named(changes: dict[str, str | None], words: list[str]) -> None:
    environ = {name: value for name, value in {**TORCHRUN, **changes}.items() if value is not None}
    with pytest.raises(DiscoveryError) as caught:
        discover(environ)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.code == contract.ExitCode.USAGE


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
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
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
    {*FLK, "TORCHELASTIC_USE_AGENT_STORE", "GROUP_WORLD_SIZE", *PODS, *HOROVOD, *OPENMPI, *MPICH, *MVAPICH, *SLURM}
    | {"SLURM_RESTART_COUNT", "PMI_JOBID"}
)


def test_pods_of_a_pytorchjob_with_one_process_each() -> None:
    expected = RankInfo(1, 0, 2, 1, 1, "pytorchjob", ("job-master-0", 23456), 0, 2)
    assert discover(PODS) == discover({**PODS, "PET_NPROC_PER_NODE": "1"}) == expected
    assert discover({**PODS, "RANK": "0", "WORLD_SIZE": "1", "PET_NODE_RANK": "0", "PET_NNODES": "1"}) == RankInfo(
        launcher="pytorchjob"
    )


def test_pods_of_a_trainjob_with_one_process_each() -> None:
    assert discover(TRAINER) == RankInfo(1, 0, 2, 1, 1, "trainer", ("job-node-0-0.job", 29500), 0, 2)
    assert discover({**TRAINER, "PET_NNODES": "1", "PET_NODE_RANK": "0"}) == RankInfo(launcher="trainer")
    # The only process of the only pod keeps nobody waiting.
    only = {**TRAINER, "PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "auto"}
    assert discover(only) == RankInfo(launcher="trainer")


@pytest.mark.parametrize(
    ("pod", "changes", "words"),
    [
        (PODS, {"WORLD_SIZE": "4", "PET_NPROC_PER_NODE": "2"}, ["RANK=1", "PET_NPROC_PER_NODE=2", "number of the pod"]),
        (PODS, {"WORLD_SIZE": "4"}, ["WORLD_SIZE=4", "PET_NNODES=2", "torchrun script.py"]),
        (PODS, {"PET_NPROC_PER_NODE": "gpu"}, ["PET_NPROC_PER_NODE=gpu"]),
        (PODS, {"PET_NODE_RANK": "0"}, ["PET_NODE_RANK=0", "RANK=1"]),
        (PODS, {"PET_NNODES": "1:4"}, ["PET_NNODES=1:4", "elastic", "torchrun script.py"]),
        (PODS, {"PET_NNODES": None}, ["PET_NNODES must", "RANK=1"]),
        (PODS, {"MASTER_ADDR": None}, ["MASTER_ADDR must", "RANK=1"]),
        (TRAINER, {"PET_NPROC_PER_NODE": "8"}, ["PET_NODE_RANK=1", "PET_NPROC_PER_NODE=8", "python -m flk_runtime"]),
        (TRAINER, {"PET_NPROC_PER_NODE": "auto"}, ["PET_NPROC_PER_NODE=auto"]),
        (TRAINER, {"PET_MASTER_PORT": None}, ["PET_MASTER_PORT must", "PET_NODE_RANK=1"]),
        ({}, {"PET_NNODES": "4"}, ["PET_NNODES=4", "train alone"]),
        ({}, {"PET_NNODES": "1:4"}, ["PET_NNODES=1:4", "train alone"]),
    ],
)
def test_a_pod_of_an_operator_without_a_launcher(
    pod: dict[str, str], changes: dict[str, str | None], words: list[str]
) -> None:
    refused({**pod, **changes}, words)


def refused(environ: Mapping[str, str | None], words: list[str]) -> None:
    with pytest.raises(DiscoveryError) as caught:
        discover({name: value for name, value in environ.items() if value is not None})
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_virtual_local_ranks_are_places_on_the_node() -> None:
    # torchrun --virtual-local-rank: LOCAL_RANK is 0 in all workers, each of which sees one GPU.
    environ = {**TORCHRUN, "GROUP_WORLD_SIZE": "2", "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "5"}
    assert [discover({**environ, "RANK": str(rank)}).local_rank for rank in (4, 5, 6, 7)] == [0, 1, 2, 3]
    # Where nodes differ, its info on the node can't be told; LOCAL_RANK is believed.
    uneven = {**environ, "WORLD_SIZE": "7", "RANK": "5", "LOCAL_WORLD_SIZE": "3"}
    assert (discover(uneven).local_rank, discover(uneven).nodes) == (0, 2)
    assert discover({**environ, "RANK": "5", "LOCAL_RANK": "3"}).local_rank == 3


def test_horovod() -> None:
    assert discover(HOROVOD) == RankInfo(3, 1, 4, 2, 1, "horovod", None, 0, 2)
    assert discover({**HOROVOD, **MEETING}).master == ("10.0.0.7", 29501)
    # `horovodrun --mpi` is mpirun: no HOROVOD_RANK, but settings of Horovod's.
    assert discover({**OPENMPI, "HOROVOD_FUSION_THRESHOLD": "0"}).launcher == "openmpi"
    one_node = {**HOROVOD, "HOROVOD_LOCAL_RANK": "3", "HOROVOD_LOCAL_SIZE": "4"}
    master = discover(one_node).master
    assert master
    assert master[0] == "127.0.0.1"
    assert discover({**one_node, "HOROVOD_GLOO_RENDEZVOUS_PORT": "41235"}).master != master


def test_openmpi() -> None:
    info = discover(OPENMPI)
    assert info == RankInfo(3, 3, 4, 4, 0, "openmpi", info.master)
    assert info.master
    assert info.master[0] == "127.0.0.1"
    assert 15000 <= info.master[1] < 25000
    other = discover({**OPENMPI, "PMIX_NAMESPACE": "7", "OMPI_MCA_ess_base_jobid": "7"}).master
    assert other != info.master
    assert discover({**OPENMPI, "MASTER_PORT": "4000"}).master == ("127.0.0.1", 4000)
    several = {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    assert discover(several) == RankInfo(3, 1, 4, 2, 1, "openmpi", None, 0, 2)
    assert discover({**several, "MASTER_ADDR": "n1"}).master == ("n1", info.master[1])
    refused({**several, "MASTER_PORT": "4000"}, ["MASTER_ADDR must", "OMPI_COMM_WORLD_RANK=3"])


@pytest.mark.parametrize("environ", [MPICH, MVAPICH], ids=["mpich", "mvapich2"])
def test_mpich(environ: dict[str, str]) -> None:
    assert discover(environ) == RankInfo(3, 1, 4, 2, 1, "mpich", None, 0, 2)
    assert discover({**environ, **MEETING}).master == ("10.0.0.7", 29501)
    refused({**environ, "MASTER_ADDR": "n1"}, ["MASTER_PORT must"])


def test_mpich_on_one_node_needs_a_port_or_its_communicator() -> None:
    # Hydra sets nothing that would tell one start from another.
    one = {**MPICH, "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4"}
    assert discover(one).master is None
    assert discover({**one, "MASTER_PORT": "4000"}).master == ("127.0.0.1", 4000)


def test_one_process_of_mpirun_is_a_world_of_one() -> None:
    one = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    assert discover(one) == RankInfo(launcher="openmpi")
    assert discover({"PMI_RANK": "0", "PMI_SIZE": "1"}) == RankInfo(launcher="mpich")


def test_slurm() -> None:
    info = discover(SLURM)
    assert info == RankInfo(5, 1, 7, 2, 2, "slurm", info.master, 0, 4)
    assert info.master
    assert info.master[0] == "gpu07"
    last = {**SLURM, "SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "3", "SLURM_RESTART_COUNT": "2"}
    assert discover(last) == RankInfo(6, 0, 7, 1, 3, "slurm", info.master, 2, 4)
    assert discover({**SLURM, "SLURM_STEP_ID": "1"}).master != info.master
    assert discover({**SLURM, "SLURM_JOB_ID": "813"}).master != info.master
    assert discover({**SLURM, "MASTER_ADDR": "ib7"}).master == ("ib7", info.master[1])
    assert discover({**SLURM, "MASTER_PORT": "4000"}).master == ("gpu07", 4000)
    assert discover({**SLURM, **MEETING}).master == ("10.0.0.7", 29501)


def test_slurm_knows_its_nodes_where_ranks_go_round_them() -> None:
    # srun -m cyclic, and --preserve-env, which leaves the numbers of the job in SLURM_NTASKS and SLURM_TASKS_PER_NODE.
    environ = {**SLURM, "SLURM_NTASKS": "64", "SLURM_TASKS_PER_NODE": "16(x4)"}
    environ |= {"SLURM_PROCID": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"}
    assert discover(environ) == RankInfo(4, 1, 7, 2, 0, "slurm", discover(SLURM).master, 0, 4)


def test_slurm_on_one_node_needs_no_name() -> None:
    environ = {**BATCH, "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_LOCALID": "2"}
    info = discover(environ)
    assert info == RankInfo(2, 2, 4, 4, 0, "slurm", info.master)
    assert info.master
    assert info.master[0] == "127.0.0.1"
    assert discover({**environ, "SLURM_NTASKS": "1", "SLURM_TASKS_PER_NODE": "1", "SLURM_PROCID": "0",
                     "SLURM_LOCALID": "0"}) == RankInfo(launcher="slurm")  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"SLURM_PROCID": None}, ["SLURM_PROCID must", "SLURM_STEP_ID=0"]),
        ({"SLURM_NODEID": None}, ["SLURM_NODEID must"]),
        ({"SLURM_TASKS_PER_NODE": None, "SLURM_STEP_TASKS_PER_NODE": None}, ["SLURM_TASKS_PER_NODE must"]),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3"}, ["SLURM_STEP_TASKS_PER_NODE=2(x3", "not a number of tasks"]),
        ({"SLURM_STEP_NUM_TASKS": "8"}, ["SLURM_STEP_TASKS_PER_NODE=2(x3),1", "7 tasks", "SLURM_STEP_NUM_TASKS=8"]),
        ({"SLURM_PROCID": "7"}, ["SLURM_PROCID=7", "must be less than SLURM_STEP_NUM_TASKS"]),
        ({"SLURM_LOCALID": "2"}, ["SLURM_LOCALID=2"]),
        ({"SLURM_NODEID": "4"}, ["SLURM_NODEID=4"]),
        ({"SLURM_STEP_NODELIST": "gpu[7-"}, ["SLURM_STEP_NODELIST=gpu[7-", "list of hosts"]),
        ({"SLURM_STEP_NODELIST": None, "SLURM_JOB_NODELIST": None}, ["MASTER_ADDR must", "SLURM_PROCID=5"]),
    ],
)
def test_contradictions_of_slurm_are_named(changes: dict[str, str | None], words: list[str]) -> None:
    refused({**SLURM, **changes}, words)


@pytest.mark.parametrize("step", [{}, {"SLURM_STEP_ID": "4294967290"}, {"SLURM_STEP_ID": "4294967291"}])
def test_a_shell_in_a_slurm_job_waits_for_nobody(step: dict[str, str]) -> None:
    refused({**BATCH, **step}, ["SLURM_NTASKS=4", "srun did not start", "`srun python script.py`", "WORLD_SIZE=1"])
    refused({**BATCH, **step, "SLURM_NTASKS": "", "SLURM_NNODES": "2"}, ["SLURM_NNODES=2", "srun python"])
    # salloc on a login node: no number of a process at all.
    refused({"SLURM_JOB_ID": "9", "SLURM_NTASKS": "4", "SLURM_JOB_NAME": "interactive"}, ["SLURM_NTASKS=4"])
    assert discover({**BATCH, **step, "SLURM_NTASKS": "1"}) == RankInfo()
    assert discover({**BATCH, **step, "WORLD_SIZE": "1"}) == RankInfo(launcher="env")
    assert discover({**BATCH, **step, **OPENMPI}).launcher == "openmpi"
    assert discover({**BATCH, **step, **TORCHRUN}).launcher == "torchrun"


def test_variables_written_down_once_more_change_nothing() -> None:
    by_hand = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "7", "MASTER_ADDR": "gpu07", "MASTER_PORT": "29500"}
    expected = RankInfo(5, 1, 7, 2, 2, "slurm", ("gpu07", 29500), 0, 4)
    assert discover({**SLURM, **by_hand}) == expected
    assert (
        discover({**SLURM, **by_hand, "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "2", "GROUP_WORLD_SIZE": "4"}) == expected
    )
    assert discover({**SLURM, "WORLD_SIZE": "7"}).launcher == "slurm"
    # srun --mpi=pmi2 numbers the tasks for MPI as well.
    assert discover({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "7", "PMI_FD": "9"}) == discover(SLURM)
    assert discover({**HOROVOD, "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}) == discover(HOROVOD)


def test_a_launcher_that_another_started_once_per_node() -> None:
    # mpirun on three nodes of a Slurm job: srun starts its daemons on the two others, and they start the ranks.
    daemons = {**SLURM, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1",
               "SLURM_LOCALID": "0", "SLURM_NODEID": "1"}  # fmt: skip
    ranks = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
             "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}  # fmt: skip
    assert discover({**daemons, **ranks}) == RankInfo(5, 1, 6, 2, 2, "openmpi", None, 0, 3)
    # srun -n 1 horovodrun -np 4; a wrapper of one's own in each pod of an operator.
    one = {**BATCH, "SLURM_STEP_ID": "0", "SLURM_NTASKS": "1", "SLURM_TASKS_PER_NODE": "1"}
    assert discover({**one, **HOROVOD}) == discover(HOROVOD)
    assert discover({**one, **TORCHRUN}) == discover(TORCHRUN)
    assert discover({**TRAINER, **MPICH}) == discover(MPICH)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        # Left over from the shell that srun was called in: the same in all tasks.
        ({**SLURM, "PMI_RANK": "0", "PMI_SIZE": "1"}, ["PMI_RANK=0", "SLURM_PROCID=5", "contradict", "unset"]),
        ({**SLURM, "PMI_RANK": "5"}, ["PMI_RANK=5", "without PMI_SIZE"]),
        ({**SLURM, "PMI_RANK": "x", "PMI_SIZE": "7"}, ["PMI_RANK=x"]),
        ({**SLURM, **OPENMPI}, ["OMPI_COMM_WORLD_RANK=3", "SLURM_PROCID=5", "contradict"]),
        ({**SLURM, "WORLD_SIZE": "8"}, ["WORLD_SIZE=8", "SLURM_NTASKS=7"]),
        ({**SLURM, "LOCAL_RANK": "0"}, ["LOCAL_RANK=0", "SLURM_LOCALID=1"]),
        ({**SLURM, "WORLD_SIZE": "1"}, ["WORLD_SIZE=1", "SLURM_PROCID=5"]),
        ({**OPENMPI, **MPICH}, ["OMPI_COMM_WORLD_LOCAL_RANK=3", "MPI_LOCALRANKID=1"]),
        ({**HOROVOD, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}, ["HOROVOD_RANK=3", "OMPI_COMM_WORLD"]),
        ({**OPENMPI, "RANK": "3", "WORLD_SIZE": "8"}, ["WORLD_SIZE=8", "OMPI_COMM_WORLD_SIZE=4"]),
        # Ranks on as many nodes as Slurm has tasks would be four at least.
        ({**SLURM, **OPENMPI, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_LOCALID": "0",
          "SLURM_PROCID": "2"}, ["OMPI_COMM_WORLD_RANK=3", "SLURM_PROCID=2"]),
        # Two tasks of Slurm on a node are no daemons of mpirun, one of which would do.
        ({**SLURM, **MPICH, "PMI_SIZE": "16"}, ["PMI_RANK=3", "SLURM_PROCID=5"]),
        # Of two that are incomplete the outer one is more than an exported variable.
        ({**SLURM, "WORLD_SIZE": "7", "SLURM_LOCALID": ""}, ["SLURM_LOCALID must be set"]),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_PROCID": "1",
          "SLURM_NODEID": "0", "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4",
          **MEETING}, ["LOCAL_WORLD_SIZE=4", "SLURM_PROCID=1"]),
        # mpirun --map-by node: which node a rank is on can't be told.
        ({**MPICH, "MPI_LOCALRANKID": "0"}, ["PMI_RANK=3", "must be PMI_RANK % MPI_LOCALNRANKS = 1", "--map-by slot"]),
        ({**MPICH, "PMI_SIZE": "5"}, ["PMI_SIZE=5", "not a multiple of MPI_LOCALNRANKS"]),
        ({**MPICH, "MPI_LOCALRANKID": None}, ["MPI_LOCALRANKID must", "PMI_RANK=3"]),
        ({**HOROVOD, "HOROVOD_SIZE": "0"}, ["HOROVOD_SIZE=0"]),
    ],
)  # fmt: skip
def test_launchers_that_contradict_each_other(environ: dict[str, str | None], words: list[str]) -> None:
    refused(environ, words)


def of_torchrun(node: int, local: int, nodes: int, processes: int) -> dict[str, str]:
    return {
        **MEETING, "TORCHELASTIC_RUN_ID": "none", "RANK": str(node * processes + local), "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(nodes * processes), "LOCAL_WORLD_SIZE": str(processes), "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(nodes),
    }  # fmt: skip


def of_env(node: int, local: int, nodes: int, processes: int) -> dict[str, str]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in of_torchrun(node, local, nodes, processes).items() if name in names}


def of_mpi(prefix: str) -> Callable[[int, int, int, int], dict[str, str]]:
    def environ(node: int, local: int, nodes: int, processes: int) -> dict[str, str]:
        return {
            f"{prefix}RANK": str(node * processes + local), f"{prefix}LOCAL_RANK": str(local),
            f"{prefix}SIZE": str(nodes * processes), f"{prefix}LOCAL_SIZE": str(processes),
            "PMIX_NAMESPACE": "prterun-n1-77@1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "41234",
        }  # fmt: skip

    return environ


def of_mpich(node: int, local: int, nodes: int, processes: int) -> dict[str, str]:
    return {
        "PMI_RANK": str(node * processes + local), "PMI_SIZE": str(nodes * processes), "MPI_LOCALRANKID": str(local),
        "MPI_LOCALNRANKS": str(processes),
    }  # fmt: skip


def of_slurm(node: int, local: int, nodes: int, processes: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "812", "SLURM_STEP_ID": "3", "SLURM_PROCID": str(node * processes + local),
        "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node), "SLURM_NTASKS": str(nodes * processes),
        "SLURM_TASKS_PER_NODE": f"{processes}(x{nodes})", "SLURM_JOB_NODELIST": f"n[1000-{999 + nodes}]",
    }  # fmt: skip


def of_slurm_cyclic(node: int, local: int, nodes: int, processes: int) -> dict[str, str]:
    return {**of_slurm(node, local, nodes, processes), "SLURM_PROCID": str(local * nodes + node)}


def of_pytorchjob(node: int, local: int, nodes: int, processes: int) -> dict[str, str]:
    pod = {**PODS, "RANK": str(node), "PET_NODE_RANK": str(node), "PET_NNODES": str(nodes)}
    pod |= {"WORLD_SIZE": str(nodes * processes), "PET_NPROC_PER_NODE": str(processes)}
    return pod if processes == 1 else {**pod, **of_torchrun(node, local, nodes, processes)}


def of_trainjob(node: int, local: int, nodes: int, processes: int) -> dict[str, str]:
    pod = {**TRAINER, "PET_NODE_RANK": str(node), "PET_NNODES": str(nodes), "PET_NPROC_PER_NODE": str(processes)}
    return pod if processes == 1 else {**pod, **of_torchrun(node, local, nodes, processes)}


SEEN = sorted(Path(__file__).with_name("data").glob("environments/*.json"))
# What started the ranks of each file; by default what the file is called.
STARTED = {
    "horovodrun": "horovod", "pytorchjob_auto": "pytorchjob", "sbatch_mpich": "mpich", "sbatch_openmpi": "openmpi",
    "sbatch_srun": "slurm", "srun": "slurm", "srun_torchrun": "torchrun", "torchrun_c10d": "torchrun",
    "torchrun_standalone": "torchrun", "torchrun_static": "torchrun",
}  # fmt: skip


REFUSED = {
    "sbatch_script": ["SLURM_NTASKS=2", "srun did not start this process"],
    "pytorchjob_two": ["RANK=0", "WORLD_SIZE=4", "PET_NPROC_PER_NODE=2", "no launcher started this process"],
    "trainer_two": ["PET_NODE_RANK=0", "PET_NPROC_PER_NODE=2", "no launcher started this process"],
}


@pytest.mark.parametrize("file", SEEN, ids=lambda file: file.stem)
def test_environments_as_they_were_seen(file: Path) -> None:
    seen = json.loads(file.read_text())
    environs = [{**seen["common"], **rank} for rank in seen["ranks"]]
    if file.stem in REFUSED:
        refused(environs[0], REFUSED[file.stem])
        return
    infos = [discover(environ) for environ in environs]
    assert {info.launcher for info in infos} == {STARTED.get(file.stem, file.stem)}
    assert {info.world_size for info in infos} == {len(environs)}
    assert [info.rank for info in infos] == [*range(len(environs))]
    assert len({(info.node_rank, info.local_rank) for info in infos}) == len(environs)
    assert len({info.master for info in infos}) == 1
    # Only Hydra sets nothing that tells one start from another.
    assert (infos[0].master is None) == ("mpich" in file.stem)


FIELD = {
    "flk": lambda *where: {**of_torchrun(*where), contract.ATTEMPT: "0", "TORCHELASTIC_USE_AGENT_STORE": "True"},
    "torchrun": of_torchrun,
    "torchrun, virtual local ranks": lambda *where: {**of_torchrun(*where), "LOCAL_RANK": "0"},
    "torchrun in a step of Slurm": lambda *where: {**of_slurm(where[0], 0, where[2], 1), **of_torchrun(*where)},
    "env": of_env,
    "horovod": of_mpi("HOROVOD_"),
    "openmpi": of_mpi("OMPI_COMM_WORLD_"),
    "openmpi in a step of Slurm": lambda *where: {
        **of_slurm(where[0], 0, where[2], 1), **of_mpi("OMPI_COMM_WORLD_")(*where)
    },
    "mvapich2": of_mpi("MV2_COMM_WORLD_"),
    "mpich": of_mpich,
    "slurm": of_slurm,
    "slurm, cyclic": of_slurm_cyclic,
    "pytorchjob": of_pytorchjob,
    "trainer": of_trainjob,
}  # fmt: skip


@pytest.mark.parametrize("launcher", FIELD)
@given(nodes=st.integers(1, 40), processes=st.integers(1, 16))
@settings(max_examples=12, deadline=None)
def test_ranks_of_a_job_are_a_permutation(launcher: str, nodes: int, processes: int) -> None:
    check_job(FIELD[launcher], nodes, processes)


@pytest.mark.parametrize("launcher", FIELD)
def test_ranks_of_4096_nodes_are_a_permutation(launcher: str) -> None:
    check_job(FIELD[launcher], 4096, 1)
    check_job(FIELD[launcher], 4096, 16)


def check_job(environ: Callable[[int, int, int, int], dict[str, str]], nodes: int, processes: int) -> None:
    """All ranks are on their node, no two have the same number, and none is missing."""
    ranks, masters = set(), set()
    for node in range(nodes):
        for local in range(processes):
            info = discover(environ(node, local, nodes, processes))
            assert (info.world_size, info.local_world_size, info.nodes) == (nodes * processes, processes, nodes)
            assert (info.node_rank, info.local_rank) == (node, local)
            ranks.add(info.rank)
            masters.add(info.master)
    assert ranks == {*range(nodes * processes)}
    assert len(masters) == 1


@pytest.mark.parametrize("launcher", ["env", "horovod", "openmpi", "mvapich2", "mpich"])
@given(nodes=st.integers(1, 8), processes=st.integers(2, 8), data=st.data())
@settings(max_examples=30, deadline=None)
def test_ranks_that_are_not_numbered_node_by_node_are_refused(
    launcher: str, nodes: int, processes: int, data: st.DataObject
) -> None:
    # These launchers do not number the nodes: a rank's node follows from its number, if local ranks fit to it.
    node, local = data.draw(st.integers(0, nodes - 1)), data.draw(st.integers(0, processes - 1))
    environ = FIELD[launcher](node, local, nodes, processes)
    names = next(row for row in LAUNCHERS if row.is_present(environ))
    other = data.draw(st.integers(0, nodes * processes - 1).filter(lambda rank: rank % processes != local))
    refused({**environ, names.rank: str(other)}, [f"{names.rank}={other}", f"% {names.local_world_size} = "])


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_slurm_with_different_numbers_of_tasks(data: st.DataObject) -> None:
    tasks = data.draw(st.lists(st.integers(1, 16), min_size=1, max_size=12))
    order = [(node, local) for node, count in enumerate(tasks) for local in range(count)]
    if data.draw(st.booleans()):
        order.sort(key=lambda at: at[1])  # srun -m cyclic
    environ = {
        "SLURM_JOB_ID": "812", "SLURM_STEP_ID": "3", "SLURM_NTASKS": str(sum(tasks)),
        "SLURM_TASKS_PER_NODE": ",".join(f"{count}(x{len([*run])})" for count, run in itertools.groupby(tasks)),
        "SLURM_JOB_NODELIST": f"n[1-{len(tasks)}]",
    }  # fmt: skip
    for rank, (node, local) in enumerate(order):
        ids = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node)}
        info = discover({**environ, **ids})
        assert (info.rank, info.local_rank, info.node_rank) == (rank, local, node)
        assert (info.world_size, info.local_world_size, info.nodes) == (sum(tasks), tasks[node], len(tasks))


VALUES = st.one_of(
    st.integers(0, 8).map(str),
    st.text(max_size=6),
    st.sampled_from(["auto", "1:4", "2(x3),1", "1(x4)", "n[1-4]", "n[", "True", "4294967290", "127.0.0.1", "29500"]),
)


@given(st.dictionaries(st.sampled_from(KNOWN), VALUES))
@settings(max_examples=500, deadline=None)
def test_any_environment_gives_a_rank_or_an_error_of_ours(environ: dict[str, str]) -> None:
    check_any(environ)


@given(
    st.sampled_from([FLK, TORCHRUN, PODS, TRAINER, HOROVOD, OPENMPI, MPICH, MVAPICH, SLURM, BATCH, MEETING]),
    st.sampled_from([{}, HOROVOD, OPENMPI, MPICH, SLURM, BATCH, PODS, MEETING]),
    st.dictionaries(st.sampled_from(KNOWN), VALUES, max_size=3),
    st.sets(st.sampled_from(KNOWN), max_size=3),
)
@settings(max_examples=500, deadline=None)
def test_any_change_to_an_environment_gives_a_rank_or_an_error_of_ours(
    first: dict[str, str], second: dict[str, str], changes: dict[str, str], without: set[str]
) -> None:
    check_any({name: value for name, value in {**first, **second, **changes}.items() if name not in without})


def check_any(environ: dict[str, str]) -> None:
    info = None
    message = ""
    try:
        info = discover(environ)
    except DiscoveryError as error:
        message = str(error)
    if info is None:
        assert any(value and f"{name}={value}" in message for name, value in environ.items()), message
        return
    assert 0 <= info.rank < info.world_size
    assert 0 <= info.local_rank < info.local_world_size <= info.world_size
    assert 0 <= info.node_rank < info.nodes <= info.world_size
    assert info.world_size > 1 or info.master is None
    if info.master:
        assert info.master[0]
        assert 0 < info.master[1] < 1 << 16


def test_the_page_of_launchers_is_the_table() -> None:
    page = Path(__file__).parents[2] / "docs" / "launchers.md"
    section = page.read_text().partition("## Where the numbers come from")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "| `" in line]
    written = [tuple(re.findall("^`(.+?)`", cell)[:1] for cell in row[:6]) for row in rows]
    expected = [
        tuple(
            [name] if name else []
            for name in (row.name, row.marker, row.rank, row.local_rank, row.world_size, row.local_world_size)
        )
        for row in LAUNCHERS
    ]
    assert written == [*expected, (["alone"], [], [], [], [], [])]
    for launcher, row in zip(LAUNCHERS, rows, strict=False):
        meeting = (launcher.address, launcher.port) if launcher.start_id is None else launcher.start_id
        assert any(f"`{name}`" in row[6] for name in meeting), f"{launcher.name}: {meeting}"
        assert not launcher.hosts or f"`{launcher.hosts[0]}`" in row[6]


def test_importing_the_package_imports_no_torch() -> None:
    program = (
        "import sys, flk_runtime, flk_runtime.contract\n"
        "from flk_runtime.discovery import discover\n"
        "assert discover({}).rank == 0\n"
        "assert flk_runtime.__version__ == flk_runtime.contract.VERSION\n"
        "assert 'init' in dir(flk_runtime) and not hasattr(flk_runtime, 'nothing')\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
