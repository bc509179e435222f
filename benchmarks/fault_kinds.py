"""The faults that diagnosis.py injects: a row for each, with how it is made, and what the job's record has to say.

The rows of `tests.support.failure_kinds` that end one rank by themselves belong to them. `GROUPS` has all of them.
These kinds are missing, since they take a cluster or a machine that these processes do not have: a container that is
out of memory, a file server (NFS) that hangs, a wrong image, a quota that is used up, and all faults of GPUs.
"""

from __future__ import annotations

import enum
import signal
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from flk_runtime.contract.failure import Kind
from flk_runtime.launcher.hangs.detector import CPU_PATIENCE
from tests.support import failure_kinds

HANG_LIMIT: Final = 5.0  # seconds without progress; flk's default is minutes
LEASE: Final = 3.0  # seconds of silence between launchers
SLOW_WINDOW: Final = 10.0  # seconds over which ranks are compared


class Who(enum.Enum):
    """Whom the record has to name."""

    RANK = "the rank that the fault hits"
    POD = "the pod that the fault hits"
    ANY = "any rank, since the fault is between them; no share counts it"


class Act(enum.Enum):
    """A fault that the harness makes from outside, with the rank or the pod that it hits."""

    NONE = "the rank runs the code of the row"
    KILL_RANK = "SIGKILL for a rank"
    END_RANK = "SIGTERM for a rank"
    STOP_RANK = "SIGSTOP for a rank"
    KILL_WORKER = "SIGKILL for a worker process of a rank's loader"
    KILL_LAUNCHER = "SIGKILL for a launcher"
    END_LAUNCHER = "SIGTERM for a launcher, as a drained node does it"
    STOP_POD = "SIGSTOP for a launcher and its ranks, as a node that stands still"
    CUT = "no packet from or to the pod's host"
    CUT_RECEIVES = "no packet to the pod's host"
    CUT_SENDS = "no packet from the pod's host"


@dataclass(frozen=True)
class Fault:
    """A kind of fault."""

    name: str
    code: str = ""  # body of a function, with the names of HEAD
    act: Act = Act.NONE
    place: str = "step"  # where in the training the code runs: step, sample (in the loader's worker), forward, backward
    who: Who = Who.RANK
    kinds: tuple[Kind, ...] = (Kind.EXCEPTION,)  # one of them
    type: str = ""
    signal: int | None = None
    exit_code: int | None = None
    words: str = ""  # in the summary of the failure, or in the details or the stack of the rank that the fault hits
    own_words: tuple[str, ...] = ()  # one of them in the summary: flk's own sentence, not a line of the fault's code
    limit: float = 0.0  # seconds that flk has to wait by its settings before it may call this a fault
    slow: bool = False  # the rank becomes slow, and nothing ends; the record does not say why, so no cause is judged

    @property
    def module(self) -> str:
        """A module whose function `fail` makes the fault."""
        body = textwrap.dedent(self.code).strip("\n") or "pass"
        if "def fail" in body:
            return f"{HEAD}\n{body}\n"
        return f"{HEAD}\n\ndef fail():\n{textwrap.indent(body, '    ')}\n"


HEAD: Final = (
    "import atexit, ctypes, errno, faulthandler, json, mmap, os, pathlib, queue, resource, signal, socket, subprocess\n"
    "import sys, tempfile, threading, time\n"
    "import torch, torch.distributed as dist\n"
    "import faulty\n"
)
EXCEPTIONS: Final = (
    Fault("exception in forward", "raise ValueError('bad shape')", place="forward", type="ValueError"),
    Fault("exception in a backward hook", "raise ValueError('bad grad')", place="backward", type="ValueError"),
    Fault("exception in a dataset", "raise KeyError('sample 7')", place="sample", type="KeyError"),
    Fault("sizes of a product", "torch.ones(2, 3) @ torch.ones(2, 3)", type="RuntimeError", words="be multiplied"),
    Fault(
        "NaN that autograd finds",
        "with torch.autograd.detect_anomaly():\n    torch.tensor(0.0, requires_grad=True).sqrt().mul(0.0).backward()",
        type="RuntimeError",
        words="returned nan values",
    ),
    Fault("index out of range", "torch.nn.Embedding(4, 2)(torch.tensor([4]))", type="IndexError"),
    Fault("missing file", "open('shard-7.bin', 'rb')", type="FileNotFoundError", words="shard-7.bin"),
    Fault(
        "damaged checkpoint of the script",
        "pathlib.Path('weights.pt').write_bytes(b'nothing')\ntorch.load('weights.pt')",
        type="UnpicklingError",
    ),
    Fault("file of another format", "json.loads('{]')", type="JSONDecodeError"),
    Fault(
        "read-only file system",
        "open('read-only/log', 'w')",
        kinds=(Kind.READ_ONLY,),
        type="OSError",
        words="Read-only file system",
    ),
    Fault(
        "full file system",
        "with open('small/file', 'wb', buffering=0) as file:\n    while True: file.write(bytes(1 << 16))",
        kinds=(Kind.DISK_FULL,),
        type="OSError",
        words="No space left on device",
    ),
    Fault("disk that fails", "os.read(os.open('/proc/self/mem', os.O_RDONLY), 1)", kinds=(Kind.IO,), type="OSError"),
    Fault(
        "stale file handle",
        "raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), '/data/shard')",
        kinds=(Kind.IO,),
        words="/data/shard",
    ),
    Fault(
        "address in use",
        "held = socket.create_server(('127.0.0.1', 0))\nsocket.create_server(held.getsockname())",
        kinds=(Kind.ADDRESS,),
    ),
    Fault("refused connection", "socket.create_connection(('127.0.0.1', 1))", type="ConnectionRefusedError"),
)
LOADERS: Final = (
    Fault(
        "worker of a loader crashes",
        "faulthandler.disable(); faulthandler._sigsegv()",
        place="sample",
        words="DataLoader worker",
    ),
    Fault("worker of a loader is killed", act=Act.KILL_WORKER, words="DataLoader worker"),
)
_STUCK: Final = (Kind.HANG,)
DIFFERENT_CALLS: Final = "the ranks called different collectives, or one with other sizes"
HANGS: Final = (
    Fault("hang in the loop", "time.sleep(1000)", kinds=_STUCK, limit=HANG_LIMIT, words="time.sleep(1000)"),
    Fault("hang in forward", "time.sleep(1000)", place="forward", kinds=_STUCK, limit=HANG_LIMIT, words="sleep(1000)"),
    Fault(
        "hang in backward", "time.sleep(1000)", place="backward", kinds=_STUCK, limit=HANG_LIMIT, words="sleep(1000)"
    ),
    Fault("hang in a dataset", "time.sleep(1000)", place="sample", kinds=_STUCK, limit=HANG_LIMIT, words="DataLoader"),
    Fault(
        "hang in a lock",
        "lock = threading.Lock()\nlock.acquire()\nlock.acquire()",
        kinds=_STUCK,
        limit=HANG_LIMIT,
        words="lock.acquire()",
    ),
    Fault(
        "hang in another thread",
        "thread = threading.Thread(target=time.sleep, args=(1000,), daemon=True)\nthread.start()\nthread.join()",
        kinds=_STUCK,
        limit=HANG_LIMIT,
        words="waits for another thread",
    ),
    Fault("hang in a queue", "queue.Queue().get()", kinds=_STUCK, limit=HANG_LIMIT, words="waits for a queue"),
    Fault(
        "hang in native code with Python's lock",
        "while True:\n    ctypes.PyDLL(None).sleep(1000)",
        kinds=_STUCK,
        limit=HANG_LIMIT,
        words="native code that holds Python's lock",
    ),
    Fault(
        "hang in a program that the rank has started",
        "subprocess.run(['sleep', '1000'])",
        kinds=_STUCK,
        limit=HANG_LIMIT,
        words="waits for a process that it started",
    ),
    Fault(
        "hang of a server",
        "server = socket.create_server(('127.0.0.1', 0))\nimport urllib.request\n"
        "urllib.request.urlopen('http://127.0.0.1:%d/' % server.getsockname()[1])",
        kinds=_STUCK,
        limit=HANG_LIMIT,
        words="waits for the network",
    ),
    Fault(
        "hang of a file system",
        "os.mkfifo(name := tempfile.mktemp())\nopen(name, 'rb').read()",
        kinds=_STUCK,
        limit=HANG_LIMIT,
        words="open(name, 'rb')",
    ),
    Fault(
        "hang in an import",
        "pathlib.Path('endless.py').write_text('import time\\ntime.sleep(1000)')\nimport endless",
        kinds=_STUCK,
        limit=HANG_LIMIT,
        words="imports a module",
    ),
    # A rank that computes has CPU_PATIENCE times the limit: 20 s here, and 32 minutes by flk's defaults.
    Fault("endless loop", "while True: pass", kinds=_STUCK, limit=CPU_PATIENCE * HANG_LIMIT, words="while True: pass"),
    Fault("stopped rank", act=Act.STOP_RANK, kinds=_STUCK, limit=HANG_LIMIT, words="stopped (SIGSTOP)"),
    Fault(
        "other collective",
        "dist.broadcast(torch.ones(1), 0)\ntime.sleep(1000)",
        kinds=(Kind.HANG, Kind.SIGNAL),
        limit=HANG_LIMIT,
        own_words=("is in broadcast", DIFFERENT_CALLS),
    ),
    Fault(
        "collective of one rank",
        "dist.barrier()\ntime.sleep(1000)",
        kinds=(Kind.HANG, Kind.SIGNAL),
        limit=HANG_LIMIT,
        own_words=("is in barrier", DIFFERENT_CALLS),
    ),
    Fault(
        "sizes that differ between ranks",
        "dist.all_reduce(torch.ones(1 << 20))",
        who=Who.ANY,
        kinds=(Kind.SIGNAL, Kind.EXCEPTION, Kind.HANG),
        limit=HANG_LIMIT,
        own_words=("with sizes", DIFFERENT_CALLS),
    ),
)
PROCESSES: Final = (
    Fault("rank killed from outside", act=Act.KILL_RANK, kinds=(Kind.KILLED,), signal=signal.SIGKILL),
    Fault("rank ended from outside", act=Act.END_RANK, kinds=(Kind.KILLED, Kind.EXIT)),
)
_LOST: Final = (Kind.LOST,)
PODS: Final = (
    Fault("launcher killed", act=Act.KILL_LAUNCHER, who=Who.POD, kinds=(Kind.CONTAINER_KILLED,)),
    Fault("pod ended", act=Act.END_LAUNCHER, who=Who.POD, kinds=(Kind.PREEMPTED,)),
    Fault("pod stands still", act=Act.STOP_POD, who=Who.POD, kinds=_LOST, limit=LEASE),
    Fault("cut both ways", act=Act.CUT, who=Who.POD, kinds=_LOST, limit=LEASE),
    Fault("cut of what arrives", act=Act.CUT_RECEIVES, who=Who.POD, kinds=_LOST, limit=LEASE),
    Fault("cut of what is sent", act=Act.CUT_SENDS, who=Who.POD, kinds=_LOST, limit=LEASE),
)
SLOW: Final = (
    Fault(
        "slow rank, by processor, files or sleep",
        "ways = (faulty.compute, faulty.write, time.sleep)\nfaulty.slow = ways[os.getpid() % 3]",
        slow=True,
        limit=SLOW_WINDOW,
    ),
)


def of_tests() -> Iterator[Fault]:
    """The kinds of the tests that end one rank, whichever it is."""
    for each in failure_kinds.KINDS:
        if each.ranks == (2,) and not each.whole and "def fail" not in each.fault and each.attempts > 1:
            yield Fault(
                each.name,
                each.fault,
                kinds=(Kind(each.kind),),
                type=each.type,
                signal=each.signal,
                exit_code=each.exit_code,
                words=each.words,
            )


# By group, which has a share of its own, its faults.
GROUPS: Final[dict[str, tuple[Fault, ...]]] = {
    "ranks that end": (*of_tests(), *EXCEPTIONS, *LOADERS, *PROCESSES),
    "hangs": HANGS,
    "pods and network": PODS,
    "slow ranks": SLOW,
}
FAULTS: Final = tuple(fault for group in GROUPS.values() for fault in group)
