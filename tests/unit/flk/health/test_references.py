"""Devices that pods claim (dynamic resource allocation): rendered, checked before the job, and explained afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flk.errors import UsageError
from flk.manifest.bundle import Bundle
from flk.manifest.pod import pod_template
from flk.manifest.render import render
from flk.spec.job import validated
from tests.support.commands import Run

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
