"""The JSON schemas of models, for the chart's values, and the commented flk.yaml that `flk init` writes.

Both are generated from the models, so they always agree with them.
"""

from __future__ import annotations

import re
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from flk.spec import file as jobfile
from flk.spec.job import Job
from flk.spec.options import rows


class _Generator(GenerateJsonSchema):
    """pydantic's generator, except that a key that does not match the pattern of a mapping's keys is refused."""

    def dict_schema(self, schema: Any) -> Any:
        found = super().dict_schema(schema)
        for pattern, value in found.pop("patternProperties", {}).items():
            found |= {"propertyNames": {"pattern": pattern, **found.get("propertyNames", {})}}
            found |= {"additionalProperties": value}
        return found


def schema_of(model: type[BaseModel], definitions: str = "$defs") -> dict[str, Any]:
    """Return the JSON schema of a model, with the schemas of its parts under the key ``definitions``."""
    found = model.model_json_schema(schema_generator=_Generator, ref_template=f"#/{definitions}/{{model}}")
    found[definitions] = found.pop("$defs", {})
    return found


def template(script: str, replicas: int) -> str:
    """Return the text of a flk.yaml that runs a script, with a comment for each field."""
    lines = ["# A training job of flk. Flags on the command line win over the values in this file.", ""]
    values = {"command": _command(script), "replicas": str(replicas)}
    examples = {row.path[0]: row.option.example for row in rows(Job) if len(row.path) == 1}
    for name, field in sorted(Job.model_fields.items(), key=lambda item: item[0] not in values):
        lines.append(f"# {field.description}")
        lines.append(f"{name}: {values[name]}" if name in values else f"# {name}: {examples[name]}")
    return "\n".join(lines) + "\n"


def _command(script: str) -> str:
    """Return the YAML of a command that is only this script: its name, or a list where that would be read otherwise."""
    plain = re.fullmatch(r"[\w./][\w./-]*", script)
    if plain and jobfile.mapping(f"command: {script}", "") == {"command": script}:
        return script
    return yaml.safe_dump([script], default_flow_style=True, default_style='"', width=float("inf")).rstrip()
