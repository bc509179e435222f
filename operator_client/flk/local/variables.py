"""The environment variables of a launcher on this machine, in place of those of its pod."""

from __future__ import annotations

import contextlib
import math
import os
import random
import secrets
import socket
from decimal import Decimal
from pathlib import Path

from flk import units
from flk.errors import UsageError
from flk.local.places import checkpoint_place, made, packages_folder
from flk.manifest.environment import environment
from flk.spec.diloco import HUB_MODULE
from flk.spec.job import Job
from flk_runtime.contract import pod_env, pod_layout, user_env
from flk_runtime.contract.options import DILOCO


def launcher_variables(job: Job, folder: Path, scratch: Path, python: tuple[str, str]) -> dict[str, str]:
    """Return the variables that all launchers share: the shell's, except those that another launcher has set.

    ``folder`` and ``python`` are as in `LocalRun` and `interpreter`. What the launchers keep in ``scratch``
    goes with the run. Raises UsageError for what a pod would have from the cluster and this machine lacks.
    """
    values = {k: v for k, v in os.environ.items() if not user_env.is_reserved(k) or k == "PYTHONUNBUFFERED"}
    missing = [name for name in job.secrets if name not in values]
    if missing:
        raise UsageError(
            f"the secret variable {missing[0]} is not set in this environment, and `flk run` reads no Secrets",
            hint=f"export {missing[0]}=… before `flk run`",
        )
    values.update(environment(job))
    asked = (
        units.parse_quantity(job.resources.cpu)
        if job.resources.cpu
        else Decimal(os.cpu_count() or 1) / job.created_pods
    )
    values |= {
        **_outer_rendezvous(job),
        pod_env.POD_IP: "127.0.0.1",
        pod_env.JOB_UID: secrets.token_hex(16),
        pod_env.RDZV_SECRET: secrets.token_hex(16),
        pod_env.CPUS: str(math.ceil(asked)),
        user_env.NODE_NAME: socket.gethostname(),
        user_env.CHECKPOINT: str(checkpoint_place(job, folder) or scratch / "checkpoint"),
        pod_env.PARENT: str(os.getpid()),
        pod_env.SETUP_DONE: str(scratch / "setup" / "done"),
    }
    if job.pip or job.requirements:
        packages = packages_folder(job, folder, python[0], values)
        made(packages.parent, "set XDG_CACHE_HOME to a folder that you can write")
        values[pod_env.PACKAGES] = str(packages)
    given = values.pop("PYTHONPATH", None)  # Python takes one that is empty for one that is not set
    path = os.pathsep.join(filter(None, (python[1], given)))
    return values | ({"PYTHONPATH": path} if path else {})


def _outer_rendezvous(job: Job) -> dict[str, str]:
    """Return the variables that say where DiLoCo's workers meet: at this job's hub or at another job's."""
    if job.strategy != DILOCO:
        return {}
    diloco = job.diloco
    secret = os.environ.get(pod_env.SERVICE_SECRET, "")
    if diloco and diloco.secret and not secret:
        raise UsageError(
            f"diloco.secret: `flk run` reads no Secrets, and {pod_env.SERVICE_SECRET} is not set in this environment",
            hint=f"export {pod_env.SERVICE_SECRET}=… before `flk run`",
        )
    given: dict[str, str] = {pod_env.SERVICE_SECRET: secret} if secret else {}
    if diloco and diloco.hub:
        return {pod_env.SERVICE_ADDRESS: diloco.hub, **given}
    port = str(pod_layout.SERVICE_PORT if secret else free_port())
    return {pod_env.SERVICE_ADDRESS: f"127.0.0.1:{port}", pod_env.SERVICE: HUB_MODULE, **given}


def free_port() -> int:
    """Return a free port for the launcher of pod 0.

    It is below net.ipv4.ip_local_port_range, so that no connection takes it before the launcher listens or restarts.
    """
    while True:
        port = random.randrange(20_000, 32_768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
