"""Submit a job: apply the namespace's defaults, pack the code, render the manifests, create the objects."""

from __future__ import annotations

import contextlib
import uuid
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flk import manifest
from flk.errors import ForbiddenError, MissingApiError, UnreachableError
from flk.jobs.answer import answer_of, keep
from flk.jobs.handle import JobHandle
from flk.jobs.lifecycle import create_job
from flk.jobs.lifecycle.secret import objects_with_uid
from flk.jobs.listing import cluster_user, current_owner
from flk.kube import Object, RequestTarget, Resource
from flk.manifest import Bundle, make_bundle
from flk.manifest.environment import warnings as mistakes
from flk.manifest.git import commit_of, diff_of
from flk.observe.client import JobClient, JobRef
from flk.observe.observation import Observation
from flk.observe.redaction import kept_diff, secrets_of
from flk.observe.resources import POD_GROUPS, RESOURCES, TRAINING_RUNTIMES
from flk.observe.view import JobView
from flk.spec import defaults
from flk.spec.job import Job
from flk.targets import target_of
from flk.targets.gang import GANGS, NONE
from flk.targets.trainjob import RUNTIME
from flk_runtime.contract.options import AUTO


@dataclass(frozen=True)
class Submission:
    """A job that is ready to be created: named, with the namespace's defaults applied and its code packed."""

    client: JobClient
    job: Job
    bundle: Bundle
    manifests: list[Object]
    diff: str  # from the commit that the job names to its code, without secrets; empty: there is none, or no commit

    @property
    def name(self) -> str:
        """The job's name."""
        return str(self.job.name)

    def create(self) -> JobHandle:
        """Create the job with all its objects, and let it start. See `flk.jobs.lifecycle` for errors and Ctrl-C.

        May be called again after an error: objects that this submission created are recognised.
        """
        target = target_of(self.manifests[0])
        client = self.client.for_job(JobRef(self.name, target))
        try:
            created = create_job(client, self.manifests, objects_with_uid)
        except UnreachableError as error:
            command = client.commands.flk("status", self.name)
            error.hint = f"{command} shows whether it was created; {error.hint}"
            raise
        try:
            view = JobView(Observation(created, time=client.now()), client.commands)
            keep(client, answer_of(view), diff=self.diff)
        except KeyboardInterrupt as interrupt:
            interrupt.args = (self._goes_on(client),)
            raise
        uid = created["metadata"]["uid"]
        return JobHandle(self.client.for_job(JobRef(self.name, target, uid)), self.name, uid)

    def _goes_on(self, client: JobClient) -> str:
        return f"the job {self.name} exists and goes on: {client.commands.flk('status', self.name)}"


def prepare(job: Job, root: Path, client: JobClient) -> Submission:
    """Return a submission that is ready to be created.

    The only requests to the cluster ask who the user is, and read the namespace's defaults and, if target or gang is
    ``auto``, which APIs the cluster serves.
    """
    job = chosen(client, defaults.apply(job, defaults.parse(client.list_defaults()))).named()
    bundle = make_bundle(job, root)
    commit = commit_of(root) if bundle.code is not None else ""
    manifests = manifest.render(
        job,
        bundle,
        namespace=client.namespace,
        submission=str(uuid.uuid4()),
        owner=current_owner(),
        user=cluster_user(client),
        commit=commit,
        shared=True,
    )
    diff = kept_diff(diff_of(root), secrets_of(manifests[0])) if commit.endswith("-dirty") else ""
    return Submission(client, job, bundle, manifests, diff)


def submit(job: Job, root: str | Path = ".", *, namespace: str | None = None, context: str | None = None) -> JobHandle:
    """Create ``job`` in a cluster and return a handle on it.

    The files that the job needs are looked up below ``root``. ``context`` and ``namespace`` default to the current
    context of the kubeconfig and its namespace. Warns (UserWarning) of what is probably a mistake. Raises UsageError if
    the job or its files cannot be submitted, ApiError if the API server refuses it.
    """
    folder = Path(root).resolve()
    submission = prepare(job, folder, JobClient.connect(context, namespace))
    bundle = submission.bundle
    for sentence in filter(None, (*mistakes(submission.job), bundle.unread)):
        warnings.warn(sentence, stacklevel=2)
    return submission.create()


def render(job: Job, root: str | Path = ".", *, namespace: str | None = None) -> list[dict[str, Any]]:
    """Return the manifests that `submit` would create, without asking a cluster: the job and what it owns.

    The files that the job needs are looked up below ``root``. The defaults of a namespace are not applied.
    """
    folder = Path(root).resolve()
    job = job.named()
    return manifest.render(job, make_bundle(job, folder), namespace=namespace)


def chosen(client: JobClient, job: Job) -> Job:
    """Return the job with a target and a gang in place of `auto`. Asks the cluster only for these."""
    if job.target == AUTO:
        job = job.changed(target=_target(client))
    if job.gang == AUTO:
        job = job.changed(gang=_gang(client, job))
    return job


def _target(client: JobClient) -> str:
    """Return the first target that the cluster serves. A TrainJob needs flk's runtime too; any cluster has Jobs."""
    for name, resource in RESOURCES.items():
        if _serves(client, resource) and (name != "trainjob" or _has_runtime(client)):
            return name
    return "job"


def _gang(client: JobClient, job: Job) -> str:
    """Return the first gang scheduler that the cluster has. A TrainJob gets none: it cannot name a scheduler.

    Raises MissingApiError if the cluster has one, in a version that flk does not know: without it, jobs may deadlock.
    """
    if job.target == "trainjob":
        return NONE
    unknown = None
    for name, gang in GANGS.items():
        try:
            client.api.served(POD_GROUPS[gang.group])
            return name
        except MissingApiError as error:
            unknown = error if error.served else unknown
    if unknown:
        raise unknown
    return NONE


def _serves(client: JobClient, resource: Resource) -> bool:
    try:
        client.api.served(resource)
    except MissingApiError:
        return False
    return True


def _has_runtime(client: JobClient) -> bool:
    with contextlib.suppress(ForbiddenError):
        return client.find_at(RequestTarget(TRAINING_RUNTIMES, None, RUNTIME)) is not None
    return False
