"""A request that a cluster refuses: one clear line, exit code 1 in bounded time, and nothing is created."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from flk.targets import TARGETS

RIGHTS = {  # all but that to start a job
    "pytorchjobs": ["create", "get", "list", "delete"],
    "configmaps": ["create", "get", "list", "patch"],
    "secrets": ["create"],
}


@pytest.mark.promise("Clusters: A request that the API server refuses creates nothing")
def test_job_that_may_not_be_started_is_not_created(flk: Any, kubectl: Any, namespace: str, tmp_path: Path) -> None:
    groups = {target.plural: target.group for target in TARGETS.values()}
    rules = [
        {"apiGroups": [groups.get(resource, "")], "resources": [resource], "verbs": verbs}
        for resource, verbs in RIGHTS.items()
    ]
    about = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "half"}}
    kubectl("create", "-f", "-", stdin={**about, "rules": rules})
    kubectl("create", "serviceaccount", "half")
    kubectl("create", "rolebinding", "half", "--role=half", f"--serviceaccount={namespace}:half")
    kubeconfig = Path(flk.env["KUBECONFIG"])
    config = yaml.safe_load(kubeconfig.read_text())
    config["users"][0]["user"] = {"token": kubectl("create", "token", "half").strip()}
    (tmp_path / "half").write_text(yaml.safe_dump(config))
    (tmp_path / "train.py").write_text("print('hello')\n")
    result = flk("submit", "train.py", "--name", "refused", cwd=tmp_path, env={"KUBECONFIG": str(tmp_path / "half")})
    assert (result.code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: "), result.stderr
    assert "no permission to patch pytorchjobs" in result.stderr
    assert "deleted" not in result.stderr
    assert kubectl("get", "pytorchjobs,configmaps", "-l", "flk.dev/job", "-o", "name") == ""
