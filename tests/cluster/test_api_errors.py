"""Requests that a cluster refuses: one clear line, exit code 1 in bounded time, and nothing is created."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

LIMIT = 60  # seconds after which a command counts as hanging; without other load each takes less than ten


@pytest.fixture
def submit(flk: Any, tmp_path: Path) -> Any:
    """Submits a script with another kubeconfig and gives code and stderr, having checked what every error has."""
    (tmp_path / "train.py").write_text("print('hello')\n")

    def run(config: Path | None, *args: str) -> Any:
        env = {"KUBECONFIG": str(config)} if config else {}
        result = flk("submit", "train.py", "--name", "refused", *args, cwd=tmp_path, env=env, timeout=LIMIT)
        assert result.stdout == ""
        lines = result.stderr.strip().splitlines()
        assert lines[0].startswith("error: "), result.stderr
        assert len(lines) <= 2
        assert "Traceback" not in result.stderr
        return result

    return run


@pytest.fixture
def altered(kubeconfig: Path, tmp_path: Path) -> Any:
    """A copy of the test's kubeconfig with another server, another user or an impersonation."""

    def write(*, server: str = "", user: dict[str, Any] | None = None, **impersonation: Any) -> Path:
        config = yaml.safe_load(kubeconfig.read_text())
        if server:
            config["clusters"][0]["cluster"] = {"server": server}
        if user:
            config["users"][0]["user"] = user
        config["users"][0]["user"] |= impersonation
        path = tmp_path / "altered"
        path.write_text(yaml.safe_dump(config))
        return path

    return write


def test_no_permission_is_told_with_verb_and_resource(submit: Any, altered: Any, kubectl: Any, namespace: str) -> None:
    kubectl("create", "serviceaccount", "nobody")
    token = kubectl("create", "token", "nobody").strip()
    result = submit(altered(user={"token": token}))
    assert result.code == 1
    assert f"no permission to create pytorchjobs.kubeflow.org in namespace {namespace}" in result.stderr
    assert f"kubectl auth can-i create pytorchjobs.kubeflow.org -n {namespace}" in result.stderr
    assert token not in result.stderr
    assert kubectl("get", "pytorchjobs,configmaps", "-l", "flk.dev/job", "-o", "name") == ""


@pytest.fixture
def restricted_user(altered: Any, kubectl: Any, namespace: str) -> Any:
    """The kubeconfig of a service account that has only the given rights: ``(["create", "get"], "configmaps")``."""

    def write(*rights: tuple[list[str], str]) -> Path:
        rules = [
            {
                "apiGroups": [resource.partition(".")[2]],
                "resources": [resource.partition(".")[0]],
                "verbs": verbs,
            }
            for verbs, resource in rights
        ]
        role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "half"}}
        kubectl("create", "-f", "-", stdin={**role, "rules": rules})
        kubectl("create", "serviceaccount", "half")
        kubectl("create", "rolebinding", "half", "--role=half", f"--serviceaccount={namespace}:half")
        result: Path = altered(user={"token": kubectl("create", "token", "half").strip()})
        return result

    return write


@pytest.mark.promise("Clusters: A request that the API server refuses creates nothing")
def test_code_that_may_not_be_stored_is_refused_before_anything_exists(
    submit: Any, restricted_user: Any, kubectl: Any
) -> None:
    result = submit(restricted_user((["create", "get", "list", "patch", "delete"], "pytorchjobs.kubeflow.org")))
    assert result.code == 1
    assert "no permission to patch configmaps" in result.stderr
    assert "deleted again" not in result.stderr
    assert kubectl("get", "pytorchjobs", "-o", "name") == ""


@pytest.mark.promise("Clusters: A request that the API server refuses creates nothing")
def test_job_that_may_not_be_started_is_deleted_again(submit: Any, restricted_user: Any, kubectl: Any) -> None:
    rights = [
        (["create", "get", "list", "delete"], "pytorchjobs.kubeflow.org"),
        (["create", "get", "list", "patch"], "configmaps"),
        (["create"], "secrets"),
    ]
    result = submit(restricted_user(*rights))
    assert result.code == 1
    assert "no permission to patch pytorchjobs" in result.stderr
    assert "the job refused was deleted again" in result.stderr
    kubectl("wait", "--for=delete", "pytorchjob/refused", "--timeout=60s")
