"""How the containers of a job in a cluster have ended."""

from __future__ import annotations

import json
from typing import Any

from tests.support.processes import until

PATIENCE = 60  # seconds


def terminations(kubectl: Any, job: str) -> list[dict[str, Any]]:
    """The terminated states of a PyTorchJob's containers, once all have ended: the job may end before its last pod."""

    def find() -> list[dict[str, Any]]:
        selector = f"training.kubeflow.org/job-name={job}"
        pods = json.loads(kubectl("get", "pods", "-l", selector, "-o", "json"))["items"]
        statuses = [status for pod in pods for status in pod["status"].get("containerStatuses", [])]
        ends = [status["state"]["terminated"] for status in statuses if "terminated" in status["state"]]
        return ends if len(ends) == len(pods) else []

    ends: list[dict[str, Any]] = until(find, f"all pods of {job} end", PATIENCE, every=0.5)
    return ends
