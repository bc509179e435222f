"""Environment variables that users may set or scripts may read, and the names that users must not set."""

from __future__ import annotations

from typing import Final

from flk_runtime.contract.options import AUTO, parse_interval
from flk_runtime.contract.quantities import parse_duration
from flk_runtime.contract.variable import Setting, Variable, choice, integer, number, size

# A row for each variable: its name, what it means, its default, and how its text is read.
JOB: Final = Variable("FLK_JOB", "name of the job", "")
METRICS_PORT: Final = Setting(
    "FLK_METRICS_PORT", "port at which each launcher serves metrics for Prometheus; 0: none", 0, integer()
)
METRICS: Final = Variable(
    "FLK_METRICS",
    "where the lines of metrics go besides the log: tensorboard:/PATH, mlflow, wandb, separated by commas; none: "
    "nowhere; unset: what MLFLOW_TRACKING_URI and WANDB_PROJECT say",
    "",
)
NAMESPACE: Final = Variable("FLK_NAMESPACE", "namespace of the job", "")
POD_IMAGE: Final = Variable("FLK_POD_IMAGE", "image of the pods; set for jobs with FLK_METRICS", "")
TELEMETRY: Final = Setting(
    "FLK_TELEMETRY", "whether the launchers measure the job, for `flk top` and `flk report`: on or off", "on",
    choice(("on", "off")),
)  # fmt: skip
LAST_CALL: Final = Setting(
    "FLK_LAST_CALL", "seconds that an attempt which could start waits for pods that may still come", 5.0, number()
)
POD_NAME: Final = Variable("FLK_POD_NAME", "name of this pod", "")
NODE_NAME: Final = Variable("FLK_NODE_NAME", "name of the node that this pod runs on", "")
BUDGET_RESET: Final = Setting(
    "FLK_BUDGET_RESET",
    "seconds after which an attempt with progress renews restarts and disruptions; 0: never",
    3600.0,
    number(),
)
BACKOFF: Final = Setting(
    "FLK_BACKOFF", "longest delay in seconds after quick failures in a row; 0: no delay", 60.0, number()
)
NODE_MEMORY: Final = Setting(
    "FLK_NODE_MEMORY", "seconds until the failures of attempts on a node are forgotten; 0: at once", 86400.0, number()
)
RETRY_SAME_FAILURE: Final = Setting(
    "FLK_RETRY_SAME_FAILURE",
    "1: the same failure without progress, else final after two or ten times, is retried too",
    0,
    integer(),
)
KILL_TIMEOUT: Final = Setting(
    "FLK_KILL_TIMEOUT", "seconds after SIGKILL in which a rank has to end, or its pod is replaced", 30.0, number()
)
JOIN_TIMEOUT: Final = Setting("FLK_JOIN_TIMEOUT", "seconds that a launcher waits for the other pods", 1800.0, number())
LEASE: Final = Setting(
    "FLK_LEASE", "seconds of silence after which the launchers give up a connection between them", 15.0, number(0.5)
)
START: Final = Setting("FLK_START", "start method of the ranks: fork or spawn", "fork", choice(("fork", "spawn")))
HANG_TIMEOUT: Final[Setting[float | None]] = Setting(
    "FLK_HANG_TIMEOUT",
    "time without progress that is a hang, as 10m, four times as long for a save; 0: never; unset: by phase",
    None,
    parse_duration,
)
SLOW_WINDOW: Final = Setting(
    "FLK_SLOW_WINDOW",
    "seconds over which ranks are compared to find slow ones, or 60 steps if these take longer",
    60.0,
    number(1),
)
MEMORY_LIMIT: Final[Setting[int | None]] = Setting(
    "FLK_MEMORY_LIMIT",
    "bytes, as 8Gi, that checkpoints in memory may take in a pod; unset: half of its memory; 0: none are kept",
    None,
    size,
)
STRATEGY: Final = Variable("FLK_STRATEGY", "how the ranks share the model", "ddp")
VERIFY: Final = Variable(
    "FLK_VERIFY", "first steps that are compared with those of the whole model in one process; 0: none", 0, integer()
)
STANDS_FOR: Final = Variable(
    "FLK_STANDS_FOR", "ranks in whose place one process trains, to verify them; set by flk", 1, integer(1)
)
MEASURED: Final = Setting("FLK_MEASURED", "results of `flk bench` that strategy auto uses: a list in JSON", "")
FABRIC: Final = Variable("FLK_FABRIC", "preset of NCCL's variables that the job uses", AUTO)
CHECKPOINT: Final = Variable(
    "FLK_CHECKPOINT", "folder of the checkpoints, or their address in S3: s3://BUCKET/PREFIX", ""
)
SAVE_EVERY: Final = Setting("FLK_SAVE_EVERY", "steps between two checkpoints", 100, parse_interval)
STORE_EVERY: Final[Setting[int | None]] = Setting(
    "FLK_STORE_EVERY",
    "steps between two checkpoints in storage, where the memory of the pods keeps more; without it, every checkpoint "
    "is stored",
    None,
    parse_interval,
)
FULL_WORLD_SIZE: Final = Variable(
    "FLK_FULL_WORLD_SIZE", "ranks of the job when it has all its pods; set by the launcher", 0, integer()
)
KEEP: Final = Setting("FLK_KEEP", "number of the newest checkpoints that stay", 2, integer())
SEED: Final = Setting("FLK_SEED", "seed of the random number generators", 0, integer())
PREFLIGHT: Final = Setting("FLK_PREFLIGHT", "checks before the start", "on", choice(("on", "off")))
PREFLIGHT_TIMEOUT: Final = Setting(
    "FLK_PREFLIGHT_TIMEOUT", "seconds that each rank waits for the others in the preflight", 300.0, number()
)
WORKERS: Final = Variable(
    "FLK_WORKERS",
    "groups of pods that train by themselves, with attempts of their own; the pods are divided among them",
    1,
    integer(1),
)
WORKER: Final = Variable("FLK_WORKER", "number of this rank's worker, from 0; set by the launcher", 0, integer())
TRIAL: Final = Variable(
    "FLK_TRIAL", "1: the script is run for a few steps to plan or measure it; checkpoints are left alone", ""
)
HEARTBEAT: Final = Variable("FLK_HEARTBEAT", "file that a script may touch to say that it makes progress", "")
ATTEMPT: Final = Variable("FLK_ATTEMPT", "number of the attempt, from 0; set by the launcher", 0, integer())

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
SETTABLE: Final = frozenset(row for row in list(globals().values()) if isinstance(row, Setting))


def is_reserved(name: str) -> bool:
    """Return whether users must not set the environment variable ``name``."""
    return name not in SETTABLE and (name in RESERVED_NAMES or name.startswith(RESERVED_PREFIXES))
