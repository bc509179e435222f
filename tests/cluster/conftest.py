"""How cluster tests get their cluster, their namespace, the programs they call, and images.

The cluster is the context in FLK_TEST_CONTEXT. Else, with FLK_TEST_CLUSTER=create or required, it is the kind cluster
FLK_TEST_KIND (default `flk`), which is created if it does not exist. Else the tests are skipped with the reason.
Neither the developer's kubeconfig nor other namespaces are changed: each test has its own kubeconfig, whose context
points to its own namespace. That namespace enforces Pod Security `restricted`, so that each test proves that flk's pods
comply.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
import textwrap
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import yaml

from flk.kube.client import ApiClient
from flk.kube.credentials import connect
from flk.kube.resources import RequestTarget, Resource
from tests.support.collection import in_folder
from tests.support.commands import Flk, ForkedFlk, Kubectl
from tests.support.fork_server import start_fork_server
from tests.support.processes import checked, until
from tests.support.requirements import locked, may_create_cluster, unavailable

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
REPORTS = ROOT / "reports"
MAKE_CLUSTER = 900  # seconds, for a kind cluster or the images
NAMESPACES = Resource("", "v1", "namespaces")
PATIENCE = 240  # seconds for something to happen on a machine that does much else


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test in this folder. The time that it takes to create a cluster does not count as a test's time."""
    for item in in_folder(items, Path(__file__).parent):
        item.add_marker(pytest.mark.cluster)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600, func_only=True))


@dataclass(frozen=True)
class Cluster:
    """A cluster to test in: a kubeconfig file that holds one context, and the name of the kind cluster if it is one."""

    config: dict[str, Any]
    kubeconfig: Path
    kind: str | None

    def kubectl(self, *args: str, stdin: str | None = None, timeout: float = 120) -> str:
        return checked(["kubectl", "--kubeconfig", str(self.kubeconfig), *args], stdin=stdin, timeout=timeout)


# The cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """The cluster of this session, with the training operator in it."""
    if not shutil.which("kubectl"):
        unavailable("kubectl is not installed")
    context = os.environ.get("FLK_TEST_CONTEXT")
    if context:
        kind = context.removeprefix("kind-") if context.startswith("kind-") else None
        text = checked(["kubectl", "config", "view", "--minify", "--flatten", "--context", context, "-o", "yaml"])
    else:
        kind = os.environ.get("FLK_TEST_KIND", "flk")
        text = kind_kubeconfig(kind, whole=True)
    path = tmp_path_factory.mktemp("cluster") / "kubeconfig"
    path.write_text(text)
    path.chmod(0o600)
    result = Cluster(yaml.safe_load(text), path, kind)
    install = [str(K8S / "install-operator"), "--kubeconfig", str(path)]
    crd = "pytorchjobs.kubeflow.org"
    with locked("cluster"):
        if not result.kubectl("get", "crd", crd, "--ignore-not-found", "-o", "name"):
            if context:
                unavailable(f"the cluster of context {context} has no training operator")
            checked(install, timeout=MAKE_CLUSTER)
    return result


def kind_kubeconfig(name: str, *, whole: bool = False) -> str:
    """The kubeconfig of the kind cluster of that name, which is created if it does not exist.

    ``whole``: for all tests, with Kubeflow Trainer and a storage class `shared`.
    """
    if not may_create_cluster():
        unavailable(
            "no cluster is chosen: FLK_TEST_CONTEXT=CONTEXT names one, and FLK_TEST_CLUSTER=create, which `make test` "
            f"sets, uses the kind cluster {name} and creates it if it does not exist"
        )
    for program in ("docker", "kind"):
        if not shutil.which(program):
            unavailable(f"there is neither FLK_TEST_CONTEXT nor {program} to make a kind cluster with")
    if subprocess.run(["docker", "info"], capture_output=True).returncode:
        unavailable("there is no FLK_TEST_CONTEXT, and no Docker daemon answers to make a kind cluster with")
    with locked("cluster"):
        if name not in checked(["kind", "get", "clusters"]).split():
            create = ["kind", "create", "cluster", "--name", name, "--config", str(K8S / "kind.yaml"), "--wait", "120s"]
            if whole:
                create = [str(K8S / "test-cluster"), name]
            with tempfile.TemporaryDirectory() as folder:
                checked(["env", f"KUBECONFIG={folder}/kubeconfig", *create], timeout=MAKE_CLUSTER)
        return checked(["kind", "get", "kubeconfig", "--name", name])


# What a test has of its own


@pytest.fixture(scope="session")
def api(cluster: Cluster) -> ApiClient:
    """flk's client of the API server, in this process: kubectl takes a tenth of a second of processor time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        return ApiClient(connect())


@pytest.fixture
def namespace(api: ApiClient, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace for this test. Its deletion is not waited for."""
    slug = re.sub(r"[^a-z0-9]+", "-", request.node.name.removeprefix("test_").lower())[:30].strip("-")
    name = f"flk-test-{slug}-{uuid.uuid4().hex[:6]}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted", "flk.dev/test": "true"}
    manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    api.call("create", RequestTarget(NAMESPACES), body=manifest)
    accounts = RequestTarget(Resource("", "v1", "serviceaccounts"), name)
    try:
        until(lambda: api.list_all(accounts)[0], f"{name} has an account", seconds=60, every=0.1)
        yield name
    finally:
        api.call("delete", RequestTarget(NAMESPACES, name=name))


@pytest.fixture
def kubeconfig(cluster: Cluster, namespace: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kubeconfig file whose current context points to this test's namespace."""
    config = json.loads(json.dumps(cluster.config))
    config["contexts"][0]["context"]["namespace"] = namespace
    config["current-context"] = config["contexts"][0]["name"]
    path = tmp_path_factory.mktemp("kubeconfig") / "config"
    path.write_text(yaml.safe_dump(config))
    path.chmod(0o600)
    return path


@pytest.fixture
def kubectl(kubeconfig: Path) -> Kubectl:
    return Kubectl(kubeconfig)


@pytest.fixture
def shared_class(kubectl: Kubectl) -> str:
    """A storage class whose claims pods on all nodes can mount at once, as a network file system's."""
    name = os.environ.get("FLK_TEST_STORAGE_CLASS", "shared")
    if f"storageclass.storage.k8s.io/{name}" not in kubectl("get", "storageclasses", "-o", "name").split():
        unavailable(f"the cluster has no storage class {name} (ReadWriteMany); name one in FLK_TEST_STORAGE_CLASS")
    return name


@pytest.fixture
def checkpoints_claim(kubectl: Kubectl, shared_class: str) -> None:
    """The claim ``checkpoints`` in the namespace of the test, which pods on all nodes can mount at once."""
    access = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "100Mi"}}}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "checkpoints"}}
    kubectl("create", "-f", "-", stdin=claim | {"spec": {"storageClassName": shared_class, **access}})


@pytest.fixture(scope="session")
def trainer(cluster: Cluster) -> None:
    """Kubeflow Trainer in the cluster, with JobSet, which it brings, and flk's ClusterTrainingRuntime, which stays.

    Trainer itself is not installed here.
    """
    if not cluster.kubectl("get", "crd", "trainjobs.trainer.kubeflow.org", "--ignore-not-found", "-o", "name"):
        unavailable("the cluster has no Kubeflow Trainer: k8s/install-trainer installs it")
    apply = ["apply", "--server-side", "--force-conflicts", "-f", str(K8S / "training-runtime.yaml")]
    cluster.kubectl(*apply)


@pytest.fixture(scope="session")
def fork_server() -> ForkServerContext:
    return start_fork_server()


@pytest.fixture
def flk(
    fork_server: ForkServerContext,
    kubeconfig: Path,
    tmp_path_factory: pytest.TempPathFactory,
    cache_home: Path,
) -> Iterator[Flk]:
    """Runs flk: ``flk("submit", "--replicas", "4").code``; its folder is empty unless ``cwd`` says otherwise.

    A job that names no image takes flk's own; a test whose pods start takes the fixture ``image``, too, which loads it.
    """
    home = tmp_path_factory.mktemp("home")
    command = ForkedFlk(fork_server, tmp_path_factory.mktemp("folder"), kubeconfig=kubeconfig, home=home)
    _, variable, name = IMAGES["cpu"]
    command.env |= {"XDG_CACHE_HOME": str(cache_home), "FLK_IMAGE": os.environ.get(variable, name)}
    yield command
    command.close()


@pytest.fixture
def eventually() -> Callable[[str, Callable[[], Any]], Any]:
    """Waits until a check returns something true, and returns it: ``eventually("two pods run", lambda: ...)``."""
    # A question takes a tenth of a second of processor time, and the pods that it asks about wait for the processor.
    return lambda what, check: until(check, what, seconds=PATIENCE, every=0.5, slowest=3)


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """Writes train.py into a folder of its own and gives the folder."""

    def write(text: str) -> Path:
        (tmp_path / "train.py").write_text(textwrap.dedent(text))
        return tmp_path

    return write


# Images


@pytest.fixture(scope="session")
def image(request: pytest.FixtureRequest, cluster: Cluster) -> str:
    """The name of flk's own CPU image, built from this source and loaded into the cluster."""
    return loaded("cpu", request, cluster)


@pytest.fixture(scope="session")
def torch_image(request: pytest.FixtureRequest, cluster: Cluster) -> str:
    """The name of an image with Python and torch, and nothing of flk."""
    return loaded("torch", request, cluster)


# Each image: the fixture that gives it, the variable that names another one, and its name.
IMAGES = {
    "cpu": ("image", "FLK_TEST_IMAGE", "flktrain/flk:0.1.0-cpu"),
    "torch": ("torch_image", "FLK_TEST_TORCH_IMAGE", "flktrain/torch-only:test"),
}


def loaded(target: str, request: pytest.FixtureRequest, cluster: Cluster) -> str:
    """The name of an image. All images that tests of this run take are loaded at once, since they share a gigabyte."""
    _, variable, name = IMAGES[target]
    if given := os.environ.get(variable):
        return given
    if cluster.kind is None:
        unavailable("images can be loaded into kind clusters only: name those it has in FLK_TEST[_TORCH]_IMAGE")
    used = {fixture for item in request.session.items for fixture in getattr(item, "fixturenames", ())}
    used.add(IMAGES[target][0])
    needed = [each for each, (fixture, other, _) in IMAGES.items() if fixture in used and not os.environ.get(other)]
    with locked("image"):
        checked([str(ROOT / "docker" / "build"), *needed, "--kind", str(cluster.kind)], timeout=MAKE_CLUSTER)
    return name


# What a failing test leaves behind


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: Any = yield
    values: Mapping[str, Any] = getattr(item, "funcargs", {})
    if report.failed and report.when != "teardown" and "namespace" in values:
        folder = REPORTS / re.sub(r"[^\w.-]+", "_", item.nodeid.rsplit("/", 1)[-1])
        leave_evidence(values["cluster"], values["namespace"], folder)
        report.sections.append(("cluster", f"logs, descriptions and events of its namespace: {folder}"))
    return report


def leave_evidence(cluster: Cluster, namespace: str, folder: Path) -> None:
    """Writes what the namespace holds into ``folder``; a failure to do so must not hide the one it explains."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    def write(name: str, *args: str) -> str:
        try:
            text = cluster.kubectl("-n", namespace, *args)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            text = str(error)
        (folder / name).write_text(text)
        return text

    write("events.txt", "get", "events", "--sort-by=.metadata.creationTimestamp")
    write("describe.txt", "describe", "pytorchjobs,pods,services,configmaps")
    write("objects.yaml", "get", "pytorchjobs,pods,services,configmaps,persistentvolumeclaims", "-o", "yaml")
    for pod in write("pods.txt", "get", "pods", "-o", "name").split():
        write(f"{pod.removeprefix('pod/')}.log", "logs", pod, "--all-containers", "--prefix")
