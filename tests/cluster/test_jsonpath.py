"""Templates of JSONPath print what kubectl prints."""

from __future__ import annotations

import json
from typing import Any

from flk.cli.jsonpath import parse_template

# Without paths that give several values of a mapping: kubectl has these in a random order.
TEMPLATES = (
    "{.metadata.name}",
    r"{.metadata.labels.a\.b/c}",
    "{.metadata.labels['team']}",
    "{.metadata.labels}",
    "{.missing}{.metadata.missing.deep}",
    "x{.kind}y",
    '{.kind}{"\\t"}{.apiVersion}',
    "{$.kind} {['kind','apiVersion']} {.metadata['name','namespace']}",
    "{.metadata.managedFields[0].manager} {.metadata.managedFields[-1].manager}",
    "{.metadata.managedFields[*].operation}",
    "{.metadata.managedFields[0:1].operation} {.metadata.managedFields[0:].operation}",
    "{.metadata.managedFields[::2].manager}",
    "{range .metadata.managedFields[*]}{.manager}{'\\t'}{.operation}{'\\n'}{end}",
    '{.metadata.managedFields[?(@.operation=="Update")].operation}',
    '{.metadata.managedFields[?(@.manager!="x")].operation}',
    "{.metadata.managedFields[?(@.manager)].operation}",
    "{.metadata..operation}",
    "{.metadata.managedFields.manager}",
    "{range .nothing[*]}{.a}{end}",
    "{.data.k1} {'text'}",
)


def test_a_template_prints_what_kubectl_prints(kubectl: Any) -> None:
    metadata = {"name": "gpt", "labels": {"a.b/c": "x", "team": "nlp"}}
    item = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"k1": "v1", "k2": "v2"}}
    kubectl("create", "-f", "-", stdin=json.dumps(item))
    get = ("get", "configmap", "gpt", "--show-managed-fields", "-o")
    stored = json.loads(kubectl(*get, "json"))
    every = "\n---\n".join(TEMPLATES)
    printed = str(kubectl(*get, f"jsonpath={every}")).split("\n---\n")
    assert parse_template(every)(stored).split("\n---\n") == printed
    assert dict(zip(TEMPLATES, printed, strict=True))["x{.kind}y"] == "xConfigMapy"
