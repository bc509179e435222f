"""Settings of the pods and other vendors' devices: flags, the job file, what is refused, and the manifest."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

import flk
from flk.errors import UsageError
from flk.manifest.pod import START
from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.contract.record import JobRecord
from tests.support.commands import Run


def rendered(run: Run, *flags: str) -> Any:
    Path("train.py").write_text("")
    code, stdout, stderr = run("render", "train.py", "--name", "gpt", *flags, "-o", "json")
    assert code == 0, stderr
    return json.loads(stdout)["items"][0]


def test_flags_reach_the_manifest(run: Run) -> None:
    job = rendered(
        run,
        *("--label", "team=vision", "--annotation", "example.com/note=a b", "--service-account", "trainer"),
        *("--pull-secret", "registry", "--pull-secret", "mirror", "--priority-class", "high"),
    )
    template = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    for metadata in (job["metadata"], template["metadata"]):
        assert metadata["labels"]["team"] == "vision"
        assert metadata["labels"]["flk.dev/job"] == "gpt"
        assert metadata["annotations"]["example.com/note"] == "a b"
    assert template["spec"]["serviceAccountName"] == "trainer"
    assert template["spec"]["imagePullSecrets"] == [{"name": "registry"}, {"name": "mirror"}]
    assert template["spec"]["priorityClassName"] == "high"
    assert template["spec"]["automountServiceAccountToken"] is False


@pytest.mark.parametrize("strength", ["required", "preferred"])
def test_the_topology_of_a_job_is_told_to_the_scheduler_and_to_kueue(run: Run, strength: str) -> None:
    job = rendered(run, "--queue", "gold", "--topology", f"example.com/rack:{strength}")
    template = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    assert template["metadata"]["annotations"][f"kueue.x-k8s.io/podset-{strength}-topology"] == "example.com/rack"
    assert f"{strength}DuringSchedulingIgnoredDuringExecution" in template["spec"]["affinity"]["podAffinity"]


def test_devices_of_another_vendor(run: Run) -> None:
    job = rendered(run, "--resource", "amd.com/gpu=8", "--resource", "rdma/hca=1")
    container = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"] == {"amd.com/gpu": "8", "rdma/hca": "1"}
    assert job["spec"]["nprocPerNode"] == "8"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--resource", "gpu=8"], "--resource gpu: must be the name of a device plugin's resource"),
        (["--resource", "nvidia.com/gpu=8"], "--resource nvidia.com/gpu: nvidia.com/gpu is requested by gpu"),
        (["--resource", "amd.com/gpu=0"], "amd.com/gpu must be at least 1"),
        (["--resource", "amd.com/gpu=some"], "--resource amd.com/gpu: must be a whole number"),
        (["--label", "flk.dev/job=other"], "--label: flk or the training operator sets flk.dev/job"),
        (["--label", "kueue.x-k8s.io/queue-name=q"], "--label: queue sets it"),
        (["--label", "team"], "--label"),
        (["--label", "team=a b"], "--label: must be at most 63 letters"),
        (["--annotation", "a b=c"], "--annotation: must be at most 63"),
        (["--pull-secret", "A_B"], "--pull-secret: must be lower-case"),
        (["--service-account", ""], "--service-account: must be lower-case"),
        (["--priority-class", "high!"], "--priority-class: must be lower-case"),
    ],
)
def test_bad_values_are_refused(run: Run, flags: list[str], message: str) -> None:
    Path("train.py").write_text("")
    code, _, stderr = run("render", "train.py", *flags)
    assert code == 2
    assert message in stderr


def test_python_api() -> None:
    job = flk.Job(command=["train.py"], pods={"labels": {"team": "vision"}})
    assert job.pods is not None
    assert job.pods.labels == {"team": "vision"}
    with pytest.raises(UsageError, match=r"pods\.label: unknown key"):
        job.changed(pods={"label": {}})


def test_an_image_without_python_leaves_a_record_of_a_usage_error(tmp_path: Path) -> None:
    env = {"FLK_POD_INDEX": "1", "FLK_POD_NAME": "gpt-worker-1", "FLK_NODE_NAME": "n", "FLK_TERMINATION_LOG": "log"}
    words = ["/bin/sh", "-c", START, "flk", "no-such-python", "-u"]
    done = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "[pod 1] error: the image has no no-such-python\n")
    failure = Failure(Kind.USAGE, 1, pod_name="gpt-worker-1", node="n", message="the image has no no-such-python")
    record = JobRecord("failed", 2, failure=failure, no_retry_reason=f"not retried: {Kind.USAGE.meaning.reason}")
    assert (tmp_path / "log").read_text() == record.to_json()
