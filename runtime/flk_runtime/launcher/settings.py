"""What a launcher is told by its environment and its command line, checked before anything starts."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flk_runtime import contract
from flk_runtime.system import host

_NUMBER = re.compile("0|[1-9][0-9]{0,8}")


class SettingsError(ValueError):
    """The environment or the command line of the launcher is wrong; one sentence that names the variable."""


@dataclass(frozen=True)
class Settings:
    """One launcher's view of its job. Times are in seconds."""

    command: tuple[str, ...]  # script.py args, or -m module args
    job: str = "local"
    host: str = "127.0.0.1"  # of the control store, held by the launcher of pod 0
    port: int = 0  # of the control store; 0 where there is one pod only: any free one
    pod: int = 0
    pods: int = 1
    processes: int = 1
    pod_name: str = ""
    pod_ip: str = ""
    node: str = ""
    cpus: int = 0  # that the pod asks for; 0: not said
    restarts: int = 0
    deadline: float = 0.0  # from the launcher's start; 0: none
    join_timeout: float = 1800.0
    grace: float = 10.0
    fork: bool = True
    fabric: str = "auto"
    code: str = ""  # folder of the archive; empty: the code is where the launcher starts
    code_hash: str = ""
    work: str = ""
    termination_log: str = ""
    parent: int = 0

    @property
    def world_size(self) -> int:
        return self.pods * self.processes

    @classmethod
    def read(cls, arguments: Sequence[str], environ: Mapping[str, str]) -> Settings:
        """The settings of this process.

        ``arguments`` are what follows ``python -m flk_runtime``: an optional ``--``, then a script or ``-m module``,
        then what is the script's own. In a pod of an operator (PyTorchJob with a Master, TrainJob), whose variables are
        torchrun's PET_*, they say what FLK_PODS, FLK_POD_INDEX, FLK_PROCESSES and FLK_RDZV_ENDPOINT do not.
        """
        command = list(arguments[1:]) if arguments[:1] == ["--"] else list(arguments)
        if not command or command == ["-m"]:
            raise SettingsError("nothing to start: give a script, or -m and a module")
        if command[0] == "-m" or not command[0].startswith("-"):
            pass
        else:
            raise SettingsError(f"unknown option {command[0]}: expected a script, or -m and a module")
        environ = {**environ, **_of_operator(environ)}

        def number(name: str, default: float, least: float = 0) -> float:
            text = environ.get(name, "")
            if not text:
                return default
            try:
                value = float(text)
            except ValueError:
                raise SettingsError(f"{name} must be a number, not {text!r}") from None
            if not value >= least:
                raise SettingsError(f"{name} must be at least {least:g}, not {text}")
            return value

        def whole(name: str, default: int, least: int = 0) -> int:
            value = number(name, default, least)
            if value != int(value):
                raise SettingsError(f"{name} must be a whole number, not {environ[name]}")
            return int(value)

        pods = whole(contract.PODS, 1, 1)
        pod = whole(contract.POD_INDEX, 0)
        if pod >= pods:
            raise SettingsError(f"{contract.POD_INDEX} is {pod}, but there are {pods} pods ({contract.PODS})")
        address, port = _endpoint(environ.get(contract.RDZV_ENDPOINT, ""), alone=pods == 1)
        start = environ.get(contract.START, "fork")
        if start not in ("fork", "spawn"):
            raise SettingsError(f"{contract.START} must be fork or spawn, not {start!r}")
        deadline = number(contract.DEADLINE, 0)
        patience = number(contract.JOIN_TIMEOUT, cls.join_timeout)
        return cls(
            command=tuple(command),
            job=environ.get(contract.JOB, "") or "local",
            host=address,
            port=port,
            pod=pod,
            pods=pods,
            processes=whole(contract.PROCESSES, 1, 1),
            pod_name=environ.get(contract.POD_NAME, "") or socket.gethostname(),
            pod_ip=environ.get(contract.POD_IP, ""),
            node=environ.get(contract.NODE_NAME, ""),
            cpus=whole(contract.CPUS, 0),
            restarts=whole(contract.RESTARTS, 0),
            deadline=deadline,
            join_timeout=min(patience, deadline or patience),
            grace=number(contract.GRACE, cls.grace),
            fork=start == "fork",
            fabric=environ.get(contract.FABRIC, "") or "auto",
            code=environ.get(contract.CODE, ""),
            code_hash=environ.get(contract.CODE_HASH, ""),
            work=environ.get(contract.WORK, "") or os.getcwd(),
            termination_log=environ.get(contract.TERMINATION_LOG, ""),
            parent=whole(contract.PARENT, 0),
        )


def _of_operator(environ: Mapping[str, str]) -> dict[str, str]:
    """What an operator's variables for torchrun say in flk's own names; nothing where flk's own are set."""
    pods = environ.get("PET_NNODES", "")
    if not pods or any(environ.get(name) for name in (contract.PODS, contract.POD_INDEX, contract.RDZV_ENDPOINT)):
        return {}
    if not _NUMBER.fullmatch(pods) or pods == "0":
        raise SettingsError(
            f"PET_NNODES must be a number of pods, not {pods!r}: flk's launcher runs no elastic job; start it with "
            "torchrun, or give the job no elasticPolicy"
        )
    found = {contract.PODS: pods}
    if pods != "1":
        names = ("PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
        missing = [name for name in names if not environ.get(name)]
        if missing:
            raise SettingsError(
                f"{' and '.join(missing)} must be set beside PET_NNODES={pods}: give the PyTorchJob a Master, or set "
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
    """Ranks per pod for torchrun's --nproc-per-node. ``auto`` is as in a job of flk: one for each GPU, else one."""
    if text == "cpu":
        return str(host.processors())
    if text in ("", "auto", "gpu"):
        gpus = host.gpus()
        if text == "gpu" and not gpus:
            raise SettingsError(f"PET_NPROC_PER_NODE is gpu, but no GPU is here: set {contract.PROCESSES}")
        return str(max(1, gpus))
    if not _NUMBER.fullmatch(text) or text == "0":
        raise SettingsError(f"PET_NPROC_PER_NODE must be a number, auto, gpu or cpu, not {text!r}")
    return text


def _endpoint(text: str, *, alone: bool) -> tuple[str, int]:
    """Host and port of the control store. A job of one pod meets nobody, so it takes any free port of its own."""
    if alone:
        return "127.0.0.1", 0
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise SettingsError(
            f"{contract.RDZV_ENDPOINT} must be host:port where there is more than one pod, not {text!r}"
        )
    return host.strip("[]"), int(port)
