"""The Secret of a job's pods has another name for each submission, and nothing else is renamed."""

from __future__ import annotations

import copy
from typing import Any

from flk.targets.rendezvous import environments, name_secret, require_secret, secret_name


def reference(variable: str, secret: str, **fields: bool) -> dict[str, Any]:
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": "uid", **fields}}}


def test_only_what_names_a_secret_of_this_job_gets_the_name_of_its_submission() -> None:
    kept = [
        reference("FLK_RDZV_SECRET", "mine"),  # of a patch
        reference("FLK_RDZV_SECRET", "gpt-rendezvous2"),
        reference("FLK_RDZV_SECRET", "gpt-rendezvous-shared"),
        reference("TOKEN", "gpt-rendezvous"),
        {"name": "FLK_JOB_UID", "value": "gpt-rendezvous"},
    ]
    changed = [
        reference("FLK_JOB_UID", "gpt-rendezvous"),
        reference("FLK_RDZV_SECRET", "gpt-rendezvous-0123abcd", optional=False),
    ]
    job = {
        "metadata": {"name": "gpt", "annotations": {"flk.dev/submission": "89abcdef-0123"}},
        "spec": {"containers": [{"env": copy.deepcopy([*changed, *kept])}]},
    }
    name = "gpt-rendezvous-89abcdef"
    for change, optional in ((name_secret, True), (require_secret, False)):
        change(job)
        (variables,) = environments(job)
        own = [reference(variable, name, optional=optional) for variable in ("FLK_JOB_UID", "FLK_RDZV_SECRET")]
        assert variables == [*own, *kept]


def test_a_job_that_kubectl_creates_has_no_submission() -> None:
    assert secret_name("gpt") == "gpt-rendezvous"
