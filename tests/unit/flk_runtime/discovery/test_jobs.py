"""Discovery for whole jobs: recorded environments, the ranks of all processes of a job, and any environment."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flk_runtime.discovery import discover
from flk_runtime.errors import DiscoveryError
from tests.support.environments import (
    BATCH,
    FLK,
    HOROVOD,
    KNOWN,
    MEETING,
    MPICH,
    OPENMPI,
    PODS,
    SLURM,
    TORCHRUN,
    TRAINER,
    refused,
)

SEEN = sorted(Path(__file__).with_name("environments").glob("*.json"))
# What started the ranks of each file; by default what the file is called.
STARTED = {
    "horovodrun": "horovod", "pytorchjob_auto": "pytorchjob", "salloc_openmpi_empty_nodes": "openmpi",
    "sbatch_mpich": "mpich", "sbatch_openmpi": "openmpi", "sbatch_srun": "slurm", "sbatch_srun_components": "slurm",
    "srun": "slurm", "srun_torchrun": "torchrun", "torchrun_c10d": "torchrun",
    "torchrun_standalone": "torchrun", "torchrun_static": "torchrun",
}  # fmt: skip


REFUSED = {
    "mpich": ["MASTER_PORT must be set", "PMI_RANK=0"],  # Hydra sets nothing that tells one start from another
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


@given(st.data())
@settings(max_examples=50)
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


@pytest.mark.promise("Jobs: Variables of two launchers that contradict each other are named before any connection")
@given(
    st.sampled_from([FLK, TORCHRUN, PODS, TRAINER, HOROVOD, OPENMPI, MPICH, SLURM, BATCH, MEETING]),
    st.sampled_from([{}, HOROVOD, OPENMPI, MPICH, SLURM, BATCH, PODS, MEETING]),
    st.dictionaries(st.sampled_from(KNOWN), VALUES, max_size=3),
    st.sets(st.sampled_from(KNOWN), max_size=3),
)
@settings(max_examples=500, deadline=None)
def test_any_environment_gives_a_rank_or_an_error_of_ours(
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
