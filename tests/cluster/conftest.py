"""How cluster tests get their cluster, their namespace, flk itself and images.

The cluster is the context in FLK_TEST_CONTEXT; else the kind cluster FLK_TEST_KIND (default `flk`), made if it is not
there; else the tests are skipped with the reason, or fail with it under FLK_TEST_CLUSTER=required. Neither the
developer's kubeconfig nor other namespaces are touched: each test has a kubeconfig of its own whose context points to a
namespace of its own, which enforces Pod Security `restricted`, so that each test proves that our pods comply.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
REPORTS = ROOT / "reports"
FLK_IMAGE = "flktrain/flk:0.1.0-cpu"
TORCH_IMAGE = "flktrain/torch-only:test"
MAKE_CLUSTER = 600  # seconds, for a kind cluster or the images
PATIENCE = 240  # seconds for something to happen on a machine that does much else
RUN_CLI = 300  # seconds that a command of a test may take unless it says otherwise


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test in this folder needs a cluster; making one does not count against a test's own time."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
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


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str


def checked(command: Sequence[str], stdin: str | None = None, timeout: float = 120) -> str:
    """The stdout of a command that must succeed."""
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def unavailable(reason: str) -> None:
    if os.environ.get("FLK_TEST_CLUSTER") == "required":
        pytest.fail(f"FLK_TEST_CLUSTER=required, but {reason}", pytrace=False)
    pytest.skip(reason)


@contextmanager
def locked(name: str) -> Iterator[None]:
    """One process at a time, of all the test runs on this machine: workers of pytest-xdist, and other runs."""
    path = Path(tempfile.gettempdir()) / f"flk-tests-{os.getuid()}-{name}.lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


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
        text = kind_kubeconfig(kind)
    path = tmp_path_factory.mktemp("cluster") / "kubeconfig"
    path.write_text(text)
    path.chmod(0o600)
    result = Cluster(yaml.safe_load(text), path, kind)
    install = [str(ROOT / "k8s" / "install-operator"), "--kubeconfig", str(path)]
    crd = "pytorchjobs.kubeflow.org"
    with locked("cluster"):
        if not result.kubectl("get", "crd", crd, "--ignore-not-found", "-o", "name"):
            if context:
                unavailable(f"the cluster of context {context} has no training operator")
            checked(install, timeout=MAKE_CLUSTER)
    return result


def kind_kubeconfig(name: str) -> str:
    """The kubeconfig of the kind cluster of that name, which is made if it is not there."""
    for program in ("docker", "kind"):
        if not shutil.which(program):
            unavailable(f"there is neither FLK_TEST_CONTEXT nor {program} to make a kind cluster with")
    if subprocess.run(["docker", "info"], capture_output=True).returncode:
        unavailable("there is no FLK_TEST_CONTEXT, and no Docker daemon answers to make a kind cluster with")
    with locked("cluster"):
        if name not in checked(["kind", "get", "clusters"]).split():
            config = str(ROOT / "k8s" / "kind.yaml")
            with tempfile.TemporaryDirectory() as folder:
                create = ["kind", "create", "cluster", "--name", name, "--config", config, "--wait", "120s"]
                checked([*create, "--kubeconfig", f"{folder}/kubeconfig"], timeout=MAKE_CLUSTER)
        return checked(["kind", "get", "kubeconfig", "--name", name])


# What a test has of its own


@pytest.fixture
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace for this test. Its deletion is not waited for."""
    slug = re.sub(r"[^a-z0-9]+", "-", request.node.name.removeprefix("test_").lower())[:30].strip("-")
    name = f"flk-test-{slug}-{uuid.uuid4().hex[:6]}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted", "flk.dev/test": "true"}
    manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    cluster.kubectl("create", "-f", "-", stdin=json.dumps(manifest))
    try:
        cluster.kubectl("-n", name, "wait", "--for=create", "serviceaccount/default", "--timeout=60s")
        yield name
    finally:
        cluster.kubectl("delete", "namespace", name, "--wait=false")


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


class Kubectl:
    """kubectl in the test's namespace: call it with arguments, get stdout; a failure is the test's."""

    def __init__(self, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig

    def __call__(self, *args: str, stdin: object = None, timeout: float = 120) -> str:
        """``stdin`` is text, or an object that is passed as JSON (a manifest for ``apply -f -``)."""
        text = stdin if stdin is None or isinstance(stdin, str) else json.dumps(stdin)
        return checked(["kubectl", "--kubeconfig", str(self.kubeconfig), *args], stdin=text, timeout=timeout)

    def json(self, *args: str) -> Any:
        return json.loads(self(*args, "-o", "json"))


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


@pytest.fixture(scope="session")
def trainer(cluster: Cluster) -> None:
    """Kubeflow Trainer in the cluster, which knows of TrainJobs. It is not installed here: it brings JobSet with it."""
    if not cluster.kubectl("get", "crd", "trainjobs.trainer.kubeflow.org", "--ignore-not-found", "-o", "name"):
        unavailable("the cluster has no Kubeflow Trainer: k8s/install-trainer installs it")


class Flk:
    """The command line as a user has it: another process, in a folder, with this test's kubeconfig."""

    def __init__(self, kubeconfig: Path, cwd: Path, home: Path) -> None:
        self.cwd = cwd
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("FLK_", "KUBE"))}
        self.env = kept | {"KUBECONFIG": str(kubeconfig), "HOME": str(home), "NO_COLOR": "1"}

    def start(self, *args: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """The command running, with pipes, in a process group of its own, for tests that signal or follow it."""
        return subprocess.Popen(
            [sys.executable, "-m", "flk", *args],
            cwd=cwd or self.cwd,
            env=self.env | dict(env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __call__(
        self, *args: str, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float = RUN_CLI
    ) -> Result:
        process = self.start(*args, cwd=cwd, env=env)
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            stdout, stderr = process.communicate()
            pytest.fail(f"flk {' '.join(args)} took more than {timeout} s:\n{stdout}\n{stderr}", pytrace=False)
        return Result(process.returncode, stdout, stderr)


@pytest.fixture
def flk(kubeconfig: Path, tmp_path_factory: pytest.TempPathFactory) -> Flk:
    """Runs flk: ``flk("submit", "--replicas", "4").code``; its folder is empty unless ``cwd`` says otherwise."""
    return Flk(kubeconfig, tmp_path_factory.mktemp("folder"), tmp_path_factory.mktemp("home"))


@pytest.fixture
def eventually() -> Callable[[str, Callable[[], Any]], Any]:
    """Waits until a check gives something true, and gives it: ``eventually("two pods run", lambda: ...)``."""

    def wait(what: str, check: Callable[[], Any]) -> Any:
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            found = check()
            if found:
                return found
            time.sleep(0.5)
        pytest.fail(f"did not happen in {PATIENCE} s: {what}", pytrace=False)

    return wait


# Images


@pytest.fixture(scope="session")
def image(cluster: Cluster) -> str:
    """The name of flk's own CPU image, built from this source and loaded into the cluster."""
    return os.environ.get("FLK_TEST_IMAGE") or loaded("cpu", FLK_IMAGE, cluster)


@pytest.fixture(scope="session")
def torch_image(cluster: Cluster) -> str:
    """The name of an image with Python and torch, and nothing of flk."""
    return os.environ.get("FLK_TEST_TORCH_IMAGE") or loaded("torch", TORCH_IMAGE, cluster)


def loaded(target: str, name: str, cluster: Cluster) -> str:
    if cluster.kind is None:
        unavailable("images can be loaded into kind clusters only: name those it has in FLK_TEST[_TORCH]_IMAGE")
    with locked("image"):
        checked([str(ROOT / "docker" / "build"), target, "--kind", str(cluster.kind)], timeout=MAKE_CLUSTER)
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
