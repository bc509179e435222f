"""Render the chart for values, without a cluster."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from scripts.chart import CHART, prepare
from tests.support.commands import helm

ROOT = Path(__file__).parents[2]
JOB = {"enabled": True, "command": ["train.py"]}  # values of a job whose code is in the image
prepared = functools.cache(prepare)  # packs the runtime, so no module calls it when it is imported


@dataclass(frozen=True)
class Rendered:
    """The end of one `helm template`: its exit code, what it rendered and its stderr."""

    code: int
    documents: list[dict[str, Any]]
    stderr: str

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        assert self.code == 0, self.stderr
        return [document for document in self.documents if document["kind"] == kind]

    def one(self, kind: str) -> dict[str, Any]:
        (document,) = self.of_kind(kind)
        return document

    def kinds(self) -> list[str]:
        assert self.code == 0, self.stderr
        return sorted(document["kind"] for document in self.documents)


def template(values: dict[str, Any], *args: str, release: str = "gpt", chart: Path | None = None) -> Rendered:
    """Render the chart with ``values``, which Helm reads from a file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "values.json")
        file.write_text(json.dumps(values))
        done = helm("template", release, str(chart or prepared()), "--values", str(file), *args)
    return Rendered(done.code, _documents(done.stdout) if done.code == 0 else [], done.stderr)


# Renders templates/job.yaml of the chart once for each of many values.
_MANY = """{{ range $name, $values := .Values.many }}
---
{{ $values := fromJson $values }}
{{ $job := include (print $.Template.BasePath "/_job.yaml") (set (omit $ "Values") "Values" $values) }}
{{ dict "name" $name "text" $job | toJson }}
{{ end }}"""


def templates(many: dict[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Render templates/job.yaml for many values, by their names, in one process. The values have to be valid."""
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = jsonschema.Draft7Validator(json.loads((CHART / "values.schema.json").read_text()))
    with tempfile.TemporaryDirectory() as folder:
        chart = Path(folder, "flk")
        shutil.copytree(prepared(), chart, ignore=shutil.ignore_patterns("NOTES.txt", "values.schema.json"))
        for path in (chart / "templates").glob("*.yaml"):
            if path.name != "job.yaml":
                path.unlink()
        for values in many.values():
            schema.validate(values)
        texts = {name: json.dumps(merged(defaults, values)) for name, values in many.items()}
        (chart / "templates" / "job.yaml").rename(chart / "templates" / "_job.yaml")
        (chart / "templates" / "many.yaml").write_text(_MANY)
        (chart / "values.yaml").write_text(json.dumps({"many": texts}))
        done = helm("template", "gpt", str(chart))
    assert done.code == 0, done.stderr
    return {document["name"]: _documents(document["text"]) for document in _documents(done.stdout)}


def merged(base: Any, over: Any) -> Any:
    """Values over the chart's defaults, as Helm merges them."""
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    return {**base, **{key: merged(base.get(key), value) for key, value in over.items()}}


def _documents(text: str) -> list[dict[str, Any]]:
    found = yaml.load_all(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return [document for document in found if document]
