"""Labels, annotations and API groups of the Kubernetes objects that flk writes or reads.

This module imports nothing of flk, so that commands that only read a cluster stay fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

KUBEFLOW_GROUP: Final = "kubeflow.org"

# Labels of the objects that flk creates.
MANAGED_BY: Final = {"app.kubernetes.io/managed-by": "flk"}
JOB: Final = "flk.dev/job"
DEFAULTS: Final = "flk.dev/defaults"  # "true" on a ConfigMap that holds the defaults of a namespace
DEFAULTS_KEY: Final = "defaults.yaml"  # key in the data of that ConfigMap
STUCK_AFTER: Final = "flk.dev/stuck-after"  # on a job: seconds after which one whose pods wait for nodes is stuck
SHARED: Final = "flk.dev/shared"  # "true" on a ConfigMap with an archive that all jobs of the namespace use
RECORDS: Final = "flk.dev/records"  # "true" on a ConfigMap in which launchers keep the records of jobs
QUEUE: Final = "kueue.x-k8s.io/queue-name"
QUEUE_PRIORITY: Final = "kueue.x-k8s.io/priority-class"
QUEUE_TOPOLOGY: Final = {  # on pods: the label of nodes by which Kueue keeps a job together, by how strictly
    "required": "kueue.x-k8s.io/podset-required-topology",
    "preferred": "kueue.x-k8s.io/podset-preferred-topology",
}
KUEUE_JOB_UID: Final = "kueue.x-k8s.io/job-uid"  # on Kueue's Workload: the UID of the job that it stands for

# Annotations of the job.
SUBMISSION: Final = "flk.dev/submission"  # a random id, equal in all attempts to create one job
INCOMPLETE: Final = "flk.dev/incomplete"  # "true" until all objects of the job exist
OWNER: Final = "flk.dev/owner"  # who submitted it, by the names on the machine: user@host
CODE_HASH: Final = "flk.dev/code-hash"
COMMIT: Final = "flk.dev/commit"  # of git, in which the code was; with "-dirty" if tracked files differed from it
VERSION: Final = "flk.dev/version"
SPEC: Final = "flk.dev/spec"

# Annotation of the pods.
STARTED: Final = "flk.dev/started"  # when their job was started or resumed, in seconds since the epoch

# Labels that the training operator puts on pods.
OPERATOR_JOB_NAME: Final = "training.kubeflow.org/job-name"
REPLICA_TYPE: Final = "training.kubeflow.org/replica-type"
REPLICA_INDEX: Final = "training.kubeflow.org/replica-index"


def of(item: Mapping[str, Any]) -> dict[str, str]:
    """Return the labels of an object."""
    return item["metadata"].get("labels") or {}


def annotations_of(item: Mapping[str, Any]) -> dict[str, str]:
    """Return the annotations of an object."""
    return item["metadata"].get("annotations") or {}
