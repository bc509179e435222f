"""Environment variables that users may set or scripts may read, and the names that users must not set."""

from __future__ import annotations

from typing import Final

JOB: Final = "FLK_JOB"  # name of the job
METRICS_PORT: Final = "FLK_METRICS_PORT"  # port at which each launcher serves metrics for Prometheus; unset: none
LAST_CALL: Final = "FLK_LAST_CALL"  # seconds that an attempt which could start waits for pods that may still come
POD_NAME: Final = "FLK_POD_NAME"  # name of this pod
NODE_NAME: Final = "FLK_NODE_NAME"  # name of the node that this pod runs on
BUDGET_RESET: Final = "FLK_BUDGET_RESET"  # seconds after which an attempt renews restarts and disruptions; 0: never
BACKOFF: Final = "FLK_BACKOFF"  # longest delay in seconds after quick failures in a row, 60 by default; 0: no delay
RETRY_SAME_FAILURE: Final = "FLK_RETRY_SAME_FAILURE"  # 1: the same failure twice without progress is retried too
KILL_TIMEOUT: Final = "FLK_KILL_TIMEOUT"  # seconds after SIGKILL in which a rank has to end, or its pod is replaced
JOIN_TIMEOUT: Final = "FLK_JOIN_TIMEOUT"  # seconds that a launcher waits for the other pods
LEASE: Final = "FLK_LEASE"  # seconds of silence after which the launchers give up a connection between them
START: Final = "FLK_START"  # start method of the ranks: fork (default) or spawn
HANG_TIMEOUT: Final = "FLK_HANG_TIMEOUT"  # seconds without progress that are a hang, 480 by default; 0: never
SLOW_FACTOR: Final = "FLK_SLOW_FACTOR"  # a rank that works so many times as long as the median is slow, 1.5 by default
SLOW_WINDOW: Final = "FLK_SLOW_WINDOW"  # seconds over which ranks are compared for that, 60 by default
MEMORY_LIMIT: Final = "FLK_MEMORY_LIMIT"  # bytes, as 8Gi, that they may take in a pod; half of it by default; 0: none
STRATEGY: Final = "FLK_STRATEGY"  # how the ranks share the model
MEASURED: Final = "FLK_MEASURED"  # results of `flk bench` that strategy auto uses: a list in JSON
FABRIC: Final = "FLK_FABRIC"  # preset of NCCL's variables that the job uses
CHECKPOINT: Final = "FLK_CHECKPOINT"  # folder of the checkpoints, or their address in S3: s3://BUCKET/PREFIX
SAVE_EVERY: Final = "FLK_SAVE_EVERY"  # steps between two checkpoints; auto: computed from what a save costs
FULL_WORLD_SIZE: Final = "FLK_FULL_WORLD_SIZE"  # ranks of the job when it has all its pods; set by the launcher
KEEP: Final = "FLK_KEEP"  # number of the newest checkpoints that stay, 2 by default
KEEP_EVERY: Final = "FLK_KEEP_EVERY"  # checkpoints of which the step is a multiple of this stay too; 0 or unset: none
SEED: Final = "FLK_SEED"  # seed of the random number generators, 0 by default
PREFLIGHT: Final = "FLK_PREFLIGHT"  # checks before the start: on, off, or some of them off, as in -shm,-code
PREFLIGHT_TIMEOUT: Final = "FLK_PREFLIGHT_TIMEOUT"  # seconds that each rank waits for the others in the preflight
STEP_TIMEOUT: Final = "FLK_STEP_TIMEOUT"  # timeout of collectives after the first step, in seconds
WORKERS: Final = "FLK_WORKERS"  # number of workers of strategy diloco in this job; its pods are divided among them
WORKER: Final = "FLK_WORKER"  # number of this rank's worker, from 0; set by the launcher
TRIAL: Final = "FLK_TRIAL"  # 1: the script is run for a few steps to plan or measure it; checkpoints are left alone
HEARTBEAT: Final = "FLK_HEARTBEAT"  # file that a script may touch to say that it makes progress
ATTEMPT: Final = "FLK_ATTEMPT"  # number of the attempt, from 0; set by the launcher

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
