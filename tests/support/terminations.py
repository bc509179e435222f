"""How the containers of a job in a cluster have ended."""

from __future__ import annotations

from typing import Any

from tests.support.commands import Kubectl
from tests.support.processes import until

PATIENCE = 60  # seconds


def terminations(kubectl: Kubectl, job: str) -> list[dict[str, Any]]:
    """The terminated states of a PyTorchJob's containers, once all have ended: the job may end before its last pod."""

    def find() -> list[dict[str, Any]]:
        pods = kubectl.json("get", "pods", "-l", f"training.kubeflow.org/job-name={job}")["items"]
        statuses = [status for pod in pods for status in pod["status"].get("containerStatuses", [])]
        ends = [status["state"]["terminated"] for status in statuses if "terminated" in status["state"]]
        return ends if len(ends) == len(pods) else []

    ends: list[dict[str, Any]] = until(find, f"all pods of {job} end", PATIENCE, every=0.5)
    return ends
