"""``python -m flk_plan.bench.script REQUEST script.py args``: run a script for a few steps and measure them.

REQUEST is a JSON object: strategy, steps, and output, the file for the result: seconds of a step, mfu, and the most
memory that this rank has used, in bytes. The script ends after its last measured step.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from flk_runtime.errors import RuntimeFailure, SetupError
from flk_runtime.system import host, trial
from flk_runtime.training.process import current
from flk_runtime.training.run import Run

WARMUP = 3  # steps that are not measured: they compile, allocate and connect


class _Done(BaseException):
    """Ends the script after the last measured step."""


class _Clock:
    """Measures the steps of a run."""

    def __init__(self, strategy: str, steps: int) -> None:
        self._strategy, self._steps = strategy, steps
        self._times: list[float] = []  # at the end of each step
        self.needed = WARMUP + steps
        self.result: dict[str, Any] | None = None

    def tick(self) -> None:
        """Count the end of a step of the run."""
        run = cast("Run", current.training)
        if not self._times and run.strategy != self._strategy:
            raise SetupError("the script passes strategy= to init: leave it out, so that others can be measured")
        done = len(self._times) + 1
        if run.device.type == "cuda" and done in (WARMUP, self.needed):
            torch.cuda.synchronize(run.device)
        self._times.append(time.perf_counter())
        if done == self.needed:
            seconds = (self._times[-1] - self._times[-self._steps - 1]) / self._steps
            self.result = {"seconds": seconds, "mfu": run.mfu, "memory": _peak_memory(run)}
            dist.barrier()  # no rank ends while another still communicates
            raise _Done


def _peak_memory(run: Run) -> int:
    if run.device.type == "cuda":
        return torch.cuda.max_memory_reserved(run.device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def measure(command: Sequence[str], strategy: str, steps: int) -> dict[str, Any]:
    """Run ``script.py args`` or ``-m module args`` and measure ``steps`` steps after the warm-up.

    Raises SetupError if the script makes fewer, or uses another strategy, and what the script raises.
    """
    clock = _Clock(strategy, steps)
    try:
        with current.observed(tick=clock.tick):
            trial.run_script(command)
    except _Done:
        pass
    except SystemExit as error:
        raise SetupError(f"the script ended with exit code {error.code}") from None
    if clock.result is None:
        raise SetupError(f"the script made fewer than {clock.needed} steps, each with a call of run.step")
    return clock.result


def main() -> int:
    """Measure, write the result, and return an exit code."""
    request = json.loads(sys.argv[1])
    try:
        result = measure(sys.argv[2:], request["strategy"], request["steps"])
    except torch.cuda.OutOfMemoryError:
        result = {"error": "out of memory"}
    except RuntimeFailure as error:
        result = {"error": str(error)}
    Path(request["output"]).write_text(json.dumps(result))
    return 1 if "error" in result else 0


if __name__ == "__main__":
    host.exit_at_once(main())
