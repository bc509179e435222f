"""The GPUs of this machine that each replica of `flk run` gets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from flk.errors import UsageError
from flk.spec.job import Job
from flk_runtime.contract.pod_layout import VISIBLE_GPUS, gpu_names
from flk_runtime.contract.quantities import plural

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
    visible = environ.get(VISIBLE_GPUS)
    asked = job.resources.gpu
    if visible == "" or not (asked or visible or gpus):
        return None
    each = asked or job.processes_per_pod
    needed = job.created_pods * each
    names = gpu_names(visible) if visible else [str(number) for number in range(gpus or needed)]
    if len(names) >= needed:
        return [",".join(names[index * each :][:each]) for index in range(job.created_pods)]
    if not asked:
        return None if visible else [""] * job.created_pods
    has = f"{VISIBLE_GPUS}={visible} names {len(names)}" if visible else f"this machine has {len(names)}"
    raise UsageError(
        f"the job needs {plural(needed, 'GPU')} ({plural(job.created_pods, 'pod')} with {each} each), and {has}",
        hint=f"unset {VISIBLE_GPUS}, or use fewer --replicas or --gpu" if visible else "use fewer --replicas or --gpu",
    )


def on_cpus(job: Job, gpus: int, shared: list[str] | None, environ: Mapping[str, str] = os.environ) -> str:
    """Why ranks train on the CPU of a machine with so many ``gpus``, as a sentence; empty if nothing says that they do.

    ``shared``: what `shares` has returned.
    """
    if shared is not None and not any(shared):
        return (
            "the pods of the job have more ranks than this machine has GPUs, so they train on the CPU: "
            "use fewer --replicas, --processes or --spares"
        )
    if job.resources.gpu and shared is not None and not gpus and VISIBLE_GPUS not in environ and not _WSL.exists():
        return "the job asks for GPUs, and /dev has none of NVIDIA's: ranks that find no other train on the CPU"
    return ""
