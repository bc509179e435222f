"""Submit a job: apply the namespace's defaults, pack the code, render the manifests, create the objects."""

from __future__ import annotations

import uuid
import warnings
from functools import partial
from pathlib import Path
from typing import Any

from flk import manifest
from flk.errors import UnreachableError
from flk.jobs.answer import answer_of, keep
from flk.jobs.choice import first_that_fits
from flk.jobs.handle import JobHandle
from flk.jobs.lifecycle import create_job
from flk.jobs.listing import current_owner
from flk.kube import Object
from flk.manifest import Bundle, make_bundle
from flk.manifest.environment import warnings as mistakes
from flk.manifest.git import commit_of
from flk.observe.client import JobClient, JobRef
from flk.observe.observation import Observation
from flk.observe.view import JobView
from flk.spec import defaults
from flk.spec.job import Job
from flk.targets import target_of
from flk_runtime.contract.values import dataclass


@dataclass(frozen=True)
class Submission:
    """A job that is ready to be created: named, with the namespace's defaults applied and its code packed."""

    client: JobClient
    job: Job
    bundle: Bundle
    manifests: list[Object]

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
            created = create_job(client, self.manifests)
        except UnreachableError as error:
            command = client.commands.flk("status", self.name)
            error.hint = f"{command} shows whether it was created; {error.hint}"
            raise
        try:
            keep(client, answer_of(JobView(Observation(created, time=client.now()), client.commands)))
        except KeyboardInterrupt as interrupt:
            goes_on = client.commands.flk("status", self.name)
            interrupt.args = (f"the job {self.name} exists and goes on: {goes_on}",)
            raise
        uid = created["metadata"]["uid"]
        return JobHandle(self.client.for_job(JobRef(self.name, target, uid)), self.name, uid)


def prepare(job: Job, root: Path, client: JobClient) -> Submission:
    """Return a submission that is ready to be created.

    The only requests to the cluster read the namespace's defaults and, if the job leaves its target or gang to the
    cluster, which APIs the cluster serves.
    """
    job = defaults.apply(job, defaults.parse(client.list_defaults()))
    bundle = make_bundle(job, root)
    commit = commit_of(root) if bundle.code is not None else ""
    render_for = partial(
        manifest.render,
        bundle=bundle,
        namespace=client.namespace,
        submission=str(uuid.uuid4()),
        owner=current_owner(),
        commit=commit,
        shared=True,
    )

    def rendered(job: Job) -> tuple[Job, list[Object]]:
        named = job.named()
        return named, render_for(named)

    job, manifests = first_that_fits(client, job, rendered)
    return Submission(client, job, bundle, manifests)


def submit(job: Job, root: str | Path = ".", *, namespace: str | None = None, context: str | None = None) -> JobHandle:
    """Create ``job`` in a cluster and return a handle on it.

    The files that the job needs are looked up below ``root``. ``context`` and ``namespace`` default to the current
    context of the kubeconfig and its namespace. Warns (UserWarning) of what is probably a mistake. Raises UsageError if
    the job or its files cannot be submitted, ApiError if the API server refuses it.
    """
    submission = prepare(job, Path(root).resolve(), JobClient.connect(context, namespace))
    bundle = submission.bundle
    for sentence in filter(None, (*mistakes(submission.job), bundle.unread)):
        warnings.warn(sentence, stacklevel=2)
    return submission.create()


def render(job: Job, root: str | Path = ".", *, namespace: str | None = None) -> list[dict[str, Any]]:
    """Return the manifests of a job and of what it owns, without asking a cluster: a PyTorchJob if it names no target.

    The files that the job needs are looked up below ``root``. The defaults of a namespace are not applied.
    """
    job = job.named()
    return manifest.render(job, make_bundle(job, Path(root).resolve()), namespace=namespace)
