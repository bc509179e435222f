"""What the chart renders for values, without a cluster."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from scripts.chart import prepare
from tests.support.commands import helm

ROOT = Path(__file__).parents[2]
CHART = prepare()


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


def template(values: dict[str, Any], *args: str, release: str = "gpt", chart: Path = CHART) -> Rendered:
    """Render the chart with ``values``, which Helm reads from a file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "values.json")
        file.write_text(json.dumps(values))
        done = helm("template", release, str(chart), "--values", str(file), *args)
    documents = (
        list(yaml.load_all(done.stdout, getattr(yaml, "CSafeLoader", yaml.SafeLoader))) if done.code == 0 else []
    )
    return Rendered(done.code, [document for document in documents if document], done.stderr)
