"""Environment variables by which the manifest and the launchers configure the pods: for flk only."""

from __future__ import annotations

from typing import Final

from flk_runtime.contract.variable import Variable, choice, integer, number, words

BATCHES: Final = ("keep", "scale")

# A row for each variable: its name, what it means, its default, and how its text is read.
# Of the launcher. The manifest or `flk run` sets these variables.
RDZV_ENDPOINT: Final = Variable(
    "FLK_RDZV_ENDPOINT", "host:port of the rendezvous, which the launcher of pod 0 serves", ""
)
JOB_UID: Final = Variable("FLK_JOB_UID", "UID of the job, which distinguishes jobs that have the same name", "")
RDZV_SECRET: Final = Variable("FLK_RDZV_SECRET", "launchers authenticate each other with it; ranks do not get it", "")
POD_INDEX: Final = Variable("FLK_POD_INDEX", "index of this pod, from 0", 0, integer())
PODS: Final = Variable(
    "FLK_PODS",
    "number of pods; of an elastic job the most that it may have; spares included",
    1,
    integer(1),
)
MIN_PODS: Final = Variable(
    "FLK_MIN_PODS",
    "pods with which an attempt of an elastic job may start; unset: all that train",
    0,
    integer(),
)
SPARES: Final = Variable("FLK_SPARES", "how many of the pods wait to take the place of a lost one", 0, integer())
PROCESSES: Final = Variable("FLK_PROCESSES", "number of ranks in each pod", 1, integer(1))
POD_IP: Final = Variable("FLK_POD_IP", "IP address of this pod", "")
GPUS: Final = Variable("FLK_GPUS", "number of GPUs that this pod has requested; 0 or unset: none", 0, integer())
CPUS: Final = Variable("FLK_CPUS", "CPU request of the pod, rounded up; 0 or unset: no request", 0, integer())
RESTARTS: Final = Variable("FLK_RESTARTS", "how many attempts may follow failures of the training code", 0, integer())
DISRUPTIONS: Final = Variable(
    "FLK_DISRUPTIONS",
    "how many attempts may follow disruptions: lost pods, preemptions, connections",
    100,
    integer(),
)
DEADLINE: Final = Variable(
    "FLK_DEADLINE", "seconds that the job may take, from FLK_STARTED; 0 or unset: no deadline", 0.0, number()
)
STARTED: Final = Variable(
    "FLK_STARTED",
    "when the job was started or resumed, in seconds since the epoch; 0 or unset: when the launcher started",
    0.0,
    number(),
)
GRACE: Final = Variable(
    "FLK_GRACE", "seconds between the signal that stops the pod and SIGKILL for its ranks", 30.0, number()
)
PARENT: Final = Variable(
    "FLK_PARENT",
    "process id; the launcher ends when this process ends (set by `flk run`)",
    0,
    integer(),
)
CODE: Final = Variable(
    "FLK_CODE",
    "folder with the archive of the user's code; unset: the image has the code",
    "",
)
CODE_HASH: Final = Variable("FLK_CODE_HASH", "SHA-256 of the archive, in hex", "")
PIP: Final = Variable("FLK_PIP", "packages that are installed before the ranks start, one a line", "")
REQUIREMENTS: Final = Variable("FLK_REQUIREMENTS", "pip's file of packages that are installed as well", "")
SETUP: Final = Variable("FLK_SETUP", "shell command that runs once in each pod before the ranks start", "")
PREPARATION: Final = (PIP, REQUIREMENTS, SETUP)
ON_RESTART: Final[Variable[tuple[str, ...]]] = Variable(
    "FLK_ON_RESTART", "arguments that the script gets after its own in every attempt but the first", (), words
)
PRELOAD: Final[Variable[tuple[str, ...]]] = Variable(
    "FLK_PRELOAD",
    "modules that are imported once for the ranks of all attempts; unset: packages that the script imports at its top",
    (),
    words,
)
RESTARTED: Final = Variable("FLK_RESTARTED", "yes: the job was created again by flk restart, after it had ended", "")
PACKAGES: Final = Variable("FLK_PACKAGES", "folder of the packages (set by `flk run`)", "")
SETUP_DONE: Final = Variable("FLK_SETUP_DONE", "file that says that FLK_SETUP has run (set by `flk run`)", "")
WORK: Final = Variable("FLK_WORK", "folder into which the code is unpacked; working folder of the ranks", "")
MEMORY_ROOT: Final = Variable(
    "FLK_MEMORY_ROOT", "folder in memory (tmpfs) for checkpoints; unset: none are kept in memory", ""
)
RECORDS: Final = Variable(
    "FLK_RECORDS", "ConfigMap in which pod 0's launcher keeps the record of the job; unset: none", ""
)
TERMINATION_LOG: Final = Variable(
    "FLK_TERMINATION_LOG", "file for the final job record; in a pod, the termination message", ""
)

# Of the ranks, in addition to torchrun's variables.
BATCH: Final = Variable(
    "FLK_BATCH",
    "global batch of an elastic job with fewer pods: keep (default) or scale",
    BATCHES[0],
    choice(BATCHES),
)
DILOCO_OPTIONS: Final = Variable("FLK_DILOCO", "options of strategy diloco: KEY=VALUE, separated by commas", "")
SERVICE: Final = Variable(
    "FLK_SERVICE",
    "module of an extension that pod 0's launcher runs as a program beside the ranks; unset: none",
    "",
)
SERVICE_ADDRESS: Final = Variable("FLK_SERVICE_ADDRESS", "host:port of that program, in this job or in another one", "")
SERVICE_SECRET: Final = Variable(
    "FLK_SERVICE_SECRET", "the program and its clients authenticate each other with it; unset: with FLK_SERVICE_KEY", ""
)
SERVICE_KEY: Final = Variable("FLK_SERVICE_KEY", "a secret of the job for this; set by the launcher", "")
PROGRESS: Final = Variable("FLK_PROGRESS", "file of the progress page that a rank shares with its launcher", "")
OBSERVER: Final = Variable(
    "FLK_OBSERVER",
    "path, without suffix, of the files through which the launcher reads a rank's stacks",
    "",
)
CHOICE: Final = Variable("FLK_CHOICE", "file of a pod that keeps the choice of strategy auto for later attempts", "")
MEMORY: Final = Variable("FLK_MEMORY", "socket on which the launcher answers ranks about checkpoints in memory", "")
REPORT_FD: Final = Variable(
    "FLK_REPORT_FD",
    "file descriptor, and inode, of the pipe on which a rank reports its failure to the launcher",
    "",
)
