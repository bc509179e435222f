"""The contract of client and pods: exit codes, variables, paths in the pod, failures, records, the format of logs.

Of the runtime the client imports this package only. It uses the standard library only, so that every command of the
client can import it fast.
"""

from __future__ import annotations

import enum
from typing import Final

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
    UNUSABLE = 144  # in pods only: a lost GPU, an unhealthy node or an unkillable rank: another pod replaces this one
