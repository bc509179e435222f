"""Secrets that a job's object has in plain text do not get into a report."""

from __future__ import annotations

import json

import pytest

from flk import labels
from flk.observe.redaction import masked, secrets_of
from flk.report.build import build
from flk.report.model import Excerpt
from flk.report.page import page_of
from tests.support.reports import job, telemetry

CANARY = "canary-7f3b"
PLACES = {
    "variable": lambda made: made.container["env"].append({"name": "WANDB_API_KEY", "value": CANARY}),
    "s3": lambda made: made.container["env"].append({"name": "AWS_SECRET_ACCESS_KEY", "value": CANARY}),
    "option": lambda made: made.container.update(command=["python", "train.py", "--hub-token", CANARY]),
    "assigned": lambda made: made.container.update(args=["train.py", f"--api-key={CANARY}"]),
    "address": lambda made: made.container["env"].append({"name": "TRACKING", "value": f"https://me:{CANARY}@host/x"}),
    "spec": lambda made: made.job["metadata"]["annotations"].update(
        {labels.SPEC: json.dumps({"command": ["t.py", "--token", CANARY], "env": {"HF_TOKEN": CANARY}})}
    ),
    "applied": lambda made: made.job["metadata"]["annotations"].update(
        {"kubectl.kubernetes.io/last-applied-configuration": CANARY}
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_secret_is_nowhere_in_the_report(place: str) -> None:
    made = job()
    PLACES[place](made)
    told = [f"https://me:{CANARY}@host/x"] if place in ("address", "applied") else [f"key is {CANARY}"]
    if place == "spec":  # the container has what the options say
        PLACES["variable"](made)
    report = build(made.view(), made.state(), telemetry=telemetry(), excerpts=[Excerpt("log", told)])
    assert CANARY in report.excerpts[0].lines[0]
    clean = masked(report, secrets_of(made.job))
    assert CANARY not in json.dumps(clean.to_dict())
    assert CANARY not in page_of(clean, None)


def test_other_values_stay() -> None:
    made = job()
    made.container["env"].append({"name": "AUTHOR", "value": "mona"})
    report = build(made.view(), made.state(), telemetry=None, excerpts=[])
    clean = masked(report, secrets_of(made.job))
    assert clean == report
    assert clean.submitted.variables["AUTHOR"] == "mona"
