"""What this machine gives to the launchers of `flk run`: a Python that has torch, GPUs, and environment variables."""

from __future__ import annotations

import importlib.util
import math
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Final

from flk.errors import UsageError
from flk.local.places import checkpoint_place, made, packages_folder
from flk.manifest.environment import environment
from flk.spec import units
from flk.spec.job import Job
from flk.spec.parts import HUB_MODULE
from flk_runtime import contract
from flk_runtime.contract import pod_env, pod_layout, user_env
from flk_runtime.contract.options import DILOCO
from flk_runtime.contract.quantities import plural


def launcher_variables(job: Job, folder: Path, scratch: Path, python: tuple[str, str], port: int) -> dict[str, str]:
    """Return the variables that all launchers share: the shell's, except those that another launcher has set.

    ``folder`` and ``python`` are as in `LocalRun` and `interpreter`. What the launchers keep in ``scratch``
    goes with the run. ``port`` is for the hub of DiLoCo's workers. Raises UsageError for what a pod would have from
    the cluster and this machine lacks.
    """
    values = {k: v for k, v in os.environ.items() if not user_env.is_reserved(k) or k == "PYTHONUNBUFFERED"}
    missing = [name for name in job.secrets if name not in values]
    if missing:
        raise UsageError(
            f"the secret variable {missing[0]} is not set in this environment, and `flk run` reads no Secrets",
            hint=f"export {missing[0]}=… before `flk run`",
        )
    values.update(environment(job))
    cpu = job.resources.cpu
    asked = units.parse_quantity(cpu) if cpu else Decimal(os.cpu_count() or 1) / job.created_pods
    values |= {
        **_outer_rendezvous(job, port),
        pod_env.POD_IP: "127.0.0.1",
        pod_env.JOB_UID: secrets.token_hex(16),
        pod_env.RDZV_SECRET: secrets.token_hex(16),
        pod_env.CPUS: str(math.ceil(asked)),
        user_env.NODE_NAME: socket.gethostname(),
        user_env.CHECKPOINT: str(checkpoint_place(job, folder) or scratch / "checkpoint"),
        pod_env.PARENT: str(os.getpid()),
        pod_env.STARTED: str(time.time()),
        pod_env.SETUP_DONE: str(scratch / "setup" / "done"),
    }
    if job.pip or job.requirements:
        packages = packages_folder(job, folder, python[0], values)
        made(packages.parent, "set XDG_CACHE_HOME to a folder that you can write")
        values[pod_env.PACKAGES] = str(packages)
    given = values.pop("PYTHONPATH", None)  # Python takes one that is empty for one that is not set
    path = os.pathsep.join(filter(None, (python[1], given)))
    return values | ({"PYTHONPATH": path} if path else {})


def _outer_rendezvous(job: Job, port: int) -> dict[str, str]:
    """Return the variables that say where DiLoCo's workers meet: at this job's hub, at ``port``, or at another job's.

    Sites find each other at the port that pods have.
    """
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
    port = pod_layout.SERVICE_PORT if secret else port
    return {pod_env.SERVICE_ADDRESS: f"127.0.0.1:{port}", pod_env.SERVICE: HUB_MODULE, **given}


_WSL = Path("/dev/dxg")  # the device of all GPUs where Linux runs in Windows


def count_gpus(devices: Path = Path("/dev")) -> int:
    """The number of NVIDIA's GPUs on this machine, by their device files; 0 also where others have none."""
    return len(list(devices.glob("nvidia[0-9]*")))


def shares(job: Job, gpus: int, environ: Mapping[str, str] = os.environ) -> list[str] | None:
    """The value of CUDA_VISIBLE_DEVICES of each created pod; None leaves the variable as it is.

    ``gpus`` is their number on this machine, 0 if it is not known; the variable may name some of them, or none. A job
    that asks for GPUs gets as many. Another one gets a GPU for each rank if there are enough. If not, it gets none,
    since two ranks cannot share a GPU, unless the user has set the variable.

    Raises UsageError if there are fewer GPUs than the job asks for.
    """
    visible = environ.get(pod_layout.VISIBLE_GPUS)
    asked = job.resources.gpu
    if visible == "" or not (asked or visible or gpus):
        return None
    each = asked or job.processes_per_pod
    needed = job.created_pods * each
    names = pod_layout.gpu_names(visible) if visible else [str(number) for number in range(gpus or needed)]
    if len(names) >= needed:
        return [",".join(names[index * each :][:each]) for index in range(job.created_pods)]
    if not asked:
        return None if visible else [""] * job.created_pods
    has, hint = f"this machine has {len(names)}", "use fewer --replicas or --gpu"
    if visible:
        has = f"{pod_layout.VISIBLE_GPUS}={visible} names {len(names)}"
        hint = f"unset {pod_layout.VISIBLE_GPUS}, or {hint}"
    raise UsageError(
        f"the job needs {plural(needed, 'GPU')} ({plural(job.created_pods, 'pod')} with {each} each), and {has}",
        hint=hint,
    )


def on_cpus(job: Job, gpus: int, shared: list[str] | None, environ: Mapping[str, str] = os.environ) -> str:
    """Why ranks train on the CPU of a machine with so many ``gpus``, as a sentence; empty if nothing says that they do.

    ``shared``: what `shares` has returned.
    """
    if shared is None:
        return ""
    if not any(shared):
        return (
            "the pods of the job have more ranks than this machine has GPUs, so they train on the CPU: "
            "use fewer --replicas, --processes or --spares"
        )
    if job.resources.gpu and not gpus and pod_layout.VISIBLE_GPUS not in environ and not _WSL.exists():
        return "the job asks for GPUs, and /dev has none of NVIDIA's: ranks that find no other train on the CPU"
    return ""


_INSTALL: Final = (
    "activate the environment that has torch, or install torch beside flk: "
    f"{sys.executable} -m pip install torch, or pipx inject flk torch"
)


def interpreter() -> tuple[str, str]:
    """Return the Python that runs the launchers, and what to add to its module path so that it finds flk_runtime.

    It is flk's own Python if that has torch, otherwise (flk installed by pipx, for instance) the one on PATH. Raises
    UsageError if neither has it.
    """
    if importlib.util.find_spec("torch"):
        return sys.executable, ""
    python = shutil.which("python3") or shutil.which("python")
    if not python:
        raise UsageError("no Python with torch: flk's own has none, and there is no python3 on PATH", hint=_INSTALL)
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    if subprocess.run([python, "-c", look], capture_output=True).returncode:
        raise UsageError(f"no Python with torch: neither flk's own nor {python} has it", hint=_INSTALL)
    return python, str(Path(contract.__file__).parents[2])
