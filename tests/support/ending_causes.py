"""The causes of jobs that have started: how tests produce each in a cluster, and what flk must say about it."""

from flk_runtime.contract import ExitCode
from tests.support.cause_cases import Case, Expected, job, python, with_volume

CLOSED_CONNECTION = "raise ConnectionResetError('Connection reset by peer')"
# A stand-in for NVIDIA's library, which Python imports at its start: no node of a test has a GPU. The GPU does nothing,
# or has fallen off the bus. The torch of the image says that it is built for GPUs.
NVML = """
import ctypes, importlib.util, os, sys
CODES = {"nvmlEventSetWait_v2": 10, "nvmlDeviceGetHandleByIndex_v2": {"lost": 15}.get(os.environ.get("NVML"), 0)}
class Nvml:
    def __getattr__(self, name):
        return lambda *values: CODES.get(name, 0)
    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = 1
        return 0
class Build:
    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_loader(name, self) if name == "torch.version" else None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        vars(module).update(__version__="2.13.0", cuda="12.8", hip=None, xpu=None, git_version="", debug=False)
load = ctypes.CDLL
ctypes.CDLL = lambda name, *rest, **more: Nvml() if "nvidia-ml" in str(name) else load(name, *rest, **more)
sys.meta_path.insert(0, Build())
"""
# The two ranks of a pod. Another process traces rank 0 and never waits for it, so that it stays after SIGKILL, as one
# does that hangs in a driver; rank 1 waits for it in vain.
TRACED = """
import ctypes, os, pathlib, time
traced, rank = pathlib.Path("traced"), os.getpid()
if os.environ["RANK"] == "0":
    system = ctypes.CDLL(None)
    system.prctl(0x59616D61, ctypes.c_ulong(-1))  # PR_SET_PTRACER: any process
    if not os.fork():
        os.setsid()
        if not os.fork():
            assert system.ptrace(0x4206, rank, None, None) == 0  # PTRACE_SEIZE
            traced.touch()
            time.sleep(600)
        os._exit(0)
    time.sleep(600)
while not traced.exists():
    time.sleep(0.1)
raise RuntimeError("[Rank 1] Watchdog caught collective operation timeout")"""
# What the launcher of a later release may leave: a kind of failure that this client does not know.
NEWER = (
    '{"outcome":"failed","code":100,"failure":{"kind":"melted","pod":0,"rank":0,"pod_name":"newer-worker-0",'
    '"message":"of a newer launcher"}}'
)

# Jobs without flk's launcher that end.
ENDING = (
    Case(
        "foreign-exception",
        Expected(
            "ExceptionRaised",
            "rank 2 in foreign-exception-worker-2 raised ValueError: no label",
            "ValueError",
            "logs foreign-exception",
            ExitCode.TRAINING,
        ),
        job(
            "foreign-exception",
            command=python(
                "import os, time\nif os.environ['HOSTNAME'].endswith('-2'):\n    time.sleep(3)\n"
                f"    raise ValueError('no label')\ntime.sleep(5)\n{CLOSED_CONNECTION}"
            ),
            replicas=3,
        ),
    ),
    Case(
        "signal",
        Expected("RankFailed", "was killed by SIGSEGV", "SIGSEGV", "logs signal", ExitCode.TRAINING),
        job("signal", command=["sh", "-c", "kill -SEGV $$; sleep 1; exit 139"]),
    ),
    Case(
        "newer",
        Expected("RankFailed", "of a newer launcher", "of a newer launcher", "logs newer", ExitCode.TRAINING),
        job("newer", command=["sh", "-c", f"echo '{NEWER}' > /dev/termination-log; exit 100"]),
    ),
    Case(
        "no-trace",
        Expected("FailedWithoutTrace", "its pods have left no trace", "no-trace", "keeps evidence while a job runs"),
        job("no-trace", command=["sh", "-c", "exit 17"], run_policy={"cleanPodPolicy": "All"}),
        forgotten=True,
    ),
    Case(
        "restart-loop",
        Expected("CrashLoop", "is created again and again", "exited with code 139", "delete", ExitCode.TRAINING),
        job("restart-loop", command=["sh", "-c", "sleep 20; exit 139"], policy="ExitCode"),
    ),
    Case(
        "deadline",
        Expected("DeadlineExceeded", "deadline", "deadline", "--deadline", ExitCode.TIMEOUT),
        job("deadline", run_policy={"activeDeadlineSeconds": 3}, command=python("import time; time.sleep(6)")),
    ),
    Case(
        "memory-limit",
        Expected("OutOfMemory", "ran out of memory", "memory", "--memory"),
        job(
            "memory-limit",
            command=python("import os\nx = []\nwhile True:\n    x.append(os.urandom(1 << 20))"),
            container={"resources": {"requests": {"cpu": "10m"}, "limits": {"memory": "40Mi"}}},
        ),
    ),
    Case(
        "disk-full",
        Expected("DiskFull", "No space left on device", "No space left", "larger volume"),
        with_volume(
            "disk-full",
            {"emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
            python("open('/data/x', 'wb').write(bytes(8 << 20))"),
        ),
    ),
    Case(
        "import-error",
        Expected(
            "ImportFailed",
            "No module named 'lightninq'",
            "lightninq",
            "install lightninq with --pip",
            ExitCode.TRAINING,
        ),
        job("import-error", command=python("import lightninq")),
    ),
    Case(
        "no-torch",
        Expected("ImportFailed", "No module named 'torch'", "torch", "choose an image with torch", ExitCode.TRAINING),
        job("no-torch", command=["python3", "-S", "-c", "import torch"]),
    ),
)
# Jobs that flk's launcher starts.
LAUNCHED = (
    Case(
        "rank-exception",
        Expected(
            "ExceptionRaised",
            "rank 1 in rank-exception-worker-1 raised ValueError: shard 3",
            "ValueError: shard 3",
            "--rank 1",
            ExitCode.TRAINING,
        ),
        job={"replicas": 2, "restarts": 0},
        script="import os, time\nif os.environ['RANK'] == '1':\n    raise ValueError('shard 3')\ntime.sleep(600)",
        namespace="restricted",
    ),
    Case(
        "never-joins",
        Expected("RankNeverJoined", "the launcher of never-joins-worker-0 (rank 0) has not", "waiting for", "logs"),
        job={"replicas": 2},
        sleeping=0,
        namespace="restricted",
    ),
    Case(
        "name-not-resolved",
        Expected("NameNotResolved", "cannot resolve the name name-not-resolved-worker-0", "waiting for", "get service"),
        job={"replicas": 2},
        pod={"dnsPolicy": "None", "dnsConfig": {"nameservers": ["127.0.0.1"]}},
        namespace="restricted",
    ),
    Case(
        "join-timeout",
        Expected("RendezvousTimeout", "never joined", "never joined", "FLK_JOIN_TIMEOUT"),
        job={"replicas": 2, "env": {"FLK_JOIN_TIMEOUT": "15"}},
        sleeping=1,
        namespace="restricted",
    ),
    Case(
        "small-shm",
        Expected("SharedMemoryTooSmall", "was killed by SIGBUS", "train.py", "a larger --shm", ExitCode.TRAINING),
        job={"replicas": 1, "restarts": 0, "resources": {"cpu": "10m", "shm": "4Mi"}},
        script="""import mmap, os
file = os.open("/dev/shm/batch", os.O_RDWR | os.O_CREAT)
os.ftruncate(file, 8 << 20)
mmap.mmap(file, 8 << 20).write(bytes(8 << 20))""",
        namespace="restricted",
    ),
    Case(
        "code-missing",
        Expected("ReferenceMissing", "the ConfigMap", "FailedMount", "flk submit makes it"),
        job={"replicas": 1},
        without_code=True,
        namespace="restricted",
    ),
)
# What the ranks of flk's launcher end with, or do not get beyond.
RANKS = (
    Case(
        "gpu-memory",
        Expected("GpuOutOfMemory", "CUDA out of memory", "out of memory", "batch", ExitCode.TRAINING),
        job={"replicas": 1, "restarts": 0},
        script="""class OutOfMemoryError(RuntimeError):
    __module__ = "torch"
raise OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")""",
        namespace="restricted",
    ),
    Case(
        "gpu-assertion",
        Expected(
            "DeviceAssertion", "device-side assert", "device-side assert", "CUDA_LAUNCH_BLOCKING", ExitCode.TRAINING
        ),
        job={"replicas": 1, "restarts": 0},
        script="""class AcceleratorError(RuntimeError):
    __module__ = "torch"
raise AcceleratorError("CUDA error: device-side assert triggered")""",
        namespace="restricted",
    ),
    Case(
        "gpu-error",
        Expected("NodeUnhealthy", "uncorrectable ECC error", "CUDA error", "cordon"),
        job={"replicas": 1, "restarts": 0, "disruptions": 0},
        script="raise RuntimeError('CUDA error: uncorrectable ECC error encountered')",
        namespace="restricted",
    ),
    Case(
        "stale-file",
        Expected("VolumeFailed", "Stale file handle", "Stale file handle", "persistentvolumeclaims"),
        job={"replicas": 1, "restarts": 0, "disruptions": 0},
        # Of two files in turn, since the same failure ten times would end the job.
        script="import os\nraise OSError(116, 'Stale file handle', 'ab'[int(os.environ['FLK_ATTEMPT']) % 2])",
        namespace="restricted",
    ),
    Case(
        "setup-fails",
        Expected(
            "InvalidStart", "the setup command ended with exit code 7: no data", "no data", "logs", ExitCode.USAGE
        ),
        job={"replicas": 1, "setup": "echo no data >&2; exit 7"},
        namespace="restricted",
    ),
    Case(
        "gpu-lost",
        Expected("NodeUnhealthy", "GPU 0 is lost: it has fallen off the bus", "GPU 0 is lost", "cordon"),
        job={"replicas": 1, "restarts": 0, "disruptions": 0},
        nvml="lost",
        namespace="restricted",
    ),
    Case(
        "unkillable",
        Expected("NodeUnhealthy", "has a rank that survives SIGKILL", "rank 0, process", "cordon"),
        job={"replicas": 1, "processes": 2, "restarts": 0, "disruptions": 0, "env": {"FLK_KILL_TIMEOUT": "1"}},
        script=TRACED,
        namespace="restricted",
    ),
    Case(
        "pod-lost",
        Expected("PodLost", "pod-lost-worker-1", "pod-lost-worker-1", "--disruptions"),
        job={"replicas": 2, "disruptions": 0},
        lost="pod-lost-worker-1",
        namespace="restricted",
    ),
    Case(
        "standstill",
        Expected("Standstill", "no rank makes progress", "train.py:1", "flk stacks", ExitCode.RUNNING, stuck=False),
        job={"replicas": 1},
        script="import time; time.sleep(3600)",
        namespace="restricted",
    ),
    Case(
        "no-progress",
        Expected("NoProgress", "without a further step", "Stale file", "logs", ExitCode.RUNNING, stuck=False),
        job={"replicas": 1},
        # Of two files in turn, since the same failure ten times would end the job.
        script="import os\nraise OSError(116, 'Stale file handle', 'ab'[int(os.environ['FLK_ATTEMPT']) % 2])",
        namespace="restricted",
    ),
)
