"""The rank and sizes of a process under each launcher of the field, and what is refused."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from flk_runtime.discovery import LAUNCHERS, RankInfo, discover
from tests.support.environments import (
    BATCH,
    FLK,
    HOROVOD,
    INSIDE_FLK,
    MEETING,
    MPICH,
    OPENMPI,
    PODS,
    SLURM,
    TORCHRUN,
    TRAINER,
    refused,
)


def test_a_process_without_a_launcher_is_a_world_of_one() -> None:
    assert discover({}) == RankInfo(0, 0, 1, 1, 0, "alone", None, 0)
    assert discover({"PATH": "/bin", "RANK": "", "PET_NNODES": "1"}) == RankInfo()


@pytest.mark.parametrize(("environ", "launcher", "restarts"), [(TORCHRUN, "torchrun", 2), (FLK, "flk", 3)])
def test_torchrun_and_flk(environ: dict[str, str], launcher: str, restarts: int) -> None:
    assert discover(environ) == RankInfo(5, 1, 8, 4, 1, launcher, ("10.0.0.7", 29501), restarts, 2)


def test_who_holds_the_store() -> None:
    assert discover({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}).agent_store
    assert not discover({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"}).agent_store
    assert not discover({**SLURM, "TORCHELASTIC_USE_AGENT_STORE": "True"}).agent_store


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
    refused({**TORCHRUN, **changes}, words)


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
    assert discover({**TRAINER, "PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "auto"}) == RankInfo(
        launcher="trainer"
    )


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
        (TRAINER, {"PET_NPROC_PER_NODE": "8"}, ["PET_NODE_RANK=1", "PET_NPROC_PER_NODE=8", "or submit it with flk"]),
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
    assert discover({**several, "MASTER_ADDR": "n1"}).master == ("n1", info.master[1])
    refused(several, ["MASTER_ADDR must", "OMPI_COMM_WORLD_RANK=3"])


def test_mpich() -> None:
    assert discover({**MPICH, **MEETING}) == RankInfo(3, 1, 4, 2, 1, "mpich", ("10.0.0.7", 29501), 0, 2)
    refused({**MPICH, "MASTER_ADDR": "n1"}, ["MASTER_PORT must"])


def test_mpich_on_one_node_needs_a_port() -> None:
    # Hydra sets nothing that would tell one start from another.
    one = {**MPICH, "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4"}
    refused(one, ["MASTER_PORT must"])
    assert discover({**one, "MASTER_PORT": "4000"}).master == ("127.0.0.1", 4000)


def test_slurm() -> None:
    info = discover(SLURM)
    assert info == RankInfo(5, 1, 7, 2, 2, "slurm", info.master, 0, 4)
    last = {**SLURM, "SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "3", "SLURM_RESTART_COUNT": "2"}
    assert discover(last) == RankInfo(6, 0, 7, 1, 3, "slurm", info.master, 2, 4)
    assert discover({**SLURM, "SLURM_STEP_ID": "1"}).master != info.master
    assert discover({**SLURM, "SLURM_JOB_ID": "813"}).master != info.master
    assert discover({**SLURM, "MASTER_ADDR": "ib7"}).master == ("ib7", info.master[1])
    assert discover({**SLURM, "MASTER_PORT": "4000"}).master == ("gpu07", 4000)
    # Components of a heterogeneous job: the first one has rank 0 in a step of all, but not of some, nor of another job.
    parts = {
        "SLURM_JOB_NODELIST_HET_GROUP_0": "login2",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "gpu[05-12]",
        "SLURM_JOB_NUM_NODES_HET_GROUP_0": "1",
        "SLURM_JOB_NUM_NODES_HET_GROUP_1": "3",
        "SLURM_JOB_ID_HET_GROUP_0": SLURM["SLURM_JOB_ID"],
        "SLURM_STEP_NUM_NODES": "4",
    }
    assert discover({**SLURM, **parts}).master == ("login2", info.master[1])
    for other in ({"SLURM_STEP_NUM_NODES": "2"}, {"SLURM_JOB_ID_HET_GROUP_0": "1"}):
        assert discover({**SLURM, **parts, **other}).master == info.master


def test_slurm_knows_its_nodes_where_ranks_go_round_them() -> None:
    # srun -m cyclic, and --preserve-env, which leaves the numbers of the job in SLURM_NTASKS and SLURM_TASKS_PER_NODE.
    environ = {**SLURM, "SLURM_NTASKS": "64", "SLURM_TASKS_PER_NODE": "16(x4)"}
    environ |= {"SLURM_PROCID": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"}
    assert discover(environ) == RankInfo(4, 1, 7, 2, 0, "slurm", discover(SLURM).master, 0, 4)


def test_slurm_on_one_node_needs_no_name() -> None:
    environ = {**BATCH, "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_LOCALID": "2"}
    info = discover({**environ, "MASTER_PORT": "4000"})
    assert info == RankInfo(2, 2, 4, 4, 0, "slurm", ("127.0.0.1", 4000))
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


@pytest.mark.promise("Jobs: Variables of two launchers that contradict each other are named before any connection")
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
    horovod = {**HOROVOD, **MEETING}
    assert discover({**horovod, "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}) == discover(horovod)


def test_a_launcher_that_another_started_once_per_node() -> None:
    # mpirun on three nodes of a Slurm job: srun starts its daemons on the two others, and they start the ranks.
    daemons = {**SLURM, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1",
               "SLURM_LOCALID": "0", "SLURM_NODEID": "1"}  # fmt: skip
    ranks = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
             "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}  # fmt: skip
    info = discover({**daemons, **ranks, "PMIX_NAMESPACE": "7"})
    assert info == RankInfo(5, 1, 6, 2, 2, "openmpi", info.master, 0, 3)
    assert info.master
    assert info.master[0] == "gpu05", "the first host of the job, not of the step"
    # srun -n 1 mpiexec -n 4; a wrapper of one's own in each pod of an operator.
    one = {**BATCH, "SLURM_STEP_ID": "0", "SLURM_NTASKS": "1", "SLURM_TASKS_PER_NODE": "1"}
    assert discover({**one, **MPICH, **MEETING}) == discover({**MPICH, **MEETING})
    assert discover({**one, **TORCHRUN}) == discover(TORCHRUN)
    assert discover(INSIDE_FLK) == discover(TORCHRUN)
    assert discover({**TRAINER, **MPICH, **MEETING}) == discover({**MPICH, **MEETING})


@pytest.mark.promise("Jobs: Variables of two launchers that contradict each other are named before any connection")
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
        ({**HOROVOD, **MEETING, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}, ["HOROVOD_RANK=3", "OMPI_"]),
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
        ({**MPICH, "MPI_LOCALRANKID": "0"}, ["PMI_RANK=3", "must be PMI_RANK % MPI_LOCALNRANKS = 1", "mpiexec -hosts"]),
        ({**MPICH, "PMI_SIZE": "5"}, ["PMI_SIZE=5", "not a multiple of MPI_LOCALNRANKS"]),
        ({**MPICH, "MPI_LOCALRANKID": None}, ["MPI_LOCALRANKID must", "PMI_RANK=3"]),
        ({**HOROVOD, "HOROVOD_SIZE": "0"}, ["HOROVOD_SIZE=0"]),
    ],
)  # fmt: skip
def test_launchers_that_contradict_each_other(environ: dict[str, str | None], words: list[str]) -> None:
    refused(environ, words)


def test_the_page_of_launchers_is_the_table() -> None:
    page = (Path(__file__).parents[4] / "docs" / "concepts" / "how-ranks-meet.md").read_text()
    section = page.partition("## Where the numbers come from")[2].partition("\n## ")[0]
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
    addresses = page.partition("## Where the ranks meet")[2].partition("\n## ")[0]
    for launcher in LAUNCHERS:
        names = (launcher.address, launcher.port) if launcher.start_id is None else launcher.start_id
        assert any(f"`{name}`" in addresses for name in names), f"{launcher.name}: {names}"
        assert not launcher.hosts or f"`{launcher.hosts[0]}`" in addresses


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
