"""Trials: processes that a rank starts to run the script for a few steps, to plan or to measure it.

A trial leaves the job alone: it does not use the rank's connections to its launcher, and `flk_runtime.init`, `save`
and `restore` neither read nor write checkpoints in it.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from typing import Final

from flk_runtime.contract import pod_env, user_env
from flk_runtime.errors import SetupError

# The variables that connect a rank with its launcher and with the other ranks of its attempt.
_OF_RANK: Final = (
    pod_env.PROGRESS,
    pod_env.OBSERVER,
    user_env.HEARTBEAT,
    pod_env.MEMORY,
    pod_env.CHOICE,
    pod_env.REPORT_FD,
    user_env.CHECKPOINT,
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_USE_AGENT_STORE",
)


def is_trial() -> bool:
    """Return whether this process runs a script only to plan or to measure it."""
    return os.environ.get(user_env.TRIAL) == "1"


def trial_environment() -> dict[str, str]:
    """The variables of a trial that this process starts."""
    return {name: value for name, value in os.environ.items() if name not in _OF_RANK} | {user_env.TRIAL: "1"}


def script_command() -> list[str]:
    """The script that this process runs, with its arguments, or ``-m``, the module and its arguments.

    Raises SetupError if it runs neither, as an interactive Python does.
    """
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None:
        return ["-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]
    if not os.path.isfile(sys.argv[0]):
        raise SetupError("this Python runs no script that could be run a second time")
    return list(sys.argv)


def run_script(command: Sequence[str]) -> None:
    """Run ``script.py args``, or ``-m module args``, in this process as Python would run it.

    Raises what it raises, but for a SystemExit with which a script ends that has done its work.
    """
    try:
        if command[0] == "-m":
            sys.argv = list(command[1:])
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(command)
            sys.path.insert(0, os.path.dirname(os.path.realpath(command[0])))
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
