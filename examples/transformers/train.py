"""A Hugging Face Transformers script: a Trainer, which reads the launcher's variables. It does not use flk.

    flk run --replicas 2 examples/transformers/train.py
    torchrun --nproc-per-node 2 examples/transformers/train.py
    python examples/transformers/train.py

A tiny Llama with random weights learns sequences of numbers. Nothing is downloaded.
"""

import json
import os
import sys
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

SAMPLES, BATCH, LENGTH, VOCABULARY = 64, 8, 16, 32


class Counting(Dataset):
    """Sequences that go up by one: 5 6 7 …, each with itself as its labels."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        if index >= SAMPLES:
            raise IndexError(index)
        sequence = torch.arange(index, index + LENGTH) % VOCABULARY
        return {"input_ids": sequence, "labels": sequence}


def main():
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    set_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH // world_size,
            num_train_epochs=2,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )
        trainer = Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=Counting())
        trainer.train()
        model = trainer.accelerator.unwrap_model(trainer.model)
        batch = torch.stack([sample["input_ids"] for sample in trainer.train_dataset]).to(arguments.device)
        with torch.no_grad():
            loss = model(input_ids=batch, labels=batch).loss  # of all samples, with this rank's parameters
        norm = torch.stack([parameter.detach().norm() for parameter in model.parameters()]).norm()
        result = {
            "rank": arguments.process_index,
            "world_size": arguments.world_size,
            "steps": trainer.state.global_step,
            "loss": loss.item(),
            "norm": norm.item(),
        }
        sys.stdout.write(json.dumps(result) + "\n")
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
