"""Settings of a launcher, read from its environment and command line and validated."""

from __future__ import annotations

import hmac
import math
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from flk_runtime.contract import pod_env, pod_layout, user_env
from flk_runtime.contract.secrets import secrets_in
from flk_runtime.contract.variable import T, Variable
from flk_runtime.errors import SetupError, setting
from flk_runtime.wire import Session
from flk_runtime.wire.listener import LOOPBACK

_CHECK = "flk_runtime.check"
_VARIABLE: Final = "variable"  # in the metadata of fields


def _of(variable: Variable[T]) -> T:
    """A field that is read from a variable of the environment, and has its default."""
    return field(default_factory=lambda: variable.default, metadata={_VARIABLE: variable})


def _values(kind: type, read: Callable[[Variable[Any]], Any]) -> dict[str, Any]:
    """The values of the fields of ``kind`` that are read from variables."""
    return {each.name: read(each.metadata[_VARIABLE]) for each in fields(kind) if _VARIABLE in each.metadata}


@dataclass(frozen=True)
class Limits:
    """The limits of a job for the restart policy. Times are in seconds."""

    restarts: int = _of(pod_env.RESTARTS)
    disruptions: int = _of(pod_env.DISRUPTIONS)
    reset: float = _of(user_env.BUDGET_RESET)  # an attempt that ran as long with progress renews both; 0: never
    backoff: float = _of(user_env.BACKOFF)  # longest delay after quick failures in a row; 0: no delay
    node_memory: float = _of(user_env.NODE_MEMORY)  # until failures on a node are forgotten
    retry_same: bool = False  # the same failure twice in a row without progress is not final


@dataclass(frozen=True)
class Settings:
    """Settings of one launcher. Times are in seconds."""

    command: tuple[str, ...]  # script.py args, or -m module args
    on_restart: tuple[str, ...] = _of(pod_env.ON_RESTART)  # more arguments in every attempt but the first
    preload: tuple[str, ...] = _of(pod_env.PRELOAD)  # modules that the fork server imports; empty: see `preload`
    restarted: str = _of(pod_env.RESTARTED)  # "yes": the job has had attempts before it was created again
    workers: int = _of(user_env.WORKERS)  # among which the pods of the job are divided
    worker: int = 0  # number of this pod's worker
    first_pod: int = 0  # index, in the job, of the first pod of that worker
    service: str = ""  # module that this launcher runs beside the ranks; empty: none
    service_key: str = ""  # that the ranks of the job and the service share; empty: there is no service
    job: str = "local"
    job_uid: str = _of(pod_env.JOB_UID)  # of the PyTorchJob; empty: not known
    secrets: tuple[str, ...] = ()  # values that are hidden in what the ranks print and in records, the longest first
    secret: str = _of(pod_env.RDZV_SECRET)  # with which the launchers authenticate each other; empty: none
    rendezvous_host: str = "127.0.0.1"  # of the launcher of pod 0
    rendezvous_port: int = 0  # 0: any free port, in a job of one pod
    pod: int = 0  # index of this pod
    pods: int = 1  # number of pods, spares included; of an elastic job the most that it may have
    min_pods: int = _of(pod_env.MIN_PODS)  # with which an attempt may start; 0: all that train
    spares: int = _of(pod_env.SPARES)  # pods that wait to take the place of a lost one
    last_call: float = _of(user_env.LAST_CALL)
    processes: int = _of(pod_env.PROCESSES)  # number of ranks in each pod
    gpus: int = 0  # number of GPUs that the pod has requested
    namespace: str = _of(user_env.NAMESPACE)
    pod_name: str = ""
    pod_ip: str = _of(pod_env.POD_IP)
    node: str = _of(user_env.NODE_NAME)
    cpus: int = _of(pod_env.CPUS)  # CPU request of the pod; 0: no request
    limits: Limits = field(default_factory=Limits)
    deadline: float = _of(pod_env.DEADLINE)  # that the job may take; 0: no deadline
    started: float = _of(pod_env.STARTED)  # when the job was started or resumed, seconds since the epoch; 0: not known
    join_timeout: float = user_env.JOIN_TIMEOUT.default
    lease: float = _of(user_env.LEASE)
    kill_timeout: float = _of(user_env.KILL_TIMEOUT)
    grace: float = _of(pod_env.GRACE)
    hang_timeout: float | None = _of(user_env.HANG_TIMEOUT)  # 0: never; None: those of hangs.detector.LIMITS
    slow_window: float = _of(user_env.SLOW_WINDOW)
    health: bool = False  # the pod's health is checked before it joins
    fork: bool = True
    metrics_port: int = _of(user_env.METRICS_PORT)  # 0: metrics are not served
    measures: bool = True  # the launchers measure the job, if it trains
    code: str = _of(pod_env.CODE)  # folder of the archive; empty: the code is in the working folder already
    code_hash: str = _of(pod_env.CODE_HASH)
    work: str = ""  # working folder of the ranks
    memory_root: str = _of(pod_env.MEMORY_ROOT)  # folder in memory for checkpoints; empty: none are kept in memory
    memory_limit: int | None = _of(user_env.MEMORY_LIMIT)  # bytes that they may take; 0: none are kept
    termination_log: str = _of(pod_env.TERMINATION_LOG)
    records: str = _of(pod_env.RECORDS)  # ConfigMap in which pod 0 keeps the record of the job; empty: none
    volume: str = ""  # folder of the checkpoints that outlives the pods; empty: there is none
    parent: int = _of(pod_env.PARENT)  # process id; the launcher ends with it. 0: none

    def session(self, purpose: str = "rendezvous", *, serves: bool, other: str = "it") -> Session:
        """One end of a connection to another launcher of this job; arguments as for `Session`."""
        return Session(self.secret, [purpose, self.job, self.job_uid, self.pods], serves=serves, other=other)

    def seconds_left(self, now: float) -> float:
        """Seconds until the job's deadline, at the time ``now`` in seconds since the epoch; infinite without one."""
        used = max(0.0, now - self.started) if self.started else 0.0
        return self.deadline - used if self.deadline else math.inf

    @property
    def service_key_variable(self) -> dict[str, str]:
        """The key as a variable of the ranks and the service."""
        return {pod_env.SERVICE_KEY: self.service_key} if self.service_key else {}

    @property
    def trains(self) -> bool:
        """Whether the job trains: its command is no other program of flk."""
        return not (self.command[0] == "-m" and self.command[1].partition(".")[0] in pod_layout.PROGRAMS)

    @property
    def makes_steps(self) -> bool:
        """Whether the ranks make steps of training: the ranks of a check only open the process group of the job."""
        return self.trains and self.command[:2] != ("-m", _CHECK)

    @property
    def telemetry(self) -> bool:
        """Whether the launchers measure the job."""
        return self.measures and self.trains

    @property
    def record_folder(self) -> str:
        """Folder in which pod 0 keeps the record of the job where no ConfigMap has it; empty: none.

        There is none where records of two jobs could not be told apart, and none under `flk run`, whose launchers end
        with it.
        """
        return self.volume if self.job_uid and self.trains and self.workers == 1 and not self.parent else ""

    @property
    def local(self) -> bool:
        """Whether all pods are on this machine, so that their launchers meet on its loopback interface."""
        return self.pods == 1 or self.pod_ip == LOOPBACK

    @property
    def pod_in_job(self) -> int:
        """Index of this pod among the pods of all workers, for people."""
        return self.first_pod + self.pod

    @property
    def most_pods(self) -> int:
        """Number of pods that train when all are there."""
        return self.pods - self.spares

    @property
    def least_pods(self) -> int:
        """Number of pods with which an attempt may start."""
        return self.min_pods or self.most_pods

    @property
    def elastic(self) -> bool:
        """Whether the job may run with fewer pods than it may have."""
        return self.least_pods < self.most_pods

    @property
    def world_size(self) -> int:
        """Number of ranks of the job when all pods that train are there."""
        return self.most_pods * self.processes

    @classmethod
    def from_environment(cls, arguments: Sequence[str], environ: Mapping[str, str]) -> Settings:
        """The settings of this process. Raises SetupError.

        ``arguments`` follow ``python -m flk_runtime``: an optional ``--``, a script or ``-m module``, and the script's
        own arguments.
        """
        command = list(arguments[1:]) if arguments[:1] == ["--"] else list(arguments)
        if not command or command == ["-m"]:
            raise SetupError("nothing to start: pass a script, or -m and a module")
        if command[0].startswith("-") and command[0] != "-m":
            raise SetupError(f"unknown option {command[0]}: expected a script, or -m and a module")
        if environ.get("PET_NNODES") and not environ.get(pod_env.PODS):
            raise SetupError(
                "an operator has set PET_NNODES here, which flk's launcher does not read, so each pod would train "
                f"alone: start the script with torchrun, submit the job with flk, or set {pod_env.PODS}, "
                f"{pod_env.POD_INDEX}, {pod_env.PROCESSES} and {pod_env.RDZV_ENDPOINT}"
            )

        def value(variable: Variable[T]) -> T:
            return setting(variable, environ)

        pods = value(pod_env.PODS)
        pod = value(pod_env.POD_INDEX)
        if pod >= pods:
            raise SetupError(f"{pod_env.POD_INDEX} is {pod}, but there are {pods} pods ({pod_env.PODS})")
        workers = value(user_env.WORKERS)
        if pods % workers:
            raise SetupError(f"{user_env.WORKERS} is {workers}, which does not divide {pods} pods ({pod_env.PODS})")
        # The pods of a worker have a rendezvous and attempts of their own, so that the other workers go on without it.
        pods //= workers
        worker, pod = divmod(pod, pods)
        first_pod = worker * pods
        endpoint = value(pod_env.RDZV_ENDPOINT).replace(pod_layout.FIRST_POD, str(first_pod))
        spares, min_pods = value(pod_env.SPARES), value(pod_env.MIN_PODS)
        if spares >= pods:
            raise SetupError(f"{pod_env.SPARES} is {spares}, so none of {pods} pods ({pod_env.PODS}) trains")
        if min_pods > pods - spares:
            raise SetupError(f"{pod_env.MIN_PODS} is {min_pods}, but only {pods - spares} pods train")
        address, port = _rendezvous_address(endpoint, pods)
        secret = value(pod_env.RDZV_SECRET)
        has_key = secret and value(pod_env.SERVICE_ADDRESS)
        deadline = value(pod_env.DEADLINE)
        join_timeout = value(user_env.JOIN_TIMEOUT)
        return cls(
            **_values(cls, value),
            command=tuple(command),
            job=value(user_env.JOB) or cls.job,
            secrets=tuple(secrets_in(environ, arguments)),
            worker=worker,
            first_pod=first_pod,
            service="" if pod or worker else value(pod_env.SERVICE),
            service_key=hmac.digest(secret.encode(), b"service", "sha256").hex() if has_key else "",
            rendezvous_host=address,
            rendezvous_port=port,
            pod=pod,
            pods=pods,
            measures=value(user_env.TELEMETRY) == "on",
            gpus=value(pod_env.GPUS),
            pod_name=value(user_env.POD_NAME) or socket.gethostname(),
            limits=Limits(**_values(Limits, value), retry_same=bool(value(user_env.RETRY_SAME_FAILURE))),
            join_timeout=min(join_timeout, deadline or join_timeout),
            health=value(user_env.PREFLIGHT) == "on",
            fork=value(user_env.START) == "fork" and pod_layout.LINUX,
            work=value(pod_env.WORK) or os.getcwd(),
            volume=pod_layout.on_volume(value(user_env.CHECKPOINT)),
        )


def _rendezvous_address(text: str, pods: int) -> tuple[str, int]:
    """Host and port of the leader. A job of one pod uses any free port of this machine."""
    if pods == 1:
        return "127.0.0.1", 0
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise SetupError(f"{pod_env.RDZV_ENDPOINT} must be host:port in a job of several pods, not {text!r}")
    return host.strip("[]"), int(port)
