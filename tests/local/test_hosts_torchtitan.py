"""torchtitan with flk, where it is installed: its debug model on the CPU resumes exactly after a killed rank."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flk_runtime.contract import pod_env, pod_layout, user_env
from tests.support.pods import Pods

pytest.importorskip("torchtitan")
pytestmark = pytest.mark.soak

# torchtitan needs a GPU and Triton. This gives it a CPU. In the first attempt rank 1 dies after the step in argv[1].
TRAIN = """
    import os, runpy, signal, sys, torch, torch._utils
    from unittest.mock import MagicMock

    torch._utils._get_available_device_type = lambda: "cpu"
    module = "torchtitan.distributed.minimal_async_ep"
    sys.modules |= {module: MagicMock(), module + ".api": MagicMock()}
    torch.cpu.set_device = torch.cpu.reset_peak_memory_stats = lambda *_: None
    torch.cpu.get_device_name, torch.cpu.memory_stats = lambda *_: "cpu", lambda *_: {}
    torch.cpu.get_device_properties, torch.cpu.empty_cache = lambda *_: MagicMock(total_memory=1 << 40), lambda: None

    from torchtitan import trainer
    from torchtitan.components.metrics import MetricsProcessor

    dies, step = int(sys.argv.pop(1)), trainer.Trainer.train_step
    def train_step(self, *arguments):
        step(self, *arguments)
        if self.step == dies and os.environ["FLK_ATTEMPT"] == "0" and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
    trainer.Trainer.train_step = train_step
    log = MetricsProcessor.log
    def logged(self, step, loss, *more, **named):
        print(f"step {step} has loss {loss!r}")
        log(self, step, loss, *more, **named)
    MetricsProcessor.log = logged
    from torch.distributed.fsdp import FSDPModule
    divide = FSDPModule.set_gradient_divide_factor
    def divided(self, factor):  # gloo has no PREMUL_SUM
        divide(self, factor), self.set_force_sum_reduction_for_comms(True)
    FSDPModule.set_gradient_divide_factor = divided

    from torchtitan.distributed import utils
    utils.set_pg_timeouts = lambda **_: None  # gloo's barrier takes no devices
    from torchtitan.models.common.attention import FlexAttention  # which has no backward pass on the CPU
    def attend(q, k, v, *, scale, enable_gqa, **_):
        with torch.no_grad():
            rest = MagicMock(lse=q.sum(-1))
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa
        ), rest
    FlexAttention._compiled_flex_attn = staticmethod(attend)
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle
    whole = PipelineScheduleSingle.step
    def step_of_parts(self, *, arg_mbs, kwarg_mbs, target_mbs, losses, **named):  # torch 2.13 splits batches itself
        arguments = [torch.cat(parts) for parts in zip(*arg_mbs or [])]
        extra = {name: torch.cat([each[name] for each in kwarg_mbs]) if torch.is_tensor(first) else first
                 for name, first in kwarg_mbs[0].items()}
        target = None if target_mbs is None else torch.cat(target_mbs)
        return whole(self, *arguments, target=target, losses=losses, **named, **extra)
    PipelineScheduleSingle.step = step_of_parts
    runpy.run_module("flk_runtime.hosts.torchtitan" if dies else "torchtitan.train", run_name="__main__")
"""
STEPS = 5
MESHES = {
    "FSDP2": (2, ""),
    "FSDP2 x TP": (4, "--parallelism.tensor_parallel_degree 2"),
    "PP x FSDP2": (
        4,
        "--parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_schedule 1F1B "
        "--training.local_batch_size 4 --training.disable_cuda_graphs",
    ),
}


def assets(folder: Path) -> None:
    """A tokenizer of sixty words, and texts of them."""
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


@pytest.mark.parametrize("mesh", MESHES)
def test_after_a_killed_rank_the_losses_are_those_of_the_undisturbed_training(
    forked_pods: Callable[..., Pods], root: Path, mesh: str
) -> None:
    processes, options = MESHES[mesh]
    losses = []
    for dies in (0, 3):
        variables: dict[str, Any] = {
            pod_env.MEMORY_ROOT: str(root),
            user_env.CHECKPOINT: pod_layout.CHECKPOINT_FOLDER,
            user_env.SAVE_EVERY: "1",
            pod_env.RESTARTS: "1",
            "HF_HUB_OFFLINE": "1",
            "TORCHDYNAMO_DISABLE": "1",
        }
        job = forked_pods(1, processes, script=TRAIN, **variables)
        if not dies:
            assets(job.folder / "assets")
        words = (
            f"{dies} --module llama3 --config llama3_debugmodel --hf_assets_path assets --training.steps {STEPS} "
            "--dataloader.dataset_path assets/data --training.seq_len 32 --training.local_batch_size 2 "
            f"--parallelism.spmd_backend partial_dtensor --debug.seed 1 --dump_folder out {options}"
        )
        job.start("train.py", *words.split())
        assert job.wait() == [0], job.log()
        losses.append(dict(re.findall(r"\[rank \d\] step (\d+) has loss (\d\S+)", job.log())))  # negative: no loss
    assert "resumed at step 2 from pod memory" in job.log()
    assert set(losses[0]) == {str(step) for step in range(1, STEPS + 1)}
    assert losses[0] == losses[1]
