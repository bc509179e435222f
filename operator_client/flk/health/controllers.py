"""Checks of the cluster: the API server, the API of the target, and the controllers that create the pods of jobs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from flk.health.facts import Facts, Level, Result, Unreadable
from flk.kube import Object
from flk.targets.controllers import CONTROLLERS, Controller, trouble
from flk.targets.trainjob import RUNTIME

OLDEST_KUBERNETES: Final = (1, 25)
_SKEW: Final = 60.0  # seconds: from here on ages and timeouts are misleading
_TESTED: Final = {"operator": "1.9.4"}
# What versions of a controller before the given one lack, and whether jobs can run without it.
_LACKS: Final[Mapping[str, Sequence[tuple[tuple[int, ...], Level, str]]]] = {
    "operator": (
        ((1, 7, 0), Level.FAILED, "it does not know runPolicy.suspend, with which every job of flk begins"),
        (
            (1, 8, 0),
            Level.WARNING,
            "it does not validate jobs, so mistakes in a patch show only in the events of the job",
        ),
    ),
}


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
    """Check that the cluster serves the kind of objects that jobs become."""
    target, kinds = facts.target, f"{facts.target.kind}s"
    install = next((controller.install for controller in CONTROLLERS[target.name]), "")
    if isinstance(facts.api, Unreadable):
        if facts.api.missing:
            found = f"the cluster does not serve {kinds} ({target.api_version})"
            yield Result(target.plural, Level.FAILED, found, install)
        else:
            found = f"the API {target.api_version} cannot be read: {facts.api.reason}"
            yield Result(target.plural, Level.UNKNOWN, found)
        return
    names = {resource.get("name") for resource in facts.api.get("resources") or []}
    if target.plural not in names:
        yield Result(target.plural, Level.FAILED, f"the API {target.api_version} has no {kinds}", install)
    else:
        yield Result(target.plural, Level.OK, f"the cluster serves {kinds} ({target.api_version})")


def check_runtime(facts: Facts) -> Iterator[Result]:
    """Check that the cluster has flk's ClusterTrainingRuntime, where the target is a TrainJob."""
    if facts.runtime is None:
        return
    if not isinstance(facts.runtime, Unreadable):
        yield Result("runtime", Level.OK, f"the ClusterTrainingRuntime {RUNTIME} is there")
    elif facts.runtime.missing:
        found = f"there is no ClusterTrainingRuntime {RUNTIME}, which TrainJobs of flk need"
        remedy = "kubectl apply --server-side -f k8s/training-runtime.yaml in flk's repository, or its chart with "
        yield Result("runtime", Level.FAILED, found, f"{remedy}trainingRuntime.create=true")
    else:
        found = f"whether there is a ClusterTrainingRuntime {RUNTIME} is not known: {facts.runtime.reason}"
        yield Result("runtime", Level.UNKNOWN, found)


def check_controllers(facts: Facts) -> Iterator[Result]:
    """Check that the controllers that create the pods run, and what their versions lack."""
    for controller in CONTROLLERS[facts.target.name]:
        deployments = facts.controllers[controller.check]
        if isinstance(deployments, Unreadable):
            found = f"whether {controller.name} runs is not known: {deployments.reason}"
            yield Result(controller.check, Level.UNKNOWN, found)
        elif deployments:
            for deployment in deployments:
                yield from _check_deployment(facts, controller, deployment)
        elif not isinstance(facts.api, Unreadable):
            found = f"no Deployment of {controller.name} was found, so a job may stay without pods"
            yield Result(controller.check, Level.WARNING, found, controller.install)


def _check_deployment(facts: Facts, controller: Controller, deployment: Object) -> Iterator[Result]:
    context = facts.flags.partition(" --context")
    image = deployment["spec"]["template"]["spec"]["containers"][0].get("image", "")
    what = f"{controller.name} ({image}) in namespace {deployment['metadata']['namespace']}"
    problem = trouble(controller, deployment)
    if problem:
        remedy = f"kubectl {problem.remedy}{context[1]}{context[2]}"
        yield Result(controller.check, Level.FAILED, f"{what} {problem.found}, so no job gets pods", remedy)
    else:
        yield Result(controller.check, Level.OK, f"{what} runs")
    version = version_number(image.rpartition(":")[2])
    for since, level, lacks in _LACKS.get(controller.check, ()):
        if version and version < since:
            remedy = f"upgrade it; flk is tested with {_TESTED[controller.check]}"
            yield Result(controller.check, level, f"{what} is old: {lacks}", remedy)


def version_number(text: str) -> tuple[int, ...]:
    """Return the numbers of a version like ``v1.9.4-gke.1``; empty if it has none."""
    match = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(part) for part in match.groups() if part is not None) if match else ()
