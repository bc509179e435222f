"""What the client and the pods agree in: variables, places, exit codes and the formats of records.

Both sides import this module and nothing else of each other, so it uses the standard library only and imports fast.
"""

from __future__ import annotations

import enum
import json
import re
import signal
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final

VERSION: Final = "0.1.0"


class ExitCode(enum.IntEnum):
    """What a process of flk ends with, in the client and in the pods.

    Codes below 128 are final for the training operator's restart policy ``ExitCode``; 128 and more (signals, PREEMPTED)
    make it start the pod again.
    """

    DONE = 0
    ERROR = 1  # a bug in flk, or the API server refused or did not answer
    USAGE = 2  # the command line, the job file or the environment is wrong
    TRAINING = 100  # the user's code failed
    RUNNING = 101  # asked without waiting, and the job has not ended
    NOT_FOUND = 102
    CANCELLED = 103  # deleted or cancelled by somebody
    INFRASTRUCTURE = 104  # lost node, image, out of memory, a pod that never came
    TIMEOUT = 124
    INTERRUPTED = 130
    PREEMPTED = 143  # in pods only: SIGTERM, the pod may be started again


# Variables of the launcher, set by the manifest or by `flk run`.
JOB: Final = "FLK_JOB"
RDZV_ENDPOINT: Final = "FLK_RDZV_ENDPOINT"  # host:port of the control store, held by the launcher of pod 0
POD_INDEX: Final = "FLK_POD_INDEX"
PODS: Final = "FLK_PODS"  # number of pods
PROCESSES: Final = "FLK_PROCESSES"  # ranks per pod
POD_NAME: Final = "FLK_POD_NAME"
POD_IP: Final = "FLK_POD_IP"
NODE_NAME: Final = "FLK_NODE_NAME"
CPUS: Final = "FLK_CPUS"  # processors that the pod asks for, rounded up; 0 or unset: not said
RESTARTS: Final = "FLK_RESTARTS"  # attempts after the first that a failure may lead to
DEADLINE: Final = "FLK_DEADLINE"  # seconds from the launcher's start, 0 or unset: none
GRACE: Final = "FLK_GRACE"  # seconds that ranks get to end by themselves when the pod is told to stop
PARENT: Final = "FLK_PARENT"  # process that the launcher must not outlive (`flk run`)
JOIN_TIMEOUT: Final = "FLK_JOIN_TIMEOUT"  # seconds that a launcher waits for the other pods
START: Final = "FLK_START"  # how ranks start: fork (default) or spawn
CODE: Final = "FLK_CODE"  # folder with the archive of the user's code; unset: the code is in the image
CODE_HASH: Final = "FLK_CODE_HASH"  # sha256 of the archive, in hex
WORK: Final = "FLK_WORK"  # folder to unpack the code into, and to start the ranks in
TERMINATION_LOG: Final = "FLK_TERMINATION_LOG"  # file for the record; the kubelet's in a pod

# Variables for the ranks and their script, beside torchrun's own.
STRATEGY: Final = "FLK_STRATEGY"
FABRIC: Final = "FLK_FABRIC"
CHECKPOINT: Final = "FLK_CHECKPOINT"  # folder of the snapshots
SAVE_EVERY: Final = "FLK_SAVE_EVERY"  # steps between two snapshots
SEED: Final = "FLK_SEED"
PREFLIGHT: Final = "FLK_PREFLIGHT"  # off: the ranks do not compare what they see before they begin
PREFLIGHT_TIMEOUT: Final = "FLK_PREFLIGHT_TIMEOUT"  # seconds that the ranks get to meet
STEP_TIMEOUT: Final = "FLK_STEP_TIMEOUT"  # seconds that a collective may take once the first step is done
ATTEMPT: Final = "FLK_ATTEMPT"  # number of the attempt, from 0; set by the launcher
REPORT_FD: Final = "FLK_REPORT_FD"  # where a rank tells its launcher the exception it ends with

# Names that the operator, torch's launcher or flk's own launcher sets. The operator appends its values after the
# user's, so a user's would be lost silently (kubeflow/trainer pkg/controller.v1/pytorch/envvar.go).
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
# What a user may set among flk's own: they are settings of the runtime, not facts of the job.
SETTABLE: Final = frozenset({SAVE_EVERY, SEED, START, JOIN_TIMEOUT, PREFLIGHT, PREFLIGHT_TIMEOUT, STEP_TIMEOUT})


def is_reserved(name: str) -> bool:
    """Whether a user's environment may not carry this name."""
    return name not in SETTABLE and (name in RESERVED_NAMES or name.startswith(RESERVED_PREFIXES))


# How the ranks share a model. no_shard is ddp under FSDP's name; the last five are FSDP's ShardingStrategy.
STRATEGIES: Final = ("none", "ddp", "no_shard", "shard_grad_op", "full_shard", "hybrid_shard", "hybrid_shard_zero2")


def strategy_named(text: str) -> str:
    """The strategy that ``text`` means, written as here or as torch writes it (FULL_SHARD, _HYBRID_SHARD_ZERO2).

    Raises ValueError, which lists the names, for anything else.
    """
    name = text.lower().replace("-", "_").lstrip("_")
    if name not in STRATEGIES:
        raise ValueError(f"unknown strategy {text!r}: expected one of {', '.join(STRATEGIES)}")
    return name


RDZV_PORT: Final = 29400
CONTAINER: Final = "pytorch"  # the operator looks for a container of this name

# Places in the pod.
SHIP_FOLDER: Final = "/flk/ship"  # the ConfigMaps, read-only
WORK_FOLDER: Final = "/flk/work"  # the unpacked code, and the working folder
CHECKPOINT_FOLDER: Final = "/flk/checkpoint"  # where snapshots go without a volume: as long-lived as the pod
RUNTIME_ARCHIVE: Final = "flk_runtime.zip"  # key of the runtime in the ConfigMap
CODE_ARCHIVE: Final = "code.tar.gz"  # key of the code: code.tar.gz.000, code.tar.gz.001, … in order
TERMINATION_LOG_PATH: Final = "/dev/termination-log"
TERMINATION_LOG_LIMIT: Final = 4096  # bytes that the kubelet keeps of it

LAUNCHER_TAG: Final = "[pod {index}] "
RANK_TAG: Final = "[rank {rank}] "
RECORD_MARK: Final = "flk-record "  # after the launcher's tag: a JobRecord as JSON, for `flk status`
RECORD_EVERY: Final = 1000  # the launcher of pod 0 repeats its record after so many lines, so that a tail shows it
_TAG = re.compile(r"^\[pod \d+\] " + re.escape(RECORD_MARK))


@dataclass(frozen=True)
class Failure:
    """Why a rank, or the pod as a whole (rank None), ended badly."""

    kind: str  # exception, exit, signal, oom, lost (a pod that went away or never came), deadline, usage
    pod: int
    rank: int | None = None
    pod_name: str = ""
    node: str = ""
    attempt: int = 0
    time: float = 0.0  # seconds since the epoch, by the clock of that pod's node
    type: str = ""  # class of the exception
    message: str = ""
    traceback: str = ""  # its end, which names the line
    exit_code: int | None = None
    signal: int | None = None
    echo: bool = False  # a peer's broken connection: what another rank's failure looks like from here

    @property
    def code(self) -> ExitCode:
        """The exit code that a job ends with when this is its cause."""
        if self.kind in ("oom", "lost"):
            return ExitCode.INFRASTRUCTURE
        if self.kind == "deadline":
            return ExitCode.TIMEOUT
        return ExitCode.USAGE if self.kind == "usage" else ExitCode.TRAINING

    @property
    def summary(self) -> str:
        """One line: who, and what."""
        where = (
            f"rank {self.rank} in {self.pod_name or f'pod {self.pod}'}"
            if self.rank is not None
            else (self.pod_name or f"pod {self.pod}")
        )
        if self.kind == "exception":
            first = self.message.splitlines()[0] if self.message else ""
            return f"{where} raised {self.type}: {first}" if first else f"{where} raised {self.type}"
        what = {
            "exit": f"ended with exit code {self.exit_code}",
            "signal": f"was killed by {_signal_name(self.signal)}",
            "oom": "ran out of memory (killed by the kernel at the container's memory limit)",
            "lost": "went away",
            "deadline": "reached the job's deadline",
            "usage": "could not start",
        }.get(self.kind, self.kind)
        return f"{where} {what}" + (f": {self.message.splitlines()[0]}" if self.message else "")


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks together."""

    number: int
    started: float
    ended: float | None = None
    failure: Failure | None = None  # why it ended; None while it runs, and when it succeeded


@dataclass(frozen=True)
class JobRecord:
    """What a launcher knows of its job: a record in its log while it runs, the termination message at its end."""

    outcome: str  # running, succeeded, failed, preempted
    code: int
    restarts: int = 0  # how many the job may use
    failure: Failure | None = None
    attempts: list[Attempt] = field(default_factory=list)

    def to_json(self, limit: int | None = None) -> str:
        """One line of JSON, cut to ``limit`` bytes: first the tracebacks of old attempts go, then old attempts."""
        data = asdict(self)
        text = _dump(data)
        if limit is None or len(text.encode()) <= limit:
            return text
        for attempt in data["attempts"]:
            if attempt["failure"]:
                attempt["failure"]["traceback"] = ""
                attempt["failure"]["message"] = attempt["failure"]["message"][:200]
        while len(_dump(data).encode()) > limit and data["attempts"]:
            del data["attempts"][0]
        if data["failure"]:
            for key in ("traceback", "message"):
                over = len(_dump(data).encode()) - limit
                if over > 0:
                    # Every character can take six bytes as JSON, so cutting by bytes over the limit always suffices.
                    kept = max(0, len(data["failure"][key]) - over)
                    data["failure"][key] = (
                        data["failure"][key][-kept:] if key == "traceback" and kept else data["failure"][key][:kept]
                    )
        return _dump(data)

    @classmethod
    def from_json(cls, text: str) -> JobRecord | None:
        """The record in ``text``, or None where it holds none (another program's message, a cut line)."""
        try:
            data = json.loads(text)
            return cls(
                outcome=str(data["outcome"]),
                code=int(data["code"]),
                restarts=int(data.get("restarts", 0)),
                failure=_failure(data.get("failure")),
                attempts=[
                    Attempt(int(a["number"]), float(a["started"]), a.get("ended"), _failure(a.get("failure")))
                    for a in data.get("attempts", [])
                ],
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            return None


def _signal_name(number: int | None) -> str:
    try:
        return signal.Signals(number or 0).name
    except ValueError:
        return f"signal {number}"


def _failure(data: Any) -> Failure | None:
    known = {f.name for f in fields(Failure)}
    return Failure(**{k: v for k, v in data.items() if k in known}) if data else None


def _dump(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"))


def record_in(line: str) -> JobRecord | None:
    """The record that a line of a pod's log holds, if any."""
    match = _TAG.match(line)
    return JobRecord.from_json(line[match.end() :]) if match else None


def is_record(line: str) -> bool:
    """Whether a line of a pod's log is a record, for machines, rather than output."""
    return _TAG.match(line) is not None
