"""Failures of ranks and pods: what each kind of failure means (`MEANINGS`), and `Failure`, one of them as data.

Launcher, client and documentation read the table. Nothing else says what a kind means. `ExitCode` has the exit codes
that follow, and `kind_of_text` knows kinds by what torch, CUDA, NCCL and gloo write.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from typing import Final

from flk_runtime.contract import ExitCode
from flk_runtime.contract.foreign import Time
from flk_runtime.contract.quantities import plural
from flk_runtime.contract.values import StrEnum, dataclass, field, replace

BEFORE_FIRST: Final = -1  # the attempt of a failure that was found before its launcher took part in one


class Kind(StrEnum):
    """The kind of a failure: what happened. The values are in records, so they stay as they are."""

    USAGE = "usage"
    MISMATCH = "mismatch"
    DIFFERENCE = "difference"
    DEADLINE = "deadline"
    HANG = "hang"
    EXCEPTION = "exception"
    DISK_FULL = "disk_full"
    READ_ONLY = "read_only"
    IO = "io"
    GPU = "gpu"
    ADDRESS = "address"
    SIGNAL = "signal"
    KILLED = "killed"
    OOM = "oom"
    EXIT = "exit"
    PREEMPTED = "preempted"
    LOST = "lost"
    CONTAINER_KILLED = "container_killed"
    ABSENT = "absent"
    UNKILLABLE = "unkillable"
    UNHEALTHY = "unhealthy"
    RESIZED = "resized"
    STORAGE = "storage"
    RENDEZVOUS = "rendezvous"
    EARLY = "early"
    TIMEOUT = "timeout"
    CONNECTION = "connection"
    PEER = "peer"
    STOPPED = "stopped"
    UNKNOWN = "unknown"

    @classmethod
    def _missing_(cls, value: object) -> Kind:
        return cls.UNKNOWN

    @property
    def meaning(self) -> Meaning:
        """The kind's row of the table."""
        return MEANINGS[self]

    @property
    def may_be_of_hardware(self) -> bool:
        """Whether a node or a device may have caused the failure, and not only the script."""
        return self.meaning.node_at_fault or self.meaning.node_suspect

    @property
    def suspicious(self) -> bool:
        """Whether a broken node, or its network, may be the reason."""
        return self.meaning.node_at_fault or self.meaning.network_at_fault


class Retry(StrEnum):
    """The process that makes the next attempt possible."""

    NOBODY = ""
    LAUNCHER = "launcher"  # all ranks start again in the same pods
    OPERATOR = "operator"  # it replaces the pod first


class Budget(StrEnum):
    """The budget that a next attempt uses."""

    NONE = ""
    RESTARTS = "restarts"  # few: for failures of the training code
    DISRUPTIONS = "disruptions"  # more: so Kubernetes calls what happens to pods, their nodes and their network


@dataclass(frozen=True)
class Meaning:
    """The meaning of one kind of failure: a row of the table."""

    what: str  # what happened, as the documentation says it
    precedence: int  # of several failures the one with the lowest number is the cause, whatever the clocks say
    code: ExitCode  # of the job, if it ends so
    retried_by: Retry = Retry.NOBODY
    budget: Budget = Budget.NONE
    # What the rank or pod did, before a message; {type}, {exit_code} and {signal} are fields of the failure. Empty:
    # the one of these fields that is set says it.
    predicate: str = ""
    message_is_predicate: bool = False  # the message, if there is one, takes the place of the predicate
    reason: str = ""  # why a failure that nobody retries is final
    same: tuple[str, ...] = ()  # two failures of this kind with these fields equal count as the same
    final_after: int = 0  # times in a row without progress after which the same failure is final; 0: never
    delay: float = 0.0  # seconds before the attempt that follows the first such failure
    node_at_fault: bool = False  # it may be the fault of the node, which pods avoid if it happens again
    node_unfit: bool = False  # it is the fault of the node, which pods avoid at once
    node_suspect: bool = False  # a broken node does so too, although the script or the storage is as likely
    network_at_fault: bool = False  # it may be the fault of the network between nodes
    secondary: bool = False  # a consequence of another rank's failure, whenever there is one
    explained: bool = True  # it says why it happened; else another launcher may know
    needs_new_pod: bool = False  # the pod exists, and must be replaced before another attempt
    may_follow_loss: bool = False  # an exception of this kind may be raised because a connection to a peer broke
    saves: bool = False  # the ranks are asked to save after the same step before the attempt ends
    planned: bool = False  # nothing has failed: the next attempt has other pods
    answers_sigterm: bool = False  # it is probably how a script answers SIGTERM, if the rank has received one


_SAME_WAY: Final = "the next attempt would fail in the same way"
_ERROR: Final = ("type", "message")
_TWICE: Final = 2
_TEN_TIMES: Final = 10  # storage or a network may be away, or a disk full, for as long as ten attempts take
_TRAINING, _INFRASTRUCTURE = ExitCode.TRAINING, ExitCode.INFRASTRUCTURE
_LAUNCHER, _OPERATOR = Retry.LAUNCHER, Retry.OPERATOR
_RESTARTS, _DISRUPTIONS = Budget.RESTARTS, Budget.DISRUPTIONS

MEANINGS: Final[Mapping[Kind, Meaning]] = {
    Kind.USAGE: Meaning(
        "the environment, the command or an option is wrong; the image has no Python or torch; the preflight fails",
        # It may mention NCCL without a loss.
        0, ExitCode.USAGE, predicate="could not start", reason=_SAME_WAY, same=_ERROR, answers_sigterm=True,
    ),
    Kind.MISMATCH: Meaning(
        "a checkpoint does not match the state that it is restored into, or the state cannot be saved",
        0, ExitCode.USAGE, predicate="could not use a checkpoint", reason=_SAME_WAY, same=_ERROR,
        may_follow_loss=True, answers_sigterm=True,
    ),
    Kind.DIFFERENCE: Meaning(
        "the first steps differ from those of the whole model in one process, which `--verify` compares",
        0, _TRAINING, predicate="trains otherwise than one process", reason=_SAME_WAY, same=_ERROR,
    ),
    Kind.DEADLINE: Meaning(
        "the job's deadline passed",
        0, ExitCode.TIMEOUT, predicate="reached the job's deadline", reason="the time of the job is over",
    ),
    Kind.HANG: Meaning(
        "a rank hangs",
        0, _INFRASTRUCTURE, _LAUNCHER, _RESTARTS, "makes no progress", True, same=("message",), final_after=_TWICE,
        node_at_fault=True,
    ),
    Kind.EXCEPTION: Meaning(
        "a rank raises another exception",
        1, _TRAINING, _LAUNCHER, _RESTARTS, "raised {type}", same=_ERROR, final_after=_TWICE, may_follow_loss=True,
        answers_sigterm=True,
    ),
    Kind.DISK_FULL: Meaning(
        "a rank finds no space on a file system (ENOSPC, EDQUOT)",
        # Whoever fills it may free it: another job, or files of ranks that have ended. The message may name a temporary
        # file, which is another one each time.
        1, _INFRASTRUCTURE, _LAUNCHER, _DISRUPTIONS, "raised {type}", same=("type",), final_after=_TEN_TIMES,
    ),
    Kind.READ_ONLY: Meaning(
        "a rank writes to a file system that is mounted read-only (EROFS)",
        # Linux mounts a failing disk so, and a pod on another node has another disk.
        1, _INFRASTRUCTURE, _LAUNCHER, _DISRUPTIONS, "raised {type}", same=_ERROR, final_after=_TWICE,
        node_at_fault=True,
    ),
    Kind.IO: Meaning(
        "a disk or a network file system fails (EIO, ESTALE)",
        1, _INFRASTRUCTURE, _LAUNCHER, _DISRUPTIONS, "raised {type}", same=_ERROR, final_after=_TEN_TIMES,
        node_at_fault=True,
    ),
    Kind.GPU: Meaning(
        "a rank's GPU is lost (an ECC or NVLink error, a GPU that fell off the bus)",
        1, _INFRASTRUCTURE, _OPERATOR, _DISRUPTIONS, "raised {type}", same=_ERROR, node_at_fault=True,
        needs_new_pod=True,
    ),
    Kind.ADDRESS: Meaning(
        "a rank finds its address in use",
        1, _TRAINING, _LAUNCHER, _RESTARTS, "raised {type}", same=_ERROR, delay=1.0,  # its holder may end meanwhile
    ),
    Kind.SIGNAL: Meaning(
        "a rank dies of another signal (SIGSEGV, SIGABRT and so on)",
        2, _TRAINING, _LAUNCHER, _RESTARTS, "was killed by {signal}", same=("signal", "message"), final_after=_TWICE,
        node_suspect=True,
    ),
    Kind.KILLED: Meaning(
        "a rank is killed from outside (SIGKILL, SIGTERM, SIGINT, SIGHUP, SIGQUIT)",
        2, _TRAINING, _LAUNCHER, _RESTARTS, same=("signal", "exit_code"),
    ),
    Kind.OOM: Meaning(
        "a rank is killed at the memory limit",
        2, _INFRASTRUCTURE, _LAUNCHER, _RESTARTS,
        "ran out of memory (killed by the kernel at the container's memory limit)", final_after=_TWICE,
    ),
    Kind.EXIT: Meaning(
        "a rank ends with an exit code",
        3, _TRAINING, _LAUNCHER, _RESTARTS, "ended with exit code {exit_code}", same=("exit_code", "message"),
        final_after=_TWICE, answers_sigterm=True,
    ),
    Kind.UNKNOWN: Meaning(
        "a rank fails in a way that only a newer version of flk knows",
        3, _TRAINING, _LAUNCHER, _RESTARTS, "failed", same=_ERROR, final_after=_TWICE,
    ),
    Kind.UNHEALTHY: Meaning(  # the reason for the loss or the connection that broke, if it is found after that
        "the check of a pod finds a fault of its GPUs or their driver",
        3, _INFRASTRUCTURE, _OPERATOR, _DISRUPTIONS, "is on an unhealthy node", same=("pod", "node", "message"),
        final_after=_TEN_TIMES, node_at_fault=True, node_unfit=True, needs_new_pod=True,
    ),
    Kind.PREEMPTED: Meaning(
        "a pod receives SIGTERM: a drain, an eviction, a preemption",
        4, _INFRASTRUCTURE, _OPERATOR, _DISRUPTIONS, "was preempted", True, same=("pod",), saves=True,
    ),
    Kind.LOST: Meaning(
        "a pod is lost: it is deleted, or its node is gone",
        4, _INFRASTRUCTURE, _OPERATOR, _DISRUPTIONS, "was lost", True, same=("pod",), node_at_fault=True,
        explained=False,
    ),
    Kind.CONTAINER_KILLED: Meaning(
        "a container is killed with its launcher, as at its memory limit under control groups v2",
        4, _INFRASTRUCTURE, _OPERATOR, _DISRUPTIONS, "was killed, at the memory limit of its container or from outside",
        same=("pod",), final_after=_TWICE, explained=False,
    ),
    Kind.ABSENT: Meaning(
        "a pod never joins within FLK_JOIN_TIMEOUT, or pod 0 does not answer for as long",
        4, _INFRASTRUCTURE, predicate="never joined", message_is_predicate=True, same=("pod",),
        reason="the other pods have waited long enough", explained=False,
    ),
    Kind.UNKILLABLE: Meaning(
        "a rank survives SIGKILL for FLK_KILL_TIMEOUT",
        4, _INFRASTRUCTURE, _OPERATOR, _DISRUPTIONS, "has a rank that survives SIGKILL", same=("pod",),
        node_at_fault=True, needs_new_pod=True,
    ),
    Kind.RESIZED: Meaning(
        "a pod joins an elastic job, or leaves it after SIGTERM",
        5, _INFRASTRUCTURE, _LAUNCHER, predicate="joined or left", message_is_predicate=True, saves=True, planned=True,
    ),
    # A shard of a checkpoint in memory cannot be read when its pod is lost, and a save fails when a rank has failed.
    Kind.STORAGE: Meaning(
        "a checkpoint cannot be read or written now: a time-out, a server that refuses, no memory for a copy",
        6, _INFRASTRUCTURE, _LAUNCHER, _DISRUPTIONS, "raised {type}", same=_ERROR, final_after=_TEN_TIMES,
        node_suspect=True, may_follow_loss=True, answers_sigterm=True,
    ),
    Kind.RENDEZVOUS: Meaning(  # a rank that failed earlier could not be met
        "the ranks do not find each other in the preflight",
        7, _INFRASTRUCTURE, _LAUNCHER, _RESTARTS, "raised {type}", same=_ERROR,
    ),
    Kind.EARLY: Meaning(  # the others may have had little left to do
        "a rank ends with 0 before the others",
        8, _TRAINING, _LAUNCHER, _RESTARTS, "ended with exit code 0 before the other ranks", final_after=_TWICE,
    ),
    Kind.TIMEOUT: Meaning(  # the rank that gives up closes its connections, so it counts before ranks that lose them
        "a collective of ranks that still run times out",
        9, _TRAINING, _LAUNCHER, _RESTARTS, same=_ERROR, final_after=_TWICE, secondary=True, network_at_fault=True,
    ),
    Kind.CONNECTION: Meaning(
        "ranks lose the connection to each other, and none of them failed",
        10, _INFRASTRUCTURE, _LAUNCHER, _DISRUPTIONS, same=_ERROR, final_after=_TEN_TIMES, secondary=True,
        network_at_fault=True,
    ),
    Kind.PEER: Meaning(
        "a rank is told that another one failed",
        10, _TRAINING, _LAUNCHER, _RESTARTS, same=_ERROR, final_after=_TWICE, secondary=True,
    ),
    Kind.STOPPED: Meaning(
        "a rank fails after the launcher has told it to end",
        11, _TRAINING, _LAUNCHER, _RESTARTS, same=_ERROR, final_after=_TWICE, secondary=True,
    ),
}  # fmt: skip

_SOURCE_FILE = r"\[[^\[\]\s]*\.(?:c|cc|cpp|cu|cuh|h|hpp):\d+\]\s*"  # of torch, on the machine that built it
_LINE_LIMIT = 300  # characters of a message in a line for people
_COMPARED = 200  # characters of a message that are compared; histories keep 300
_VARYING = r"0x[0-9a-fA-F]+|\d+"  # addresses and numbers
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True)
class Failure:
    """The failure of one rank, or of a whole pod (``rank`` is None)."""

    kind: Kind
    pod: int
    rank: int | None = None
    pod_name: str = ""
    node: str = ""
    attempt: int = 0
    time: Time = 0.0  # seconds since the epoch, by the clock of the pod's node
    type: str = ""  # class name of the exception
    message: str = ""  # of the exception or the container; or what the pod did, see Meaning.message_is_predicate
    traceback: str = ""  # its last characters
    exit_code: int | None = None
    signal: int | None = None
    secondary: bool = field(init=False)  # a consequence of another rank's failure; programs read it in records
    stderr: str = ""  # the last lines that the rank wrote to stderr
    count: int = 1  # number of ranks that failed in this way
    step: int | None = None  # optimizer steps that the rank had done; None if it does not tell (see shared.progress)

    def __post_init__(self) -> None:
        object.__setattr__(self, "secondary", self.kind.meaning.secondary)

    @property
    def details(self) -> str:
        """The traceback of the exception, or the last lines on stderr of a rank that ended otherwise; may be empty."""
        return self.traceback or self.stderr

    @property
    def code(self) -> ExitCode:
        """Exit code of a job that ends because of this failure."""
        return self.kind.meaning.code

    @property
    def is_cause(self) -> bool:
        """Whether it says why the attempt ended. Another launcher may know why a pod was lost or a connection broke."""
        return not self.secondary and self.kind.meaning.explained

    @property
    def signature(self) -> tuple[object, ...]:
        """A value that is equal for the same failure. Process ids, ports and addresses in messages may differ."""
        values = [getattr(self, name) for name in self.kind.meaning.same]
        return (
            self.kind,
            *(re.sub(_VARYING, "#", each)[:_COMPARED] if isinstance(each, str) else each for each in values),
        )

    @property
    def summary(self) -> str:
        """One line that names the rank or the pod and says what happened to it."""
        subject = self.pod_name or f"pod {self.pod}"
        if self.rank is not None:
            subject = f"rank {self.rank} in {subject}"
        if self.count > 1:
            subject = f"{subject} and {plural(self.count - 1, 'other rank')}"
        first_line = _shortened(re.sub(_SOURCE_FILE, "", self.message.splitlines()[0])) if self.message else ""
        if self.kind in (Kind.PREEMPTED, Kind.RESIZED) and self.node:
            subject = f"{subject} on {self.node}"
        if self.kind.meaning.message_is_predicate and first_line:
            return f"{subject} {first_line}"
        after = f" after step {self.step}" if self.step and not self.kind.meaning.message_is_predicate else ""
        return f"{subject} {self._predicate}{after}" + (f": {first_line}" if first_line else "")

    @property
    def _predicate(self) -> str:
        """The predicate of a sentence about the rank or pod."""
        text = self.kind.meaning.predicate
        if not text:
            text = "raised {type}" if self.type else Kind.SIGNAL.meaning.predicate if self.signal else _EXITED
        return text.format(type=self.type, exit_code=self.exit_code, signal=signal_name(self.signal))


def _shortened(line: str) -> str:
    """At most _LINE_LIMIT characters of a line: words, and an ellipsis if some are left out."""
    if len(line) <= _LINE_LIMIT:
        return line
    kept = line[: _LINE_LIMIT - 1]
    return f"{kept.rpartition(' ')[0] or kept}…"


def root_cause(failures: Sequence[Failure]) -> Failure:
    """The failure that led to the others, with the number of ranks that failed in the same way.

    The kinds have an order of precedence. Among failures of equal precedence the earliest is chosen.
    """
    cause = min(failures, key=lambda failure: (failure.kind.meaning.precedence, failure.time))
    same = {failure.rank for failure in failures if failure.signature == cause.signature}
    return replace(cause, count=max(cause.count, len(same)))


_EXITED: Final = Kind.EXIT.meaning.predicate

_TIMEOUT: Final = r"(?i)tim(ed |e)out|Watchdog caught"  # a rank waited for a peer that still ran


def kind_of_loss(text: str) -> Kind:
    """The kind of a failure that is secondary: the connection broke, or by its text, the peer did not come in time."""
    return Kind.TIMEOUT if re.search(_TIMEOUT, text) else Kind.CONNECTION


def kind_of_container(reason: str, exit_code: int | None, number: int | None) -> Kind:
    """The kind of a failure by what Kubernetes says of a container. Without an exit code, its pod is lost."""
    if reason == "OOMKilled":
        return Kind.OOM
    return Kind.LOST if exit_code is None else kind_of_end(exit_code, number)


def kind_of_end(exit_code: int | None, number: int | None) -> Kind:
    """The kind of a failure by the exit code of the process, or by the signal that ended it."""
    if (number if number is not None else (exit_code or 0) - 128) in _FROM_OUTSIDE:
        return Kind.KILLED
    if number is not None:
        return Kind.SIGNAL
    return Kind.EARLY if exit_code == 0 else Kind.EXIT


def signal_name(number: int | None) -> str:
    """The name of a signal in messages."""
    try:
        return signal.Signals(number or 0).name
    except ValueError:
        return f"signal {number}"


# What torch, CUDA, NCCL and gloo write, in the order of the search: the kind of the failure, the exceptions' classes
# (None: of any class; "": lines on stderr), and words that one of the lines has.
_TORCH_TYPES: Final = frozenset({"", "RuntimeError"})
_TEXTS: Final[Sequence[tuple[Kind, frozenset[str] | None, tuple[str, ...]]]] = (
    # CUDA's are the texts of cudaGetErrorString for errors of the device or its driver: 46, 100, 214, 220, 714, 721,
    # 802. Errors that a kernel may cause too (an illegal address) are not among them.
    (Kind.GPU, None, (
        "CUDA-capable device(s) is/are busy or unavailable",
        "no CUDA-capable device is detected",
        "uncorrectable ECC error encountered",
        "uncorrectable NVLink error detected",
        "hardware stack error",
        "Invalid access of peer GPU memory over nvlink or a hardware error",
        "system not yet initialized",
        "GPU is lost",
    )),
    (Kind.ADDRESS, None, ("EADDRINUSE",)),
    (Kind.IO, None, ("PytorchStreamWriter failed writing",)),  # torch.save does not say why
    # No connection broke: NCCL or gloo refuses how it is used (two ranks on one GPU, sizes that differ between ranks),
    # or NCCL's thread or a collective meets an error that this rank's own kernels have left on its GPU.
    (Kind.EXCEPTION, None, (
        "ncclInvalidUsage",
        "ncclInvalidArgument",
        "Duplicate GPU detected",
        "gloo::EnforceNotMet",
        "enforce fail at",
        "CUDA error: ",
        "Cuda failure ",
    )),
    # A rank lost the connection to a peer. An OSError does not say so, since it comes from a socket or a pipe that the
    # script has opened itself.
    (Kind.CONNECTION, frozenset({"DistBackendError", "DistNetworkError", "DistStoreError"}), ("",)),
    (Kind.CONNECTION, _TORCH_TYPES, (
        "gloo/transport",
        "Connection closed by peer",
        "Connection reset by peer",
        "Broken pipe",
        "NCCL",
        "Watchdog caught collective",
        "recvValue failed",
        "sendBytes failed",
    )),
)  # fmt: skip


# What to say of exceptions that name neither their cause nor a cure, by words of their messages.
_ADVICE: Final = {
    # gloo's; NCCL waits, and the launcher finds the hang
    "op.preamble.length <= op.nbytes": (
        "the ranks called different collectives, or one with other sizes, as where a rank skips a batch, ends its loop "
        "first, or evaluates, saves or takes a mean alone: do each of these on all ranks or on none"
    ),
    "can't start new thread": (
        "the pod is at a limit of processes, for which threads count (pids.max of the pod, ulimit -u), or has no "
        "memory for another thread: use fewer workers and threads, or raise the limit"
    ),
}


def with_advice(message: str) -> str:
    """``message`` of an exception, and before it the cause and the cure, where torch and Python name none."""
    advice = next((advice for words, advice in _ADVICE.items() if words in message), "")
    return f"{advice} ({message})" if advice else message


def kind_of_text(type_name: str, message: str) -> Kind:
    """The kind of a failure by the class and the message of its exception. Without a class: by lines on stderr."""
    for kind, types, words in _TEXTS:
        if (types is None or type_name in types) and any(word in message for word in words):
            return kind_of_loss(message) if kind is Kind.CONNECTION else kind
    return Kind.EXCEPTION
