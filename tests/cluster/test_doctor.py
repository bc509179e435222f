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


@pytest.mark.promise("Causes: flk doctor says what keeps a job from running before it exists")
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
    }
    for check, sentence in expected.items():
        assert found[check][0] == "failed", (check, found)
        assert sentence in found[check][1]
