"""Plan a job: run its script in planning mode, in a Python that has torch, and read the result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from flk.errors import FlkError, UsageError
from flk.local.machine import interpreter
from flk.local.places import packages_folder
from flk.spec.job import Job
from flk.user.terminal import printable_lines
from flk_runtime.contract.values import dataclass

LIMIT: Final = 300.0  # seconds in which a script has to reach its first step, as for strategy auto


@dataclass(frozen=True)
class Row:
    """Memory, communication and time of one strategy. Bytes are for rank 0, seconds for one step."""

    strategy: str
    fits: bool
    total: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    wire_inside: float
    wire_between: float
    step_seconds: float
    mfu: float | None
    largest_batch: float
    modelled: bool  # whether nothing is left out of the times

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Row:
        """Return the row that `python -m flk_plan` has written."""
        return cls(**{name: data[name] for name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class Plan:
    """Predictions for a job's script; the first row that fits is the recommendation, if it can be compared."""

    parameters: int
    world_size: int
    gpu: str
    memory: int
    rows: list[Row]
    savings: list[str]  # options that save memory, which the script can use and does not
    assumptions: list[str]
    warnings: list[str]
    output: dict[str, Any]  # everything, as plain data

    @property
    def best(self) -> Row | None:
        """The fastest row that fits; None also if something is left out of the times."""
        return next((row for row in self.rows if row.fits and row.modelled), None)


def make_plan(job: Job, folder: Path, gpu_type: str) -> Plan:
    """Run the script of ``job`` in ``folder`` up to its first step, without memory for its model.

    The packages of the job are those that `flk run` has installed. Raises UsageError if the script or the GPU type
    cannot be planned, or if the script does not reach its first step in time.
    """
    python, path = interpreter()
    with tempfile.TemporaryDirectory(prefix="flk-") as scratch:
        result = Path(scratch, "plan.json")
        request = {
            "nodes": job.replicas,
            "ranks": job.processes_per_pod,
            "gpu_type": gpu_type,
            "fabric": str(job.fabric or "auto"),
            "output": str(result),
        }
        packages = [_installed(job, folder, python)] if job.pip or job.requirements else []
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, (path, *packages, os.environ.get("PYTHONPATH")))
        )  # Python takes an empty one for one that is not set
        try:
            process = subprocess.run(
                [python, "-m", "flk_plan", json.dumps(request), *job.command],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                check=False,
                timeout=LIMIT,
            )
        except subprocess.TimeoutExpired:
            raise UsageError(
                f"the script did not reach its first step within {LIMIT:g} s",
                hint="a loop that waits for a value of the model, as generate(), never ends: leave it out where "
                "FLK_TRIAL is set",
            ) from None
        if not result.exists():
            sys.stderr.write(printable_lines(process.stderr.splitlines()))
            raise FlkError(
                f"the script failed while it was planned (exit code {process.returncode}): see its output above"
            )
        data = json.loads(result.read_text())
    if "error" in data:
        raise UsageError(data["error"], hint=data.get("hint", ""))
    return Plan(
        data["parameters"],
        data["world_size"],
        data["gpu"],
        data["memory"],
        [Row.from_dict(row) for row in data["rows"]],
        data["savings"],
        data["assumptions"],
        data["warnings"],
        data,
    )


def _installed(job: Job, folder: Path, python: str) -> str:
    """Return the folder with the packages of a job that `flk run` has installed. Raises UsageError if it has not."""
    packages = packages_folder(job, folder, python, os.environ)
    found = next(packages.glob("lib/python*/site-packages"), None)
    if found is None or not (packages / "installed").exists():
        named = ", ".join([*(job.pip or []), *filter(None, [job.requirements])])
        raise UsageError(
            f"the packages of the job ({named}) are not installed on this machine, and flk plan installs none",
            hint="flk run with the same options installs them; or install them here and leave the options out",
        )
    return str(found)
