"""Devices that pods claim (dynamic resource allocation): rendered, checked before the job, and explained afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flk.errors import UsageError
from flk.health import find
from flk.manifest.bundle import Bundle
from flk.manifest.pod import pod_template
from flk.manifest.render import render
from flk.spec.job import validated
from tests.support.commands import Run
from tests.support.jobs import JobBuilder

POD = "gpt-worker-1"
GROUP = "/apis/resource.k8s.io"


def claiming(**more: Any) -> Any:
    return validated({"name": "n", "command": "train.py", "claims": ["one-gpu", "nic.fast"], **more})


def test_each_pod_gets_claims_of_its_own_and_its_container_uses_them() -> None:
    spec = pod_template(claiming(resources={"cpu": 1}), Bundle(runtime=b"x"), ["runtime-0"])["spec"]
    assert spec["resourceClaims"] == [
        {"name": "claim-0", "resourceClaimTemplateName": "one-gpu"},
        {"name": "claim-1", "resourceClaimTemplateName": "nic.fast"},
    ]
    resources = spec["containers"][0]["resources"]
    assert resources["claims"] == [{"name": "claim-0"}, {"name": "claim-1"}]
    assert resources["requests"] == {"cpu": "1"}


def test_a_target_whose_pods_take_no_claims_is_refused() -> None:
    with pytest.raises(UsageError, match="a TrainJob cannot set resourceClaims of its pods"):
        render(claiming(target="trainjob"), Bundle())


def pending(message: str) -> JobBuilder:
    said = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return JobBuilder().pod(0).pod(2).pod(1, "Pending", {}, node="", conditions=[said])


@pytest.mark.parametrize(
    "message",
    [
        "0/3 nodes are available: 3 cannot allocate all claims. preemption: 0/3 nodes are available.",
        "0/2 nodes are available: 1 cannot allocate all claims, 1 node(s) didn't match Pod's node affinity/selector.",
        "0/3 nodes are available: 3 resourceclaim not available on the node.",
    ],
)
def test_devices_that_no_node_has_free(message: str) -> None:
    (found,) = find(pending(message).view())
    assert (found.code, found.resolves_itself) == ("NotEnoughDevices", True)
    assert found.sentence.startswith(f"{POD}: no node has the devices free that it claims (")
    assert "get resourceslices" in found.remedy


def test_a_class_of_devices_that_does_not_exist() -> None:
    message = (
        "0/3 nodes are available: request gpu: device class gpu.example.com does not exist. no new claims to "
        "deallocate, preemption: 0/3 nodes are available: 3 Preemption is not helpful for scheduling."
    )
    (found,) = find(pending(message).view())
    assert (found.code, found.resolves_itself) == ("DeviceClassMissing", False)
    assert "the DeviceClass gpu.example.com does not exist" in found.sentence


@pytest.mark.parametrize(
    ("job", "kind"),
    [
        (
            lambda: (
                JobBuilder()
                .pod(0)
                .pod(2)
                .pod(1, "Pending", {}, node="")
                .event(
                    "FailedResourceClaimCreation",
                    'PodResourceClaim claim-0: resource claim template "gone": '
                    'resourceclaimtemplate.resource.k8s.io "gone" not found',
                    "Pod",
                    POD,
                )
            ),
            "ResourceClaimTemplate",
        ),
        (lambda: pending('0/3 nodes are available: resourceclaim "gone" not found.'), "ResourceClaim"),
    ],
)
def test_a_claim_or_template_that_does_not_exist(job: Callable[[], JobBuilder], kind: str) -> None:
    (found,) = find(job().view())
    assert (found.code, found.resolves_itself) == ("DeviceClaimMissing", False)
    assert found.sentence == f"{POD} cannot be scheduled: the {kind} gone does not exist in namespace team"
    assert found.pods == [POD]


@pytest.fixture
def check(fake: Any, run: Run, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    (tmp_path / "train.py").touch()

    def check(*flags: str) -> tuple[int, str]:
        code, stdout, stderr = run("submit", "--dry-run", "--name", "gpt", "--claim", "one-gpu", *flags, "train.py")
        return code, stdout + stderr

    return check


def serve(fake: Any, *versions: str) -> None:
    fake.objects |= {f"{GROUP}/{version}/namespaces/team/resourceclaimtemplates": {} for version in versions}


@pytest.mark.parametrize(
    ("served", "used"),
    [(["v1", "v1beta2"], "v1"), (["v1beta1", "v1beta2"], "v1beta2"), (["v1alpha3", "v1beta1"], "v1beta1")],
)
def test_a_template_is_read_in_a_version_that_the_cluster_serves(fake: Any, check: Any, served: Any, used: str) -> None:
    serve(fake, *served)
    path = f"{GROUP}/{used}/namespaces/team/resourceclaimtemplates/one-gpu"
    fake.documents[path] = {"metadata": {"name": "one-gpu"}, "spec": {}}
    _, text = check()
    assert path in fake.asked("GET")
    assert "devices" not in text


def test_a_template_that_does_not_exist_fails_the_check(fake: Any, check: Any) -> None:
    serve(fake, "v1")
    code, text = check()
    assert code == 104
    assert "there is no ResourceClaimTemplate one-gpu" in text


@pytest.mark.parametrize(
    ("served", "said"),
    [
        ([], "does not serve resourceclaimtemplates.resource.k8s.io"),
        (
            ["v2"],
            "resourceclaimtemplates.resource.k8s.io in version v2 only, and flk knows v1, v1beta2, v1beta1",
        ),
    ],
)
def test_a_cluster_without_claims_or_with_unknown_ones_fails_the_check(
    fake: Any, check: Any, served: list[str], said: str
) -> None:
    if served:
        serve(fake, *served)
    code, text = check()
    assert code == 104
    assert said in text
