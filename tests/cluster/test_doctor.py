"""`flk doctor` in a real cluster: each check is seen failing, and `flk submit --dry-run` says the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

JOB = {"command": "train.py", "replicas": 2, "resources": {"cpu": "100m", "memory": "64Mi"}}


@pytest.fixture
def doctor(flk: Any, tmp_path: Path, image: str) -> Any:
    """Runs flk doctor for a job that differs from a small one: exit code, and what each check found by its name."""
    (tmp_path / "train.py").write_text("print('hello')\n")

    def run(env: dict[str, str] | None = None, **differs: Any) -> tuple[int, dict[str, tuple[str, str]]]:
        (tmp_path / "flk.yaml").write_text(yaml.safe_dump({**JOB, "image": image, **differs}))
        result = flk("doctor", "-o", "json", cwd=tmp_path, env=env or {})
        assert result.stdout, result.stderr
        found: dict[str, tuple[str, str]] = {}
        for check in json.loads(result.stdout)["checks"]:
            if found.get(check["check"], ("ok", ""))[0] != "failed":
                found[check["check"]] = (check["level"], check["found"])
        return result.code, found

    return run


def test_job_that_can_run(doctor: Any) -> None:
    code, found = doctor()
    assert code == 0, found
    assert {level for level, _ in found.values()} == {"ok"}, found
    assert "operator" in found


def test_what_the_namespace_lacks_or_forbids(doctor: Any, kubectl: Any) -> None:
    code, found = doctor(
        secrets={"TOKEN": "wandb:token"},
        checkpoint="nowhere:/checkpoints",
        queue="gold",
        resources={"cpu": "100m", "gpu": 1},
        patch={
            "spec": {
                "hostNetwork": True,
                "priorityClassName": "flk-nowhere",
                "serviceAccountName": "nobody",
                "imagePullSecrets": [{"name": "registry"}],
            }
        },
    )
    assert code == 104
    expected = {
        "secret": "there is no secret wandb for key token",
        "claim": "there is no PersistentVolumeClaim nowhere",
        "queue": "queue gold: the cluster of context",  # there is no Kueue
        "capacity": "the job requests nvidia.com/gpu, and no node offers any",
        "priority": "there is no PriorityClass flk-nowhere",
        "service account": "there is no ServiceAccount nobody",
        "admission": "the namespace enforces restricted, and the pods break it: host namespaces (hostNetwork=true)",
    }
    for check, sentence in expected.items():
        assert found[check][0] == "failed", (check, found)
        assert sentence in found[check][1]


def test_quota_limit_range_claim_and_key(doctor: Any, flk: Any, kubectl: Any, tmp_path: Path) -> None:
    kubectl("create", "quota", "tight", "--hard=pods=1")
    kubectl("create", "secret", "generic", "wandb", "--from-literal=another=canary-value")
    limits = {"limits": [{"type": "Container", "max": {"memory": "32Mi"}}]}
    kubectl(
        "create",
        "-f",
        "-",
        stdin={"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "low"}, "spec": limits},
    )
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}}
    pvc = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "one"}, "spec": claim}
    kubectl("create", "-f", "-", stdin=pvc)
    code, found = doctor(secrets={"TOKEN": "wandb:token"}, checkpoint="one:/checkpoints")
    assert code == 104
    assert found["quota"][0] == "failed"
    assert "the job needs 2 pods, and quota tight has 1 left of 1" in found["quota"][1]
    assert found["limit range"] == ("failed", "a container may have at most 32Mi memory, and the job asks for 64Mi")
    assert found["secret"] == ("failed", "secret wandb has no key token; its keys: another")
    assert found["claim"][0] == "warning"
    assert "on one node at a time only (ReadWriteOnce)" in found["claim"][1]

    checked = flk("submit", "--dry-run", cwd=tmp_path)
    assert checked.code == 104
    assert "check failed: limit range: a container may have at most 32Mi memory" in checked.stderr
    assert "canary-value" not in checked.stderr
    assert kubectl("get", "pytorchjobs", "-o", "name") == ""


def test_user_without_rights(doctor: Any, kubeconfig: Path, kubectl: Any, tmp_path: Path) -> None:
    kubectl("create", "serviceaccount", "nobody")
    config = yaml.safe_load(kubeconfig.read_text())
    config["users"][0]["user"] = {"token": kubectl("create", "token", "nobody").strip()}
    path = tmp_path / "nobody"
    path.write_text(yaml.safe_dump(config))
    code, found = doctor(env={"KUBECONFIG": str(path)})
    assert code == 104
    assert found["rights"][0] == "failed"
    assert "which flk submit" in found["rights"][1]
    assert {found[check][0] for check in ("operator", "quota", "limit range", "gpus", "capacity")} == {"unknown"}
