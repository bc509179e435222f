"""Start a training script as several ranks under flk's launcher, torchrun or ft_launcher of nvidia-resiliency-ext."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from measure import progress

THREADS: Final = {"OMP_NUM_THREADS": "1"}  # the ranks share the cores of one machine
# glibc adapts these limits to what a process has freed. Whether the tensors of a step were allocated and returned to
# Linux in each step was chance, and made a step of 15 ms on either side up to a third longer. With fixed limits memory
# is kept. 32 MiB is the largest limit of a block that all versions of glibc take.
MEMORY: Final = {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
RESULT: Final = "BENCHMARK_RESULT"  # environment variable: the file that ranks write their measurements to
# What nvidia-resiliency-ext needs except torch, which is not installed a second time.
RESILIENCY_NEEDS: Final = ("defusedxml", "nvidia-ml-py", "packaging", "psutil>=6", "pynvml>=12", "pyyaml")


@dataclass(frozen=True)
class Process:
    """One launcher process to start: its command and the variables to add to its environment."""

    command: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)

    def start(self, folder: Path, **options: Any) -> subprocess.Popen[Any]:
        """Start it in ``folder``. ``options`` are passed to subprocess.Popen."""
        share_processor()
        environment = os.environ | THREADS | MEMORY | dict(self.variables)
        return subprocess.Popen(self.command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, **options)


# script and its arguments, ranks, launchers, restarts -> one process per launcher
Launcher = Callable[[Sequence[str], int, int, int], list[Process]]


def flk(script: Sequence[str], ranks: int, launchers: int = 1, restarts: int = 0) -> list[Process]:
    """flk's launcher as a pod starts it. ``ranks`` is the number of ranks of all launchers together."""
    shared = {
        "FLK_PODS": str(launchers),
        "FLK_PROCESSES": str(ranks // launchers),
        "FLK_RESTARTS": str(restarts),
        "FLK_RDZV_ENDPOINT": f"127.0.0.1:{free_port()}",
        "FLK_POD_IP": "127.0.0.1",
        "FLK_PARENT": str(os.getpid()),  # the job ends if the benchmark is killed
    }
    command = [sys.executable, "-m", "flk_runtime", "--", *script]
    return [Process(command, shared | {"FLK_POD_INDEX": str(index)}) for index in range(launchers)]


def torchrun(script: Sequence[str], ranks: int, launchers: int = 1, restarts: int = 0) -> list[Process]:
    """torchrun, with a new store for each attempt: with its defaults, the restarts of torch 2.13 do not recover."""
    return _elastic(["torch.distributed.run"], {}, script, ranks, launchers, restarts)


@dataclass(frozen=True)
class FtLauncher:
    """ft_launcher of a release of nvidia-resiliency-ext, with its defaults but for the store, see `torchrun`."""

    release: str
    no_configuration: str  # its option that takes the defaults
    pip: tuple[str, ...] = ()  # options for its wheel
    variables: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, script: Sequence[str], ranks: int, launchers: int = 1, restarts: int = 0) -> list[Process]:
        """Return what starts the ranks."""
        folder = self.folder()
        assert folder is not None, "check folder() before"
        module = ["nvidia_resiliency_ext.fault_tolerance.launcher", self.no_configuration]
        variables = {"PYTHONPATH": with_packages(folder), **self.variables}
        return _elastic(module, variables, script, ranks, launchers, restarts)

    def folder(self) -> Path | None:
        """The folder with the package, see `packages_folder`."""
        return packages_folder(f"nvidia-resiliency-ext=={self.release}", RESILIENCY_NEEDS, self.pip)


FT_LAUNCHERS: Final = {
    "ft_launcher": FtLauncher("0.4.1", "--ignore-missing-fault-tol-cfg"),
    # Its wheels are for Python 3.12 and glibc 2.39 or newer, for the sake of a module that profiles kernels of GPUs;
    # ft_launcher is Python. It takes two launchers on one machine for a mistake unless it is told of them.
    "ft_launcher 0.7.0": FtLauncher(
        "0.7.0",
        "--ft-ignore-missing-cfg",
        ("--only-binary=:all:", "--python-version=3.12", "--platform=manylinux_2_39_x86_64"),
        {"NVRX_ENABLE_MULTI_LAUNCHERS_PER_NODE": "1"},
    ),
}


def _elastic(
    module: Sequence[str],
    variables: Mapping[str, str],
    script: Sequence[str],
    ranks: int,
    launchers: int,
    restarts: int,
) -> list[Process]:
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=benchmark"]
    shape = [f"--nnodes={launchers}", f"--nproc-per-node={ranks // launchers}", f"--max-restarts={restarts}"]
    command = [sys.executable, "-m", *module, *rendezvous, *shape, "--local-addr=127.0.0.1", *script]
    return [Process(command, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **variables})] * launchers


@functools.cache
def share_processor() -> None:
    """Have this process and all that it starts share the processor alike, which needs root; else print a line.

    Linux gives each session the same share of the processor (autogroup) unless a control group says otherwise, as in a
    pod. torchrun starts each rank in a session of its own, and flk's ranks are in that of their launcher. On a busy
    machine this alone gave one side up to twice the rate of the other.
    """
    for root in ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup"):  # of version 1, and of version 2
        group = Path(root, "flk-benchmark")
        with contextlib.suppress(OSError):
            group.mkdir(exist_ok=True)
            if (group / "cpu.shares").exists() or (group / "cpu.weight").exists():
                (group / "cgroup.procs").write_text(str(os.getpid()))
                return
    progress("sessions may get unlike shares of the processor: measure as root, or where nothing else runs")


def free_port() -> int:
    """A TCP port of this machine that nothing uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def with_packages(folder: Path) -> str:
    """PYTHONPATH with the packages in a folder."""
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


@functools.cache
def packages_folder(peer: str, needs: tuple[str, ...], pip_options: tuple[str, ...] = ()) -> Path | None:
    """The folder with a peer and its dependencies except torch, installed on the first call.

    ``pip_options`` are for the peer alone.
    It lies in the user's cache folder and is found through PYTHONPATH, so that the environment of flk stays as it is.
    Returns None, and prints a line on stderr, if the installation fails.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flk-benchmarks"
    folder = cache / peer.replace("==", "-")
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as name:
        target = Path(name) / "packages"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(target)]
        for command in ([*pip, "--no-deps", *pip_options, peer], [*pip, *needs]):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
                progress(f"{peer} cannot be installed, so it is not measured: {reason}")
                return None
        shutil.move(target, folder)
    return folder


def run_ranks(
    script: Sequence[str],
    ranks: int,
    launcher: Launcher = flk,
    variables: Mapping[str, str] | None = None,
    *,
    restarts: int = 0,
) -> list[Any]:
    """Run a script as ranks under one launcher. Returns what they passed to `write_result`, in order.

    ``variables`` are added to the launcher's environment. The ranks' stderr goes to this process's stderr. Raises
    SystemExit if the job fails.
    """
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "results"
        (process,) = launcher(script, ranks, 1, restarts)
        with_file = Process(process.command, {**process.variables, **(variables or {}), RESULT: str(file)})
        code = with_file.start(Path.cwd(), stdout=subprocess.DEVNULL).wait()
        if code:
            raise SystemExit(f"the ranks of {script[0]} ended with {code}")
        return [json.loads(line) for line in file.read_text().splitlines()]


def write_result(value: object) -> None:
    """Add a measurement, any value that JSON can express. For ranks of a script that `run_ranks` started."""
    with Path(os.environ[RESULT]).open("a") as file:
        file.write(json.dumps(value) + "\n")
