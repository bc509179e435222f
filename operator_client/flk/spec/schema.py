"""The JSON schema of the job file, and the commented flk.yaml that `flk init` writes.

Both are generated from the model, so they always agree with it.
"""

from __future__ import annotations

import re
from typing import Any, Final

import yaml

from flk.spec import file as jobfile
from flk.spec.job import Job

SCHEMA_FILE: Final = "flk.schema.json"
# Values of the fields that the generated file shows as comments.
_EXAMPLES: Final = {
    "name": "my-job",
    "image": "team/train:1.0",
    "elastic": "{min: 2, max: 4, batch: keep}",
    "spares": "0",
    "processes": "1",
    "resources": "{cpu: 2, memory: 4Gi, gpu: 0, shm: 1Gi}",
    "strategy": "ddp",
    "diloco": "{inner: full_shard, workers: 4, every: 100, dtype: int8}",
    "fabric": "auto",
    "restarts": "3",
    "disruptions": "100",
    "deadline": "2h",
    "ttl": "7d",
    "hang_timeout": "10m",
    "grace": "30s",
    "checkpoint": "my-pvc:/checkpoints",
    "save_every": "100",
    "keep": "2",
    "keep_every": "1000",
    "queue": "my-queue",
    "queue_priority": "high",
    "target": "pytorchjob",
    "gang": "none",
    "topology": "topology.kubernetes.io/rack:preferred",
    "env": '{LEARNING_RATE: "3e-4"}',
    "secrets": "{WANDB_API_KEY: wandb:key}",
    "volumes": "[my-data:/data]",
    "nodes": "{selector: {pool: gpu}, tolerations: [nvidia.com/gpu:NoSchedule]}",
    "pods": "{labels: {team: vision}, service_account: trainer, pull_secrets: [registry], priority_class: high}",
    "records": "my-release-flk-records",
    "patch": "{spec: {runtimeClassName: nvidia}}",
    "ship": "[config/*.yaml]",
}


def schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of flk.yaml."""
    inner = Job.model_json_schema()
    inner["required"] = []  # the command may come from the command line
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "flk.yaml",
        **{k: v for k, v in inner.items() if k != "title"},
    }


def template(script: str, replicas: int, *, with_schema: bool) -> str:
    """Return the text of a flk.yaml that runs a script, with a comment for each field."""
    lines = [f"# yaml-language-server: $schema={SCHEMA_FILE}"] if with_schema else []
    lines += ["# A training job of flk. Flags on the command line win over the values in this file.", ""]
    values = {"command": _command(script), "replicas": str(replicas)}
    fields = sorted(Job.model_fields.items(), key=lambda item: item[0] not in values)
    for name, field in fields:
        lines.append(f"# {field.description}")
        lines.append(f"{name}: {values[name]}" if name in values else f"# {name}: {_EXAMPLES[name]}")
    return "\n".join(lines) + "\n"


def _command(script: str) -> str:
    """Return the YAML of a command that is only this script: its name, or a list where that would be read otherwise."""
    plain = re.fullmatch(r"[\w./][\w./-]*", script)
    if plain and jobfile.mapping(f"command: {script}", "") == {"command": script}:
        return script
    return yaml.safe_dump([script], default_flow_style=True, default_style='"', width=float("inf")).rstrip()
