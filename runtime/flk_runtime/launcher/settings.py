"""Settings of a launcher, read from its environment and command line and validated."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flk_runtime import contract
from flk_runtime.launcher.policy import Limits
from flk_runtime.system import host

_NUMBER = re.compile("0|[1-9][0-9]{0,8}")
_SHORTEST_LEASE = 0.5  # seconds


class SettingsError(ValueError):
    """The environment or the command line of the launcher is wrong; the message names the variable."""


@dataclass(frozen=True)
class Settings:
    """Settings of one launcher. Times are in seconds."""

    command: tuple[str, ...]  # script.py args, or -m module args
    job: str = "local"
    job_uid: str = ""  # of the PyTorchJob; empty: not known
    secret: str = ""  # with which the launchers of the job authenticate each other; empty: there is none
    rendezvous_host: str = "127.0.0.1"  # of the launcher of pod 0
    rendezvous_port: int = 0  # 0: any free port, in a job of one pod
    pod: int = 0  # index of this pod
    pods: int = 1  # number of pods
    processes: int = 1  # number of ranks in each pod
    gpus: int = 0  # number of GPUs that the pod has requested
    pod_name: str = ""
    pod_ip: str = ""
    node: str = ""
    cpus: int = 0  # CPU request of the pod; 0: no request
    limits: Limits = field(default_factory=Limits)
    deadline: float = 0.0  # from the start of the launcher; 0: no deadline
    join_timeout: float = 1800.0
    lease: float = 15.0  # silence after which the launchers give up a connection between them
    kill_timeout: float = 30.0  # in which a rank has to end after SIGKILL
    grace: float = 10.0
    hang_timeout: float = 480.0  # without progress; 0: never. Below the 10 minutes after which NCCL aborts a rank
    slow_factor: float = 1.5
    slow_window: float = 60.0
    fork: bool = True
    code: str = ""  # folder of the archive; empty: the code is in the working folder already
    code_hash: str = ""
    work: str = ""  # working folder of the ranks
    termination_log: str = ""
    parent: int = 0  # process id; the launcher ends with it. 0: none

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return self.pods * self.processes

    def rank(self, local_rank: int) -> int:
        """Rank of the process with this local rank in this pod."""
        return self.pod * self.processes + local_rank

    @classmethod
    def from_environment(cls, arguments: Sequence[str], environ: Mapping[str, str]) -> Settings:
        """The settings of this process. Raises SettingsError.

        ``arguments`` follow ``python -m flk_runtime``: an optional ``--``, a script or ``-m module``, and the script's
        own arguments. A pod of another operator (PyTorchJob with a Master, TrainJob) has torchrun's PET_* variables;
        they are used if FLK_PODS, FLK_POD_INDEX and FLK_RDZV_ENDPOINT are unset.
        """
        command = list(arguments[1:]) if arguments[:1] == ["--"] else list(arguments)
        if not command or command == ["-m"]:
            raise SettingsError("nothing to start: pass a script, or -m and a module")
        if command[0].startswith("-") and command[0] != "-m":
            raise SettingsError(f"unknown option {command[0]}: expected a script, or -m and a module")
        environ = {**environ, **_from_torchrun_variables(environ)}

        def number(name: str, default: float, minimum: float = 0) -> float:
            text = environ.get(name, "")
            if not text:
                return default
            try:
                value = float(text)
            except ValueError:
                raise SettingsError(f"{name} must be a number, not {text!r}") from None
            if not value >= minimum:
                raise SettingsError(f"{name} must be at least {minimum:g}, not {text}")
            return value

        def integer(name: str, default: int, minimum: int = 0) -> int:
            value = number(name, default, minimum)
            if value != int(value):
                raise SettingsError(f"{name} must be an integer, not {environ[name]}")
            return int(value)

        pods = integer(contract.PODS, 1, 1)
        pod = integer(contract.POD_INDEX, 0)
        if pod >= pods:
            raise SettingsError(f"{contract.POD_INDEX} is {pod}, but there are {pods} pods ({contract.PODS})")
        address, port = _rendezvous_address(environ.get(contract.RDZV_ENDPOINT, ""), pods)
        start = environ.get(contract.START, "fork")
        if start not in ("fork", "spawn"):
            raise SettingsError(f"{contract.START} must be fork or spawn, not {start!r}")
        deadline = number(contract.DEADLINE, 0)
        join_timeout = number(contract.JOIN_TIMEOUT, cls.join_timeout)
        return cls(
            command=tuple(command),
            job=environ.get(contract.JOB, "") or "local",
            job_uid=environ.get(contract.JOB_UID, ""),
            secret=environ.get(contract.RDZV_SECRET, ""),
            rendezvous_host=address,
            rendezvous_port=port,
            pod=pod,
            pods=pods,
            processes=integer(contract.PROCESSES, 1, 1),
            gpus=_gpus(integer(contract.GPUS, 0), environ.get(contract.PREFLIGHT, "")),
            pod_name=environ.get(contract.POD_NAME, "") or socket.gethostname(),
            pod_ip=environ.get(contract.POD_IP, ""),
            node=environ.get(contract.NODE_NAME, ""),
            cpus=integer(contract.CPUS, 0),
            limits=Limits(
                restarts=integer(contract.RESTARTS, 0),
                disruptions=integer(contract.DISRUPTIONS, contract.MAX_DISRUPTIONS),
                reset=number(contract.BUDGET_RESET, Limits.reset),
                backoff=number(contract.BACKOFF, Limits.backoff),
                retry_same=bool(integer(contract.RETRY_SAME_FAILURE, 0)),
            ),
            deadline=deadline,
            join_timeout=min(join_timeout, deadline or join_timeout),
            lease=number(contract.LEASE, cls.lease, _SHORTEST_LEASE),
            kill_timeout=number(contract.KILL_TIMEOUT, cls.kill_timeout),
            grace=number(contract.GRACE, cls.grace),
            hang_timeout=number(contract.HANG_TIMEOUT, cls.hang_timeout),
            slow_factor=number(contract.SLOW_FACTOR, cls.slow_factor, 1),
            slow_window=number(contract.SLOW_WINDOW, cls.slow_window, 1),
            fork=start == "fork",
            code=environ.get(contract.CODE, ""),
            code_hash=environ.get(contract.CODE_HASH, ""),
            work=environ.get(contract.WORK, "") or os.getcwd(),
            termination_log=environ.get(contract.TERMINATION_LOG, ""),
            parent=integer(contract.PARENT, 0),
        )


def _gpus(requested: int, preflight: str) -> int:
    """The number of GPUs that the ranks must be able to use: none if FLK_PREFLIGHT switches that check off."""
    try:
        return 0 if "gpu" in contract.parse_preflight(preflight) else requested
    except ValueError as error:
        raise SettingsError(f"{contract.PREFLIGHT}={preflight}: {error}") from None


def _from_torchrun_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables, which an operator has set, by the names of flk's; empty if flk's own variables are set."""
    pods = environ.get("PET_NNODES", "")
    if not pods or any(environ.get(name) for name in (contract.PODS, contract.POD_INDEX, contract.RDZV_ENDPOINT)):
        return {}
    if not _NUMBER.fullmatch(pods) or pods == "0":
        raise SettingsError(
            f"PET_NNODES must be a number of pods, not {pods!r}: flk's launcher does not run elastic jobs; start the "
            "script with torchrun, or remove elasticPolicy from the job"
        )
    found = {contract.PODS: pods}
    if pods != "1":
        names = ("PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
        missing = [name for name in names if not environ.get(name)]
        if missing:
            raise SettingsError(
                f"{' and '.join(missing)} must be set with PET_NNODES={pods}: add a Master to the PyTorchJob, or set "
                f"{contract.PODS}, {contract.POD_INDEX} and {contract.RDZV_ENDPOINT}"
            )
        index, address, port = (environ[name] for name in names)
        if not _NUMBER.fullmatch(index) or int(index) >= int(pods):
            raise SettingsError(f"PET_NODE_RANK must be a number below PET_NNODES={pods}, not {index!r}")
        if not _NUMBER.fullmatch(port) or not 0 < int(port) < 1 << 16:
            raise SettingsError(f"PET_MASTER_PORT must be a port, not {port!r}")
        found[contract.POD_INDEX] = index
        found[contract.RDZV_ENDPOINT] = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    if not environ.get(contract.PROCESSES):
        found[contract.PROCESSES] = _processes(environ.get("PET_NPROC_PER_NODE", ""))
    return found


def _processes(text: str) -> str:
    """Number of ranks per pod for a value of torchrun's --nproc-per-node. ``auto`` means one per GPU, else one."""
    if text == "cpu":
        return str(host.cpu_count())
    if text in ("", "auto", "gpu"):
        gpus = host.gpu_count()
        if text == "gpu" and not gpus:
            raise SettingsError(f"PET_NPROC_PER_NODE is gpu, but this pod has no GPU: set {contract.PROCESSES}")
        return str(max(1, gpus))
    if not _NUMBER.fullmatch(text) or text == "0":
        raise SettingsError(f"PET_NPROC_PER_NODE must be a number, auto, gpu or cpu, not {text!r}")
    return text


def _rendezvous_address(text: str, pods: int) -> tuple[str, int]:
    """Host and port of the leader. A job of one pod uses any free port of this machine."""
    if pods == 1:
        return "127.0.0.1", 0
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise SettingsError(f"{contract.RDZV_ENDPOINT} must be host:port in a job of several pods, not {text!r}")
    return host.strip("[]"), int(port)
