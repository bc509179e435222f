"""accelerate launch under flk: ``-m flk_hosts.accelerate_launch`` takes its arguments in its place.

flk has started the ranks, so what a configuration file or an option says of processes, machines and GPUs is left aside.
The script gets the other variables that ``accelerate launch`` would have set, made by accelerate's own code.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

from accelerate.commands import launch
from accelerate.utils import launch as environments

from flk_runtime.errors import SetupError

# What flk has set: where the ranks are, what each of them uses, and the path of modules.
_OF_FLK: Final = ("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "PYTHONPATH", "CUDA_VISIBLE_DEVICES")
_OTHER_LAUNCHERS: Final = ("tpu", "no_python", "mpirun_hostfile")  # options that need another launcher than torchrun


def variables(arguments: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that ``accelerate launch`` would add to ``environment`` for these arguments.

    Raises SetupError if they name another launcher, or do not fit each other.
    """
    for name in _OTHER_LAUNCHERS:
        if getattr(arguments, name):
            raise SetupError(f"--{name} cannot be used under flk, which starts the ranks itself: leave it out")
    ranks = int(environment["WORLD_SIZE"])
    arguments.num_processes, arguments.num_machines, arguments.machine_rank = ranks, 1, 0
    arguments.main_process_ip, arguments.main_process_port = None, 0
    arguments.num_cpu_threads_per_process = int(environment.get("OMP_NUM_THREADS", "1"))
    if ranks == 1:
        arguments.multi_gpu = False
    try:
        chosen, defaults, from_file = launch._validate_launch_command(arguments)
        chosen.gpu_ids = "all"
        found = _made(chosen, defaults, from_file)
    except (ValueError, RuntimeError, OSError) as error:
        raise SetupError(f"accelerate refuses these options: {error}") from error
    return {name: value for name, value in found.items() if environment.get(name) != value and name not in _OF_FLK}


def _made(chosen: Any, defaults: Any, from_file: bool) -> dict[str, str]:
    """The environment by the function that accelerate uses for this kind of training."""
    if chosen.cpu or not (chosen.use_deepspeed or chosen.use_fsdp or chosen.use_megatron_lm or chosen.multi_gpu):
        return dict(environments.prepare_simple_launcher_cmd_env(chosen)[1])
    if chosen.use_deepspeed:
        fields = list(defaults.deepspeed_config) if defaults else []
        chosen.deepspeed_fields_from_accelerate_config = ",".join(fields + ["mixed_precision"] * bool(from_file))
        return dict(environments.prepare_deepspeed_cmd_env(chosen)[1])
    return dict(environments.prepare_multi_gpu_env(chosen))


def _refuse(message: str) -> NoReturn:
    raise SetupError(f"accelerate launch refuses these arguments: {message}")


def main(words: Sequence[str]) -> None:
    """Run the script or module that the arguments of ``accelerate launch`` name, in this process."""
    parser = launch.launch_command_parser()
    parser.error = _refuse  # argparse would print all of its 150 options, on every rank and in two attempts
    arguments = parser.parse_args(words)
    os.environ.update(variables(arguments, os.environ))
    script, sys.argv[1:] = arguments.training_script, arguments.training_script_args
    if arguments.module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
        return
    sys.argv[0] = script
    sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    with open(script, "rb") as file:
        code = compile(file.read(), script, "exec", dont_inherit=True)  # or its annotations would be texts, as here
    own: Any = sys.modules["__main__"]  # it stays, so that the script's variables live until the process ends
    own.__file__, own.__spec__ = script, None
    exec(code, own.__dict__)  # noqa: S102 - it is the user's script


if __name__ == "__main__":
    main(sys.argv[1:])
