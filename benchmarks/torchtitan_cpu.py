"""torchtitan 0.3 on CPUs: what takes the place of its GPU and kernels, and the arguments of its debug model."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any, Final
from unittest.mock import MagicMock

import torch

VARIABLES: Final = {"HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}  # of each rank


def arguments(folder: Path, steps: int) -> list[str]:
    """The arguments of torchtitan.train for ``steps`` of its debug model on the files that `assets` has made."""
    words = (
        f"--module llama3 --config llama3_debugmodel --training.steps {steps} --training.seq_len 32 "
        "--training.local_batch_size 2 --parallelism.spmd_backend partial_dtensor --debug.seed 1"
    )
    files = {"--hf_assets_path": folder, "--dataloader.dataset_path": folder / "data", "--dump_folder": folder / "out"}
    return [*words.split(), *(str(word) for pair in files.items() for word in pair)]


def assets(folder: Path) -> None:
    """Make a tokenizer of sixty words, and texts of them."""
    (folder / "data").mkdir(parents=True)
    marks = [{"id": number, "content": text, "special": True} for number, text in enumerate(("<s>", "</s>"))]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    vocabulary = {"<s>": 0, "</s>": 1, **{f"w{number}": number + 2 for number in range(60)}}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{**mark, **flags} for mark in marks],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "</s>"},
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder")),
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    own = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    draw = random.Random(0)
    texts = [" ".join(f"w{draw.randrange(60)}" for _ in range(100)) for _ in range(200)]
    (folder / "data" / "data.json").write_text("\n".join(json.dumps({"text": text}) for text in texts))


def replace_gpu() -> None:
    """Give torchtitan, which needs a GPU and Triton, a CPU. Call it before any of torchtitan is imported."""
    module = "torchtitan.distributed.minimal_async_ep"
    sys.modules |= {module: MagicMock(), module + ".api": MagicMock()}
    utilities, cpu = torch._utils, vars(torch.cpu)
    utilities._get_available_device_type = lambda: "cpu"
    cpu |= dict.fromkeys(("set_device", "reset_peak_memory_stats", "empty_cache"), lambda *_: None)
    cpu |= {
        "get_device_name": lambda *_: "cpu",
        "memory_stats": lambda *_: {},
        "get_device_properties": lambda *_: MagicMock(total_memory=1 << 40),
    }

    from torch.distributed.fsdp import FSDPModule

    divide = FSDPModule.set_gradient_divide_factor

    def divided(self: FSDPModule, factor: float) -> None:
        divide(self, factor)
        self.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM

    FSDPModule.set_gradient_divide_factor = divided  # type: ignore[method-assign]

    from torchtitan.distributed import utils
    from torchtitan.models.common.attention import FlexAttention

    utils.set_pg_timeouts = lambda **_: None  # gloo's barrier takes no devices

    def attend(q: Any, k: Any, v: Any, *, scale: float, enable_gqa: bool, **_: Any) -> tuple[torch.Tensor, Any]:
        with torch.no_grad():
            rest = MagicMock(lse=q.sum(-1))
        found = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa
        )
        return found, rest

    FlexAttention._compiled_flex_attn = staticmethod(attend)  # its own has no backward pass on the CPU
    _split_batches()


def _split_batches() -> None:
    """Take batches that torchtitan has split for torch's nightly release: the schedules of torch 2.13 split them."""
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

    whole: Any = PipelineScheduleSingle.step

    def step(self: Any, *, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, losses: Any, **named: Any) -> Any:
        arguments = [torch.cat(parts) for parts in zip(*arg_mbs or [], strict=True)]
        extra = {
            name: torch.cat([each[name] for each in kwarg_mbs]) if torch.is_tensor(first) else first
            for name, first in kwarg_mbs[0].items()
        }
        target = None if target_mbs is None else torch.cat(target_mbs)
        return whole(self, *arguments, target=target, losses=losses, **named, **extra)

    PipelineScheduleSingle.step = step  # type: ignore[assignment, method-assign]
