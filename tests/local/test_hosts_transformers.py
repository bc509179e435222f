"""A Transformers Trainer whose state flk keeps: it resumes exactly, and saves before a pod goes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import adapters
from tests.support.pods import Pods

pytest.importorskip("transformers")

# Two epochs of six steps of two micro-batches, with dropout and two evaluations in each epoch.
TRAIN = """
    import os, pathlib, signal, sys, tempfile, time, torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

    from flk_runtime.hosts import transformers as flk_transformers

    ATTEMPT, RANK = int(os.environ["FLK_ATTEMPT"]), int(os.environ["RANK"])
    DIES = {0: 4, 1: 7} if sys.argv[1] == "dies" else {}

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 48
        def __getitem__(self, index):
            if index >= 48:
                raise IndexError
            sequence = torch.arange(index, index + 8) % 16
            return {"input_ids": sequence, "labels": sequence}

    class Faults(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if DIES.get(ATTEMPT) == state.global_step and RANK == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if sys.argv[1] == "waits":
                pathlib.Path(f"step.{ATTEMPT}.{RANK}").write_text(str(state.global_step))
                while state.global_step == 3 and ATTEMPT == 0 and not pathlib.Path("go").exists():
                    time.sleep(0.01)

    def trainer(faults, folder, **more):
        set_seed(3)
        config = LlamaConfig(
            vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=8, attention_dropout=0.3,
        )
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=2, gradient_accumulation_steps=2, num_train_epochs=2,
            learning_rate=1e-2, logging_steps=3, eval_strategy="steps", eval_steps=3, report_to="none",
            disable_tqdm=True, use_cpu=True, include_num_input_tokens_seen="all", **more,
        )
        made = Trainer(
            model=LlamaForCausalLM(config), args=arguments, train_dataset=Data(), eval_dataset=Data(),
            callbacks=[Faults()] if faults else [],
        )
        return made

    def told(trainer):
        kept = ("step", "loss", "grad_norm", "learning_rate", "eval_loss", "num_input_tokens_seen", "train_loss")
        return [{name: each[name] for name in kept if name in each} for each in trainer.state.log_history]

    with tempfile.TemporaryDirectory() as folder:
        kept = trainer(True, folder, save_strategy="no")
        flk_transformers.adopt(kept, save_every=1)
        kept.train()
        if sys.argv[1] == "dies":
            plain = trainer(False, folder, save_strategy="steps", save_steps=5)
            plain.train()
            assert told(kept) == told(plain), (told(kept), told(plain))
            same = [torch.equal(*pair) for pair in zip(kept.model.parameters(), plain.model.parameters(), strict=True)]
            assert all(same)
            print("equal", len(told(kept)))
"""


OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "DISABLE_KUBEFLOW_INTEGRATION": "TRUE",  # of the other trainer, whose reports are lines too
}


def test_after_a_killed_rank_the_losses_are_those_of_the_undisturbed_training(
    forked_pods: Callable[..., Pods], root: Path
) -> None:
    job = adapters.start(forked_pods, root, TRAIN, 2, "dies", **OFFLINE)
    assert job.wait() == [0, 0], job.logs_of_all()
    assert re.findall(r"resumed at step (\d+) from pod memory", job.log(0)) == ["3", "6"]
    assert all("equal 9" in job.log(pod) for pod in job.running)
    lines = [json.loads(line) for line in re.findall(r"\[rank 0\] (\{\"step.*\})", job.log(0))]
    assert [(line["step"], line["total_steps"]) for line in lines] == [(3, 12), (6, 12), (9, 12), (12, 12)]
    assert all(line["samples_per_s"] > 0 and line["tokens_per_s"] > 0 and line["eval_loss"] > 0 for line in lines)


def test_all_ranks_save_after_the_same_step_when_a_pod_must_go(forked_pods: Callable[..., Pods], root: Path) -> None:
    job = adapters.start(forked_pods, root, TRAIN, 0, "waits", **OFFLINE)
    paths = [job.folder / f"step.0.{rank}" for rank in (0, 1)]
    job.until(lambda: all(path.exists() and path.read_text() >= "2" for path in paths), "both ranks count steps")
    adapters.ends_saved(job)
