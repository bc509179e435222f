"""Device of a rank. Needs torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import torch

from flk_runtime.contract import pod_env, pod_layout
from flk_runtime.contract.quantities import plural
from flk_runtime.discovery import RankInfo
from flk_runtime.errors import SetupError

# They hide GPUs from a process: NVIDIA's, and AMD's from the most to the least specific.
_VISIBLE_DEVICES: Final = (pod_layout.VISIBLE_GPUS, "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def select(
    rank_info: RankInfo,
    requested: str | torch.device | None = None,
    *,
    gpus: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> torch.device:
    """The device of this rank: the ``requested`` one, else cuda:<local rank> if there are GPUs, else the CPU.

    ``gpus`` is the number of GPUs that this process sees, by default torch's. A launcher may show each process a single
    GPU of its own (Slurm's --gpus-per-task), which is cuda:0 for every local rank.

    Raises SetupError if there are fewer GPUs than processes, or if torch can use none and one is ``requested``, or the
    pod has requested some (FLK_GPUS).
    """
    device = torch.device("cuda" if requested is None else requested)
    if device.type != "cuda":
        return device
    if gpus is None:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus == 0:
        in_pod = pod_env.GPUS.read(environ)
        if requested is None and not in_pod:
            return torch.device("cpu")
        what = f"{plural(in_pod, 'GPU')} for each pod" if in_pod else f"device='{requested}'"
        raise SetupError(f"{what}, but {_why_unusable()}; to train on the CPU, pass device='cpu'")
    if device.index is not None:
        return device
    variable = next((name for name in _VISIBLE_DEVICES if name in environ), _VISIBLE_DEVICES[0])
    visible = environ.get(variable)
    if gpus == 1 and visible:
        return torch.device("cuda", 0)  # the only device that the launcher has shown to this process
    if rank_info.local_world_size > gpus:
        raise SetupError(
            f"local rank {rank_info.local_rank} of {rank_info.local_world_size} on a node with {plural(gpus, 'GPU')} "
            f"({variable}={visible if visible is not None else 'not set'}), and each process needs a GPU of its own: "
            f"start at most {gpus} on each node, or pass device='cpu'"
        )
    return torch.device("cuda", rank_info.local_rank)


def in_use(objects: Iterable[object]) -> torch.device | None:
    """The device of a script that has opened the process group or chosen a GPU, and trains the modules among these.

    It is that of a parameter, else the current GPU of a process that uses one, else the CPU. None: the script has
    chosen nothing, or there is no GPU.
    """
    used = (
        each.device
        for module in objects
        if isinstance(module, torch.nn.Module)
        for each in module.parameters()
        if each.device.type not in ("cpu", "meta")
    )
    found = next(
        used,
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        else torch.device("cpu"),
    )
    # The first GPU may be that of a script which has chosen none.
    return found if torch.cuda.is_available() and (torch.distributed.is_initialized() or found.index) else None


def synchronize() -> None:
    """Wait for all that this process has queued on its GPU, on every stream; at once where it uses none."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


@contextlib.contextmanager
def across_streams() -> Iterator[None]:
    """Have the block see what every stream of the GPU has queued before it, and every stream what the block does.

    For what flk does with parameters that a script may train on a stream of its own.
    """
    synchronize()
    yield
    synchronize()


def _why_unusable() -> str:
    """Why torch sees no GPU: its build, or the driver on the node."""
    reason = "it sees none"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
    return f"torch {torch.__version__} can use none ({reason}): use an image whose build of torch fits the driver"
