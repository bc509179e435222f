"""Submitting a job, and the handle on it: what the command line does, for Python."""

from __future__ import annotations

import getpass
import socket
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flk.errors import UnreachableError, WaitTimeoutError
from flk.jobs import logs, wait
from flk.jobs.client import JobClient
from flk.jobs.state import State
from flk.manifest import bundle as ship
from flk.manifest import render
from flk.manifest.bundle import Shipment
from flk.spec import defaults as site
from flk.spec.job import Job


@dataclass(frozen=True)
class Plan:
    """A job that is ready to be created: named, with the site's defaults, its code packed."""

    cluster: JobClient
    job: Job
    shipment: Shipment
    manifests: list[dict[str, Any]]

    @property
    def name(self) -> str:
        """The job's name."""
        return str(self.job.name)

    def create(self) -> JobHandle:
        """Create it. Can be called again after an error: what is there already is recognised."""
        try:
            made = self.cluster.create_job(self.manifests)
        except UnreachableError as error:
            error.hint = f"whether it was created is not known: flk status {self.name} tells. {error.hint}"
            raise
        return JobHandle(self.cluster, self.name, made["metadata"]["uid"])


@dataclass(frozen=True)
class JobHandle:
    """A job in a cluster."""

    cluster: JobClient
    name: str
    uid: str | None = None

    @property
    def namespace(self) -> str:
        """The job's namespace."""
        return self.cluster.namespace

    def status(self) -> State:
        """What is true of it now. JobNotFoundError if it is gone."""
        return wait.look(self.cluster, self.name)

    def wait(self, timeout: float | None = None) -> State:
        """Its state once it has ended, well or badly. WaitTimeoutError if it has not within ``timeout`` seconds."""
        state = wait.until_end(self.cluster, self.name, uid=self.uid, timeout=timeout)
        if not state.final:
            raise WaitTimeoutError(f"job {wait.describe(state)}, after {timeout:g} s of waiting")
        return state

    def logs(self, follow: bool = True) -> Iterator[str]:
        """What every rank prints, line by line, until the job ends; without ``follow`` what is there now."""
        read = logs.follow if follow else logs.dump
        return (line.text for line in read(self.cluster, self.name, logs.Options()) if not line.note)

    def delete(self) -> None:
        """Have it deleted, with its pods and all that belongs to it. Does not wait until they are gone."""
        self.cluster.delete_job(self.name, self.uid)


def plan(job: Job, root: Path, cluster: JobClient) -> Plan:
    """Everything that submitting takes but the creation itself. Asks the cluster for the site's defaults only."""
    job = site.apply(job, site.parse(cluster.defaults())).named()
    shipment = ship.collect(job, root)
    manifests = render.render(job, shipment, namespace=cluster.namespace, submission=str(uuid.uuid4()), owner=whoami())
    return Plan(cluster, job, shipment, manifests)


def submit(job: Job, root: Path, *, namespace: str | None = None, context: str | None = None) -> JobHandle:
    """Create ``job``, with the files it needs from below ``root``."""
    return plan(job, root, JobClient.connect(context, namespace)).create()


def get(name: str, *, namespace: str | None = None, context: str | None = None) -> JobHandle:
    """The job of that name, which must be there."""
    cluster = JobClient.connect(context, namespace)
    return JobHandle(cluster, name, cluster.job(name)["metadata"]["uid"])


def whoami() -> str:
    """Who submits, for colleagues who look at the job."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    return f"{user}@{socket.gethostname()}"
