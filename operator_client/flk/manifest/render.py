"""Render a job as Kubernetes objects: a PyTorchJob of workers only, and the ConfigMaps that hold its code.

Rendering is a pure function, so what `flk render` prints is what `flk submit` creates. Every field whose default
differs between operators, clusters or versions is set.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any, Final

from flk import labels
from flk.manifest.bundle import Bundle
from flk.manifest.pod import pod_template
from flk.spec.job import Job, PodSettings
from flk_runtime import contract

CHUNK: Final = 900_000  # bytes of data in a ConfigMap; the API server accepts 1 MiB
_LARGEST_INT: Final = 2**31 - 1


def render(
    job: Job, bundle: Bundle, *, namespace: str | None = None, submission: str = "", owner: str = ""
) -> list[dict[str, Any]]:
    """Return the PyTorchJob of ``job``, which has a name, and then its ConfigMaps.

    ``submission`` is an id that is equal in all attempts to create this job, and ``owner`` the user who submits it.
    Equal arguments give equal manifests. Raises UsageError if the job's patch does not fit the pod template.
    """
    if job.name is None:
        raise ValueError("the job has no name yet")
    own_labels = {**labels.MANAGED_BY, labels.JOB: job.name}
    in_namespace = {"namespace": namespace} if namespace else {}
    config_maps: list[dict[str, Any]] = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": f"{job.name}-code-{number}", **in_namespace, "labels": dict(own_labels)},
            "immutable": True,
            "binaryData": data,
        }
        for number, data in enumerate(_chunks(bundle))
    ]
    pods = job.pods or PodSettings()
    annotations = {
        **pods.annotations,
        labels.VERSION: contract.VERSION,
        labels.SPEC: job.model_dump_json(exclude_none=True),
        **({labels.CODE_HASH: bundle.sha256} if bundle.code is not None else {}),
        **({labels.SUBMISSION: submission} if submission else {}),
        **({labels.OWNER: owner} if owner else {}),
    }
    worker = {
        "replicas": job.replicas,
        "restartPolicy": "ExitCode",
        "template": pod_template(
            job, bundle, [config_map["metadata"]["name"] for config_map in config_maps], namespace
        ),
    }
    manifest = {
        "apiVersion": labels.KUBEFLOW_API_VERSION,
        "kind": "PyTorchJob",
        "metadata": {
            "name": job.name,
            **in_namespace,
            "labels": {**pods.labels, **own_labels, **({labels.QUEUE: job.queue} if job.queue else {})},
            "annotations": annotations,
        },
        "spec": {
            "nprocPerNode": str(job.processes_per_pod),
            "runPolicy": {
                "cleanPodPolicy": "None",
                # flk counts the attempts. The operator's own count must not end a job earlier; with zero it would, at
                # the first pod that it recreates.
                "backoffLimit": min(_LARGEST_INT, (job.restarts + job.disruptions + 1) * job.replicas),
                **({"activeDeadlineSeconds": job.deadline} if job.deadline is not None else {}),
                **({"suspend": True} if job.queue else {}),  # Kueue starts it
            },
            "pytorchReplicaSpecs": {"Worker": worker},
        },
    }
    return [manifest, *config_maps]


def _chunks(bundle: Bundle) -> Iterator[dict[str, str]]:
    """Yield the data of each ConfigMap: the runtime, and the code in as many pieces as it needs."""
    if bundle.runtime is None:
        return
    data = {contract.RUNTIME_ARCHIVE: _base64(bundle.runtime)}
    rest, room, number = bundle.code or b"", CHUNK - len(bundle.runtime), 0
    while rest:
        data[f"{contract.CODE_ARCHIVE}.{number:03}"] = _base64(rest[:room])
        rest, room, number = rest[room:], CHUNK, number + 1
        if rest:
            yield data
            data = {}
    yield data


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
