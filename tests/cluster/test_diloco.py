"""Strategy diloco in a cluster: two sites, each a PyTorchJob, whose workers meet at the hub of the first."""

from __future__ import annotations

import json
from typing import Any

import pytest

SMALL = ["--", "--steps", "20", "--batch-size", "4", "--layers", "1", "--width", "32", "--block", "32"]
ENOUGH = 400  # seconds for a job of a few steps


@pytest.mark.promise("Extensions: Sites over slow links train one model")
@pytest.mark.soak
@pytest.mark.timeout(900)
def test_two_sites_train_one_model(flk: Any, kubectl: Any, image: str) -> None:
    kubectl("create", "secret", "generic", "hub", "--from-literal=secret=of-both-sites")
    shared = ["every=10", "sites=2", "secret=hub:secret"]
    job = ["--processes", "2", "--cpu", "100m", "--env", "OMP_NUM_THREADS=1", "--strategy", "diloco", "--restarts", "0"]
    for name, own in (("west", ["site=0"]), ("east", ["site=1", "hub=west-worker-0:29401"])):
        options = [part for text in (*shared, *own) for part in ("--diloco", text)]
        submitted = flk("submit", *job, *options, "--name", name, *SMALL)
        assert submitted.code == 0, submitted.stderr
    lines: list[str] = []
    for name in ("west", "east"):
        waited = flk("wait", name, timeout=ENOUGH)
        assert waited.code == 0, waited.stderr
        lines += flk("logs", name, "--no-follow").stdout.splitlines()
    found = [
        json.loads(line.partition("] ")[2]) for line in lines if line.startswith("[rank ") and '"heldout_loss"' in line
    ]
    losses = [each["heldout_loss"] for each in found if each["step"] == 20]
    assert len(losses) == 2  # of the first rank of each
    assert losses == pytest.approx([losses[0]] * 2, abs=1e-6)
