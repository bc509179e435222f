"""-m flk_hosts.accelerate_launch: the script gets what accelerate launch would have given it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.collection import skip_without

skip_without("accelerate")

# It tells the variables of accelerate, its arguments, whether it is the main module, and the types that it annotates.
SHOW = """
import json, os, sys
class Options:
    rate: float = 0.1
names = ("ACCELERATE_", "FSDP_", "PARALLELISM_", "KMP_")
found = {name: value for name, value in os.environ.items() if name.startswith(names)}
main = [__name__, os.path.basename(__file__), str(Options.__annotations__)]
print("SHOWN " + json.dumps([found, sys.argv[1:], *main]), flush=True)
"""
# For two machines of eight processes: flk starts as many ranks as it was told to.
FSDP = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 2
num_processes: 16
machine_rank: 1
main_process_ip: 10.0.0.1
main_process_port: 29500
use_cpu: false
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: Block
  fsdp_reshard_after_forward: false
"""
CPU = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_CPU
mixed_precision: "no"
num_machines: 1
num_processes: 2
use_cpu: true
dynamo_config:
  dynamo_backend: EAGER
"""


def shown(folder: Path, *command: str) -> list[Any]:
    """What the scripts tell that a command starts in ``folder``."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line.partition("SHOWN ")[2]) for line in done.stdout.splitlines() if "SHOWN " in line]


@pytest.mark.soak
@pytest.mark.parametrize("configuration", [FSDP, CPU], ids=["fsdp", "cpu"])
def test_the_script_gets_the_variables_of_accelerate_launch(tmp_path: Path, configuration: str) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    (tmp_path / "accelerate.yaml").write_text(configuration)
    script = ("--config_file", "accelerate.yaml", "show.py", "--lr", "0.1")
    here = ("--num_machines", "1", "--num_processes", "1", "--main_process_port", "0")
    (expected,) = shown(tmp_path, "-m", "accelerate.commands.launch", *here, *script)
    assert expected[0]["ACCELERATE_MIXED_PRECISION"] == ("bf16" if configuration == FSDP else "no")
    flk = ("-m", "flk", "run", "--processes", "2", "-m", "flk_hosts.accelerate_launch", "--")
    found = shown(tmp_path, *flk, *script)
    assert found == [expected, expected]
