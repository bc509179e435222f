"""The chart in a cluster: a release trains to its end, its check passes, another beside it does not clash, and
uninstalling leaves nothing."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import helm as helm_command

CHART = Path(__file__).parents[2] / "charts" / "flk"
SMALL = ["--set", "job.enabled=true", "--set", "job.resources.cpu=100m"]
TRAINING = 400  # seconds that a small training may take on a machine that does much else
# Everything that a release or its job can leave in a namespace.
KINDS = "pytorchjobs,pods,services,configmaps,secrets,serviceaccounts,roles,rolebindings,jobs,persistentvolumeclaims"


@pytest.fixture
def helm(kubeconfig: Path, namespace: str) -> Any:
    """Runs helm in the test's namespace; gives its exit code and all it printed."""

    def run(*args: str) -> tuple[int, str]:
        done = helm_command(*args, "--kubeconfig", str(kubeconfig), "--namespace", namespace, timeout=TRAINING)
        return done.code, done.stdout + done.stderr

    return run


def wait_for(kubectl: Any, job: str, condition: str) -> None:
    kubectl("wait", f"pytorchjob/{job}", f"--for=condition={condition}", f"--timeout={TRAINING}s", timeout=TRAINING + 9)


def names(kubectl: Any) -> set[str]:
    # Kubernetes puts its own certificate and account into every namespace; Events end by themselves.
    found = set(kubectl("get", KINDS, "-o", "name").split())
    return found - {"configmap/kube-root-ca.crt", "serviceaccount/default"}


def test_release_trains_beside_another_and_leaves_nothing(helm: Any, kubectl: Any, image: str) -> None:
    steps = json.dumps(["/opt/flk/examples/gpt/train.py", "--steps", "20"])
    code, text = helm(
        "install", "gpt", str(CHART), *SMALL, "--set", "job.replicas=4", "--set-json", f"job.command={steps}"
    )
    assert code == 0, text
    assert "flk logs gpt" in text
    # A second release, of the same values but smaller, while the first trains.
    code, text = helm("install", "second", str(CHART), *SMALL, "--set-json", f"job.command={steps}")
    assert code == 0, text

    code, text = helm("test", "gpt", "--logs")
    assert code == 0, text
    assert "may do all that flk needs" in text

    wait_for(kubectl, "gpt", "Succeeded")
    wait_for(kubectl, "second", "Succeeded")
    pods = kubectl.json("get", "pods", "-l", "flk.dev/job=gpt")["items"]
    assert len(pods) == 4
    assert {p["status"]["phase"] for p in pods} == {"Succeeded"}
    metrics = [line for line in kubectl("logs", "gpt-worker-0").splitlines() if line.startswith("[rank 0] {")]
    first, last = (json.loads(line.removeprefix("[rank 0] ")) for line in (metrics[0], metrics[-1]))
    assert first["processes"] == 4
    assert last["step"] == 20
    assert last["heldout_loss"] < first["heldout_loss"]

    assert helm("uninstall", "gpt", "--wait", "--cascade", "foreground")[0] == 0
    assert {name for name in names(kubectl) if "gpt" in name} == set()
    kubectl("get", "pytorchjob/second", "serviceaccount/second-flk")  # the other release is whole
    assert helm("uninstall", "second", "--wait", "--cascade", "foreground")[0] == 0
    assert names(kubectl) == set()


def test_check_says_what_is_missing_and_is_gone_after_it(helm: Any, kubectl: Any, image: str) -> None:
    assert helm("install", "site", str(CHART))[0] == 0
    rules = [{"op": "replace", "path": "/rules/0/verbs", "value": ["get", "list", "watch"]}]
    kubectl("patch", "role/site-flk", "--type=json", "-p", json.dumps(rules))
    code, text = helm("test", "site", "--logs")
    assert code != 0
    assert "failed: may not create pytorchjobs" in text
    assert "failed: may not delete pytorchjobs" in text
    assert "may not list" not in text
    assert helm("uninstall", "site", "--wait")[0] == 0
    assert names(kubectl) == set()


def test_role_is_enough_to_submit_watch_and_delete(
    helm: Any, kubectl: Any, flk: Any, kubeconfig: Path, image: str, tmp_path: Path
) -> None:
    """As the release's ServiceAccount, with nothing but its Role."""
    assert helm("install", "site", str(CHART), "--set", "defaults.tolerations={spot:NoSchedule}")[0] == 0
    config = kubectl.json("config", "view", "--raw")
    config["users"] = [{"name": config["users"][0]["name"], "user": {"token": kubectl("create", "token", "site-flk")}}]
    kubeconfig.write_text(json.dumps(config))
    (tmp_path / "train.py").write_text("print('trained')\n")
    submitted = flk("submit", "train.py", "--name", "mine", "--cpu", "100m", cwd=tmp_path)
    assert submitted.code == 0, submitted.stderr
    assert submitted.stdout == "mine\n"
    for command in (["wait", "mine"], ["status", "mine"], ["logs", "mine"], ["list"]):
        result = flk(*command)
        assert result.code == 0, result.stderr
    job = kubectl.json("get", "pytorchjob", "mine")
    template = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    assert {"key": "spot", "operator": "Exists", "effect": "NoSchedule"} in template["spec"]["tolerations"]
    deleted = flk("delete", "mine")
    assert deleted.code == 0, deleted.stderr
    refused = subprocess.run(["kubectl", "--kubeconfig", kubeconfig, "get", "secrets"], capture_output=True, text=True)
    assert refused.returncode != 0
    assert "forbidden" in refused.stderr
