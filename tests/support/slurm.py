"""A Slurm of one node whose daemons the tests start, beside a Slurm that the machine may have already."""

from __future__ import annotations

import os
import re
import secrets
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.install import all_of, needed, said
from tests.support.ports import held_ports
from tests.support.requirements import unavailable


@dataclass(frozen=True)
class Slurm:
    """The program that starts ranks in a Slurm of one node, and the variable that names its configuration to them."""

    srun: str
    env: dict[str, str]


SLURM = ("slurmctld", "slurmd", "srun", "sinfo", "scontrol", "munged")


@contextmanager
def running_slurm() -> Iterator[Slurm]:
    """A Slurm whose controller, node and authentication are daemons that end with the block."""
    packages = ("slurmctld", "slurmd", "slurm-client", "munge")
    programs = dict(zip(SLURM, needed(lambda: all_of(*SLURM), *packages), strict=True))
    # Not pytest's folder: the name of a socket in it must be short.
    with tempfile.TemporaryDirectory(prefix="flk-slurm-") as name, ExitStack() as daemons:
        folder = Path(name)
        node = socket.gethostname().partition(".")[0]
        ports = daemons.enter_context(held_ports())
        configuration = configure_slurm(folder, node, said([programs["slurmd"], "-V"]), ports(), ports())
        env = os.environ | {"SLURM_CONF": str(configuration)}
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
        yield Slurm(programs["srun"], {"SLURM_CONF": env["SLURM_CONF"]})


def configure_slurm(folder: Path, node: str, release: str, controller_port: int, node_port: int) -> Path:
    """Write the configuration of the daemons: no cgroups, no accounting, and more tasks than processors."""
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
SlurmctldPort={controller_port}
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
NodeName={node} NodeAddr=127.0.0.1 Port={node_port} CPUs=8 State=UNKNOWN
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
    deadline = time.monotonic() + 60
    while not check():
        if time.monotonic() > deadline:
            logs = "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in folder.glob("*.[lo][ou][gt]"))
            unavailable(f"Slurm does not start, {what} is missing:\n{logs}")
        time.sleep(0.1)
