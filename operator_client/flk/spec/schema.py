"""The job file for editors and newcomers: its JSON schema, and the commented flk.yaml that `flk init` writes.

Both come from the model, so they cannot lag behind it.
"""

from __future__ import annotations

from typing import Any, Final

from flk.spec.job import Job

SCHEMA_FILE: Final = "flk.schema.json"
# What the first file shows: what most people set, with values that run anywhere; the rest stands there as comments.
_EXAMPLES: Final = {
    "name": "my-job",
    "image": "team/train:1.0",
    "processes": "1",
    "resources": "{cpu: 2, memory: 4Gi, gpu: 0, shm: 1Gi}",
    "strategy": "ddp",
    "fabric": "auto",
    "restarts": "3",
    "deadline": "2h",
    "checkpoint": "my-claim:/checkpoints",
    "save_every": "100",
    "queue": "my-queue",
    "env": '{LEARNING_RATE: "3e-4"}',
    "secrets": "{WANDB_API_KEY: wandb:key}",
    "volumes": "[my-data:/data]",
    "nodes": "{selector: {pool: gpu}, tolerations: [nvidia.com/gpu:NoSchedule]}",
    "patch": "{spec: {priorityClassName: high}}",
    "ship": "[config/*.yaml]",
}


def schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of flk.yaml."""
    inner = Job.model_json_schema()
    inner["required"] = []  # the command may come from the command line
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "flk.yaml",
        **{k: v for k, v in inner.items() if k != "title"},
    }


def template(command: str, replicas: int, *, with_schema: bool) -> str:
    """A flk.yaml that runs ``command``, with a comment for each field."""
    lines = [f"# yaml-language-server: $schema={SCHEMA_FILE}"] if with_schema else []
    lines += ["# A training job of flk. Flags of the command line win over what stands here.", ""]
    values = {"command": command, "replicas": str(replicas)}
    fields = sorted(Job.model_fields.items(), key=lambda item: item[0] not in values)
    for name, field in fields:
        lines.append(f"# {field.description}")
        lines.append(f"{name}: {values[name]}" if name in values else f"# {name}: {_EXAMPLES[name]}")
    return "\n".join(lines) + "\n"
