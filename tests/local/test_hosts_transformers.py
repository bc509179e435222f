"""A Trainer of Transformers whose state flk keeps (flk_hosts.transformers): it resumes exactly, and saves."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from flk_runtime.contract import pod_env, user_env
from tests.support import adapters, hosted, hosted_programs
from tests.support.collection import skip_without
from tests.support.pods import Pods

skip_without("transformers")

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "DISABLE_KUBEFLOW_INTEGRATION": "TRUE",  # of the other trainer, whose reports are lines too
}


@pytest.mark.promise("Extensions: Transformers, Lightning and Accelerate resume at the exact sample")
def test_after_a_killed_rank_the_losses_are_those_of_the_undisturbed_training(
    forked_pods: Callable[..., Pods], root: Path
) -> None:
    job = adapters.start(forked_pods, root, hosted.TRANSFORMERS, 2, "dies", "later", **OFFLINE)
    assert job.wait() == [0, 0], job.logs_of_all()
    assert re.findall(r"resumed at step (\d+) from pod memory", job.log(0)) == ["3", "6"]
    assert all("equal 9" in job.log(pod) for pod in job.running)
    assert all("went on from the later checkpoint" in job.log(pod) for pod in job.running)
    lines = [json.loads(line) for line in re.findall(r"\[rank 0\] (\{\"step.*\})", job.log(0).partition("equal")[0])]
    assert [(line["step"], line["total_steps"]) for line in lines] == [(3, 12), (6, 12), (9, 12), (12, 12)]
    assert all(line["samples_per_s"] > 0 and line["tokens_per_s"] > 0 and line["eval_loss"] > 0 for line in lines)


@pytest.mark.soak
def test_all_ranks_save_after_the_same_step_when_a_pod_must_go(forked_pods: Callable[..., Pods], root: Path) -> None:
    job = adapters.start(forked_pods, root, hosted.TRANSFORMERS, 0, "waits", **OFFLINE)
    paths = [job.folder / f"step.0.{rank}" for rank in (0, 1)]
    job.until(lambda: all(path.exists() and path.read_text() >= "2" for path in paths), "both ranks count steps")
    adapters.ends_saved(job)


@pytest.mark.soak
@pytest.mark.parametrize("programs", ["0 4", "1 2 3", "5 6", "7 8"])
def test_trainings_of_one_process_go_on_each_from_its_own_place(
    forked_pods: Callable[..., Pods], root: Path, programs: str
) -> None:
    numbers = programs.split()
    variables = {user_env.BACKOFF: "0", **OFFLINE}
    job = adapters.start(forked_pods, root, hosted_programs.TRANSFORMERS, len(numbers), *numbers, **variables)
    assert job.wait() == [0, 0], job.logs_of_all()
    assert all(f"equal {len(numbers)}" in job.log(pod) for pod in job.running)


# Twelve steps of four samples: two on each of two ranks, or two times two on one.
ELASTIC = """
    import os, pathlib, time, torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

    from flk_hosts import transformers as flk_transformers

    lines = [{"input_ids": line, "labels": line} for line in (torch.arange(24)[:, None] + torch.arange(8)) % 16]

    class Waits(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            pathlib.Path(f"step.{args.process_index}").write_text(str(state.global_step))
            while args.world_size == 2 and state.global_step == 3 and not pathlib.Path("go").exists():
                time.sleep(0.01)

    def trainer(pieces, callbacks):
        set_seed(3)
        config = LlamaConfig(
            vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
        arguments = TrainingArguments(
            output_dir="out", per_device_train_batch_size=2, gradient_accumulation_steps=pieces, num_train_epochs=2,
            learning_rate=1e-2, logging_steps=2, report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True,
        )
        return Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=lines, callbacks=callbacks)

    kept = trainer(1, [Waits()])
    flk_transformers.adopt(kept, save_every=1)
    means = [kept.train().training_loss]
    plain = trainer(2, [])
    means.append(plain.train().training_loss)
    losses = [[each["loss"] for each in made.state.log_history if "loss" in each] for made in (kept, plain)]
    assert len(losses[0]) == 6 and torch.allclose(*map(torch.tensor, losses), rtol=1e-3), losses
    assert abs(means[0] - means[1]) < 1e-3 * means[1], means
    print("alike")
"""


@pytest.mark.soak
def test_an_elastic_job_goes_on_with_fewer_ranks_and_the_samples_of_a_step(
    forked_pods: Callable[..., Pods], root: Path
) -> None:
    job = adapters.start(forked_pods, root, ELASTIC, 0, **{pod_env.MIN_PODS: "1"}, **OFFLINE)
    paths = [job.folder / f"step.{rank}" for rank in (0, 1)]
    job.until(lambda: all(path.exists() and path.read_text() >= "2" for path in paths), "both ranks count steps")
    job.running[1].terminate()
    job.until(lambda: "SIGTERM" in job.log(1), "the launcher has got the signal")
    (job.folder / "go").touch()
    assert job.wait() == [0, 143], job.logs_of_all()
    assert "alike" in job.log(0), job.log(0)
    assert re.search(r"resumed at step [2-9]", job.log(0))
