from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flk_runtime import contract
from flk_runtime.discover import Place, discover
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
    assert discover({}) == Place(0, 0, 1, 1, 0, "alone", None, 0)
    assert discover({"PATH": "/bin", "RANK": "", "PET_NNODES": "1"}) == Place()


def test_torchrun() -> None:
    assert discover(TORCHRUN) == Place(5, 1, 8, 4, 1, "torchrun", ("10.0.0.7", 29501), 2, 2)


def test_flk() -> None:
    assert discover(FLK) == Place(5, 1, 8, 4, 1, "flk", ("10.0.0.7", 29501), 3, 2)


def test_who_holds_the_store() -> None:
    assert discover({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}).agent_store
    assert not discover({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"}).agent_store


def test_a_launcher_inside_an_operators_pod_is_believed() -> None:
    assert discover({**TORCHRUN, "PET_NNODES": "2", "PET_NODE_RANK": "1"}).launcher == "torchrun"


def test_variables_set_by_hand() -> None:
    by_hand = {
        name: value for name, value in TORCHRUN.items() if not name.startswith("TORCHELASTIC") and name != "GROUP_RANK"
    }
    assert discover(by_hand) == Place(5, 1, 8, 4, 1, "env", ("10.0.0.7", 29501), 0, 2)


def test_a_world_of_one_leaves_nothing_open() -> None:
    # A PyTorchJob of one master, whose script is started without a launcher.
    pod = {"RANK": "0", "WORLD_SIZE": "1", "PET_NODE_RANK": "0", "PET_NNODES": "1", "MASTER_PORT": "23456"}
    assert discover(pod) == Place(launcher="env")


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


def test_a_pod_of_the_operator_without_a_launcher() -> None:
    pod = {
        "RANK": "1",
        "WORLD_SIZE": "4",
        "PET_NODE_RANK": "1",
        "PET_NNODES": "2",
        "MASTER_ADDR": "m",
        "MASTER_PORT": "1",
    }
    with pytest.raises(DiscoveryError, match="PET_NODE_RANK=1 are a PyTorchJob's") as caught:
        discover(pod)
    assert "RANK=1" in str(caught.value)
    with pytest.raises(DiscoveryError, match=r"PET_NNODES=4 .* train alone"):
        discover({"PET_NNODES": "4"})


@given(nodes=st.integers(1, 6), processes=st.integers(1, 8))
def test_ranks_of_a_job_are_a_permutation(nodes: int, processes: int) -> None:
    places = [
        discover(
            {
                **FLK,
                "RANK": str(node * processes + local),
                "LOCAL_RANK": str(local),
                "WORLD_SIZE": str(nodes * processes),
                "LOCAL_WORLD_SIZE": str(processes),
                "GROUP_RANK": str(node),
            }
        )
        for node in range(nodes)
        for local in range(processes)
    ]
    assert sorted(place.rank for place in places) == list(range(nodes * processes))
    assert {(place.node_rank, place.local_rank) for place in places} == {
        (node, local) for node in range(nodes) for local in range(processes)
    }


@given(st.dictionaries(st.sampled_from([*FLK, "PET_NNODES", "PET_NODE_RANK"]), st.text(max_size=6)))
def test_any_environment_gives_a_place_or_an_error_of_ours(environ: dict[str, str]) -> None:
    try:
        place = discover(environ)
    except DiscoveryError:
        return
    assert 0 <= place.rank < place.world_size
    assert 0 <= place.local_rank < place.local_world_size <= place.world_size


def test_importing_the_package_imports_no_torch() -> None:
    program = (
        "import sys, flk_runtime, flk_runtime.contract\n"
        "from flk_runtime.discover import discover\n"
        "assert discover({}).rank == 0\n"
        "assert flk_runtime.__version__ == flk_runtime.contract.VERSION\n"
        "assert 'init' in dir(flk_runtime) and not hasattr(flk_runtime, 'nothing')\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
