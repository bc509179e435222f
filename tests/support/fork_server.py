"""The process from which tests fork ranks and commands: it has imported torch, and all modules that both import.

A process of Python has one fork server, and what that imports is decided when it starts. With a server for ranks and
one for commands, all of one kind would import their modules anew in workers of pytest that began with the other kind.
"""

from __future__ import annotations

import functools
import multiprocessing
import pkgutil
from multiprocessing.context import ForkServerContext

import pytest

import flk
from flk_runtime.launcher.processes import preload

# What flk's own fork server preloads for a script with flk's library, and the launcher.
OF_RANKS = [
    *preload.TORCH,
    *preload.FOR_OPTIMIZERS,
    *preload.FOR_SHARDING,
    *preload.FOR_LIBRARY,
    "flk_runtime.launcher.start",
    "torch.utils.checkpoint",
]


@functools.cache
def start_fork_server() -> ForkServerContext:
    """Start the fork server of this process, or return it."""
    of_commands = [module.name for module in pkgutil.walk_packages(flk.__path__, "flk.")]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            *OF_RANKS,
            *(name for name in of_commands if not name.startswith("flk.bundled_gpt")),
            "tests.support.frozen",
        ]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        context.Process(target=int).start()  # the server takes the environment as it is now
    return context
