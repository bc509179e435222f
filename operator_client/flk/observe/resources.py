"""The kinds of objects that flk asks the API server for: a table of their groups, versions and plurals."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from flk import targets
from flk.kube import Object, Resource
from flk.targets import TARGETS
from flk.targets.gang import GANGS

# By the names of targets: the kinds of objects that jobs are.
RESOURCES: Final = {
    target.name: Resource(
        target.group,
        target.version,
        target.plural,
        jobs=f"{target.kind}s",
        install=next((controller.install for controller in target.controllers), ""),
    )
    for target in TARGETS.values()
}
PODS: Final = Resource("", "v1", "pods")
LOGS: Final = replace(PODS, subresource="log")
EXEC: Final = replace(PODS, subresource="exec")
PORT_FORWARD: Final = replace(PODS, subresource="portforward")
EVENTS: Final = Resource("", "v1", "events")
CONFIG_MAPS: Final = Resource("", "v1", "configmaps")
SECRETS: Final = Resource("", "v1", "secrets")
SERVICES: Final = Resource("", "v1", "services")
NAMESPACES: Final = Resource("", "v1", "namespaces")
NODES: Final = Resource("", "v1", "nodes")
CLAIMS: Final = Resource("", "v1", "persistentvolumeclaims")
DEPLOYMENTS: Final = Resource("apps", "v1", "deployments")
ACCESS_REVIEWS: Final = Resource("authorization.k8s.io", "v1", "selfsubjectaccessreviews")
TRAINING_RUNTIMES: Final = replace(RESOURCES["trainjob"], plural="clustertrainingruntimes", jobs="", install="")
# Kueue's, and its Visibility API.
WORKLOADS: Final = Resource(
    "kueue.x-k8s.io",
    "v1beta2",
    "workloads",
    others=("v1beta1",),
    install="install Kueue, or leave --queue out; the defaults of the namespace may set it, too",
)
LOCAL_QUEUES: Final = replace(WORKLOADS, plural="localqueues")
PENDING_WORKLOADS: Final = replace(
    LOCAL_QUEUES, group="visibility.kueue.x-k8s.io", subresource="pendingworkloads", install=""
)
# By the groups of the gang schedulers.
POD_GROUPS: Final = {
    gang.group: Resource(
        gang.group,
        gang.versions[0],
        "podgroups",
        others=gang.versions[1:],
        install=f"{gang.install}, or choose another --gang",
    )
    for gang in GANGS.values()
}
_OWNED: Final = {"ConfigMap": CONFIG_MAPS, "Secret": SECRETS, "Service": SERVICES}


def resource_of(job: Object) -> Resource:
    """Return the kind of objects that a job is of."""
    return RESOURCES[targets.target_of(job).name]


def owned_resource(manifest: Object) -> Resource | None:
    """Return the kind of an object that a job owns; None for other objects."""
    if manifest["kind"] == "PodGroup":
        return POD_GROUPS[manifest["apiVersion"].partition("/")[0]]
    return _OWNED.get(manifest["kind"])


def qualified(kind: str, name: str) -> str:
    """Return the name of a job as ``kubectl -o name`` prints it, without a kind (empty) just its name.

    As in ``pytorchjob.kubeflow.org/gpt``.
    """
    resource = next((RESOURCES[target.name] for target in TARGETS.values() if target.kind == kind), None)
    return f"{resource.singular}/{name}" if resource else name
