"""Checks of the cluster: the API server, the PyTorchJob API and the training operator."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from flk.doctor.model import Facts, Level, Result, Unreadable
from flk.kube import Object

OLDEST_KUBERNETES: Final = (1, 25)
TESTED_OPERATOR: Final = (1, 9, 4)
# What versions of the operator before the given one lack, and whether jobs can run without it.
OPERATOR_LACKS: Final = (
    ((1, 7, 0), Level.FAILED, "it does not know runPolicy.suspend, with which every job of flk begins"),
    ((1, 8, 0), Level.WARNING, "it does not validate jobs, so mistakes in a patch show only in the events of the job"),
)
_SKEW: Final = 60.0  # seconds: from here on ages and timeouts are misleading
_INSTALL: Final = "install Kubeflow's training operator: k8s/install-operator in flk's repository, or its own manifests"


def check_server(facts: Facts) -> Iterator[Result]:
    """Check the version and the clock of the API server."""
    if isinstance(facts.version, Unreadable):
        yield Result("kubernetes", Level.UNKNOWN, f"the API server does not tell its version: {facts.version.reason}")
        return
    text = str(facts.version.get("gitVersion") or "")
    number = version_number(text)
    if number and number < OLDEST_KUBERNETES:
        oldest = ".".join(map(str, OLDEST_KUBERNETES))
        yield Result(
            "kubernetes", Level.WARNING, f"the API server has version {text}; flk is made for {oldest} or newer"
        )
    else:
        yield Result("kubernetes", Level.OK, f"the API server answers, version {text}")
    if abs(facts.skew) > _SKEW:
        found = (
            f"this machine's clock is {abs(facts.skew):.0f} s {'behind' if facts.skew > 0 else 'ahead of'} the server's"
        )
        yield Result("clock", Level.WARNING, found, "set this machine's clock: credentials may count as expired")


def check_api(facts: Facts) -> Iterator[Result]:
    """Check that the cluster serves PyTorchJobs."""
    if isinstance(facts.api, Unreadable):
        if facts.api.missing:
            yield Result(
                "pytorchjobs", Level.FAILED, "the cluster does not serve PyTorchJobs (kubeflow.org/v1)", _INSTALL
            )
        else:
            yield Result("pytorchjobs", Level.UNKNOWN, f"the API kubeflow.org/v1 cannot be read: {facts.api.reason}")
        return
    names = {resource.get("name") for resource in facts.api.get("resources") or []}
    if "pytorchjobs" not in names:
        yield Result("pytorchjobs", Level.FAILED, "the API kubeflow.org/v1 has no PyTorchJobs", _INSTALL)
    else:
        yield Result("pytorchjobs", Level.OK, "the cluster serves PyTorchJobs (kubeflow.org/v1)")


def check_operator(facts: Facts) -> Iterator[Result]:
    """Check that the training operator runs, and what its version lacks."""
    if isinstance(facts.operators, Unreadable):
        yield Result(
            "operator", Level.UNKNOWN, f"whether the training operator runs is not known: {facts.operators.reason}"
        )
        return
    if not facts.operators:
        if not isinstance(facts.api, Unreadable):
            found = "no Deployment of the training operator was found, so a job may stay without pods"
            yield Result("operator", Level.WARNING, found, _INSTALL)
        return
    for deployment in facts.operators:
        yield from _check_deployment(facts, deployment)


def _check_deployment(facts: Facts, deployment: Object) -> Iterator[Result]:
    name, namespace = deployment["metadata"]["name"], deployment["metadata"]["namespace"]
    wanted = int(deployment["spec"].get("replicas", 1))
    ready = int((deployment.get("status") or {}).get("readyReplicas") or 0)
    context = facts.flags.partition(" --context")
    where = f" -n {namespace}{context[1]}{context[2]}"
    image = deployment["spec"]["template"]["spec"]["containers"][0].get("image", "")
    what = f"the training operator ({image}) in namespace {namespace}"
    if wanted == 0:
        remedy = f"kubectl scale deployment {name} --replicas 1{where}"
        yield Result("operator", Level.FAILED, f"{what} is scaled to 0 pods, so no job gets pods", remedy)
    elif ready == 0:
        remedy = f"kubectl describe pods -l control-plane=kubeflow-training-operator{where}"
        yield Result("operator", Level.FAILED, f"{what} has no pod that is ready, so no job gets pods", remedy)
    else:
        yield Result("operator", Level.OK, f"{what} runs")
    version = version_number(image.rpartition(":")[2])
    for since, level, lacks in OPERATOR_LACKS:
        if version and version < since:
            newer = ".".join(map(str, TESTED_OPERATOR))
            yield Result("operator", level, f"{what} is old: {lacks}", f"upgrade it; flk is tested with {newer}")


def version_number(text: str) -> tuple[int, ...]:
    """Return the numbers of a version like ``v1.9.4-gke.1``; empty if it has none."""
    match = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(part) for part in match.groups() if part is not None) if match else ()
