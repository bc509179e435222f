"""The controllers that create the pods of jobs, as a table by target, and why a controller does not work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from flk.targets.model import Object


@dataclass(frozen=True)
class Controller:
    """A controller of jobs, which runs as a Deployment."""

    check: str  # name of doctor's check of this controller
    name: str  # with its article, as sentences have it
    selector: str  # labels of its Deployment and of its pods
    namespace: str  # where its own manifests install it
    install: str  # how to install it


_OPERATOR: Final = Controller(
    "operator",
    "the training operator",
    "control-plane=kubeflow-training-operator",
    "kubeflow",
    "install Kubeflow's training operator: k8s/install-operator in flk's repository, or its own manifests; "
    "or use --target auto, which takes what the cluster serves",
)
_TRAINER: Final = Controller(
    "trainer",
    "Kubeflow Trainer",
    "app.kubernetes.io/name=trainer",
    "kubeflow-system",
    "install Kubeflow Trainer 2: k8s/install-trainer in flk's repository, or its own manifests",
)
_JOBSET: Final = Controller(
    "jobset controller",
    "the JobSet controller",
    "app.kubernetes.io/name=jobset",
    "jobset-system",
    "install JobSet with its own manifests, or use --target job, which needs no controller",
)
# By the names of targets, the one that serves its API first. Trainer makes a JobSet of each TrainJob.
CONTROLLERS: Final[Mapping[str, Sequence[Controller]]] = {
    "pytorchjob": (_OPERATOR,),
    "trainjob": (_TRAINER, _JOBSET),
    "jobset": (_JOBSET,),
    "job": (),  # Kubernetes' own
}


@dataclass(frozen=True)
class Trouble:
    """Why a controller does not work: its Deployment has no ready pod."""

    found: str  # what follows the name of the controller: "is scaled to 0 pods"
    field: str  # path in the Deployment
    value: str
    remedy: str  # words for kubectl, with the namespace


def trouble(controller: Controller, deployment: Object) -> Trouble | None:
    """Return why a controller with this Deployment does not work, None if it has a ready pod."""
    name, where = deployment["metadata"]["name"], f"-n {deployment['metadata']['namespace']}"
    wanted = int((deployment.get("spec") or {}).get("replicas", 1))
    ready = int((deployment.get("status") or {}).get("readyReplicas") or 0)
    if wanted == 0:
        return Trouble("is scaled to 0 pods", "spec.replicas", "0", f"scale deployment {name} --replicas 1 {where}")
    if ready == 0:
        found = "has no pod that is ready"
        return Trouble(
            found, "status.readyReplicas", f"0 of {wanted}", f"describe pods -l {controller.selector} {where}"
        )
    return None
