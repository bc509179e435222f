"""JobClient: the requests that flk sends about jobs, their pods, logs and events, in one namespace of a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

from flk import labels
from flk.errors import ApiError, ForbiddenError, JobNotFoundError, UsageError
from flk.kube import ApiClient, Object, Resource, Target, connect, connection_options
from flk.terminal import program_name
from flk.units import short_duration, timestamp
from flk_runtime.contract import CONTAINER

if TYPE_CHECKING:
    from flk.kube.execute import Executed

JOBS: Final = Resource(labels.KUBEFLOW_GROUP, "v1", "pytorchjobs")
PODS: Final = Resource("", "v1", "pods")
LOGS: Final = Resource("", "v1", "pods", "log")
EXEC: Final = Resource("", "v1", "pods", "exec")
PORT_FORWARD: Final = Resource("", "v1", "pods", "portforward")
EVENTS: Final = Resource("", "v1", "events")
CONFIG_MAPS: Final = Resource("", "v1", "configmaps")
SECRETS: Final = Resource("", "v1", "secrets")


class JobClient:
    """One namespace of a cluster. Objects are plain dicts of the API's JSON."""

    def __init__(self, api: ApiClient, namespace: str | None = None, *, context: str | None = None) -> None:
        self.api = api
        self.namespace = namespace or api.access.namespace
        self.chosen_context = context  # with --context; None for the current one

    @classmethod
    def connect(cls, context: str | None = None, namespace: str | None = None) -> JobClient:
        """Return a client for a context of the kubeconfig (default: the current one) and a namespace (default: its).

        Sends no request.
        """
        return cls(ApiClient(connect(context)), namespace, context=context)

    @property
    def context(self) -> str:
        """Name of the context."""
        return self.api.access.context.name

    def now(self) -> float:
        """Return the time by the API server's clock, in seconds since the epoch."""
        return self.api.now()

    def command(self, verb: str, job: str = "") -> str:
        """Return the flk command that does something with a job of this namespace, for hints."""
        words = [program_name(), verb, *([job] if job else []), "-n", self.namespace]
        return (
            " ".join(words + (["--context", self.chosen_context] if self.chosen_context else []))
            + connection_options().flags
        )

    @property
    def kubectl_flags(self) -> str:
        """The options with which kubectl uses the same namespace and context, for hints."""
        return f" -n {self.namespace}{self.api.access.context.flag}"

    # Reading

    def get_job(self, name: str) -> Object:
        """Return the PyTorchJob. Raises JobNotFoundError if there is none."""
        try:
            return self.api.call("get", self.target(JOBS, name))
        except JobNotFoundError as error:
            error.hint = f"{self.command('list')} lists those that exist"
            raise

    def list_jobs(self, *, all_namespaces: bool = False, selector: str | None = None) -> list[Object]:
        """Return the PyTorchJobs of the namespace, or of all namespaces, whose labels match the selector."""
        target = Target(JOBS, None if all_namespaces else self.namespace)
        return self.api.list_all(target, {"labelSelector": selector})[0]

    def list_pods(self, job: str | None = None, *, all_namespaces: bool = False) -> list[Object]:
        """Return the pods of one job, or of all jobs."""
        selector = f"{labels.OPERATOR_JOB_NAME}={job}" if job else labels.OPERATOR_JOB_NAME
        target = Target(PODS, None if all_namespaces else self.namespace)
        return self.api.list_all(target, {"labelSelector": selector})[0]

    def pod_of_rank(self, job: str, rank: int) -> str:
        """Return the name of the pod in which a rank runs. Raises UsageError if the job has fewer ranks."""
        spec = self.get_job(job)["spec"]
        count = str(spec.get("nprocPerNode") or "1")
        processes = int(count) if count.isdigit() else 1
        index = rank // processes
        for role, replica_spec in sorted((spec.get("pytorchReplicaSpecs") or {}).items()):  # the Master is first
            replicas = int((replica_spec or {}).get("replicas") or 1)
            if index < replicas:
                return f"{job}-{role.lower()}-{index}"
            index -= replicas
        raise UsageError(f"--rank: job {job} has no rank {rank}")

    def find_pod(self, name: str) -> Object | None:
        """Return the pod of that name, None if there is none."""
        return self.find(PODS, name)

    def list_events(self, kind: str, name: str) -> list[Object]:
        """Return the events about one object, oldest first; none where the user may not read them."""
        selector = f"involvedObject.kind={kind},involvedObject.name={name}"
        try:
            found = self.api.list_all(self.target(EVENTS), {"fieldSelector": selector})[0]
        except ForbiddenError:
            return []
        return sorted(found, key=lambda e: str(e.get("lastTimestamp") or e.get("eventTime") or ""))

    def list_job_events(self, *, all_namespaces: bool = False) -> list[Object]:
        """Return the warnings about PyTorchJobs, oldest first; none where the user may not read them."""
        target = Target(EVENTS, None if all_namespaces else self.namespace)
        try:
            found = self.api.list_all(target, {"fieldSelector": "involvedObject.kind=PyTorchJob,type=Warning"})[0]
        except ForbiddenError:
            return []
        return sorted(found, key=lambda e: str(e.get("lastTimestamp") or e.get("eventTime") or ""))

    def list_defaults(self) -> list[tuple[str, str]]:
        """Return name and text of each ConfigMap with defaults of the namespace; none where they may not be read."""
        try:
            found = self.api.list_all(self.target(CONFIG_MAPS), {"labelSelector": f"{labels.DEFAULTS}=true"})[0]
        except ForbiddenError:
            return []
        return [
            (c["metadata"]["name"], c["data"][labels.DEFAULTS_KEY])
            for c in found
            if labels.DEFAULTS_KEY in (c.get("data") or {})
        ]

    def stream_log(self, pod: str, idle: float, **options: Any) -> AbstractContextManager[Iterator[bytes]]:
        """Stream the lines of a pod's training container.

        ``options`` are those of the API (follow, tailLines, …). None leaves one out. Raises UnreachableError when
        nothing comes for ``idle`` seconds.
        """
        given = {key: value for key, value in options.items() if value is not None and value is not False}
        query = {key: "true" if value is True else str(value) for key, value in given.items()}
        return self.api.stream("get", self.target(LOGS, pod), query={"container": CONTAINER, **query}, idle=idle)

    def execute(self, pod: str, command: list[str], timeout: float) -> Executed:
        """Run a command in a pod's training container (see flk.kube.execute)."""
        from flk.kube.execute import EXEC, execute

        return execute(self.api.access, self.target(EXEC, pod), CONTAINER, command, timeout)

    # Changing

    def delete_job(self, name: str, uid: str | None = None) -> Object:
        """Delete a job and everything that it owns. It exists until its pods are gone."""
        body: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Foreground"}
        if uid:
            body["preconditions"] = {"uid": uid}
        return self.api.call("delete", self.target(JOBS, name), body=body)

    def target(self, resource: Resource, name: str | None = None) -> Target:
        """Return an object (or the collection) of a kind in this namespace."""
        return Target(resource, self.namespace, name)

    def find(self, resource: Resource, name: str) -> Object | None:
        """Return the object of a kind and name, None if there is none."""
        try:
            return self.api.call("get", self.target(resource, name))
        except JobNotFoundError:
            return None
        except ApiError as error:
            if error.status == 404:
                return None
            raise


def age(item: Object, now: float) -> str:
    """Return how long ago an object was created, in the two largest units, as kubectl prints it."""
    return short_duration(now - timestamp(item["metadata"].get("creationTimestamp")))
