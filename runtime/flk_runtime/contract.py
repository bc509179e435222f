"""Contract between the client and the pods: environment variables, paths, exit codes and the format of job records.

The client and the pods import this module and nothing else of each other. It uses the standard library only, so that
every command of the client can import it fast.
"""

from __future__ import annotations

import enum
import json
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final

VERSION: Final = "0.1.0"


class ExitCode(enum.IntEnum):
    """Exit codes of the client's commands and of the launcher.

    The restart policy ``ExitCode`` of the training operator treats codes below 128 as final. It starts the pod again
    after 128 and more: signals, and PREEMPTED.
    """

    DONE = 0  # the job or the command succeeded
    ERROR = 1  # a bug in flk, or an error of the Kubernetes API server
    USAGE = 2  # the command line, the job file or the environment is wrong
    TRAINING = 100  # the user's code failed
    RUNNING = 101  # the job still runs
    NOT_FOUND = 102  # there is no job of that name
    CANCELLED = 103  # the job was deleted or cancelled
    INFRASTRUCTURE = 104  # a lost node, a missing image, out of memory, a pod that never joined
    TIMEOUT = 124  # the job's deadline passed, or the time that a command was given
    INTERRUPTED = 130  # Ctrl-C (SIGINT)
    PREEMPTED = 143  # in pods only: the launcher received SIGTERM; the pod may be started again
    UNUSABLE = 144  # in pods only: a GPU was lost or a rank survives SIGKILL, so another pod has to replace this one


# Environment of the launcher. The manifest or `flk run` sets these variables.
JOB: Final = "FLK_JOB"  # name of the job
RDZV_ENDPOINT: Final = "FLK_RDZV_ENDPOINT"  # host:port of the rendezvous, which the launcher of pod 0 serves
JOB_UID: Final = "FLK_JOB_UID"  # UID of the PyTorchJob, which distinguishes jobs that have the same name
RDZV_SECRET: Final = "FLK_RDZV_SECRET"  # noqa: S105 - launchers authenticate each other with it; ranks do not get it
POD_INDEX: Final = "FLK_POD_INDEX"  # index of this pod, from 0
PODS: Final = "FLK_PODS"  # number of pods; of an elastic job the most that it may have; spares included
MIN_PODS: Final = "FLK_MIN_PODS"  # pods with which an attempt of an elastic job may start; unset: all that train
SPARES: Final = "FLK_SPARES"  # how many of the pods wait to take the place of a lost one
METRICS_PORT: Final = "FLK_METRICS_PORT"  # port at which each launcher serves metrics for Prometheus; unset: none
LAST_CALL: Final = "FLK_LAST_CALL"  # seconds that an attempt which could start waits for pods that may still come
PROCESSES: Final = "FLK_PROCESSES"  # number of ranks in each pod
POD_NAME: Final = "FLK_POD_NAME"  # name of this pod
POD_IP: Final = "FLK_POD_IP"  # IP address of this pod
GPUS: Final = "FLK_GPUS"  # number of GPUs that this pod has requested; 0 or unset: none
NODE_NAME: Final = "FLK_NODE_NAME"  # name of the node that this pod runs on
CPUS: Final = "FLK_CPUS"  # CPU request of the pod, rounded up; 0 or unset: no request
RESTARTS: Final = "FLK_RESTARTS"  # how many attempts may follow failures of the training code
DISRUPTIONS: Final = "FLK_DISRUPTIONS"  # how many attempts may follow disruptions: lost pods, preemptions, connections
BUDGET_RESET: Final = (
    "FLK_BUDGET_RESET"  # seconds after which an attempt has renewed restarts and disruptions; 0: never
)
BACKOFF: Final = "FLK_BACKOFF"  # longest delay in seconds after quick failures in a row, 60 by default; 0: no delay
RETRY_SAME_FAILURE: Final = "FLK_RETRY_SAME_FAILURE"  # 1: the same failure twice without progress is retried too
DEADLINE: Final = "FLK_DEADLINE"  # seconds from the start of the launcher; 0 or unset: no deadline
GRACE: Final = "FLK_GRACE"  # seconds between the signal that stops the pod and SIGKILL for its ranks
PARENT: Final = "FLK_PARENT"  # process id; the launcher ends when this process ends (set by `flk run`)
KILL_TIMEOUT: Final = "FLK_KILL_TIMEOUT"  # seconds after SIGKILL in which a rank has to end, or its pod is replaced
JOIN_TIMEOUT: Final = "FLK_JOIN_TIMEOUT"  # seconds that a launcher waits for the other pods
LEASE: Final = "FLK_LEASE"  # seconds of silence after which the launchers give up a connection between them
START: Final = "FLK_START"  # start method of the ranks: fork (default) or spawn
CODE: Final = "FLK_CODE"  # folder with the archive of the user's code, or with its files; unset: the image has the code
CODE_HASH: Final = "FLK_CODE_HASH"  # SHA-256 of the archive, in hex
WORK: Final = "FLK_WORK"  # folder into which the code is unpacked; working folder of the ranks
HANG_TIMEOUT: Final = "FLK_HANG_TIMEOUT"  # seconds without progress that are a hang, 480 by default; 0: never
SLOW_FACTOR: Final = "FLK_SLOW_FACTOR"  # a rank that works so many times as long as the median is slow, 1.5 by default
SLOW_WINDOW: Final = "FLK_SLOW_WINDOW"  # seconds over which ranks are compared for that, 60 by default
MEMORY_ROOT: Final = "FLK_MEMORY_ROOT"  # folder in memory (tmpfs) for checkpoints; unset: none are kept in memory
MEMORY_LIMIT: Final = "FLK_MEMORY_LIMIT"  # bytes, as 8Gi, that they may take in a pod; half of it by default; 0: none
RECORDS: Final = "FLK_RECORDS"  # ConfigMap in which pod 0's launcher keeps the record of the job; unset: none
TERMINATION_LOG: Final = "FLK_TERMINATION_LOG"  # file for the final job record; in a pod, the termination message

# Environment of the ranks, in addition to torchrun's variables.
STRATEGY: Final = "FLK_STRATEGY"  # how the ranks share the model
MEASURED: Final = "FLK_MEASURED"  # results of `flk bench` that strategy auto uses: a list in JSON
FABRIC: Final = "FLK_FABRIC"  # preset of NCCL's variables that the job uses
CHECKPOINT: Final = "FLK_CHECKPOINT"  # folder of the checkpoints, or their address in S3: s3://BUCKET/PREFIX
SAVE_EVERY: Final = "FLK_SAVE_EVERY"  # steps between two checkpoints; auto: computed from what a save costs
BATCH: Final = "FLK_BATCH"  # global batch of an elastic job with fewer pods: keep (default) or scale
FULL_WORLD_SIZE: Final = "FLK_FULL_WORLD_SIZE"  # ranks of the job when it has all its pods; set by the launcher
KEEP: Final = "FLK_KEEP"  # number of the newest checkpoints that stay, 2 by default
KEEP_EVERY: Final = "FLK_KEEP_EVERY"  # checkpoints of which the step is a multiple of this stay too; 0 or unset: none
SEED: Final = "FLK_SEED"  # seed of the random number generators, 0 by default
PREFLIGHT: Final = "FLK_PREFLIGHT"  # checks before the start: on, off, or some of them off, as in -shm,-code
PREFLIGHT_TIMEOUT: Final = "FLK_PREFLIGHT_TIMEOUT"  # seconds that each rank waits for the others in the preflight
STEP_TIMEOUT: Final = "FLK_STEP_TIMEOUT"  # timeout of collectives after the first step, in seconds
DILOCO_OPTIONS: Final = "FLK_DILOCO"  # options of strategy diloco: KEY=VALUE, separated by commas
WORKERS: Final = "FLK_WORKERS"  # number of workers of strategy diloco in this job; its pods are divided among them
WORKER: Final = "FLK_WORKER"  # number of this rank's worker, from 0; set by the launcher
MEET: Final = "FLK_MEET"  # host:port where the workers of strategy diloco meet
MEET_SECRET: Final = "FLK_MEET_SECRET"  # noqa: S105 - with which workers and hub authenticate each other
MEET_CA: Final = "FLK_MEET_CA"  # file with the certificates that the hub's is checked against; empty: no TLS
MEET_CERTIFICATE: Final = "FLK_MEET_CERTIFICATE"  # folder with tls.crt and tls.key of the hub; empty: no TLS
HUB_PORT: Final = "FLK_HUB_PORT"  # port on which the launcher of pod 0 serves the hub; 0 or unset: no hub
PROGRESS: Final = "FLK_PROGRESS"  # file of the progress page that a rank shares with its launcher
OBSERVER: Final = "FLK_OBSERVER"  # path, without suffix, of the files through which the launcher reads a rank's stacks
CHOICE: Final = "FLK_CHOICE"  # file of a pod that keeps the choice of strategy auto for later attempts
TRIAL: Final = "FLK_TRIAL"  # 1: the script is run for a few steps to plan or measure it; checkpoints are left alone
HEARTBEAT: Final = "FLK_HEARTBEAT"  # file that a script may touch to say that it makes progress
MEMORY: Final = "FLK_MEMORY"  # socket on which the launcher answers ranks about checkpoints in memory
ATTEMPT: Final = "FLK_ATTEMPT"  # number of the attempt, from 0; set by the launcher
REPORT_FD: Final = "FLK_REPORT_FD"  # file descriptor of the pipe on which a rank reports its failure to the launcher

# Names that the training operator, torchrun or flk's launcher sets. The operator appends its values to the container's
# environment, so it would silently replace the user's (kubeflow/trainer pkg/controller.v1/pytorch/envvar.go).
RESERVED_NAMES: Final = frozenset(
    {
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "PYTHONUNBUFFERED",
        "RANK",
        "ROLE_NAME",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "WORLD_SIZE",
    }
)
RESERVED_PREFIXES: Final = ("PET_", "TORCHELASTIC_", "FLK_")
# FLK_ variables that users may set. They configure the runtime and do not describe the job.
SETTABLE: Final = frozenset(
    {
        SAVE_EVERY,
        KEEP,
        KEEP_EVERY,
        SEED,
        START,
        JOIN_TIMEOUT,
        LEASE,
        LAST_CALL,
        METRICS_PORT,
        HANG_TIMEOUT,
        SLOW_FACTOR,
        SLOW_WINDOW,
        PREFLIGHT,
        PREFLIGHT_TIMEOUT,
        STEP_TIMEOUT,
        KILL_TIMEOUT,
        BUDGET_RESET,
        BACKOFF,
        RETRY_SAME_FAILURE,
        MEMORY_LIMIT,
        MEASURED,
    }
)
MAX_DISRUPTIONS: Final = 100  # default of DISRUPTIONS and of the job's field
BATCHES: Final = ("keep", "scale")  # values of BATCH


def is_reserved(name: str) -> bool:
    """Return whether users must not set the environment variable ``name``."""
    return name not in SETTABLE and (name in RESERVED_NAMES or name.startswith(RESERVED_PREFIXES))


AUTO: Final = "auto"  # in place of a value that flk chooses: of a strategy, the steps between saves, a target, a gang
DILOCO: Final = "diloco"
# Strategies of ranks that train one model. Those from no_shard on are named as in torch's FSDP ShardingStrategy;
# no_shard is the same as ddp.
INNER_STRATEGIES: Final = ("ddp", "no_shard", "shard_grad_op", "full_shard", "hybrid_shard", "hybrid_shard_zero2")
# Values of --strategy. auto has the ranks choose one of those before it at their start. diloco trains several workers,
# each with an inner strategy.
STRATEGIES: Final = ("none", *INNER_STRATEGIES, AUTO, DILOCO)
OUTER_DTYPES: Final = ("fp32", "fp16", "int8")  # of what the workers of strategy diloco send to each other


def parse_strategy(text: str) -> str:
    """Return the strategy that ``text`` names, as written in STRATEGIES or in torch (FULL_SHARD, _HYBRID_SHARD_ZERO2).

    Raises ValueError, with the list of names, if there is no such strategy.
    """
    name = text.lower().replace("-", "_").lstrip("_")
    if name not in STRATEGIES:
        raise ValueError(f"unknown strategy {text!r}: expected one of {', '.join(STRATEGIES)}")
    return name


# Checks of the preflight that FLK_PREFLIGHT can switch off. docs/concepts/preflight.md describes them.
PREFLIGHT_CHECKS: Final = (
    "world-size",
    "torch",
    "flk",
    "code",
    "backend",
    "strategy",
    "seed",
    "interface",
    "loopback",
    "gpu",
    "local-rank",
    "shm",
    "options",
)


def parse_preflight(text: str) -> frozenset[str]:
    """Return the checks that a value of FLK_PREFLIGHT switches off: none for on, all for off, or those of a list.

    Raises ValueError if the value is neither on nor off nor a list of checks, each with a minus sign before its name.
    """
    if text in ("", "on"):
        return frozenset()
    if text == "off":
        return frozenset(PREFLIGHT_CHECKS)
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name.removeprefix("-") not in PREFLIGHT_CHECKS or not name.startswith("-"):
            raise ValueError(f"{name!r} is not on, off, or a minus sign and one of {', '.join(PREFLIGHT_CHECKS)}")
    return frozenset(name.removeprefix("-") for name in names)


RDZV_PORT: Final = 29400
MEET_PORT: Final = 29401  # of the hub of strategy diloco, in pod 0
INTERRUPT_GRACE: Final = 5.0  # seconds that ranks have after SIGINT, in place of the grace period after SIGTERM
FIRST_POD: Final = "{first}"  # in RDZV_ENDPOINT: the index of the first pod of the worker of strategy diloco
CONTAINER: Final = "pytorch"  # the training operator looks for a container with this name

# Paths in the pod, and keys of the ConfigMaps that are mounted there.
SHIP_FOLDER: Final = "/flk/ship"  # mount path of the ConfigMaps, read-only
WORK_FOLDER: Final = "/flk/work"  # the unpacked code; working folder of the ranks
CHECKPOINT_FOLDER: Final = "/flk/checkpoint"  # checkpoints of jobs without a volume; deleted with the pod
API_FOLDER: Final = "/flk/api"  # token, ca.crt and namespace with which a launcher writes to RECORDS
RUNTIME_ARCHIVE: Final = "flk_runtime.zip"  # key of the archive of this package
CODE_ARCHIVE: Final = "code.tar.gz"  # prefix of the keys of the code: code.tar.gz.000, code.tar.gz.001, … in order
TERMINATION_LOG_PATH: Final = "/dev/termination-log"
TERMINATION_LOG_LIMIT: Final = 4096  # bytes; the kubelet drops what exceeds them

# Format of the pods' logs.
LAUNCHER_PREFIX: Final = "[pod {index}] "
RANK_PREFIX: Final = "[rank {rank}] "
RECORD_MARKER: Final = "flk-record "  # between the launcher's prefix and a JobRecord as JSON, for `flk status`
ATTEMPT_MARKER: Final = "flk-attempt "  # between the launcher's prefix and the number of the attempt, from 1
BENCH_MARKER: Final = "flk-bench "  # between the prefix of rank 0 and the result of `flk bench` as JSON
RECORD_INTERVAL: Final = 1000  # lines after which the launcher of pod 0 repeats the record, so that a tail contains it
_SOURCE_FILE = re.compile(r"\[[^\[\]\s]*\.(?:c|cc|cpp|cu|cuh|h|hpp):\d+\]\s*")  # of torch, on the machine that built it
_KEPT_RECORD_LIMIT = 10_000  # bytes
_LINE_LIMIT = 300  # characters of a message in a line for people
_TIMEOUT = re.compile(r"(?i)tim(ed |e)out|Watchdog caught")  # a rank waited for a peer that still ran
_RECORD_LINE = re.compile(r"^\[pod \d+\] " + re.escape(RECORD_MARKER))
_ATTEMPT_LINE = re.compile(r"^\[pod \d+\] " + re.escape(ATTEMPT_MARKER) + r"(\d{1,9})$")


# Exit code of a job that ends because of a failure of this kind; TRAINING for the others.
_CODES: Final = {
    **dict.fromkeys(
        ("oom", "lost", "preempted", "resized", "unkillable", "hang", "io", "disk_full", "gpu", "rendezvous"),
        ExitCode.INFRASTRUCTURE,
    ),
    "deadline": ExitCode.TIMEOUT,
    "usage": ExitCode.USAGE,
}
# Kinds whose message is a predicate of the pod or the rank, and the predicate where the message is empty.
_PREDICATES: Final = {
    "lost": "was lost",
    "preempted": "was preempted",
    "resized": "joined or left",
    "hang": "makes no progress",
}


@dataclass(frozen=True)
class Failure:
    """The failure of one rank, or of a whole pod (``rank`` is None)."""

    # Of a rank: exception, exit, signal, oom, hang, and exceptions of a kind of their own: io, disk_full, gpu, address
    # (in use), rendezvous, usage. Of a pod: preempted (it had to stop), resized (it joins or leaves an elastic job),
    # lost (also: it never joined), unkillable, deadline, usage.
    kind: str
    pod: int
    rank: int | None = None
    pod_name: str = ""
    node: str = ""
    attempt: int = 0
    time: float = 0.0  # seconds since the epoch, by the clock of the pod's node
    type: str = ""  # class name of the exception
    message: str = (
        ""  # of the exception or the container; or a predicate of the pod, see _PREDICATES: "received SIGTERM"
    )
    traceback: str = ""  # its last characters
    exit_code: int | None = None
    signal: int | None = None
    secondary: bool = False  # a consequence of another rank's failure: the connection to the peer broke
    stderr: str = ""  # the last lines that the rank wrote to stderr
    count: int = 1  # number of ranks that failed in this way
    step: int | None = None  # optimizer steps that the rank had done; None if it does not tell (see system.progress)

    @property
    def details(self) -> str:
        """The traceback of the exception, or the last lines on stderr of a rank that ended otherwise; may be empty."""
        return self.traceback or self.stderr

    @property
    def code(self) -> ExitCode:
        """Exit code of a job that ends because of this failure."""
        if self.is_lost_connection:
            return ExitCode.INFRASTRUCTURE
        return _CODES.get(self.kind, ExitCode.TRAINING)

    @property
    def is_lost_connection(self) -> bool:
        """Whether a rank lost its connection to a peer, which did not fail itself as far as is known."""
        return self.secondary and self.kind == "exception" and not _TIMEOUT.search(self.message)

    @property
    def summary(self) -> str:
        """One line that names the rank or the pod and says what happened to it."""
        subject = self.pod_name or f"pod {self.pod}"
        if self.rank is not None:
            subject = f"rank {self.rank} in {subject}"
        if self.count > 1:
            subject = f"{subject} and {self.count - 1} other {'rank' if self.count == 2 else 'ranks'}"
        first_line = _SOURCE_FILE.sub("", self.message.splitlines()[0])[:_LINE_LIMIT] if self.message else ""
        after = f" after step {self.step}" if self.step else ""
        if self.kind in ("exception", "io", "disk_full", "gpu", "address", "rendezvous"):
            return f"{subject} raised {self.type}{after}" + (f": {first_line}" if first_line else "")
        if self.kind in ("preempted", "resized") and self.node:
            subject = f"{subject} on {self.node}"
        if self.kind in _PREDICATES:
            return f"{subject} {first_line or _PREDICATES[self.kind]}"
        predicate = {
            "exit": f"ended with exit code {self.exit_code}" + ("" if self.exit_code else " before the other ranks"),
            "signal": f"was killed by {_signal_name(self.signal)}",
            "oom": "ran out of memory (killed by the kernel at the container's memory limit)",
            "deadline": "reached the job's deadline",
            "usage": "could not start",
            "unkillable": "has a rank that survives SIGKILL",
        }.get(self.kind, self.kind)
        return f"{subject} {predicate}{after}" + (f": {first_line}" if first_line else "")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Failure:
        """The failure from the result of ``dataclasses.asdict``; ignores fields that a newer version has added."""
        known = {f.name for f in fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in known})


# Where the ranks of an attempt got their state, by the number in the progress page; empty: the script says nothing.
SOURCES: Final = ("", "start", "memory", "storage")


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks of the job."""

    number: int
    started: float  # seconds since the epoch, as `ended`
    ended: float | None = None
    failure: Failure | None = None  # None while the attempt runs, and when it succeeded
    restarts: int = 0  # that the job had used when this attempt started
    disruptions: int = 0
    step: int | None = None  # most steps that a rank has completed; None: unknown
    pods: str = ""  # that took part, in the order of their ranks, as `format_pods` writes them; empty: unknown
    restored: int | None = None  # the step after which its ranks began; None: unknown
    restored_from: str = ""  # one of SOURCES

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Attempt:
        """The attempt from the result of ``dataclasses.asdict``; ignores fields that a newer version has added."""
        failure = data.get("failure")
        return cls(
            int(data["number"]),
            float(data["started"]),
            data.get("ended"),
            Failure.from_dict(failure) if failure else None,
            int(data.get("restarts", 0)),
            int(data.get("disruptions", 0)),
            data.get("step"),
            str(data.get("pods", "")),
            data.get("restored"),
            str(data.get("restored_from", "")),
        )


def format_pods(pods: Sequence[int]) -> str:
    """Indexes of pods in their order, with ranges of consecutive ones: ``0-2,5``."""
    ranges: list[list[int]] = []
    for pod in pods:
        if ranges and pod == ranges[-1][-1] + 1:
            ranges[-1][1:] = [pod]
        else:
            ranges.append([pod])
    return ",".join("-".join(map(str, each)) for each in ranges)


def parse_pods(text: str) -> list[int]:
    """The indexes of pods that `format_pods` has written. Raises ValueError for other text."""
    pods: list[int] = []
    for part in text.split(",") if text else []:
        first, _, last = part.partition("-")
        pods += range(int(first), int(last or first) + 1)
    return pods


@dataclass(frozen=True)
class SlowRank:
    """A rank that works longer in each step than the others, which wait for it."""

    rank: int
    pod_name: str
    node: str
    factor: float  # its work in a step, divided by that of the median rank

    @property
    def summary(self) -> str:
        """One line that names the rank and its node."""
        place = f"{self.pod_name} on {self.node}" if self.node else self.pod_name
        return f"rank {self.rank} in {place} is slow: it works {self.factor:g} times as long as the others"


@dataclass(frozen=True)
class JobRecord:
    """State of a job as its launchers know it: a line of the log while it runs, the termination message at its end."""

    outcome: (
        str  # running, succeeded, failed, preempted, replaced: the job goes on with another pod in place of this one
    )
    code: int  # exit code of the launcher
    max_restarts: int = 0  # how many the job may use
    failure: Failure | None = None
    attempts: list[Attempt] = field(default_factory=list)
    max_disruptions: int = 0
    restarts: int = 0  # used: attempts that followed failures of the training code
    disruptions: int = 0  # used: attempts that followed disruptions
    verdict: str = ""  # why no attempt follows a failure
    slow: list[SlowRank] = field(default_factory=list)  # ranks that the others wait for, while the job runs
    bad_nodes: list[str] = field(default_factory=list)  # nodes on which pods of this job have failed repeatedly

    def to_json(self, limit: int | None = None) -> str:
        """The record as one line of JSON of at most ``limit`` bytes.

        A longer one is shortened: first the tracebacks of the attempts are dropped, then the failure's stderr,
        traceback and message are cut, then the oldest attempts are dropped, then the failure's texts are cut further.
        """
        data = asdict(self)
        text = _dump(data)
        if limit is None or len(text.encode()) <= limit:
            return text
        for attempt in data["attempts"]:
            if attempt["failure"]:
                attempt["failure"]["traceback"] = attempt["failure"]["stderr"] = ""
                attempt["failure"]["message"] = attempt["failure"]["message"][:200]
        _shorten_failure(data, limit, least=800)
        while len(_dump(data).encode()) > limit and data["attempts"]:
            del data["attempts"][0]
        _shorten_failure(data, limit, least=0)
        return _dump(data)

    @classmethod
    def from_json(cls, text: str) -> JobRecord | None:
        """The record that ``text`` contains, or None if it contains none (another program's message, a cut line)."""
        try:
            return cls.from_dict(json.loads(text))
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> JobRecord:
        """The record from the result of ``dataclasses.asdict``; ignores fields that a newer version has added."""
        failure = data.get("failure")
        return cls(
            outcome=str(data["outcome"]),
            code=int(data["code"]),
            max_restarts=int(data.get("max_restarts", 0)),
            failure=Failure.from_dict(failure) if failure else None,
            attempts=[Attempt.from_dict(attempt) for attempt in data.get("attempts", [])],
            max_disruptions=int(data.get("max_disruptions", 0)),
            restarts=int(data.get("restarts", 0)),
            disruptions=int(data.get("disruptions", 0)),
            verdict=str(data.get("verdict", "")),
            slow=[SlowRank(**slow) for slow in data.get("slow", [])],
            bad_nodes=[str(node) for node in data.get("bad_nodes", [])],
        )


@dataclass(frozen=True)
class KeptRecord:
    """What the launcher of pod 0 keeps of a job in the cluster, for when its pods are gone: one entry of RECORDS."""

    job: str
    uid: str  # of the job; empty: not known
    pods: int
    processes: int  # ranks in each pod
    created: float  # when this launcher started; seconds since the epoch, as `updated`
    updated: float
    record: JobRecord
    step: int | None = None  # optimizer steps that the first rank of pod 0 has done; None: unknown
    step_seconds: float | None = None  # mean duration of its steps
    saved: int | None = None  # step of its latest checkpoint
    lines: list[str] = field(default_factory=list)  # the last ones of pod 0's log, with their prefixes

    @property
    def key(self) -> str:
        """The key of the entry, which a later job of the same name does not have."""
        return f"{self.job}.{self.uid}" if self.uid else self.job

    def to_json(self) -> str:
        """The entry as one line of JSON of at most about 20 kB."""
        return _dump({**asdict(self), "record": json.loads(self.record.to_json(_KEPT_RECORD_LIMIT))})

    @classmethod
    def from_json(cls, text: str) -> KeptRecord | None:
        """The entry that ``text`` contains, or None if it contains none."""
        try:
            data = json.loads(text)
            known = {f.name: data[f.name] for f in fields(cls) if f.name in data}
            return cls(**{**known, "record": JobRecord.from_dict(data["record"])})
        except (ValueError, KeyError, TypeError, AttributeError):
            return None


def parse_record(line: str) -> JobRecord | None:
    """The job record that a line of a pod's log contains, or None."""
    match = _RECORD_LINE.match(line)
    return JobRecord.from_json(line[match.end() :]) if match else None


def parse_attempt(line: str) -> int | None:
    """The number, from 1, of the attempt that begins with a line of a pod's log; None for other lines."""
    match = _ATTEMPT_LINE.match(line)
    return int(match[1]) if match else None


def is_record(line: str) -> bool:
    """Return whether a line of a pod's log is for programs: a job record or the mark of an attempt."""
    return _RECORD_LINE.match(line) is not None or _ATTEMPT_LINE.match(line) is not None


# Exceptions of a rank that lost the connection to a peer: they come from gloo, NCCL or the store. An OSError is none of
# them, since it comes from a socket or a pipe that the script has opened itself.
_SECONDARY_TYPES = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError"})
_TORCH_TYPES = frozenset({"", "RuntimeError"})  # of exceptions whose text tells; empty: lines of stderr
_SECONDARY_WORDS = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "NCCL",
    "Watchdog caught collective",
    "recvValue failed",
    "sendBytes failed",
)


def is_secondary(type_name: str, message: str) -> bool:
    """Return whether an exception says that the connection to a peer broke, so that it is not the root cause."""
    if type_name in _SECONDARY_TYPES:
        return True
    return type_name in _TORCH_TYPES and any(word in message for word in _SECONDARY_WORDS)


def _signal_name(number: int | None) -> str:
    try:
        return signal.Signals(number or 0).name
    except ValueError:
        return f"signal {number}"


def _shorten_failure(data: dict[str, Any], limit: int, least: int) -> None:
    """Cut the texts of the failure of a record to ``least`` characters each, as far as the record exceeds ``limit``."""
    failure = data["failure"]
    for key in ("stderr", "traceback", "message") if failure else ():
        excess = len(_dump(data).encode()) - limit
        if excess > 0:
            # A character takes at least one byte of JSON, so dropping as many characters as bytes suffices.
            kept = max(least, len(failure[key]) - excess)
            failure[key] = failure[key][-kept:] if key != "message" and kept else failure[key][:kept]


def _dump(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"))
