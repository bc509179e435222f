"""The files in k8s: example manifests are what `flk render` gives today, and the installer calls kubectl as it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

K8S = Path(__file__).parents[2] / "k8s"
EXAMPLES = K8S / "examples"


@pytest.mark.parametrize("job", sorted(EXAMPLES.glob("*.flk.yaml")), ids=lambda path: path.name)
def test_example_manifest_is_up_to_date(job: Path) -> None:
    # `make examples` renews them.
    command = [sys.executable, "-m", "flk", "render", "--file", str(job)]
    rendered = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert job.with_name(job.name.replace(".flk.yaml", ".yaml")).read_text() == rendered


def test_every_example_has_a_job_file() -> None:
    names = {path.name.split(".")[0] for path in EXAMPLES.glob("*.flk.yaml")}
    assert {path.stem for path in EXAMPLES.glob("*.yaml") if not path.name.endswith(".flk.yaml")} == names


@pytest.mark.parametrize(
    ("manifest", "source"),
    [
        (None, "-k github.com/kubeflow/training-operator.git/manifests/overlays/standalone?ref=v1.9.4"),
        ("/a folder/operator.yaml", "-f /a folder/operator.yaml"),
    ],
)
def test_installer_applies_the_published_manifests_or_those_it_is_given(
    manifest: str | None, source: str, tmp_path: Path
) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\n')
    kubectl.chmod(0o755)
    env = {k: v for k, v in os.environ.items() if k != "FLK_OPERATOR_MANIFEST"}
    env |= {"PATH": f"{tmp_path}:{env['PATH']}"} | ({"FLK_OPERATOR_MANIFEST": manifest} if manifest else {})
    subprocess.run([K8S / "install-operator", "--context", "mine"], env=env, check=True)
    assert (tmp_path / "calls").read_text().splitlines() == [
        f"--context mine apply --server-side --force-conflicts {source}",
        "--context mine -n kubeflow rollout status deployment/training-operator --timeout 300s",
    ]
