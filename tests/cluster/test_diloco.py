"""Strategy diloco in a cluster: two sites, each a PyTorchJob, whose workers meet at the hub of the first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flk_runtime.contract import pod_env
from tests.support.certificates import make_certificate

SMALL = ["--", "--steps", "20", "--batch-size", "4", "--layers", "1", "--width", "32", "--block", "32"]
ENOUGH = 400  # seconds for a job of a few steps


def certificate(folder: Path) -> list[str]:
    """The files of a Secret of type TLS, for `kubectl create secret generic`: a certificate that signs itself."""
    made = make_certificate(folder, "hub")
    return [f"--from-file=tls.key={made.key}", f"--from-file=tls.crt={made.path}", f"--from-file=ca.crt={made.path}"]


@pytest.mark.promise("Extensions: Sites over slow links train one model")
@pytest.mark.soak
@pytest.mark.timeout(900)
def test_two_sites_train_one_model(flk: Any, kubectl: Any, image: str, tmp_path: Path) -> None:
    kubectl("create", "secret", "generic", "hub", "--from-literal=secret=of-both-sites")
    kubectl("create", "secret", "generic", "certificate", *certificate(tmp_path))
    shared = ["every=10", "sites=2", "secret=hub:secret", "tls=certificate"]
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
    pods = json.loads(kubectl("get", "pods", "-o", "json"))["items"]
    names = [[variable["name"] for variable in pod["spec"]["containers"][0]["env"]] for pod in pods]
    assert [pod_env.SERVICE_CA in each for each in names] == [True] * 2
    assert [pod_env.SERVICE_CERTIFICATE in each for each in names].count(True) == 1, "that of site 0"
