"""`flk why` and `flk wait` for jobs that do not run, in a real cluster: code, sentence, evidence, remedy and exit code.

The jobs of all selected cases are created at once, because most causes take some seconds to appear. FLK_RECORD=yes
writes the objects of each job into tests/unit/flk/health/causes, where unit tests read those of all cases. Each run of
the tests creates four of the jobs, and `make soak` all of them, with the pods that the others need.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

import flk as library
from flk.health import diagnose
from flk.jobs.state import Phase, derive
from flk.observe.client import JobClient
from flk.observe.reader import view_job
from flk.observe.resources import EVENTS, PODS, RESOURCES
from flk_runtime.contract import ExitCode, user_env
from tests.cluster.conftest import Cluster
from tests.support import recorded
from tests.support.cause_cases import Case, Object
from tests.support.causes import CASES, FOREIGN_PROGRAM
from tests.support.commands import Flk, ForkedFlk
from tests.support.ending_causes import NVML
from tests.support.processes import until

pytestmark = pytest.mark.xdist_group("causes")  # the jobs of all cases are created once
OFTEN = {"secret-missing", "cpu", "quota", "rank-exception"}
assert OFTEN.issubset(case.name for case in CASES)
NAMESPACES = ("plain", "restricted", "quota", "demanding", "limits", "refusing", "webhook")
APPEAR = 200  # seconds in which a cause must be found, on a machine that does much else
REGISTRY = """
import hashlib, http.server, json
KIND = "application/vnd.oci.image.%s.v1+json"
OTHER = {"mediaType": KIND % "manifest", "digest": "sha256:" + "0" * 64, "size": 2}
OTHER["platform"] = {"os": "linux", "architecture": "s390x"}
INDEX = json.dumps({"schemaVersion": 2, "mediaType": KIND % "index", "manifests": [OTHER]}).encode()
class Registry(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        image = self.path.split("/")[2]
        code = {"private": 401, "foreign": 200, "broken": 500, "busy": 429}.get(image, 404)
        body = INDEX if code == 200 else b""
        self.send_response(code)
        if code == 401:
            self.send_header("WWW-Authenticate", 'Basic realm="tests"')
        if code == 200:
            self.send_header("Content-Type", KIND % "index")
            self.send_header("Docker-Content-Digest", "sha256:" + hashlib.sha256(INDEX).hexdigest())
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
    do_HEAD = do_GET
http.server.ThreadingHTTPServer(("", PORT), Registry).serve_forever()
"""


@dataclass(frozen=True)
class Causes:
    """The namespaces in which the jobs are, and how tests ask about them."""

    names: dict[str, str]
    flk: Flk

    def client(self, case: Case) -> JobClient:
        return JobClient.connect(namespace=self.names[case.namespace])

    def run(self, case: Case, *words: str) -> Any:
        return self.flk(*words, "-n", self.names[case.namespace])

    def delete(self, case: Case) -> None:
        """Delete the job behind flk's back, so that only what flk has kept is left."""
        client = self.client(case)
        client.delete_job(case.name)
        until(
            lambda: client.find(RESOURCES["pytorchjob"], case.name) is None,
            f"{case.name} is gone",
            seconds=APPEAR,
            every=0.5,
        )


@pytest.fixture(scope="module")
def causes(
    cluster: Cluster,
    image: str,
    fork_server: ForkServerContext,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[Causes]:
    """The jobs of the selected cases, just created."""
    selected = [
        item for item in request.session.items if isinstance(item, pytest.Function) and item.module is request.module
    ]
    cases = [item.callspec.params["case"] for item in selected]
    run = uuid.uuid4().hex[:6]
    names = {name: f"flk-test-causes-{name}-{run}" for name in NAMESPACES}
    port = str(20_000 + int(run, 16) % 10_000)
    nodes = json.loads(cluster.kubectl("get", "nodes", "-o", "json"))["items"]
    workers = [node["metadata"]["name"] for node in nodes if not node["spec"].get("taints")]
    if len(workers) < 2:
        pytest.skip("the causes of volumes need two nodes that take pods")
    cluster_wide = [*_cluster_wide(names, run), *_attached_volume(names["plain"], run, workers[0])]
    home = tmp_path_factory.mktemp("home")
    values = {"IMAGE": image, "REGISTRY": f"localhost:{port}", '"HOST-PORT"': port, "OTHER-NODE": workers[1]}
    try:
        _create(cluster, [*map(_namespace, names.items()), *cluster_wide])
        attached = ["volumeattachment", cluster_wide[-1]["metadata"]["name"], "--subresource=status", "--type=merge"]
        cluster.kubectl("patch", *attached, "-p", '{"status": {"attached": true}}')
        plain = ("-n", names["plain"])
        cluster.kubectl(*plain, "wait", "--for=create", "serviceaccount/default", "--timeout=60s")
        _create(cluster, _surroundings(names))
        if any(case.name not in OFTEN for case in cases):
            _create(cluster, _pods(names["plain"], image, workers, port))
            cluster.kubectl(*plain, "delete", "persistentvolumeclaim", "leaving", "--wait=false")  # its user stays
            ready = [f"pod/{pod}" for pod in ("registry-0", "registry-1", "holder")]
            cluster.kubectl(*plain, "wait", "--for=condition=Ready", *ready, "--timeout=120s")
        folder = tmp_path_factory.mktemp("code")
        jobs = [item for case in cases for item in _manifests(case, names, values, folder)]
        _create(cluster, jobs)
        events = [_event(names[case.namespace], case.name, *case.event) for case in cases if case.event]
        if events:
            _create(cluster, events)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KUBECONFIG", str(cluster.kubeconfig))
            patch.setenv("XDG_STATE_HOME", str(home / ".local" / "state"))  # that of the command
            where = tmp_path_factory.mktemp("folder")
            command = ForkedFlk(fork_server, where, kubeconfig=cluster.kubeconfig, home=home)
            yield Causes(names, command)
            command.close()
    finally:
        for item in cluster_wide:
            cluster.kubectl("delete", item["kind"], item["metadata"]["name"], "--ignore-not-found", "--wait=false")
        cluster.kubectl("delete", "namespace", *names.values(), "--ignore-not-found", "--wait=false")


@pytest.mark.promise("Causes: A job that is gone is still known")
@pytest.mark.promise("Causes: flk why names one cause with its evidence and a remedy")
@pytest.mark.parametrize(
    "case",
    [
        *(case for case in CASES if case.name in OFTEN),
        *(pytest.param(case, marks=pytest.mark.soak) for case in CASES if case.name not in OFTEN),
    ],
    ids=lambda case: case.name,
)
def test_cause(causes: Causes, case: Case) -> None:
    expected, client = case.expected, causes.client(case)
    if case.lost:
        _await(client, case, Phase.RUNNING)
        client.api.call("delete", client.target(PODS, case.lost))
    if case.forgotten:
        _await(client, case, Phase.FAILED)
        for event in client.api.list_all(client.target(EVENTS))[0]:
            if event["involvedObject"]["name"].startswith(case.name):
                client.api.call("delete", client.target(EVENTS, event["metadata"]["name"]))

    def found() -> bool:
        view = view_job(client, case.name)
        answer = diagnose(view)
        code = answer.cause.code if answer.cause else ""
        return code == expected.code and (answer.stuck or view.failed or not expected.stuck)

    def told() -> str:
        pods = view_job(client, case.name).objects
        return causes.run(case, "why", case.name).stdout + json.dumps([pod.get("status") for pod in pods.values()])

    until(found, f"{case.name} is {expected.code}", seconds=APPEAR, every=1, context=told)
    if os.environ.get("FLK_RECORD"):
        recorded.save(view_job(client, case.name), recorded.FOLDER / f"{case.name}.json")
    assert not _says(causes, case)["as_of"]
    ended = causes.run(case, "wait", case.name, "--timeout", "100s" if expected.stuck else "0")
    assert ended.code == (expected.exit_code if expected.stuck else ExitCode.RUNNING), ended.stderr
    if expected.stuck:
        causes.delete(case)
        kept = _says(causes, case)
        assert kept["cause"]["exit_code"] == expected.exit_code
        assert kept["as_of"]


def _await(client: JobClient, case: Case, phase: Phase) -> None:
    until(
        lambda: derive(view_job(client, case.name)).phase is phase,
        f"{case.name} is {phase}",
        seconds=APPEAR,
        every=1,
    )


def _says(causes: Causes, case: Case) -> Any:
    """What `flk why` answers, which is what the case expects."""
    expected, answer = case.expected, json.loads(causes.run(case, "why", case.name, "-o", "json").stdout)
    assert answer["code"] == expected.code
    assert expected.sentence in answer["cause"]["sentence"]
    assert any(expected.evidence in item["text"] for item in answer["cause"]["evidence"]), answer["cause"]["evidence"]
    assert all(item["source"] for item in answer["cause"]["evidence"])
    assert expected.remedy in answer["cause"]["remedy"]
    return answer


def _create(cluster: Cluster, items: list[Object]) -> None:
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    cluster.kubectl("create", "-f", "-", stdin=text)


def _namespace(item: tuple[str, str]) -> Object:
    kind, name = item
    level = {"pod-security.kubernetes.io/enforce": "restricted"} if kind == "restricted" else {}
    labels = {"flk.dev/test": "true", "flk.dev/causes": name, **level}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def _cluster_wide(names: dict[str, str], run: str) -> list[Object]:
    """A policy and a webhook that concern one namespace each."""
    policy = f"flk-test-{run}"
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    group = "admissionregistration.k8s.io/v1"
    return [
        {
            "apiVersion": group,
            "kind": "ValidatingAdmissionPolicy",
            "metadata": {"name": policy},
            "spec": {
                "failurePolicy": "Fail",
                "matchConstraints": {"resourceRules": [rule]},
                "validations": [{"expression": "false", "message": "no training on Sundays"}],
            },
        },
        {
            "apiVersion": group,
            "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": {"name": policy},
            "spec": {
                "policyName": policy,
                "validationActions": ["Deny"],
                "matchResources": {"namespaceSelector": {"matchLabels": {"flk.dev/causes": names["refusing"]}}},
            },
        },
        {
            "apiVersion": group,
            "kind": "ValidatingWebhookConfiguration",
            "metadata": {"name": policy},
            "webhooks": [
                {
                    "name": "absent.flk.dev",
                    "clientConfig": {"service": {"name": "absent", "namespace": names["webhook"]}},
                    "rules": [rule],
                    "failurePolicy": "Fail",
                    "sideEffects": "None",
                    "admissionReviewVersions": ["v1"],
                    "namespaceSelector": {"matchLabels": {"flk.dev/causes": names["webhook"]}},
                }
            ],
        },
    ]


def _attached_volume(name: str, run: str, node: str) -> list[Object]:
    """A volume that Kubernetes attaches to one node at a time, and its attachment to ``node``.

    The attachment has the name that Kubernetes gives it. The driver, which is not there, would say that it is attached.
    """
    driver = f"{run}.flk-test.example.com"
    digest = hashlib.sha256(f"{name}{driver}{node}".encode()).hexdigest()
    volume = {
        "accessModes": ["ReadWriteOnce"],
        "capacity": {"storage": "1Mi"},
        "csi": {"driver": driver, "volumeHandle": name},
        "claimRef": {"namespace": name, "name": "attached"},
        "storageClassName": "",
    }
    attachment = {"attacher": driver, "nodeName": node, "source": {"persistentVolumeName": name}}
    return [
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "CSIDriver",
            "metadata": {"name": driver},
            "spec": {"attachRequired": True},
        },
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": volume},
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "VolumeAttachment",
            "metadata": {"name": f"csi-{digest}"},
            "spec": attachment,
        },
    ]


def _surroundings(names: dict[str, str]) -> list[Object]:
    """The objects that jobs name."""
    plain = names["plain"]
    attached_claim = _claim(plain, "attached", "")
    attached_claim["spec"]["volumeName"] = plain
    return [
        _object("v1", "Secret", plain, "present", stringData={"other": "x"}),
        _object("v1", "ConfigMap", plain, "foreign", binaryData={"program": FOREIGN_PROGRAM}),
        _claim(plain, "unbound", "nowhere"),
        _claim(plain, "local", "standard"),
        _claim(plain, "leaving", "nowhere"),
        attached_claim,
        _object("v1", "ConfigMap", names["restricted"], "nvml", data={"sitecustomize.py": NVML}),
        _object("v1", "ResourceQuota", names["quota"], "tight", spec={"hard": {"pods": "0"}}),
        _object("v1", "ResourceQuota", names["demanding"], "tight", spec={"hard": {"limits.memory": "1Gi"}}),
        _object(
            "v1",
            "LimitRange",
            names["limits"],
            "small",
            spec={"limits": [{"type": "Container", "max": {"memory": "64Mi"}}]},
        ),
    ]


def _pods(plain: str, image: str, nodes: list[str], port: str) -> list[Object]:
    """Registries that have no image, and pods that hold volumes and claims on a node."""
    registry = {
        "command": ["python3", "-c", REGISTRY.replace("PORT", port)],
        "ports": [{"containerPort": int(port)}],
    }
    holder = {"command": ["sleep", "3600"], "volumeMounts": [{"name": "local", "mountPath": "/local"}]}
    volumes = [{"name": "local", "persistentVolumeClaim": {"claimName": "local"}}]
    leaving = [{"name": "leaving", "persistentVolumeClaim": {"claimName": "leaving"}}]
    attached = [{"name": "attached", "persistentVolumeClaim": {"claimName": "attached"}}]
    return [
        *(_pod(plain, f"registry-{n}", image, registry, hostNetwork=True, nodeName=nodes[n]) for n in range(2)),
        _pod(plain, "holder", image, holder, nodeSelector={"kubernetes.io/hostname": nodes[0]}, volumes=volumes),
        *(  # which no container starts
            _pod(plain, f"user-of-{each[0]['name']}", image, {}, nodeName=nodes[0], volumes=each)
            for each in (leaving, attached)
        ),
    ]


def _object(version: str, kind: str, namespace: str, name: str, **rest: Any) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "namespace": namespace}, **rest}


def _event(namespace: str, job: str, reason: str, message: str) -> Object:
    """An event about a job, as the training operator sends it."""
    about = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "name": job, "namespace": namespace}
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    times = {"firstTimestamp": now, "lastTimestamp": now, "count": 1}
    said = {"reason": reason, "message": message, "type": "Warning", "source": {"component": "pytorchjob-controller"}}
    return _object("v1", "Event", namespace, f"{job}.1", involvedObject=about, **said, **times)


def _claim(namespace: str, name: str, storage: str) -> Object:
    spec = {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": storage,
        "resources": {"requests": {"storage": "1Mi"}},
    }
    return _object("v1", "PersistentVolumeClaim", namespace, name, spec=spec)


def _pod(namespace: str, name: str, image: str, container: Object, **spec: Any) -> Object:
    main = {"name": "main", "image": image, "imagePullPolicy": "IfNotPresent", **container}
    main["resources"] = {"requests": {"cpu": "10m"}}
    every = {"containers": [main], "terminationGracePeriodSeconds": 0, **spec}
    return _object("v1", "Pod", namespace, name, spec=every)


def _manifests(case: Case, names: dict[str, str], values: dict[str, str], folder: Path) -> list[Object]:
    """The manifests of a case in its namespace."""
    if case.manifest is not None:
        text = json.dumps(case.manifest)
        for word, value in values.items():
            text = text.replace(word, value)
        items = [json.loads(text)]
    else:
        items = _launched(case, values["IMAGE"], folder)
    for item in items:
        item["metadata"]["namespace"] = names[case.namespace]
    return items


def _launched(case: Case, image: str, folder: Path) -> list[Object]:
    """The manifests that flk makes of a case, with the fault in them."""
    (folder / "train.py").write_text(case.script)
    fields = {"command": ["train.py"], "image": image, "resources": {"cpu": "10m"}, **case.job}
    fields["env"] = {str(user_env.START): "spawn"} | fields.get("env", {})  # no script uses torch
    if case.nvml:
        fields["env"] |= {"NVML": case.nvml, "PYTHONPATH": "/nvml"}
        fields |= {"resources": {"cpu": "10m", "gpu": 1}, "volumes": ["configmap:nvml:/nvml"]}
    job, *others = library.render(library.Job(name=case.name, **fields), folder)
    spec = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    container = spec["containers"][0]
    if case.nvml:  # no node has a GPU
        container["resources"] = {"requests": {"cpu": "10m"}}
    spec.update(case.pod)
    if case.sleeping is not None:
        wait = f'if [ "$FLK_POD_INDEX" = {case.sleeping} ]; then sleep 3600; fi; exec "$@"'
        container["command"] = ["sh", "-c", wait, "sh", *container["command"]]
    return [job] if case.without_code else [job, *others]
