"""The launchers of the field as real programs: found on this machine, else installed from Debian or built from PyPI.

FLK_TEST_INSTALL=no: nothing is installed. What is neither there nor can be had skips its tests with the reason, or
fails them under FLK_TEST_CLUSTER=required, as continuous integration sets it. Daemons (Slurm's, munge's) are this test
session's own: their configuration, state and ports are beside those of a Slurm that the machine may have already.
"""

from __future__ import annotations

import ctypes.util
import fcntl
import json
import os
import platform
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("train.py")
PATIENCE = 180.0  # seconds until a launch counts as hanging, on a machine that does other things too
INSTALL = 1200.0  # seconds for installing or building a launcher
SEARCH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
HOROVOD = "0.28.1"
# Variables that a launcher may have left around this test session; none of them is for the launches of a test.
FOREIGN = re.compile(
    r"(FLK|HOROVOD|HYDI|HYDRA|MPI|MPIR|MV2|OMPI|PET|PMI|PMIX|PRTE|SBATCH|SLURM|SLURMD|SRUN|TORCHELASTIC)_"
    r"|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)$|MASTER_(ADDR|PORT)$|PYTHONPATH$"
)


# Open MPI does not start without a remote shell, even where no other host takes part.
OURS = {"OMP_NUM_THREADS": "1", "OMPI_MCA_plm_rsh_agent": "sh"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Installing a launcher does not count against a test's own time; what waits for Horovod comes last."""
    for item in items:
        if SCRIPT.parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(300, func_only=True))
    items.sort(key=lambda item: "horovod" in getattr(item, "fixturenames", ()))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Horovod takes minutes to build: begin now, while other tests run."""
    if not session.config.option.collectonly and any(
        "horovod" in getattr(i, "fixturenames", ()) for i in session.items
    ):
        session.config.stash[BUILD] = Build()


def unavailable(reason: str) -> None:
    if os.environ.get("FLK_TEST_CLUSTER") == "required":
        pytest.fail(f"FLK_TEST_CLUSTER=required, but {reason}", pytrace=False)
    pytest.skip(reason)


@contextmanager
def locked(name: str) -> Iterator[None]:
    """One process at a time, of all the test runs on this machine."""
    path = Path(tempfile.gettempdir()) / f"flk-tests-{os.getuid()}-{name}.lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(name="free_port")
def any_port() -> Callable[[], int]:
    return free_port


# Starting them


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
def loss(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The final loss of train.py where it trains alone."""
    launch = Launch(tmp_path_factory.mktemp("alone"))
    return float(launch([launch.python, launch.script]).found()["loss"])


# Having them


def program(*names: str, says: str = "") -> str | None:
    """The first of these programs that is there, and whose --version says so."""
    for name in names:
        path = shutil.which(name, path=SEARCH)
        if path and (not says or says in said([path, "--version"])):
            return path
    return None


def said(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    return done.stdout + done.stderr


def from_debian(*packages: str) -> str:
    """Install Debian's packages. Returns why that was not possible, else nothing."""
    if os.environ.get("FLK_TEST_INSTALL") == "no":
        return "FLK_TEST_INSTALL=no"
    if not shutil.which("apt-get"):
        return "this is no Debian, to install it from"
    if os.geteuid() != 0:
        return "only root can install it"
    command = ["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", *packages]
    with locked("apt"):
        for before in (None, ["apt-get", "update", "--quiet"]):  # the lists of packages may be old, or not there
            if before:
                subprocess.run(before, capture_output=True, timeout=INSTALL)
            environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL, env=environment)
            if done.returncode == 0:
                return ""
    return f"apt-get install says: {(done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]}"


def cache() -> Path:
    """Where what was built stays for the next session."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flk-tests"


def pip_install(target: Path, *what: str, env: Mapping[str, str] = {}) -> str:
    """Install packages into a folder of their own. Returns why that was not possible, else nothing."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--target", str(target), *what],
        env=os.environ | dict(env),
        capture_output=True,
        text=True,
        timeout=INSTALL,
    )
    return f"pip install ended with {done.returncode}:\n{done.stderr[-2000:]}" if done.returncode else ""


def needed(find: Callable[[], Any], *packages: str) -> Any:
    """What ``find`` finds, if need be after the installation of ``packages``."""
    if not find():
        reason = from_debian(*packages)
        if not find():
            unavailable(f"{' '.join(packages)} (Debian's packages) are not installed: {reason or 'still not found'}")
    return find()


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
def mpi4py(mpich: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables that make mpi4py importable, on the MPI of ``mpich``."""
    folder = cache() / f"mpi4py-{sysconfig.get_config_var('SOABI')}-{platform.machine()}"
    with locked("mpi4py"):
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent) as name:
                target = Path(name, "site")
                install = os.environ.get("FLK_TEST_INSTALL") != "no"
                reason = pip_install(target, "mpi4py>=4.1") if install else "FLK_TEST_INSTALL=no"
                if reason:
                    unavailable(f"mpi4py (from PyPI) is not there: {reason}")
                target.rename(folder)
    # Debian calls MPICH's library by a name of its own.
    library = ctypes.util.find_library("mpich")
    found = (
        re.search(rf"{re.escape(library)} .*=> (.*)", said([program("ldconfig") or "ldconfig", "-p"]))
        if library
        else None
    )
    libraries = tmp_path_factory.mktemp("libraries")
    if found:
        (libraries / "libmpi.so.12").symlink_to(found.group(1))
    return {"PYTHONPATH": str(folder), "MPI4PY_MPIABI": "mpich", "LD_LIBRARY_PATH": str(libraries)}


# Slurm


@dataclass(frozen=True)
class Slurm:
    """A Slurm of one node: its programs, and the variable that leads them to it."""

    srun: str
    sbatch: str
    env: dict[str, str]


SLURM = ("slurmctld", "slurmd", "srun", "sbatch", "sinfo", "scontrol", "munged")


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """A Slurm whose controller, node and authentication are daemons of this session."""
    packages = ("slurmctld", "slurmd", "slurm-client", "munge")
    programs = dict(zip(SLURM, needed(lambda: all_of(*SLURM), *packages), strict=True))
    # Not pytest's folder: the name of a socket in it must be short.
    with tempfile.TemporaryDirectory(prefix="flk-slurm-") as name, ExitStack() as daemons:
        folder = Path(name)
        node = socket.gethostname().partition(".")[0]
        env = os.environ | {"SLURM_CONF": str(configure_slurm(folder, node, said([programs["slurmd"], "-V"])))}
        paths = [f"--{what}-file={folder}/munge.{what}" for what in ("key", "pid", "log", "seed")]
        daemons.enter_context(
            daemon(
                folder, env, programs["munged"], "--foreground", "--force", f"--socket={folder}/munge.socket", *paths
            )
        )
        wait_for("munged's socket", (folder / "munge.socket").exists, folder)
        daemons.enter_context(daemon(folder, env, programs["slurmctld"], "-D"))
        daemons.enter_context(daemon(folder, env, programs["slurmd"], "-D", "-N", node))

        def ready() -> bool:
            state = subprocess.run([programs["sinfo"], "-h", "-o", "%T"], env=env, capture_output=True, text=True)
            if re.match("down|drain", state.stdout):
                resume = [programs["scontrol"], "update", f"nodename={node}", "state=resume"]
                subprocess.run(resume, env=env, capture_output=True)
            return state.stdout.strip() == "idle"

        wait_for("an idle node", ready, folder)
        yield Slurm(programs["srun"], programs["sbatch"], {"SLURM_CONF": env["SLURM_CONF"]})


def all_of(*names: str) -> list[str] | None:
    paths = [program(name) for name in names]
    return [path for path in paths if path] if all(paths) else None


def configure_slurm(folder: Path, node: str, release: str) -> Path:
    """Write what the daemons read: no cgroups, no accounting, and more tasks than processors."""
    for inner in ("state", f"spool/{node}"):
        (folder / inner).mkdir(parents=True)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    # Versions before 23.02 cannot do without cgroups by name, and do so in fact with the trackers below.
    numbers = [int(number) for number in re.findall(r"\d+", release)[:2]]
    (folder / "cgroup.conf").write_text(f"CgroupPlugin={'disabled' if numbers >= [23, 2] else 'cgroup/v1'}\n")
    user = "root" if os.geteuid() == 0 else f"{os.geteuid()}"
    configuration = folder / "slurm.conf"
    configuration.write_text(f"""\
ClusterName=flk-tests
SlurmctldHost={node}(127.0.0.1)
SlurmctldPort={free_port()}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=5
NodeName={node} NodeAddr=127.0.0.1 Port={free_port()} CPUs=8 State=UNKNOWN
PartitionName=test Nodes=ALL Default=YES State=UP OverSubscribe=FORCE:8
""")
    return configuration


@contextmanager
def daemon(folder: Path, env: Mapping[str, str], *command: str) -> Iterator[None]:
    log = folder / f"{Path(command[0]).name}.out"
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for(what: str, check: Callable[[], bool], folder: Path) -> None:
    until = time.monotonic() + 60
    while not check():
        if time.monotonic() > until:
            logs = "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in folder.glob("*.[lo][ou][gt]"))
            unavailable(f"a Slurm of our own does not start, {what} is missing:\n{logs}")
        time.sleep(0.1)


# Horovod

BUILT_WITH = ("cmake", "make", "g++")  # and Debian's packages of the same names
BUILD_FLAGS = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # its projects are older than what today's cmake accepts unasked
}


class Build:
    """Horovod for this Python and this torch, in a folder of its own, so that no environment of a user's is touched."""

    def __init__(self) -> None:
        torch = version("torch")
        python = sysconfig.get_config_var("SOABI")
        self.folder = cache() / f"horovod-{HOROVOD}-torch-{torch}-{python}-{platform.machine()}"
        self.reason = ""
        self._thread = threading.Thread(target=self._have, daemon=True)
        self._thread.start()

    def wait(self) -> Path | None:
        self._thread.join(INSTALL)
        return self.folder if self.folder.exists() else None

    def _have(self) -> None:
        with locked("horovod"):
            if not self.folder.exists():
                try:
                    self.reason = self._build()
                except (OSError, subprocess.SubprocessError) as error:
                    self.reason = str(error)

    def _build(self) -> str:
        if os.environ.get("FLK_TEST_INSTALL") == "no":
            return "FLK_TEST_INSTALL=no"
        if not all_of(*BUILT_WITH) and (reason := from_debian(*BUILT_WITH)):
            return f"{', '.join(BUILT_WITH)} are needed to build it: {reason}"
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.folder.parent) as name:
            compiler = Path(name, "c++17")  # torch's headers ask for it, after Horovod has asked for less
            compiler.write_text(f'#!/bin/sh\nexec {os.environ.get("CXX", "g++")} "$@" -std=c++17\n')
            compiler.chmod(0o755)
            target = Path(name, "site")
            for more in (
                ["--no-deps", "--no-build-isolation", f"horovod=={HOROVOD}"],
                ["cloudpickle", "psutil", "pyyaml", "packaging", "cffi"],  # what it needs, and not another torch
            ):
                if reason := pip_install(target, *more, env=BUILD_FLAGS | {"CXX": str(compiler)}):
                    return reason
            target.rename(self.folder)
        return ""


BUILD = pytest.StashKey[Build]()


@dataclass(frozen=True)
class Horovod:
    """Horovod with gloo: its launcher, and the variable that makes it importable."""

    run: list[str]
    env: dict[str, str]


@pytest.fixture(scope="session")
def horovod(request: pytest.FixtureRequest) -> Horovod:
    build = request.config.stash[BUILD]
    folder = build.wait()
    if folder is None:
        unavailable(f"Horovod {HOROVOD} (from PyPI) is not there: {build.reason or 'it is still being built'}")
    return Horovod([sys.executable, f"{folder}/bin/horovodrun", "--gloo"], {"PYTHONPATH": str(folder)})
