"""Environment variables that the launcher sets: for itself before it imports torch, and for each rank."""

from __future__ import annotations

import os
import pwd
import re
import sys
import tempfile
from collections.abc import MutableMapping
from importlib import metadata
from pathlib import Path
from typing import Final

from flk_runtime.contract import pod_env, user_env
from flk_runtime.launcher.settings import Settings
from flk_runtime.launcher.transport.messages import AttemptStarted
from flk_runtime.system import host

ATTEMPT_FOLDER: Final = "attempt_{number}"  # of the files of an attempt's ranks


def rank_environment(settings: Settings, attempt: AttemptStarted, local_rank: int, error_folder: str) -> dict[str, str]:
    """The variables of one rank: torchrun's variables, so that its scripts run unchanged, and flk's own.

    For names and meaning see torch/distributed/elastic/agent/server/local_elastic_agent.py. The folder of the rank's
    error file and progress page is made in ``error_folder``.
    """
    rank = str(attempt.ranks(settings.pod, settings.processes)[local_rank])
    world_size = str(len(attempt.pods) * settings.processes)
    folder = Path(error_folder, ATTEMPT_FOLDER.format(number=attempt.number), str(local_rank))
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(settings.processes),
        "GROUP_RANK": str(attempt.pods.index(settings.pod)),
        "GROUP_WORLD_SIZE": str(len(attempt.pods)),
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": attempt.master_address,
        "MASTER_PORT": str(attempt.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(attempt.number),
        "TORCHELASTIC_MAX_RESTARTS": str(settings.limits.restarts),
        "TORCHELASTIC_RUN_ID": settings.job,
        "TORCHELASTIC_ERROR_FILE": str(folder / "error.json"),
        # The leader serves the store at MASTER_ADDR:MASTER_PORT, so rank 0 must not open one there.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        pod_env.PROGRESS: str(folder / "progress"),
        pod_env.OBSERVER: str(folder / "observer"),
        pod_env.CHOICE: str(Path(error_folder, "strategy")),
        user_env.HEARTBEAT: str(folder / "heartbeat"),
        user_env.ATTEMPT: str(attempt.number),
        user_env.FULL_WORLD_SIZE: str(settings.world_size),
        **({user_env.WORKER: str(settings.worker)} if settings.workers > 1 else {}),
        **settings.service_key_variable,
    }


def prepare_environment(settings: Settings, environ: MutableMapping[str, str]) -> None:
    """Set the launcher's variables that torch reads when it is imported. Values that the user has set are kept."""
    defaults = {
        # Without it torch starts one thread for each processor of the node, in every rank.
        "OMP_NUM_THREADS": str(max(1, (settings.cpus or host.cpu_count()) // settings.processes)),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if _records_nothing():
        defaults["TORCH_NCCL_TRACE_BUFFER_SIZE"] = "2000"  # collectives, as in newer torch
    interface = host.interface_with_address(settings.pod_ip) if settings.pod_ip else ""
    if interface:
        # Without them gloo takes the interface of the host name's address, and NCCL the first one it finds.
        defaults["GLOO_SOCKET_IFNAME"] = interface
        defaults["NCCL_SOCKET_IFNAME"] = "=" + interface
    try:
        tempfile.gettempdir()
    except FileNotFoundError:  # the file system of the image is read-only
        defaults["TMPDIR"] = tempfile.tempdir = settings.work
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:  # getpass.getuser() and what asks it, such as torch.compile of older torch, would fail
        defaults |= dict.fromkeys(("USER", "LOGNAME"), environ.get("USER") or environ.get("LOGNAME") or "flk")
    for name, value in defaults.items():
        environ.setdefault(name, value)


def resolve_python_path(work: str, environ: MutableMapping[str, str]) -> None:
    """Let the relative entries of PYTHONPATH be folders below ``work``, where the ranks start, for them and for others.

    Python has taken them for folders of the launcher's own working folder, which in a pod is the image's.
    """
    entries = environ.get("PYTHONPATH", "").split(os.pathsep)
    meant = {os.path.abspath(entry).lstrip("/"): os.path.join(work, entry) for entry in entries if entry}
    sys.path[:] = [meant.get(os.path.abspath(path).lstrip("/"), path) if path else path for path in sys.path]
    if any(entries):
        environ["PYTHONPATH"] = os.pathsep.join(os.path.join(work, entry) for entry in entries if entry)


def _records_nothing() -> bool:
    """Whether torch's flight recorder, in which flk finds the collectives that ranks wait in, is off by default.

    It is on from torch 2.11, which warns of this name of the variable: the only one that all older ones know.
    """
    try:
        version = re.match(r"(\d+)\.(\d+)", metadata.version("torch"))
    except metadata.PackageNotFoundError:  # a build that was not installed is likely to be new
        return False
    return version is not None and (int(version[1]), int(version[2])) < (2, 11)
