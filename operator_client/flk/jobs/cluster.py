"""Read a cluster for the checks before a job: many small requests at once, each of which may be refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, TypeVar

from flk.errors import ApiError, FlkError, ForbiddenError, NoConfigError, UnreachableError
from flk.health import scheduling
from flk.health.cluster import Cluster, Pods, Unreadable
from flk.health.controllers import Right, all_rights, resource_attributes
from flk.jobs.choice import targets
from flk.kube import Document, Object, RequestTarget, Resource
from flk.observe import resources
from flk.observe.client import JobClient
from flk.observe.pool import ReadPool
from flk.spec import defaults
from flk.targets import DEFAULT, TARGETS, Target
from flk.targets.trainjob import RUNTIME
from flk.user.commands import Commands

_NAMED: Final = {
    resource.plural: resource
    for resource in (resources.SECRETS, resources.CONFIG_MAPS, resources.CLAIMS, resources.LOCAL_QUEUES)
}
_VERSION: Final = Document(Resource("", "v1", "version"), document="/version")
_KARPENTER: Final = Document(Resource("karpenter.sh", "v1", ""), document="/apis/karpenter.sh")
_AUTOSCALER_STATUS: Final = RequestTarget(resources.CONFIG_MAPS, "kube-system", "cluster-autoscaler-status")

T = TypeVar("T")


def read_cluster(client: JobClient, pods: Pods | None = None) -> Cluster:
    """Return the cluster and the client's namespace as the checks need them; with ``pods`` also the objects they name.

    Raises UnreachableError and NoConfigError if the API server does not answer or refuses the credentials. Whatever
    else cannot be read becomes Unreadable.
    """
    target, gang = (pods.target, pods.gang) if pods else (_target(client), None)
    version = _call(client, "get", _VERSION)
    with ReadPool() as pool:
        futures: dict[str, Future[Any]] = {
            "api": pool.submit(_served, client, resources.RESOURCES[target.name]),
            "rights": pool.submit(_rights, client, all_rights(target, gang)),
            "accepted": pool.submit(_accepted, client),
            "nodes": pool.submit(_list, client, RequestTarget(resources.NODES)),
            "pending": pool.submit(
                _list, client, client.target(resources.PODS), {"fieldSelector": "status.phase=Pending"}
            ),
        }
        autoscalers = [pool.submit(_call, client, "get", where) for where in (_KARPENTER, _AUTOSCALER_STATUS)]
        if gang is not None:
            futures["gang_api"] = pool.submit(_served, client, resources.POD_GROUPS[gang.group])
        if target.name == "trainjob":
            futures["runtime"] = pool.submit(
                _call, client, "get", RequestTarget(resources.TRAINING_RUNTIMES, None, RUNTIME)
            )
        controllers = {
            each.check: pool.submit(_attempt, partial(client.list_deployments, each)) for each in target.controllers
        }
        named = {
            (kind, name): pool.submit(_call, client, "get", client.target(_NAMED[kind], name))
            for kind, name in (pods.named if pods else [])
        }
        values: dict[str, Any] = {name: future.result() for name, future in futures.items()}
        exist = [not isinstance(future.result(), Unreadable) for future in autoscalers]
        deployments = {check: future.result() for check, future in controllers.items()}
        objects = {key: future.result() for key, future in named.items()}
    rights = values["rights"]
    may_try = not isinstance(rights, Unreadable) and rights[("create", "pods")]  # which users of flk need not
    return Cluster(
        namespace=client.namespace,
        commands=Commands(client.namespace, client.api.access.context.named),
        version=version,
        target=target,
        gang=gang,
        controllers=deployments,
        named=objects,
        autoscaler=scheduling.of_cluster([] if isinstance(values["nodes"], Unreadable) else values["nodes"], *exist),
        admission=_admission(client, pods) if pods and may_try else None,
        **values,
    )


def _target(client: JobClient) -> Target:
    """Return the target of a job that leaves it to the site and to the cluster."""

    def name() -> str:
        site = defaults.parse(client.list_defaults())
        return next(targets(client, site.target, site.queue))

    chosen = _attempt(name)
    return DEFAULT if isinstance(chosen, Unreadable) else TARGETS[chosen]


def _served(client: JobClient, resource: Resource) -> Resource | Unreadable:
    return _attempt(lambda: client.api.served(resource))


def _attempt(request: Callable[[], T]) -> T | Unreadable:
    try:
        return request()
    except (UnreachableError, NoConfigError):
        raise
    except ForbiddenError as error:
        return Unreadable(str(error))
    except ApiError as error:
        return Unreadable(str(error), missing=error.status == 404, remedy=error.hint, causes=error.causes)
    except FlkError as error:
        return Unreadable(str(error))


def _call(client: JobClient, verb: str, target: RequestTarget, **how: Any) -> Object | Unreadable:
    return _attempt(lambda: client.api.call(verb, target, **how))


def _list(
    client: JobClient, target: RequestTarget, query: Mapping[str, str] | None = None
) -> list[Object] | Unreadable:
    return _attempt(lambda: client.api.list_all(target, query)[0])


def _accepted(client: JobClient) -> Object | Unreadable:
    """Have the API server check a ConfigMap, without creating it: who may submit may not read the namespace itself."""
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"generateName": "flk-doctor-"}}
    return _call(client, "create", client.target(resources.CONFIG_MAPS), query={"dryRun": "All"}, body=body)


def _rights(client: JobClient, rights: Sequence[Right]) -> dict[Right, bool] | Unreadable:
    """Ask for every right that flk's commands need, and for the right to create pods, which a trial of a pod needs."""
    questions = [*rights, ("create", "pods")]
    with ReadPool() as pool:
        answers = list(pool.map(lambda question: _may(client, *question), questions))
    for answer in answers:
        if isinstance(answer, Unreadable):
            return answer
    return {question: bool(answer) for question, answer in zip(questions, answers, strict=True)}


def _may(client: JobClient, verb: str, resource: str) -> bool | Unreadable:
    group, plural, subresource = resource_attributes(resource)
    attributes = {"namespace": client.namespace, "verb": verb, "group": group, "resource": plural}
    if subresource:
        attributes["subresource"] = subresource
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    answer = _call(client, "create", RequestTarget(resources.ACCESS_REVIEWS), body=body)
    return answer if isinstance(answer, Unreadable) else bool((answer.get("status") or {}).get("allowed"))


def _admission(client: JobClient, pods: Pods) -> Object | Unreadable:
    """Have the API server check a pod of the job, without creating it."""
    metadata = {"generateName": "flk-doctor-", **(pods.template.get("metadata") or {})}
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {**pods.spec, "restartPolicy": "Never"}}
    return _call(client, "create", client.target(resources.PODS), query={"dryRun": "All"}, body=body)
