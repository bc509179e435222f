"""Which device a rank computes on, and which backends carry its collectives.

The counts come as arguments, so that this can be tested where there is no GPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from flk_runtime.discovery import RankInfo
from flk_runtime.errors import SetupError


def choose(
    place: RankInfo,
    asked: str | torch.device | None = None,
    *,
    gpus: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> torch.device:
    """The device of this rank: what is ``asked`` for, else cuda:<local rank> where there are GPUs, else the CPU.

    ``gpus`` is how many this process sees. A launcher may show each process one GPU of its own (Slurm's
    --gpus-per-task, torchrun's --virtual-local-rank): then that is cuda:0, whatever the local rank. Raises SetupError
    where there are fewer GPUs than processes; that two processes were shown the same GPU is for the preflight to find.
    """
    try:
        device = torch.device("cuda" if asked is None else asked)
    except (RuntimeError, TypeError) as error:
        raise SetupError(f"device={asked!r} is not a device: {str(error).splitlines()[0]}") from None
    if device.type != "cuda":
        return device
    if gpus is None:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus == 0 and asked is None:
        return torch.device("cpu")
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    shown = f"CUDA_VISIBLE_DEVICES={visible if visible is not None else 'not set'}"
    if gpus == 0:
        raise SetupError(f"device={asked!r}: torch {torch.__version__} sees no GPU here ({shown})")
    if device.index is not None:
        if device.index >= gpus:
            raise SetupError(f"device={asked!r}: this process sees {_count(gpus)}, numbered from 0 ({shown})")
        return device
    if gpus == 1 and visible:
        return torch.device("cuda", 0)  # its own, as far as it can tell
    if place.local_world_size > gpus:
        raise SetupError(
            f"local rank {place.local_rank} of {place.local_world_size} on a node that shows {_count(gpus)} ({shown}): "
            f"two processes cannot share a GPU, so start at most {gpus} on a node, or pass device='cpu'"
        )
    return torch.device("cuda", place.local_rank)


def backend(device: torch.device) -> str:
    """The backends for a device. Beside NCCL, gloo carries what lies on the CPU: random states, offloaded shards."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def identity(device: torch.device, environ: Mapping[str, str] = os.environ) -> str:
    """What tells this GPU from all others: its UUID, else its place on the PCI bus; empty for the CPU."""
    if device.type != "cuda":
        return ""
    visible = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if len(visible) == 1 and visible[0].startswith("MIG-"):  # an instance: its GPU's UUID is its neighbours' too
        return visible[0]
    properties = torch.cuda.get_device_properties(device)
    if uuid := getattr(properties, "uuid", None):
        return f"GPU-{uuid}"
    bus = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    return f"PCI {bus[0]:04x}:{bus[1]:02x}:{bus[2]:02x}" if None not in bus else ""


def _count(gpus: int) -> str:
    return "1 GPU" if gpus == 1 else f"{gpus} GPUs"
