"""The environment: of the launcher before it imports torch, and of each rank."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

from flk_runtime import contract
from flk_runtime.launcher.rendezvous import AttemptStarted
from flk_runtime.launcher.settings import Settings
from flk_runtime.system import host


def of_rank(settings: Settings, go: AttemptStarted, local_rank: int, errors: str) -> dict[str, str]:
    """The variables of one rank: torchrun's, so that scripts written for it run unchanged, and the attempt's number.

    Names and meaning: torch/distributed/elastic/agent/server/local_elastic_agent.py.
    """
    rank = settings.pod * settings.processes + local_rank
    folder = Path(errors, f"attempt_{go.number}", str(local_rank))
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(settings.world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(settings.processes),
        "GROUP_RANK": str(settings.pod),
        "GROUP_WORLD_SIZE": str(settings.pods),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(settings.world_size),
        "MASTER_ADDR": go.address,
        "MASTER_PORT": str(go.port),
        "TORCHELASTIC_RESTART_COUNT": str(go.number),
        "TORCHELASTIC_MAX_RESTARTS": str(settings.restarts),
        "TORCHELASTIC_RUN_ID": settings.job,
        "TORCHELASTIC_ERROR_FILE": str(folder / "error.json"),
        # The launcher of pod 0 holds the store at MASTER_ADDR:MASTER_PORT; no rank opens one there.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        contract.ATTEMPT: str(go.number),
    }


def prepare(settings: Settings, environ: MutableMapping[str, str]) -> None:
    """Set what must stand in the environment before torch is imported; what the user has set stays as it is."""
    defaults = {
        # torch would start a thread for each processor of the node, in every rank.
        "OMP_NUM_THREADS": str(max(1, (settings.cpus or host.processors()) // settings.processes)),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "PYTHONUNBUFFERED": "1",
    }
    interface = host.interface_of(settings.pod_ip) if settings.pod_ip else ""
    if interface:
        # Left alone, gloo takes what the host name resolves to, and NCCL the first interface it likes.
        defaults["GLOO_SOCKET_IFNAME"] = interface
        defaults["NCCL_SOCKET_IFNAME"] = "=" + interface
    for name, value in defaults.items():
        environ.setdefault(name, value)
    archive = Path(__file__).parents[2]
    if archive.is_file():  # this package came as an archive: what a rank starts must find it as well
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(archive), environ.get("PYTHONPATH", "")]))
