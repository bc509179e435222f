"""The store's address goes to all ranks through the launcher's own communicator, or it is said what is missing."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from flk_runtime.discovery import RankInfo
from flk_runtime.errors import SetupError
from flk_runtime.preflight.bootstrap import broadcast_address

SENT = "10.0.0.1", 29500


def info(launcher: str) -> RankInfo:
    return RankInfo(rank=1, world_size=4, local_rank=1, local_world_size=2, launcher=launcher)


def mpi(rank: int = 1) -> Any:
    return SimpleNamespace(
        MPI=SimpleNamespace(COMM_WORLD=SimpleNamespace(rank=rank, size=4, bcast=lambda *_, root: SENT))
    )


def horovod(rank: int = 1) -> Any:
    return SimpleNamespace(
        init=lambda: None, rank=lambda: rank, size=lambda: 4, broadcast_object=lambda *_, root_rank: SENT
    )


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a library importable; None: it cannot be imported."""

    def install(library: str, module: Any) -> None:
        hvd = SimpleNamespace(torch=module) if module else None
        monkeypatch.setitem(sys.modules, "mpi4py", module if library == "mpi4py" else None)
        monkeypatch.setitem(sys.modules, "horovod", hvd if library == "horovod" else None)
        monkeypatch.setitem(sys.modules, "horovod.torch", module if library == "horovod" else None)

    return install


@pytest.mark.parametrize(
    ("launcher", "library", "make"),
    [("openmpi", "mpi4py", mpi), ("mpich", "mpi4py", mpi), ("horovod", "horovod", horovod)],
)
def test_the_address_comes_from_rank_0(install: Any, launcher: str, library: str, make: Any) -> None:
    install(library, make())
    assert broadcast_address(info(launcher), ("", 0)) == SENT
    install(library, make(rank=0))
    with pytest.raises(SetupError, match=r"0 of 4, but .* (?:are|say) 1 (?:and|of) 4"):
        broadcast_address(info(launcher), ("", 0))


@pytest.mark.parametrize(
    ("launcher", "remedy"),
    [("openmpi", "mpirun -x MASTER_ADDR"), ("mpich", "-genv MASTER_ADDR"), ("horovod", "install it")],
)
def test_a_missing_library_is_said(install: Any, launcher: str, remedy: str) -> None:
    install("none", None)
    with pytest.raises(SetupError, match=remedy):
        broadcast_address(info(launcher), ("", 0))
