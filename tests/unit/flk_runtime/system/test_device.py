"""The device of a rank, for every number of GPUs and every launcher that hides some."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flk_runtime.discovery import RankInfo
from flk_runtime.errors import SetupError
from flk_runtime.system import device


def rank_info(local_rank: int = 0, size: int = 1) -> RankInfo:
    return RankInfo(rank=local_rank, local_rank=local_rank, world_size=size, local_world_size=size)


@pytest.mark.parametrize(
    ("local_rank", "size", "gpus", "visible", "requested", "chosen"),
    [
        (0, 1, 0, None, None, "cpu"),
        (3, 8, 8, None, None, "cuda:3"),
        (1, 2, 8, "4,5,6,7,0,1,2,3", None, "cuda:1"),
        (3, 4, 1, "7", None, "cuda:0"),  # Slurm --gpus-per-task, a wrapper that sets CUDA_VISIBLE_DEVICES
        (0, 4, 1, "GPU-8932f937", None, "cuda:0"),  # torchrun --virtual-local-rank
        (0, 1, 1, None, None, "cuda:0"),
        (1, 2, 8, None, "cpu", "cpu"),
        (1, 2, 8, None, "cuda", "cuda:1"),
        (1, 2, 8, None, "cuda:5", "cuda:5"),
        (1, 2, 8, None, torch.device("cuda", 5), "cuda:5"),
        (0, 1, 0, None, "meta", "meta"),
    ],
)
def test_the_device_of_a_rank(
    local_rank: int, size: int, gpus: int, visible: str | None, requested: str | None, chosen: str
) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert device.select(rank_info(local_rank, size), requested, gpus=gpus, environ=environ) == torch.device(chosen)


@pytest.mark.parametrize(
    ("local_rank", "size", "gpus", "requested", "words"),
    [
        (
            1,
            2,
            1,
            None,
            "local rank 1 of 2 on a node with 1 GPU (CUDA_VISIBLE_DEVICES=not set), and each process needs",
        ),
        (0, 2, 1, None, "local rank 0 of 2 on a node with 1 GPU"),  # not only the one that finds no GPU
        (5, 8, 4, "cuda", "local rank 5 of 8 on a node with 4 GPUs"),
        (0, 1, 0, "cuda", "device='cuda', but torch "),
        (0, 1, 0, "cuda:0", "device='cuda:0', but torch "),
    ],
)
def test_too_few_gpus_are_refused_with_the_reason(
    local_rank: int, size: int, gpus: int, requested: str | None, words: str
) -> None:
    with pytest.raises(SetupError) as refused:
        device.select(rank_info(local_rank, size), requested, gpus=gpus, environ={})
    assert words in str(refused.value)


@pytest.mark.parametrize("variable", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"])
def test_one_gpu_that_a_launcher_has_shown_is_the_first(variable: str) -> None:
    """AMD's variables count as NVIDIA's do."""
    assert device.select(rank_info(3, 4), gpus=1, environ={variable: "7"}) == torch.device("cuda", 0)
    with pytest.raises(SetupError, match=variable):
        device.select(rank_info(3, 4), gpus=2, environ={variable: "6,7"})


def test_gpus_that_were_requested_and_cannot_be_used_are_an_error() -> None:
    with pytest.raises(SetupError, match="8 GPUs for each pod, but torch "):
        device.select(rank_info(), gpus=0, environ={"FLK_GPUS": "8"})
    assert device.select(rank_info(), gpus=0, environ={"FLK_GPUS": "0"}) == torch.device("cpu")
    assert device.select(rank_info(), "cpu", gpus=0, environ={"FLK_GPUS": "8"}) == torch.device("cpu")


def test_all_streams_are_waited_for_before_and_after_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(device, "synchronize", lambda: order.append("waited"))
    with device.across_streams():
        order.append("block")
    assert order == ["waited", "block", "waited"]


@pytest.mark.parametrize(
    ("used", "current", "is_open", "chosen"),
    [
        ("cpu", None, True, "cpu"),  # with gloo, beside GPUs or fewer of them than ranks
        ("cuda:1", 0, False, "cuda:1"),
        ("cuda:0", 0, False, None),
        ("cuda:0", 1, True, "cuda:0"),
        ("cpu", 2, True, "cuda:2"),  # it goes there later
        ("meta", 2, False, "cuda:2"),
        ("cpu", None, False, None),
    ],
)
def test_a_script_that_has_chosen_its_device_keeps_it(
    monkeypatch: pytest.MonkeyPatch, used: str, current: int | None, is_open: bool, chosen: str | None
) -> None:
    for name, value in (("is_available", True), ("is_initialized", current is not None), ("current_device", current)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: is_open)
    module = torch.nn.Module()
    monkeypatch.setattr(module, "parameters", lambda: iter([SimpleNamespace(device=torch.device(used))]))
    assert device.in_use([{"steps": 0}, module]) == (chosen and torch.device(chosen))
