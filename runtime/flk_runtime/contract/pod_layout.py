"""A pod: its paths, ports and names, the keys of ConfigMaps that are mounted there, and the machine of a process."""

from __future__ import annotations

import os
import sys
from typing import Final

RDZV_PORT: Final = 29400
SERVICE_PORT: Final = 29401  # of the service of an extension, in pod 0
INTERRUPT_GRACE: Final = 5.0  # seconds that ranks have after SIGINT, in place of the grace period after SIGTERM
FIRST_POD: Final = "{first}"  # in RDZV_ENDPOINT: the index of the first pod of the worker
CONTAINER: Final = "pytorch"  # the training operator looks for a container with this name
# Paths in the pod, and keys of the ConfigMaps that are mounted there.
SHM: Final = "/dev/shm"  # noqa: S108 - memory, not a temporary file
SHIP_FOLDER: Final = "/flk/ship"  # mount path of the ConfigMaps, read-only
WORK_FOLDER: Final = "/flk/work"  # the unpacked code; working folder of the ranks
PACKAGES: Final = ".flk/packages"  # in the working folder: the virtual environment with the job's packages
CHECKPOINT_FOLDER: Final = "/flk/checkpoint"  # checkpoints of jobs without a volume; deleted with the pod
API_FOLDER: Final = "/flk/api"  # token, ca.crt and namespace with which a launcher writes to RECORDS
RUNTIME_ARCHIVE: Final = "flk_runtime.zip"  # key of the archive of these packages
RUNTIME_PACKAGES: Final = (
    "flk_runtime",
    "flk_diloco",
    "flk_hosts",
    "flk_plan",
    "flk_sinks",
    "flk_verify",
)  # core first
PROGRAMS: Final = ("flk_plan", "flk_diloco")  # packages among them whose modules are programs that train nothing
CODE_ARCHIVE: Final = "code.tar.gz"  # prefix of the keys of the code: code.tar.gz.000, code.tar.gz.001, … in order
TERMINATION_LOG_PATH: Final = "/dev/termination-log"
TERMINATION_LOG_LIMIT: Final = 4096  # bytes; the kubelet drops what exceeds them


def is_address(place: str) -> bool:
    """Whether a place of checkpoints or weights is an address, such as ``s3://BUCKET/PREFIX``, and not a path."""
    return "://" in place


def is_same_place(place: str | None, other: str | None) -> bool:
    """Whether two paths or addresses, as scripts write them, are of the same place."""
    first, second = (
        each if each is None else each.rstrip("/") if is_address(each) else os.path.realpath(each)
        for each in (place, other)
    )
    return first == second


def is_of_pod(place: str | None) -> bool:
    """Whether checkpoints go to a folder that only the pod has, and that is deleted with it."""
    return place is not None and f"{place}/".startswith(f"{CHECKPOINT_FOLDER}/")


def on_volume(checkpoint: str) -> str:
    """The folder of a job's checkpoints (FLK_CHECKPOINT) if it outlives the pods; else empty, as in S3."""
    return "" if is_address(checkpoint) or is_of_pod(checkpoint) else checkpoint


LINUX = sys.platform == "linux"
"""Whether this is Linux. Elsewhere there is no /proc, and ranks are new processes, since a fork may end in macOS's
libraries."""
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"  # the variable that names the GPUs that a process may use


def gpu_names(visible: str) -> list[str]:
    """Return the numbers and UUIDs of the GPUs that a value of VISIBLE_GPUS names; -1 names none."""
    return [name for name in map(str.strip, visible.split(",")) if name not in ("", "-1")]


def free_ports(count: int) -> list[int]:
    """Return so many different TCP ports that are free now, in this container or on this machine.

    They are below net.ipv4.ip_local_port_range, so that no other process gets one as its local port before it is used.
    """
    import itertools  # what only some commands need is imported late
    import random

    ports = random.SystemRandom().sample(range(20_000, 32_768), count + 100)  # not by the script's generator
    return list(itertools.islice(filter(_is_free, ports), count))


def _is_free(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
