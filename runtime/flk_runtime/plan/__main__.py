"""``python -m flk_runtime.plan REQUEST script.py args``: what `flk plan` runs in a Python that has torch.

REQUEST is a JSON object: nodes, ranks (of each node), gpu_type, fabric, and output, the file for the result.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from flk_runtime.errors import SetupError
from flk_runtime.plan.capture import capture, open_group
from flk_runtime.plan.communication import Cluster
from flk_runtime.plan.hardware import FABRICS, GPUS
from flk_runtime.plan.plan import make_plan


def main() -> int:
    """Plan a script, write the result, and return an exit code."""
    request = json.loads(sys.argv[1])
    try:
        result = _plan(request, sys.argv[2:])
    except SetupError as error:
        result = {"error": str(error)}
    with open(request["output"], "w", encoding="utf-8") as file:
        json.dump(result, file)
    return 2 if "error" in result else 0


def _plan(request: dict[str, Any], command: list[str]) -> dict[str, Any]:
    name = request["gpu_type"].lower()
    if name not in GPUS:
        raise SetupError(f"no figures for GPUs of type {name!r}: expected one of {', '.join(GPUS)}")
    cluster = Cluster(request["nodes"], request["ranks"], GPUS[name], FABRICS[request["fabric"]])
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(cluster.world_size),
        "LOCAL_WORLD_SIZE": str(cluster.gpus),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    open_group(cluster.world_size)
    return make_plan(capture(command, cluster.gpu), cluster)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the script's threads and exit handlers belong to a run that was not finished
