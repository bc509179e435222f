"""One script, every launcher of the field: the same ranks as the launcher means, and the same loss."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import pytest

TORCHRUN = str(Path(sysconfig.get_path("scripts"), "torchrun"))


def ranks(nodes: int, processes: int) -> list[list[int]]:
    """Rank, local rank, node and processes of that node, of all ranks, as launchers lay them out."""
    return [[node * processes + local, local, node, processes] for node in range(nodes) for local in range(processes)]


def expect(found: dict[str, Any], launcher: str, nodes: int, processes: int, loss: float) -> None:
    assert found["launcher"] == launcher
    assert found["world_size"] == nodes * processes
    assert found["ranks"] == ranks(nodes, processes)
    assert found["loss"] == pytest.approx(loss, abs=1e-6)


def test_without_a_launcher(alone: dict[str, Any], loss: float) -> None:
    expect(alone, "alone", 1, 1, loss)


@pytest.mark.promise("Jobs: flk.init works under flk, torchrun, Slurm, MPI, Horovod and Kubeflow's operators")
def test_torchrun_static_with_two_agents(launch: Any, loss: float, free_port: Any) -> None:
    common = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    agents = [[TORCHRUN, "--node-rank", str(node), *common, launch.script] for node in (1, 0)]
    expect(launch(*agents).found(), "torchrun", 2, 1, loss)


@pytest.mark.soak
def test_torchrun_c10d_with_two_agents(launch: Any, loss: float, free_port: Any) -> None:
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "job"]
    agent = [TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", *meet, launch.script]
    expect(launch(agent, agent).found(), "torchrun", 2, 1, loss)


@pytest.mark.promise("Jobs: flk.init works under flk, torchrun, Slurm, MPI, Horovod and Kubeflow's operators")
def test_srun(launch: Any, loss: float, slurm: Any) -> None:
    command = [slurm.srun, "-n", "2", "--overcommit", launch.python, launch.script, "parallelize"]
    expect(launch(command, env=slurm.env).found(), "slurm", 1, 2, loss)


@pytest.mark.promise("Jobs: flk.init works under flk, torchrun, Slurm, MPI, Horovod and Kubeflow's operators")
@pytest.mark.soak
def test_mpirun_of_open_mpi(launch: Any, loss: float, openmpi: list[str]) -> None:
    command = [*openmpi, "-np", "2", launch.python, launch.script, "parallelize"]
    expect(launch(command).found(), "openmpi", 1, 2, loss)


@pytest.mark.soak
def test_mpirun_over_two_hosts(
    launch: Any, loss: float, openmpi: list[str], two_hosts: tuple[str, str], free_port: Any
) -> None:
    hosts, shell = two_hosts
    master = ["-x", "MASTER_ADDR=127.0.0.1", "-x", f"MASTER_PORT={free_port()}"]
    command = [*openmpi, "--mca", "plm_rsh_agent", shell, "--host", hosts, "-np", "4", *master]
    expect(launch([*command, launch.python, launch.script]).found(), "openmpi", 2, 2, loss)


@pytest.mark.promise("Jobs: flk.init works under flk, torchrun, Slurm, MPI, Horovod and Kubeflow's operators")
@pytest.mark.soak
def test_mpiexec_of_mpich(launch: Any, loss: float, mpich: list[str], free_port: Any) -> None:
    # MPICH tells its processes nothing that they could derive a port from.
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [*mpich, "-np", "2", launch.python, launch.script, "parallelize"]
    expect(launch(command, env=master).found(), "mpich", 1, 2, loss)


@pytest.mark.promise("Jobs: flk.init works under flk, torchrun, Slurm, MPI, Horovod and Kubeflow's operators")
@pytest.mark.soak
def test_horovodrun(launch: Any, loss: float, horovod: Any) -> None:
    command = [*horovod.run, "-np", "2", "-H", "localhost:2", launch.python, launch.script, "parallelize"]
    expect(launch(command, env=horovod.env).found(), "horovod", 1, 2, loss)
