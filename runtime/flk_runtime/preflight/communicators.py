"""Broadcast of the store's address by the launcher's own communicator: Horovod's or MPI's."""

from __future__ import annotations

from flk_runtime.discovery import RankInfo
from flk_runtime.errors import SetupError


def broadcast_address(info: RankInfo, address: tuple[str, int]) -> tuple[str, int]:
    """Rank 0's ``address`` (host, port), on every rank. Collective.

    Raises SetupError where the communicator's library is missing or does not agree with the launcher's variables.
    """
    return _by_horovod(info, address) if info.launcher == "horovod" else _by_mpi(info, address)


def _by_horovod(info: RankInfo, address: tuple[str, int]) -> tuple[str, int]:
    try:
        import horovod.torch as hvd
    except ImportError as error:
        raise SetupError(
            f"Horovod's variables are set, but horovod.torch cannot be imported ({error}): install it, or set "
            "MASTER_ADDR and MASTER_PORT"
        ) from error
    hvd.init()
    if (hvd.rank(), hvd.size()) != (info.rank, info.world_size):
        raise SetupError(
            f"hvd.rank() is {hvd.rank()} of {hvd.size()}, but HOROVOD_RANK and HOROVOD_SIZE are {info.rank} and "
            f"{info.world_size}: unset variables that are left over from another start"
        )
    received: tuple[str, int] = hvd.broadcast_object(address, root_rank=0)
    return received


def _by_mpi(info: RankInfo, address: tuple[str, int]) -> tuple[str, int]:
    try:
        from mpi4py import MPI
    except ImportError:
        option = "mpirun -x MASTER_ADDR=…" if info.launcher == "openmpi" else "mpiexec -genv MASTER_ADDR …"
        raise SetupError(
            f"{info.launcher} started {info.world_size} ranks and sets no master address: set MASTER_ADDR to the host "
            f"of rank 0 ({option}) and MASTER_PORT to a free port there, or install mpi4py"
        ) from None
    if (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size) != (info.rank, info.world_size):
        raise SetupError(
            f"mpi4py's rank is {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}, but the variables of {info.launcher} "
            f"say {info.rank} of {info.world_size}: mpi4py was built with another MPI; build it with the one that "
            "starts the ranks"
        )
    received: tuple[str, int] = MPI.COMM_WORLD.bcast(address, root=0)
    return received
