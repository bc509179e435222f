"""What k8s holds is accepted by a real API server, and the Role gives what it says and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flk.targets import TARGETS

K8S = Path(__file__).parents[2] / "k8s"


def test_an_example_manifest_is_accepted(kubectl: Any) -> None:
    created = kubectl("create", "--dry-run=server", "-f", str(K8S / "examples" / "gpt.yaml"))
    assert created.strip() == "pytorchjob.kubeflow.org/gpt created (server dry run)"


def review(namespace: str, verb: str, resource: str) -> dict[str, Any]:
    """The question whether a member of the group that k8s/rbac.yaml names may do this."""
    name, _, subresource = resource.partition("/")
    groups = {"roles": "rbac.authorization.k8s.io"} | {target.plural: target.group for target in TARGETS.values()}
    group = groups.get(name, "")
    attributes = {"namespace": namespace, "verb": verb, "group": group, "resource": name, "subresource": subresource}
    return {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": "ada", "groups": ["researchers"], "resourceAttributes": attributes},
    }


@pytest.mark.promise("Clusters: The roles give what the commands need, and no more")
def test_role_gives_submitters_what_they_need_and_no_more(kubectl: Any, namespace: str) -> None:
    kubectl("apply", "-f", str(K8S / "rbac.yaml"))
    jobs = [target.plural for target in TARGETS.values()]
    others = ("configmaps", "secrets", "services", "pods", "pods/log", "pods/exec", "events", "roles")
    asked = [
        (verb, resource)
        for verb in ("create", "get", "list", "watch", "patch", "update", "delete")
        for resource in (*jobs, *others)
    ]
    reviews = {"apiVersion": "v1", "kind": "List", "items": [review(namespace, *question) for question in asked]}
    answers = kubectl("create", "-f", "-", "-o", "jsonpath={.status.allowed}{'\\n'}", stdin=reviews).split()
    allowed = {question for question, answer in zip(asked, answers, strict=True) if answer == "true"}
    assert allowed == {
        *((verb, job) for job in jobs for verb in ("create", "get", "list", "watch", "patch", "delete")),
        *((verb, "services") for verb in ("create", "list")),
        *((verb, "configmaps") for verb in ("create", "get", "list", "patch")),
        ("create", "secrets"),
        *((verb, "pods") for verb in ("get", "list", "watch")),
        ("list", "events"),
        ("get", "pods/log"),
    }
