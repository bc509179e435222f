"""The API server, the API of the target, and the controllers that create the pods of jobs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from flk.health.cause import Cause, Found, event_evidence, subject
from flk.health.cluster import Cluster, Level, Result, Unreadable
from flk.kube import Object
from flk.observe.model import Evidence, PodPhase, PodState
from flk.observe.pods import one_line
from flk.observe.view import JobView
from flk.targets.model import Controller, trouble
from flk.targets.trainjob import RUNTIME
from flk.units import short_duration, timestamp
from flk_runtime.contract.failure import ExitCode

NAMESPACE: Final = "namespace"  # the check without which no check of a job says anything
OLDEST_KUBERNETES: Final = (1, 25)
_INSTALL: Final = {
    "pytorchjob": "; `k8s/install-operator` installs it",
    "trainjob": "; `k8s/install-trainer` installs it",
}
_SKEW: Final = 60.0  # seconds: from here on ages and timeouts are misleading
_TESTED: Final = {"operator": "1.9.4"}
# Features that a controller lacks before the given version, and whether jobs can run without them.
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


def before(cluster: Cluster) -> Iterator[Result]:
    """Check the API server, the namespace, the API of the target, and its controllers."""
    yield from _check_server(cluster)
    yield from _check_namespace(cluster)
    yield from _check_api(cluster)
    yield from _check_runtime(cluster)
    yield from _check_controllers(cluster)


def _check_server(cluster: Cluster) -> Iterator[Result]:
    """Check the version and the clock of the API server."""
    if isinstance(cluster.version, Unreadable):
        yield Result("kubernetes", Level.UNKNOWN, f"the API server does not tell its version: {cluster.version.reason}")
        return
    text = str(cluster.version.get("gitVersion") or "")
    number = version_number(text)
    if number and number < OLDEST_KUBERNETES:
        oldest = ".".join(map(str, OLDEST_KUBERNETES))
        yield Result(
            "kubernetes", Level.WARNING, f"the API server has version {text}; flk is made for {oldest} or newer"
        )
    else:
        yield Result("kubernetes", Level.OK, f"the API server answers, version {text}")
    if abs(cluster.skew) > _SKEW:
        side = "behind" if cluster.skew > 0 else "ahead of"
        found = f"this machine's clock is {abs(cluster.skew):.0f} s {side} the server's"
        yield Result("clock", Level.WARNING, found, "set this machine's clock: credentials may count as expired")


def _check_namespace(cluster: Cluster) -> Iterator[Result]:
    """Check that the namespace exists and is not being deleted. What the user may create in it is another check."""
    refusal = cluster.accepted if isinstance(cluster.accepted, Unreadable) else Unreadable("")
    if refusal.missing:
        yield Result(NAMESPACE, Level.FAILED, refusal.reason, refusal.remedy)
    elif "NamespaceTerminating" in refusal.causes:
        found = f"namespace {cluster.namespace} is being deleted, and nothing can be created in it"
        shown = cluster.commands.kubectl(f"get namespace {cluster.namespace} -o yaml", namespaced=False)
        yield Result(NAMESPACE, Level.FAILED, found, f"choose another --namespace; {shown} shows what it waits for")


def _check_api(cluster: Cluster) -> Iterator[Result]:
    """Check that the cluster serves the kind of objects that jobs become."""
    target, kinds = cluster.target, f"{cluster.target.kind}s"
    if not isinstance(cluster.api, Unreadable):
        yield Result(target.plural, Level.OK, f"the cluster serves {kinds} ({cluster.api.api_version})")
    else:
        unread = f"the API {target.api_version} cannot be read"
        yield cluster.api.result(target.plural, cluster.api.reason, cluster.api.remedy, unread=unread)


def _check_runtime(cluster: Cluster) -> Iterator[Result]:
    """Check that the cluster has flk's ClusterTrainingRuntime, where the target is a TrainJob."""
    if cluster.runtime is None:
        return
    if not isinstance(cluster.runtime, Unreadable):
        yield Result("runtime", Level.OK, f"the ClusterTrainingRuntime {RUNTIME} is there")
    else:
        found = f"there is no ClusterTrainingRuntime {RUNTIME}, which TrainJobs of flk need"
        create = cluster.commands.kubectl("apply --server-side -f k8s/training-runtime.yaml", namespaced=False)
        remedy = f"create it in a copy of flk's repository: {create}; or install flk's chart: trainingRuntime.create"
        unread = f"whether there is a ClusterTrainingRuntime {RUNTIME} is not known"
        yield cluster.runtime.result("runtime", found, remedy, unread=unread)


def _check_controllers(cluster: Cluster) -> Iterator[Result]:
    """Check that the controllers that create the pods run, and that their versions have the features that flk needs."""
    for controller in cluster.target.controllers:
        deployments = cluster.controllers[controller.check]
        if isinstance(deployments, Unreadable):
            found = f"whether {controller.name} runs is not known: {deployments.reason}"
            yield Result(controller.check, Level.UNKNOWN, found)
        elif deployments:
            for deployment in deployments:
                yield from _check_deployment(cluster, controller, deployment)
        elif not isinstance(cluster.api, Unreadable):
            found = f"no Deployment of {controller.name} was found, so a job may stay without pods"
            yield Result(controller.check, Level.WARNING, found, controller.install)


def _check_deployment(cluster: Cluster, controller: Controller, deployment: Object) -> Iterator[Result]:
    image = deployment["spec"]["template"]["spec"]["containers"][0].get("image", "")
    what = f"{controller.name} ({image}) in namespace {deployment['metadata']['namespace']}"
    problem = trouble(controller, deployment)
    if problem:
        remedy = cluster.commands.kubectl(problem.remedy, namespaced=False)
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


def _job_invalid(view: JobView) -> Found | None:
    refusals = [event for event in view.job_events if str(event.get("reason")).endswith("FailedValidation")]
    if not refusals or view.objects:
        return None
    why = one_line(refusals[-1].get("message")).partition(" because ")[2] or one_line(refusals[-1].get("message"))
    return Found(
        f"the training operator refuses the job: {why}",
        f"correct the manifest and create the job again; {view.describe} shows what the operator says",
        [event_evidence(refusals[-1])],
    )


def _managed_elsewhere(view: JobView) -> Found | None:
    manager = str(view.run_policy.get("managedBy") or "")
    if view.seen_by_operator or not manager or manager == "kubeflow.org/training-operator":
        return None
    return Found(
        f"the training operator leaves this job alone because its manager is {manager}, which has not acted on it",
        f"{view.describe} shows spec.runPolicy.managedBy; create the job without that field to have it run in this "
        "cluster",
        [Evidence(view.subject, manager, "spec.runPolicy.managedBy", view.created)],
    )


def _operator_not_running(view: JobView) -> Found | None:
    if not view.awaits_controller:
        return None
    away = _away(view)
    untouched = not view.seen_by_operator and all(pod.phase == PodPhase.MISSING for pod in view.pods)
    if away is not None or not untouched:
        return away
    pods = view.kubectl_of_cluster(view.target.controller_pods)
    remedy = f"{pods} shows the operator's pod{_INSTALL.get(view.target.name, '')}"
    return Found(
        f"{view.target.controller} has not touched the job: it does not run in this cluster, or it does not watch "
        "this namespace",
        remedy,
        [_untouched(view)],
    )


def _away(view: JobView) -> Found | None:
    """Find a controller of the job whose Deployment could be read and has no ready pod."""
    for controller in view.target.controllers:
        deployments = view.seen.controllers.get(controller.check, ())
        troubles = [trouble(controller, deployment) for deployment in deployments]
        if not troubles or troubles[0] is None or None in troubles:
            continue
        first, lacking = deployments[0]["metadata"], view.lacking
        changed = max((timestamp(entry.get("time")) for entry in first.get("managedFields") or []), default=0.0)
        where = f"Deployment {first['name']} in namespace {first['namespace']}"
        gone = view.seen_by_operator and lacking
        return Found(
            f"{controller.name} {troubles[0].found}, so nothing creates {subject(lacking) if lacking else 'its pods'}",
            view.kubectl_of_cluster(troubles[0].remedy),
            [
                Evidence(where, troubles[0].value, troubles[0].field, changed),
                _absence(lacking[0]) if gone else _untouched(view),
            ],
            [pod.name for pod in lacking],
            since=max(changed, view.created),
        )
    return None


def _untouched(view: JobView) -> Evidence:
    age = short_duration(view.now - view.created)
    return Evidence(view.subject, f"no conditions, {age} after its creation", "status", view.created)


def _absence(pod: PodState) -> Evidence:
    """Return the evidence that a pod does not exist, or that it has ended and was not replaced."""
    if pod.phase == PodPhase.MISSING:
        return Evidence(f"pod {pod.name}", "it does not exist")
    text = f"it has ended ({pod.reason or f'exit code {pod.exit_code}'}) and was not replaced"
    return Evidence(f"pod {pod.name}", text, "status.phase", pod.ended or 0.0)


CAUSES: Final = (
    Cause(
        "JobInvalid",
        _job_invalid,
        ExitCode.USAGE,
        grace=30,
    ),
    Cause(
        "ManagedElsewhere",
        _managed_elsewhere,
        grace=60,
    ),
    Cause(
        "OperatorNotRunning",
        _operator_not_running,
        grace=120,
    ),
)
