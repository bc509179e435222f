"""The files in k8s: example manifests are what `flk render` gives today, and the installer calls kubectl as it says."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import kind_kubeconfig

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


INSTALLERS = {
    "install-operator": (
        "FLK_OPERATOR_MANIFEST",
        "github.com/kubeflow/training-operator.git/manifests/overlays/standalone?ref=v1.9.4",
        "-n kubeflow rollout status deployment/training-operator",
    ),
    "install-trainer": (
        "FLK_TRAINER_MANIFEST",
        "https://github.com/kubeflow/trainer.git/manifests/overlays/manager?ref=v2.3.0",
        "-n kubeflow-system rollout status deployment/kubeflow-trainer-controller-manager",
    ),
}


@pytest.mark.parametrize("installer", INSTALLERS)
@pytest.mark.parametrize("manifest", [None, "/a folder/operator.yaml"])
def test_installers_apply_the_published_manifests_or_those_they_are_given(
    manifest: str | None, installer: str, tmp_path: Path
) -> None:
    variable, published, rollout = INSTALLERS[installer]
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\n')
    kubectl.chmod(0o755)
    env = {k: v for k, v in os.environ.items() if k != variable}
    env |= {"PATH": f"{tmp_path}:{env['PATH']}"} | ({variable: manifest} if manifest else {})
    subprocess.run([K8S / installer, "--context", "mine"], env=env, check=True)
    source = f"-f {manifest}" if manifest else f"-k {published}"
    assert (tmp_path / "calls").read_text().splitlines() == [
        f"--context mine apply --server-side --force-conflicts {source}",
        f"--context mine {rollout} --timeout 300s",
        *([f"--context mine apply --server-side -f {K8S}/training-runtime.yaml"] * (installer == "install-trainer")),
    ]


FAKE = """#!/bin/sh
echo "${0##*/} $*" >>"$CALLS"
case "$*" in
  "create cluster"*) cat >/dev/null; test -n "$KUBECONFIG" && echo made >"$MADE" ;;
  "get clusters") cat "$MADE" ;;
esac
"""


def test_a_cluster_that_the_tests_make_has_all_that_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, made = tmp_path / "calls", tmp_path / "made"
    made.touch()
    for name in ("docker", "kind", "kubectl"):
        program = tmp_path / name
        program.write_text(FAKE)
        program.chmod(0o755)
    variables = {
        "CALLS": str(calls),
        "MADE": str(made),
        "FLK_TEST_CLUSTER": "required",
        "XDG_CACHE_HOME": str(tmp_path),
    }
    for name, value in {**variables, "PATH": f"{tmp_path}:{os.environ['PATH']}"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    kind_kubeconfig("made", whole=True)
    text = calls.read_text()
    for needed in ("kind create cluster --name made", "training-operator", "kubeflow-trainer", "training-runtime.yaml"):
        assert needed in text
    assert "-n local-path-storage rollout status deployment/local-path-provisioner" in text  # of the class `shared`
    calls.unlink()
    kind_kubeconfig("made", whole=True)
    assert calls.read_text().splitlines() == ["docker info", "kind get clusters", "kind get kubeconfig --name made"]


def test_tools_are_installed_only_with_the_checksums_of_their_versions(tmp_path: Path) -> None:
    text = (K8S / "install-tools").read_text()
    assert len(re.findall(r"(?m)^fetch \S+ [0-9a-f]{64} https://\S*v[0-9]+\.[0-9]+\.[0-9]+\S*$", text)) == 3
    curl = tmp_path / "programs" / "curl"
    curl.parent.mkdir()
    curl.write_text('#!/bin/bash\nwhile [ "$1" != --output ]; do shift; done\necho something else >"$2"\n')
    curl.chmod(0o755)
    environment = os.environ | {"PATH": f"{curl.parent}:{os.environ['PATH']}"}
    command = [K8S / "install-tools", tmp_path / "bin"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "kind: FAILED" in done.stdout
    assert list((tmp_path / "bin").iterdir()) == []
    # With the checksum of what is downloaded, each is there, and can be executed.
    tar = tmp_path / "programs" / "tar"
    tar.write_text('#!/bin/bash\nwhile [ "$1" != --directory ]; do shift; done\necho helm >"$2/helm"\n')
    tar.chmod(0o755)
    script = tmp_path / "install-tools"
    script.write_text(re.sub(r"[0-9a-f]{64}", hashlib.sha256(b"something else\n").hexdigest(), text))
    subprocess.run(["bash", script, tmp_path / "bin"], env=environment, check=True)
    assert sorted(path.name for path in (tmp_path / "bin").iterdir()) == ["helm", "kind", "kubectl"]
    assert all(os.access(path, os.X_OK) for path in (tmp_path / "bin").iterdir())
