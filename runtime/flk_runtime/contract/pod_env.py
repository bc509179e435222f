"""Environment variables by which the manifest and the launchers configure the pods: for flk only."""

from __future__ import annotations

from typing import Final

# Of the launcher. The manifest or `flk run` sets these variables.
RDZV_ENDPOINT: Final = "FLK_RDZV_ENDPOINT"  # host:port of the rendezvous, which the launcher of pod 0 serves
JOB_UID: Final = "FLK_JOB_UID"  # UID of the PyTorchJob, which distinguishes jobs that have the same name
RDZV_SECRET: Final = "FLK_RDZV_SECRET"  # noqa: S105 - launchers authenticate each other with it; ranks do not get it
POD_INDEX: Final = "FLK_POD_INDEX"  # index of this pod, from 0
PODS: Final = "FLK_PODS"  # number of pods; of an elastic job the most that it may have; spares included
MIN_PODS: Final = "FLK_MIN_PODS"  # pods with which an attempt of an elastic job may start; unset: all that train
SPARES: Final = "FLK_SPARES"  # how many of the pods wait to take the place of a lost one
PROCESSES: Final = "FLK_PROCESSES"  # number of ranks in each pod
POD_IP: Final = "FLK_POD_IP"  # IP address of this pod
GPUS: Final = "FLK_GPUS"  # number of GPUs that this pod has requested; 0 or unset: none
CPUS: Final = "FLK_CPUS"  # CPU request of the pod, rounded up; 0 or unset: no request
RESTARTS: Final = "FLK_RESTARTS"  # how many attempts may follow failures of the training code
DISRUPTIONS: Final = "FLK_DISRUPTIONS"  # how many attempts may follow disruptions: lost pods, preemptions, connections
DEADLINE: Final = "FLK_DEADLINE"  # seconds from the start of the launcher; 0 or unset: no deadline
GRACE: Final = "FLK_GRACE"  # seconds between the signal that stops the pod and SIGKILL for its ranks
PARENT: Final = "FLK_PARENT"  # process id; the launcher ends when this process ends (set by `flk run`)
CODE: Final = "FLK_CODE"  # folder with the archive of the user's code, or with its files; unset: the image has the code
CODE_HASH: Final = "FLK_CODE_HASH"  # SHA-256 of the archive, in hex
WORK: Final = "FLK_WORK"  # folder into which the code is unpacked; working folder of the ranks
MEMORY_ROOT: Final = "FLK_MEMORY_ROOT"  # folder in memory (tmpfs) for checkpoints; unset: none are kept in memory
RECORDS: Final = "FLK_RECORDS"  # ConfigMap in which pod 0's launcher keeps the record of the job; unset: none
TERMINATION_LOG: Final = "FLK_TERMINATION_LOG"  # file for the final job record; in a pod, the termination message

# Of the ranks, in addition to torchrun's variables.
BATCH: Final = "FLK_BATCH"  # global batch of an elastic job with fewer pods: keep (default) or scale
DILOCO_OPTIONS: Final = "FLK_DILOCO"  # options of strategy diloco: KEY=VALUE, separated by commas
MEET: Final = "FLK_MEET"  # host:port where the workers of strategy diloco meet
MEET_SECRET: Final = "FLK_MEET_SECRET"  # noqa: S105 - with which workers and hub authenticate each other
MEET_CA: Final = "FLK_MEET_CA"  # file with the certificates that the hub's is checked against; empty: no TLS
MEET_CERTIFICATE: Final = "FLK_MEET_CERTIFICATE"  # folder with tls.crt and tls.key of the hub; empty: no TLS
HUB_PORT: Final = "FLK_HUB_PORT"  # port on which the launcher of pod 0 serves the hub; 0 or unset: no hub
PROGRESS: Final = "FLK_PROGRESS"  # file of the progress page that a rank shares with its launcher
OBSERVER: Final = "FLK_OBSERVER"  # path, without suffix, of the files through which the launcher reads a rank's stacks
CHOICE: Final = "FLK_CHOICE"  # file of a pod that keeps the choice of strategy auto for later attempts
MEMORY: Final = "FLK_MEMORY"  # socket on which the launcher answers ranks about checkpoints in memory
REPORT_FD: Final = "FLK_REPORT_FD"  # file descriptor of the pipe on which a rank reports its failure to the launcher
