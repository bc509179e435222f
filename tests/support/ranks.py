"""Ranks for tests of the runtime library: a script run by several processes, forked from one import of torch."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import pytest

from tests.support.ports import held_ports

PATIENCE = 120.0  # seconds that a script may take, for all its ranks together

# The code of a rank's process. Its output goes to a file, and a warning ends it. A rank that hangs prints the stacks of
# its threads before it is killed. Each training of a script begins as in a process of its own, unless the test says
# otherwise: so one script shows how a training resumes.
BOOT = """
import faulthandler, os, runpy, sys, warnings
os.environ.update(environment)
file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.dup2(file, 1), os.dup2(file, 2)
faulthandler.dump_traceback_later(patience * 0.8)
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # of outputs that are views, which few scripts change
if not one_process:
    from flk_runtime.training import process
    from flk_runtime.training.entry import script as of_script
    def as_in_another_process(self, name, find=process.Process.next_place):
        for place in self._places:
            place.trainings, place.saved_by = 0, ""
        return find(self, name)
    process.Process.next_place = as_in_another_process
    of_script._check_other_training = lambda *_: None
sys.argv = [script]
runpy.run_path(script, run_name="__main__")
"""


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its exit code (negative: the signal), and all that it printed."""

    code: int
    output: str

    @property
    def lines(self) -> list[str]:
        """The lines of the script: gloo writes one of its own to the standard output with torch 2.9."""
        return [line for line in self.output.splitlines() if not line.startswith("[Gloo] Rank ")]


class Ranks:
    """Runs a script as the ranks of one job, with torchrun's variables."""

    def __init__(self, fork_server: ForkServerContext, folder: Path, patience: float = PATIENCE) -> None:
        self.folder = folder
        self.patience = patience
        self._fork_server = fork_server
        self._runs = 0

    def __call__(
        self,
        script: str,
        world_size: int,
        environment: Mapping[str, str] = {},
        of_rank: Mapping[int, Mapping[str, str]] = {},
        failing: bool = False,
        one_process: bool = False,
    ) -> list[Ended]:
        """Run the script as ``world_size`` ranks and return how each ended, in the order of ranks.

        ``environment`` is added to the variables of all ranks, ``of_rank`` to the variables of the rank with this
        number. A world of one gets none of torchrun's variables. The test fails if a rank does not end within
        ``patience``, and, unless ``failing``, if one ends with another code than 0. No rank is left when this returns
        or raises. ``one_process``: a second training in the script is one of the same process.
        """
        self._runs += 1
        path = self.folder / "script.py"
        path.write_text(textwrap.dedent(script))
        outputs = [self.folder / f"output-{self._runs}-{rank}" for rank in range(world_size)]
        processes: list[ForkServerProcess] = []
        hanging: list[int] = []
        with held_ports() as free_port:
            port = free_port()
            deadline = time.monotonic() + self.patience
            try:
                for rank, output in enumerate(outputs):
                    torchrun = {
                        "RANK": str(rank),
                        "LOCAL_RANK": str(rank),
                        "WORLD_SIZE": str(world_size),
                        "LOCAL_WORLD_SIZE": str(world_size),
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": str(port),
                    }
                    names = {
                        "environment": {**(torchrun if world_size > 1 else {}), **environment, **of_rank.get(rank, {})},
                        "output": str(output),
                        "script": str(path),
                        "patience": self.patience,
                        "one_process": one_process,
                    }
                    process = self._fork_server.Process(target=exec, args=(BOOT, names))
                    process.start()
                    processes.append(process)
                for process in processes:
                    process.join(max(0.0, deadline - time.monotonic()))
                hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
            finally:
                for process in processes:
                    process.kill()
                for process in processes:
                    process.join()
        texts = [output.read_text(errors="replace") if output.exists() else "" for output in outputs]
        shown = "\n".join(f"--- rank {rank}\n{text}" for rank, text in enumerate(texts))
        if hanging:
            which = f"rank {hanging[0]}" if len(hanging) == 1 else f"ranks {', '.join(map(str, hanging))}"
            pytest.fail(f"{which} of {world_size} did not end within {self.patience:g} s\n{shown}", pytrace=False)
        ended = [Ended(process.exitcode or 0, text) for process, text in zip(processes, texts, strict=True)]
        assert failing or all(rank.code == 0 for rank in ended), shown
        return ended
