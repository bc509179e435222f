"""``python -m flk_plan REQUEST script.py args``: the program that `flk plan` runs in a Python with torch.

REQUEST is a JSON object: nodes, ranks (of each node), gpu_type (or device and memory, as torch tells them), fabric,
and output, the file for the result. With choose, the result is the strategy that `auto` stands for; measured has
results of `flk bench` for it. With identify, it is the key of such a result.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from flk_plan.capture import capture
from flk_plan.choice import choose
from flk_plan.communication import Cluster
from flk_plan.group import open_group
from flk_plan.hardware import FABRICS, find_gpu, gpu_of_type
from flk_plan.plan import identity, make_plan
from flk_runtime.contract import user_env
from flk_runtime.errors import RuntimeFailure
from flk_runtime.system import host


def main() -> int:
    """Plan a script, write the result, and return an exit code."""
    request = json.loads(sys.argv[1])
    try:
        result = _plan(request, sys.argv[2:])
    except RuntimeFailure as error:
        result = {"error": str(error)}
    with open(request["output"], "w", encoding="utf-8") as file:
        json.dump(result, file)
    return 2 if "error" in result else 0


def _plan(request: dict[str, Any], command: list[str]) -> dict[str, Any]:
    gpu = find_gpu(request["device"], request["memory"]) if "device" in request else gpu_of_type(request["gpu_type"])
    fabric = request["fabric"]
    cluster = Cluster(request["nodes"], request["ranks"], gpu, FABRICS[fabric], fabric)
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(cluster.world_size),
        "LOCAL_WORLD_SIZE": str(cluster.gpus),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        user_env.TRIAL: "1",
        "CUDA_VISIBLE_DEVICES": "",  # the plan is made on the CPU
    }
    open_group(cluster.world_size)
    captured = capture(command, cluster.gpu)
    if request.get("identify"):
        return identity(captured, cluster)
    if request.get("choose"):
        return choose(captured, cluster, request["measured"])
    return make_plan(captured, cluster)


if __name__ == "__main__":
    host.exit_at_once(main())
