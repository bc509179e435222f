"""flk's own image runs under the conditions of a training pod: a numeric user, no rights, and nowhere to write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import checked

# Everything that a training pod relies on, from inside. Prints one JSON object.
CHECK = """
import getpass, importlib, json, os, pathlib
import flk_runtime.contract, numpy, torch, torch.distributed
def writable(folder):
    try:
        pathlib.Path(folder, "probe").touch()
        return True
    except OSError:
        return False
print(json.dumps({
    "user": [os.getuid(), getpass.getuser()],
    "writable": [folder for folder in ("/", "/opt/flk/lib", os.getcwd(), torch.__path__[0]) if writable(folder)],
    "gloo": torch.distributed.is_gloo_available(),
    "flk_runtime": flk_runtime.contract.VERSION,
    "client": pathlib.Path(importlib.import_module("flk").__file__).parent.as_posix(),
    "compiled": pathlib.Path(flk_runtime.contract.__cached__).exists(),
    "example": pathlib.Path("/opt/flk/examples/gpt/train.py").exists(),
}))
"""


def pod(image: str, *command: str) -> dict[str, Any]:
    """A pod that complies with Pod Security `restricted` and has a root that nobody can write to."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "check"},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": "check",
                    "image": image,
                    "imagePullPolicy": "IfNotPresent",
                    "command": list(command),
                    "resources": {"requests": {"cpu": "100m"}},
                    "securityContext": {
                        "readOnlyRootFilesystem": True,
                        "allowPrivilegeEscalation": False,
                        "capabilities": {"drop": ["ALL"]},
                    },
                }
            ],
        },
    }


@pytest.fixture
def output(kubectl: Any) -> Any:
    """The stdout of a command in a pod of that image."""

    def run(image: str, *command: str) -> str:
        kubectl("create", "-f", "-", stdin=pod(image, *command))
        kubectl("wait", "pod/check", "--for=jsonpath={.status.phase}=Succeeded", "--timeout=100s")
        return str(kubectl("logs", "check"))

    return run


def test_own_image_runs_as_a_restricted_pod_with_a_read_only_root(image: str, output: Any) -> None:
    # No user is named in the pod: the image's own is numeric, or the kubelet would refuse it as possibly root.
    assert json.loads(output(image, "python3", "-c", CHECK)) == {
        "user": [10001, "flk"],
        "writable": [],
        "gloo": True,
        "flk_runtime": "0.1.0",
        "client": "/opt/flk/lib/flk",
        "compiled": True,
        "example": True,
    }


@pytest.mark.promise("Pages: Package, chart, images and pages have one version")
@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_the_image_builds_and_does_what_it_is_for(target: str) -> None:
    """Without a cluster. The CUDA image has several gigabytes, and needs no GPU for this."""
    folder = Path(__file__).parents[2] / "docker"
    checked([str(folder / "build"), target], timeout=3000)
    assert "the example ends with held-out loss" in checked([str(folder / "check"), target], timeout=600)
