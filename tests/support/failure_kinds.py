"""Kinds of failures in real processes, and what the record of a job says of each.

The bodies are for tests and for `benchmarks/diagnosis.py`, which has them happen at random ranks and moments.
"""

from __future__ import annotations

import signal
import sys
import textwrap
from dataclasses import dataclass, field

from flk_runtime.contract import ExitCode

HEAD = """
import atexit, ctypes, faulthandler, mmap, os, pathlib, resource, signal, subprocess, sys, tempfile, threading, time
import torch, torch.distributed as dist

rank = int(os.environ["RANK"])
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def all_have_started():
    # So that no rank is ended before it fails.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pathlib.Path(f"started.{attempt}.{rank}").touch()
    while len(list(pathlib.Path().glob(f"started.{attempt}.*"))) < 4:
        time.sleep(0.001)

"""
# All ranks reduce in a loop; FAILING fails in step 3.
LOOP = """
def train(failing, steps=200):
    dist.init_process_group("gloo")
    for step in range(steps):
        if step == 3 and rank == failing:
            fail()
        dist.all_reduce(torch.ones(1))
        time.sleep(0.01)

"""
BATCHES = """
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5:
            {fault}
        return index

def fail():
    for batch in torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context="fork"):
        pass
"""


@dataclass(frozen=True)
class Kind:
    """A way to fail, and what the record of the job says of it."""

    name: str
    fault: str  # body of `fail`, or the definitions of a script that has its own end
    ranks: tuple[int, ...] = (2,)  # any of them may be named
    kind: str = "exception"
    type: str = ""
    exit_code: int | None = None
    signal: int | None = None
    words: str = ""  # in the summary
    stderr: str = ""  # in the last lines of stderr
    count: int = 1  # number of ranks that failed in this way
    code: ExitCode = ExitCode.TRAINING
    attempts: int = 2
    failing: int = 2
    whole: bool = False  # `fault` is the whole rest of the script
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def script(self) -> str:
        if self.whole:
            return HEAD + LOOP + textwrap.dedent(self.fault)
        if "def fail" in self.fault:
            return HEAD + LOOP + textwrap.dedent(self.fault) + f"\n\ntrain({self.failing})\n"
        body = textwrap.indent(textwrap.dedent(self.fault).strip("\n"), "    ")
        return HEAD + LOOP + f"def fail():\n{body}\n\n\ntrain({self.failing})\n"


CPP_THROW = """
    cpp = ctypes.CDLL("libstdc++.so.6")
    for function in (cpp.__cxa_allocate_exception, cpp._ZNSt13runtime_errorC1EPKc, cpp.__cxa_throw):
        function.restype = ctypes.c_void_p
    error = ctypes.c_void_p(cpp.__cxa_allocate_exception(ctypes.c_size_t(64)))
    cpp._ZNSt13runtime_errorC1EPKc(error, b"enforce fail: length <= nbytes")
    cpp.__cxa_throw(error, ctypes.byref(ctypes.c_char.in_dll(cpp, "_ZTISt13runtime_error")), None)
"""
SIGNALS = (
    Kind("segfault", "faulthandler._sigsegv()", kind="signal", signal=signal.SIGSEGV, words="in fail"),
    Kind(
        "bus error",
        """
        file = tempfile.TemporaryFile()
        file.truncate(4096)
        page = mmap.mmap(file.fileno(), 4096)
        file.truncate(0)
        page[0]
        """,
        kind="signal",
        signal=signal.SIGBUS,
        words="in fail",
    ),
    Kind("division by zero in C", "faulthandler._sigfpe()", kind="signal", signal=signal.SIGFPE, words="in fail"),
    Kind("illegal instruction", "os.kill(os.getpid(), signal.SIGILL)", kind="signal", signal=signal.SIGILL),
    Kind("SIGKILL", "os.kill(os.getpid(), signal.SIGKILL)", kind="killed", signal=signal.SIGKILL),
    Kind("SIGTERM", "os.kill(os.getpid(), signal.SIGTERM)", kind="killed", signal=signal.SIGTERM),
    Kind("SIGQUIT", "os.kill(os.getpid(), signal.SIGQUIT)", kind="killed", signal=signal.SIGQUIT),
    Kind("SIGUSR1", "os.kill(os.getpid(), signal.SIGUSR1)", kind="signal", signal=signal.SIGUSR1),
    Kind("abort in C", "os.abort()", kind="signal", signal=signal.SIGABRT, words="in fail"),
    Kind(
        "uncaught exception in C++",
        CPP_THROW,
        kind="signal",
        signal=signal.SIGABRT,
        words="enforce fail: length <= nbytes",
    ),
    Kind(
        "double free",
        """
        c = ctypes.CDLL(None)
        c.malloc.restype = ctypes.c_void_p
        memory = ctypes.c_void_p(c.malloc(24))
        c.free(memory), c.free(memory)
        """,
        kind="signal",
        signal=signal.SIGABRT,
        words="free(): double free",
    ),
    Kind(
        "fatal error of Python",
        "ctypes.pythonapi.Py_FatalError(b'the interpreter is broken')",
        kind="signal",
        signal=signal.SIGABRT,
        words="the interpreter is broken",
    ),
    Kind(
        "stack overflow in C",
        """
        sys.setrecursionlimit(1 << 30)
        def dive():
            return [*map(lambda _: dive(), [0])]
        dive()
        """,
        kind="signal",
        signal=signal.SIGSEGV,
        words="train.py",
    ),
    Kind(
        "limit of CPU time",
        "resource.setrlimit(resource.RLIMIT_CPU, (1, 60))\nwhile True: pass",
        kind="signal",
        signal=signal.SIGXCPU,
    ),
    Kind("rank 0 killed", "os.kill(os.getpid(), 9)", (0,), kind="killed", signal=signal.SIGKILL, failing=0),
    Kind("last rank killed", "os.kill(os.getpid(), 9)", (3,), kind="killed", signal=signal.SIGKILL, failing=3),
)
EXITS = (
    Kind("exit code", "print('bad disk', file=sys.stderr); os._exit(17)", kind="exit", exit_code=17, stderr="bad disk"),
    Kind("exit without a flush", "os._exit(17)", kind="exit", exit_code=17),
    Kind("sys.exit with a number", "sys.exit(3)", kind="exit", exit_code=3),
    Kind("sys.exit with a text", "sys.exit('no data')", kind="exit", exit_code=1, stderr="no data"),
    Kind("exit in C", "ctypes.CDLL(None).exit(33)", kind="exit", exit_code=33),
    Kind("another program", "os.execv('/bin/false', ['false'])", kind="exit", exit_code=1),
    Kind("early success", "os._exit(0)", kind="early", exit_code=0, words="before the other ranks"),
    Kind("early sys.exit", "sys.exit()", kind="early", exit_code=0, words="before the other ranks"),
    Kind(
        "early end of the script",
        "train(-1, steps=3 if rank == 2 else 200)",
        kind="early",
        exit_code=0,
        words="before the other ranks",
        whole=True,
    ),
    Kind("exit handler", "atexit.register(os._exit, 21)\nsys.exit()", kind="exit", exit_code=21),
    Kind(
        "stderr that is not UTF-8",
        r"os.write(2, b'\xff\xfe bad header \x80\n'); os._exit(5)",
        kind="exit",
        exit_code=5,
        stderr="bad header",
    ),
    Kind(
        "thread that ends the process",
        """
        def end(arguments):
            threading.__excepthook__(arguments)
            os._exit(9)
        def read():
            raise ValueError("bad shard")
        threading.excepthook = end
        threading.Thread(target=read).start()
        time.sleep(600)
        """,
        kind="exit",
        exit_code=9,
        words="ValueError: bad shard",
    ),
)
EXCEPTIONS = (
    Kind("exception on one rank", "raise ValueError('bad sample')", type="ValueError", words="bad sample"),
    Kind(
        "exception on all ranks",
        "all_have_started()\nraise FileNotFoundError('no such dataset')",
        (0, 1, 2, 3),
        type="FileNotFoundError",
        words="and 3 other ranks raised FileNotFoundError: no such dataset",
        count=4,
        whole=True,
    ),
    Kind(
        "cause that is reported second",
        """
        try:
            raise ValueError("sample 371 has no label")
        finally:
            dist.destroy_process_group()
            time.sleep(0.05)  # less by far than the leader waits for a cause
        """,
        type="ValueError",
        words="sample 371 has no label",
    ),
    Kind(
        "exception from a broken connection",
        """
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        if rank == 2:
            time.sleep(0.2)
            os._exit(17)
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            raise OSError("the training step failed") from error
        """,
        kind="exit",
        exit_code=17,
        whole=True,
    ),
    Kind(
        "exception in a DataLoader worker",
        BATCHES.format(fault="raise ValueError('bad sample')"),
        type="ValueError",
        words="bad sample",
    ),
    Kind(
        "DataLoader worker killed",
        BATCHES.format(fault="os.kill(os.getpid(), signal.SIGKILL)"),
        words="raised ",  # RuntimeError or EOFError: torch reads from the worker in several places
    ),
    Kind(
        "DataLoader worker crashed",
        BATCHES.format(fault="faulthandler.disable(); faulthandler._sigsegv()"),
        words="raised ",  # RuntimeError or EOFError: torch reads from the worker in several places
    ),
    Kind(
        "DataLoader worker that dies while an error is reported",
        """
class Late(Exception):
    def __str__(self):
        os.kill(os.getpid(), signal.SIGCHLD)
        return "the first error"

def handle(number, frame):
    raise RuntimeError("DataLoader worker is killed")

signal.signal(signal.SIGCHLD, handle)
raise Late
""",
        type="Late",
        words="the first error",
    ),
    Kind("out of Python memory", "bytearray(1 << 62)", type="MemoryError"),
    Kind("out of CPU memory", "torch.empty(1 << 60)", type="RuntimeError", words="can't allocate memory"),
    Kind(
        "out of GPU memory",
        "raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')",
        type="OutOfMemoryError",
        words="CUDA out of memory",
    ),
    Kind("import error", "from torch import nothing", type="ImportError", words="cannot import name 'nothing'"),
    Kind("missing module", "import not_installed", type="ModuleNotFoundError", words="not_installed"),
    Kind(
        "exception before the group opens", "if rank == 2: raise KeyError('lr')\ntrain(-1)", type="KeyError", whole=True
    ),
    Kind(
        "syntax error",
        "all_have_started()\nexec(compile('for in 3:', 'model.py', 'exec'))",
        (0, 1, 2, 3),
        type="SyntaxError",
        words="and 3 other ranks raised SyntaxError",
        count=4,
        whole=True,
    ),
    Kind("KeyboardInterrupt", "raise KeyboardInterrupt", type="KeyboardInterrupt"),
    Kind("endless recursion", "fail()", type="RecursionError", words="maximum recursion depth"),
    Kind(
        "too many open files",
        """
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
        files = [open("/dev/null") for _ in range(100)]
        """,
        type="OSError",
        words="Too many open files",
    ),
    Kind(
        "full disk while saving",
        "with open('/dev/full', 'wb') as file:\n    torch.save(torch.ones(100), file)",
        kind="disk_full",
        type="OSError",
        words="No space left on device",
        code=ExitCode.INFRASTRUCTURE,
        settings={"FLK_DISRUPTIONS": "0"},
    ),
    Kind(
        "no more threads",
        """
        resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))
        threading.stack_size(64 << 20)
        for _ in range(100):
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        """,
        type="RuntimeError",
        words="the pod is at a limit of processes, for which threads count (pids.max of the pod, ulimit -u)",
    ),
    Kind(
        "exception without a text",
        """
        class Bad(Exception):
            def __str__(self):
                raise TypeError("no text")
            __repr__ = __str__
        raise Bad
        """,
        type="Bad",
    ),
    Kind("exception with a huge text", "raise ValueError('long ' * 1_000_000)", type="ValueError", words="long long"),
    Kind(
        "exception with a text that is not Unicode",
        r"raise ValueError('\udcff bad name')",
        type="ValueError",
        words="bad name",
    ),
    Kind(
        "program that fails",
        "subprocess.run(['false'], check=True)",
        type="CalledProcessError",
        words="returned non-zero exit status 1",
    ),
    Kind(
        "pool of processes that breaks",
        """
        from concurrent.futures import ProcessPoolExecutor
        if rank == 2:  # before gloo has threads, with which a fork is not safe
            with ProcessPoolExecutor(1) as pool:
                pool.submit(os._exit, 1).result()
        train(-1)
        """,
        type="BrokenProcessPool",
        whole=True,
    ),
    Kind(
        "collective that times out",
        """
        import datetime
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=2))
        (dist.barrier if rank == 2 else lambda: dist.all_reduce(torch.ones(1)))()
        time.sleep(20)
        """,
        (0, 1, 2, 3),
        kind="timeout",
        words="Timed out waiting",
        count=-1,
        whole=True,
    ),
)
GROUPS = (
    Kind(
        "exception group",
        "raise ExceptionGroup('two shards', [ValueError('a'), OSError('b')])",
        type="ValueError",
        words="ValueError: a (and 1 other exception)",
    ),
    Kind(
        "exception group from a broken connection that is reported first",
        """
        import asyncio

        async def reduce():
            raise RuntimeError("[/x/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:5")

        async def step():
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(reduce())

        all_have_started()
        if rank == 2:
            time.sleep(0.1)
            os._exit(17)
        asyncio.run(step())
        """,
        kind="exit",
        exit_code=17,
        whole=True,
    ),
)
CRASHES = (
    Kind(
        "crash that the launcher cuts short",
        """
        all_have_started()
        if rank == 2:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            words = b"terminate called after throwing an instance of 'gloo::EnforceNotMet'\\n  what():  sizes differ\\n"
            os.write(2, words)
            pathlib.Path(f"crashing.{attempt}").touch()
            time.sleep(600)  # as while a large process is dumped
        while not os.path.exists(f"crashing.{attempt}"):
            time.sleep(0.001)
        raise RuntimeError("[/x/gloo/transport/tcp/pair.cc:547] Connection reset by peer [10.0.0.1]:5")
        """,
        kind="signal",
        signal=signal.SIGABRT,
        words="sizes differ",
        whole=True,
        settings={"FLK_DISRUPTIONS": "0"},  # as if no attempt followed, until the crash is known
    ),
    Kind(
        "sizes that differ between ranks",
        """
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1 if rank == 2 else 1 << 20))
        """,
        (0, 1, 2, 3),
        kind="signal",
        signal=signal.SIGABRT,
        words="enforce fail",
        count=-1,
        whole=True,
    ),
)
FINAL = (
    Kind(
        "wrong argument of init",
        "import flk_runtime\nflk_runtime.init(strategy='magic')",
        (0, 1, 2, 3),
        kind="usage",
        words="unknown strategy 'magic'",
        count=-1,
        code=ExitCode.USAGE,
        attempts=1,
        whole=True,
    ),
)
KINDS = [*SIGNALS, *EXITS, *EXCEPTIONS, *CRASHES, *FINAL, *(GROUPS if sys.version_info >= (3, 11) else ())]
