"""The launchers that users have, as real programs: those of this machine, else from Debian's packages or PyPI.

Nothing is installed without FLK_TEST_INSTALL=yes. Tests whose launcher is unavailable are skipped with the reason, or
fail under FLK_TEST_CLUSTER=required. Slurm's daemons are started for the test session.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.collection import in_folder
from tests.support.horovod import HOROVOD, launcher_with_stand_in
from tests.support.install import needed, program
from tests.support.ports import held_ports
from tests.support.requirements import unavailable
from tests.support.slurm import Slurm, running_slurm

SCRIPT = Path(__file__).with_name("train.py")
PATIENCE = 180.0  # seconds until a launch counts as hanging, on a machine that does other things too
# Variables that a launcher may have left around this test session; none of them is for the launches of a test.
FOREIGN = re.compile(
    r"(FLK|HOROVOD|HYDI|HYDRA|MPI|MPIR|MV2|OMPI|PET|PMI|PMIX|PRTE|SBATCH|SLURM|SLURMD|SRUN|TORCHELASTIC)_"
    r"|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)$|MASTER_(ADDR|PORT)$|PYTHONPATH$"
)


# Open MPI does not start without a remote shell, even where no other host takes part.
OURS = {"OMP_NUM_THREADS": "1", "OMPI_MCA_plm_rsh_agent": "sh"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker runs this folder, which has one Slurm.

    The time that it takes to install a launcher does not count as a test's time.
    """
    for item in in_folder(items, SCRIPT.parent):
        item.add_marker(pytest.mark.xdist_group("launchers"))
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(300, func_only=True))


@pytest.fixture
def free_port() -> Iterator[Callable[[], int]]:
    """Returns a new port at each call; nothing else takes it until the test ends."""
    with held_ports() as hold:
        yield hold


# How a test starts one


@dataclass(frozen=True)
class Ended:
    """How the commands of a launch ended, and what they printed together."""

    codes: list[int]
    output: str

    def found(self) -> dict[str, Any]:
        """The line of JSON that rank 0 of train.py has printed, wherever its launcher has put it."""
        assert not any(self.codes), f"ended with {self.codes}\n{self.output}"
        lines = re.findall(r'\{"launcher": .*\}', self.output)
        assert len(lines) == 1, self.output
        return dict(json.loads(lines[0]))


@dataclass
class Launch:
    """Runs commands that start train.py, or another script, in an environment that no other launcher has touched."""

    folder: Path
    python: str = sys.executable
    script: str = str(SCRIPT)
    runs: int = 0
    env: dict[str, str] = field(
        default_factory=lambda: {k: v for k, v in os.environ.items() if not FOREIGN.match(k)} | OURS
    )

    @contextmanager
    def started(
        self, *commands: Sequence[str], env: Mapping[str, str] = {}
    ) -> Iterator[tuple[list[subprocess.Popen[bytes]], Path]]:
        """The commands, running side by side, each in a session of its own, and the file that they print to."""
        self.runs += 1
        output = self.folder / f"output-{self.runs}"
        running: list[subprocess.Popen[bytes]] = []
        try:
            with output.open("ab") as file:
                for command in commands:
                    running.append(
                        subprocess.Popen(
                            command,
                            cwd=self.folder,
                            env=self.env | dict(env),
                            stdin=subprocess.DEVNULL,
                            stdout=file,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                        )
                    )
            yield running, output
        finally:
            for process in running:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()

    def __call__(self, *commands: Sequence[str], env: Mapping[str, str] = {}, patience: float = PATIENCE) -> Ended:
        with self.started(*commands, env=env) as (running, output):
            until = time.monotonic() + patience
            try:
                codes = [process.wait(max(0.0, until - time.monotonic())) for process in running]
            except subprocess.TimeoutExpired:
                pytest.fail(f"did not end in {patience} s: {list(commands)}\n{output.read_text()}", pytrace=False)
        return Ended(codes, output.read_text(errors="replace"))


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    return Launch(tmp_path)


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What train.py prints where it trains alone."""
    launch = Launch(tmp_path_factory.mktemp("alone"))
    return launch([launch.python, launch.script]).found()


@pytest.fixture(scope="session")
def loss(alone: dict[str, Any]) -> float:
    """The final loss of train.py where it trains alone."""
    return float(alone["loss"])


# The launchers


@pytest.fixture(scope="session")
def openmpi() -> list[str]:
    """mpirun of Open MPI, ready for more ranks than processors."""
    path = needed(lambda: program("mpirun.openmpi", "mpirun", "orterun", says="Open MPI"), "openmpi-bin")
    return [path, "--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]


@pytest.fixture(scope="session")
def mpich() -> list[str]:
    """mpiexec of MPICH, whose process manager is Hydra."""
    return [needed(lambda: program("mpiexec.hydra", "mpiexec.mpich", "mpiexec", says="HYDRA"), "mpich")]


@pytest.fixture
def two_hosts(tmp_path: Path) -> tuple[str, str]:
    """Two hosts for an mpirun, this machine and an address it takes for another, and what it is to call as ssh."""
    shell = tmp_path / "shell"
    # Called with options, a host and a command.
    shell.write_text('#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nshift\nexec sh -c "$*"\n')
    shell.chmod(0o755)
    return "localhost:2,198.51.100.9:2", str(shell)  # kept for documentation (RFC 5737)


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    with running_slurm() as running:
        yield running


# Horovod


@dataclass(frozen=True)
class Horovod:
    """Horovod with gloo: its launcher, and the variable that makes it importable."""

    run: list[str]
    env: dict[str, str]


@pytest.fixture(scope="session")
def horovod() -> Horovod:
    """horovodrun, whose ranks have a stand-in for its communicator, which is C++."""
    folder, reason = launcher_with_stand_in()
    if folder is None:
        unavailable(f"Horovod {HOROVOD} (from PyPI) is not there: {reason}")
    run = "import sys; from horovod.runner.launch import run_commandline; sys.exit(run_commandline())"
    return Horovod([sys.executable, "-c", run, "--gloo"], {"PYTHONPATH": str(folder)})
