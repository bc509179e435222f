"""The API server, the rights that flk needs there, the API of the target, and the controllers that create pods."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from flk.health.cause import Cause, Found, changed_at, names, subject
from flk.health.cluster import Cluster, Level, Result, Unreadable
from flk.health.queue import awaits_room
from flk.kube import Object
from flk.observe.model import Evidence, PodPhase, PodState
from flk.observe.observation import event_time
from flk.observe.view import JobView
from flk.spec.units import short_duration, timestamp
from flk.targets.gang import GANGS, Gang
from flk.targets.model import Controller, Target, trouble
from flk.targets.trainjob import RUNTIME

NAMESPACE: Final = "namespace"  # the check without which no check of a job says anything
OLDEST_KUBERNETES: Final = (1, 29)
_INSTALL: Final = {
    "pytorchjob": "; `k8s/install-operator` installs it",
    "trainjob": "; `k8s/install-trainer` installs it",
}
OLDEST_OPERATOR: Final = (1, 8)
LONGEST_PAUSE: Final = 900.0  # seconds: the controller of Jobs waits up to ten minutes before it replaces a pod


def before(cluster: Cluster) -> Iterator[Result]:
    """Check the API server, the namespace, the user's rights, the API of the target, and its controllers."""
    yield from _check_server(cluster)
    yield from _check_namespace(cluster)
    yield from _check_rights(cluster)
    yield from _check_api(cluster)
    yield from _check_runtime(cluster)
    yield from _check_controllers(cluster)


def _check_server(cluster: Cluster) -> Iterator[Result]:
    """Check the version of the API server."""
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
        yield Result(target.plural, Level.OK, f"jobs become {kinds} ({cluster.api.api_version}) here")
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
    if controller.check == "operator" and version and version < OLDEST_OPERATOR:
        lacks = "before 1.8 it takes invalid jobs, and leaves them without pods"
        yield Result(controller.check, Level.FAILED, f"{what} is old: {lacks}", "upgrade it; flk is tested with 1.9.4")


def version_number(text: str) -> tuple[int, ...]:
    """Return the numbers of a version like ``v1.9.4-gke.1``; empty if it has none."""
    match = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(part) for part in match.groups() if part is not None) if match else ()


# The rights that flk's commands need in a namespace, by target. The Role of charts/flk gives those that are not
# optional, for the targets and gangs of its values, and k8s/rbac.yaml for all targets without a gang:
# scripts/chart/rights.py makes their rules of this table.
Right = tuple[str, str]  # a verb and a resource
Rights = dict[str, list[Right]]  # by command


def rights_for(target: Target, gang: Gang | None = None) -> Rights:
    """Return the rights that each command needs for jobs of a target, whose pods a gang may start together."""
    jobs = f"{target.plural}.{target.group}"
    follow = [("list", jobs), ("watch", jobs), ("list", "pods"), ("watch", "pods"), ("get", "pods/log")]
    state = [("get", jobs), ("list", "pods"), ("list", "events"), ("get", "pods/log")]
    # The objects that a job owns beside ConfigMaps and Secrets.
    owned = ["services"] if target.name == "job" else []
    groups = [f"podgroups.{gang.api_version.partition('/')[0]}"] if gang else []
    owned += groups
    workloads, pending = "workloads.kueue.x-k8s.io", ("get", "localqueues.visibility.kueue.x-k8s.io/pendingworkloads")
    return {
        "submit": [
            *(("create", resource) for resource in (jobs, "configmaps", "secrets", *owned)),
            *((verb, jobs) for verb in ("get", "patch", "delete")),
            *((verb, "configmaps") for verb in ("get", "list", "patch")),
        ],
        "doctor": [
            ("get", "persistentvolumeclaims"),
            ("get", "localqueues.kueue.x-k8s.io"),
        ],
        "status": state,
        "why": [
            *state,
            ("get", "persistentvolumeclaims"),
            ("list", workloads),
            pending,
            *(("get", group) for group in groups),
        ],
        "list": [
            *(
                ("list", resource)
                for resource in (jobs, "pods", "events", "persistentvolumeclaims", workloads, *groups)
            ),
            pending,
        ],
        "logs": [*follow, ("get", "pods")],
        "wait": [*follow, *state],
        "suspend": [("get", jobs), ("patch", jobs), *follow],
        "resume": [("get", jobs), ("patch", jobs)],
        "restart": [
            *((verb, jobs) for verb in ("get", "patch", "create", "delete")),
            *((verb, "configmaps") for verb in ("get", "create", "patch")),
            *((verb, resource) for resource in owned for verb in ("list", "create")),
            ("create", "secrets"),
            *follow,
        ],
        "delete": [("get", jobs), ("delete", jobs), *follow],
    }


# Commands that people work without. The chart gives these rights only where rbac.exec asks for them. The request that
# opens a WebSocket is a "get"; newer API servers ask for "create" as well.
_EXEC: Final[list[Right]] = [("get", "pods/exec"), ("create", "pods/exec")]
OPTIONAL: Final[Rights] = {
    **dict.fromkeys(("cp", "exec", "profile", "stacks"), _EXEC),
    "port-forward": [("get", "pods/portforward"), ("create", "pods/portforward")],
}


def all_rights(target: Target, gang: Gang | None = None) -> Sequence[Right]:
    """Return every verb and resource that a command needs for jobs of a target, each once."""
    tables = (rights_for(target, gang), OPTIONAL)
    return sorted({right for table in tables for rights in table.values() for right in rights})


def resource_attributes(resource: str) -> tuple[str, str, str]:
    """Return the group of a resource of the table, its plural and its subresource, each of which may be empty."""
    name, _, subresource = resource.partition("/")
    plural, _, group = name.partition(".")
    return group, plural, subresource


def _check_rights(cluster: Cluster) -> Iterator[Result]:
    """Say which commands the user has no right for."""
    if isinstance(cluster.rights, Unreadable):
        yield Result("rights", Level.UNKNOWN, f"the API server does not say what you may do: {cluster.rights.reason}")
        return
    allowed, needed = cluster.rights, rights_for(cluster.target, cluster.gang)
    denied = sorted({r for rights in needed.values() for r in rights if not allowed.get(r)})
    optional = [verb for verb, rights in OPTIONAL.items() if not all(allowed.get(right) for right in rights)]
    remedy = "ask the administrator for a Role such as the one in flk's k8s/rbac.yaml or in its chart"
    if cluster.gang is not None:
        gang = next(name for name, known in GANGS.items() if known is cluster.gang)
        values = f"rbac.targets={{{cluster.target.name}}} and rbac.gangs={{{gang}}}"
        remedy = f"ask the administrator for the Role of flk's chart with {values}"
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}  # the resources, by the verb and the commands
    for verb, resource in denied:
        commands = tuple(f"flk {command}" for command, rights in needed.items() if (verb, resource) in rights)
        groups.setdefault((verb, commands), []).append(resource)
    for (verb, commands), resources in groups.items():
        which = f"which {_listed(commands)} {'needs' if len(commands) == 1 else 'need'}"
        found = f"you may not {verb} {_listed(resources)} in namespace {cluster.namespace}, {which}"
        yield Result("rights", Level.FAILED if "flk submit" in commands else Level.WARNING, found, remedy)
    if not denied:
        without = f"; not for {_listed(optional)}" if optional else ""
        yield Result("rights", Level.OK, f"you have the rights for all commands of flk{without}")


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _operator_not_running(view: JobView) -> Found | None:
    if not view.awaits_controller:
        return None
    away = _away(view)
    untouched = not view.seen_by_operator and all(pod.phase == PodPhase.MISSING for pod in view.pods)
    if away is not None or not untouched:
        return away or _idle(view)
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
        changed = changed_at(deployments[0])
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


def _idle(view: JobView) -> Found | None:
    """Return that a controller has left the job without pods for longer than any pause of it, and says nothing.

    It may wait itself: for the scheduler of a gang, or for pods that run, as an initializer, before it makes others.
    """
    waits = "podgroups" in view.seen.unreadable or any(map(awaits_room, view.seen.pod_groups))
    if waits or any(pod.phase == PodPhase.RUNNING for pod in view.pods):
        return None
    conditions = [timestamp(condition.get("lastTransitionTime")) for condition in view.conditions.values()]
    deleted = [timestamp(pod["metadata"].get("deletionTimestamp")) for pod in view.replaced_pods.values()]
    pods = [time for pod in view.pods for time in (pod.started, pod.ended) if time]
    last = max([view.created, *conditions, *deleted, *pods, *map(event_time, view.events)])
    if view.now - last < LONGEST_PAUSE or not view.lacking:
        return None
    return Found(
        f"{view.target.controller} has not created {subject(view.lacking)} in {short_duration(view.now - last)}, and "
        "no event says why: it does not act on the job any more, or has lost its rights",
        f"{view.kubectl_of_cluster(view.target.controller_pods)} shows its pods, whose logs say more",
        [_absence(view.lacking[0])],
        names(view.lacking),
        since=last,
    )


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
        "OperatorNotRunning",
        _operator_not_running,
        grace=120,
        awaits="the operator: away, its CRDs only, without its rights, or elsewhere",
    ),
)
