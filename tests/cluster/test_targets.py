"""The same job as a TrainJob, a JobSet and an indexed Job: same numbers, same states, same commands."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from flk.targets import TARGETS, target_of

STEPS = 300
KINDS = {
    "pytorchjob": "pytorchjob.kubeflow.org",
    "trainjob": "trainjob.trainer.kubeflow.org",
    "jobset": "jobset.jobset.x-k8s.io",
    "job": "job.batch",
}
# The namespace and the API group of each operator.
OPERATORS = {
    "pytorchjob": ("kubeflow", "kubeflow.org"),
    "trainjob": ("kubeflow-system", "trainer.kubeflow.org"),
    "jobset": ("jobset-system", "jobset.x-k8s.io"),
}
HOOKS = ("validatingwebhookconfigurations", "mutatingwebhookconfigurations")
# The youngest process of the runtime in a pod is a rank. The brackets keep the shell from finding itself.
KILL = """
for process in $(ls /proc | grep -E '^[0-9]+$' | sort -rn); do
  grep -q flk[_]runtime /proc/$process/cmdline && kill -9 $process && exit
done
"""


@pytest.fixture
def no_jobs_stay(trainer: None, kubectl: Any) -> Iterator[None]:
    """Deletes the jobs of a test when it ends: each would keep its namespace."""
    yield
    kubectl("delete", "pytorchjobs,trainjobs,jobsets,jobs", "--all", "--wait=false")


def state(flk: Any, job: str) -> dict[str, Any]:
    result = flk("status", job, "-o", "json")
    assert result.code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def last_loss(flk: Any, job: str) -> float:
    lines = flk("logs", job, "--no-follow", "--rank", "0").stdout.splitlines()
    metrics = [json.loads(line.removeprefix("[rank 0] ")) for line in lines if line.startswith('[rank 0] {"step"')]
    assert metrics[-1]["step"] == STEPS, lines
    return float(metrics[-1]["heldout_loss"])


def remove(cluster: Any, namespace: str, group: str) -> None:
    """Remove an operator: its namespace, the webhooks that it served, and the definitions of its kinds."""
    cluster.kubectl("delete", "namespace", namespace, "--wait=false")
    hooks = json.loads(cluster.kubectl("get", ",".join(HOOKS), "-o", "json"))["items"]
    served_by = [
        f"{configuration['kind']}/{configuration['metadata']['name']}"
        for configuration in hooks
        for hook in configuration.get("webhooks", [])
        if hook["clientConfig"].get("service", {}).get("namespace") == namespace
    ]
    definitions = cluster.kubectl("get", "crds", "-o", "name").split()
    of_group = [name for name in definitions if name.partition(".k8s.io/")[2].partition(".")[2] == group]
    cluster.kubectl("delete", "--wait=false", *dict.fromkeys(served_by), *of_group)


def served(cluster: Any) -> set[str]:
    """The kinds that the cluster serves, each as ``kind.group``."""
    groups = cluster.kubectl("api-resources", "--no-headers", "-o", "name").split()
    return {name.replace("s.", ".", 1) for name in groups}


class Jobs:
    """The same training in several jobs, disturbed or not: the last loss of each must be equal."""

    def __init__(self, flk: Any, kubectl: Any, eventually: Callable[..., Any], *options: str) -> None:
        self._flk, self._kubectl, self._eventually = flk, kubectl, eventually
        self._options = ["--replicas", "2", "--cpu", "100m", "--save-every", "20", *options]

    def submit(self, name: str, *options: str) -> None:
        submitted = self._flk("submit", "--name", name, *options, *self._options, "--", "--steps", str(STEPS))
        assert submitted.code == 0, submitted.stderr

    def disturb(self, name: str) -> None:
        """Kill a rank while the job trains, and delete a pod while it trains again."""
        self._eventually(f"{name} trains", lambda: '"step": 10,' in self._flk("logs", name, "--no-follow").stdout)
        self._kubectl("exec", self._pod(name), "--", "sh", "-c", KILL)
        self._eventually(f"{name} starts its ranks again", lambda: self._attempts(name) >= 2)
        self._kubectl("delete", "pod", self._pod(name), "--wait=false")
        self._eventually(f"{name} starts with a new pod", lambda: self._attempts(name) >= 3)

    def lose(self, name: str) -> list[list[int]]:
        """Lose the pod of rank 1 while the job trains, without a warning.

        Return the ranks of this pod and of the others in the next attempt.
        """
        self._eventually(f"{name} trains", lambda: '"step": 10,' in self._flk("logs", name, "--no-follow").stdout)
        lost = next(pod for pod in state(self._flk, name)["pods"] if pod["ranks"] == [1])
        self._kubectl("delete", "pod", lost["name"], "--force", "--grace-period=0")
        self._eventually(f"{name} trains again", lambda: self._attempts(name) >= 2)
        pods = state(self._flk, name)["pods"]
        return [pods.pop(lost["index"])["ranks"], *(pod["ranks"] for pod in pods)]

    def losses(self, *names: str) -> dict[str, float]:
        """The last loss of each job, which has ended with success."""
        for name in names:
            ended = self._flk("wait", name, timeout=500)
            assert ended.code == 0, ended.stderr
            assert state(self._flk, name)["phase"] == "Succeeded"
        return {name: last_loss(self._flk, name) for name in names}

    def kinds(self) -> dict[str, str]:
        """The kind of each job, as `kubectl get -o name` writes it."""
        names = self._flk("list", "-o", "name").stdout.split()
        return {name: kind for kind, _, name in (text.partition("/") for text in names)}

    def _attempts(self, name: str) -> int:
        found = state(self._flk, name)
        assert found["phase"] != "Failed", found
        return len(found["attempts"])

    def _pod(self, name: str) -> str:
        """The newest pod with index 1."""
        kind = self.kinds()[name]
        target = target_of(self._kubectl.json("get", f"{kind}/{name}"))
        pods = self._kubectl.json("get", "pods", "-l", f"flk.dev/job={name}")["items"]
        mine = [pod for pod in pods if target.position(pod)[1] == 1]
        newest: str = max(mine, key=lambda pod: pod["metadata"]["creationTimestamp"])["metadata"]["name"]
        return newest


@pytest.mark.soak
@pytest.mark.timeout(1800, func_only=True)
def test_same_loss_after_a_killed_rank_and_a_deleted_pod(
    flk: Any, kubectl: Any, image: str, checkpoints_claim: None, no_jobs_stay: None, eventually: Callable[..., Any]
) -> None:
    """A PyTorchJob that nobody disturbs and a disturbed job of each target end with the same loss, to the bit."""
    jobs = Jobs(flk, kubectl, eventually, "--image", image, "--checkpoint", "checkpoints:/checkpoints")

    def disturb(target: str) -> None:
        jobs.submit(f"on-{target}", "--target", target)
        jobs.disturb(f"on-{target}")

    jobs.submit("calm", "--target", "pytorchjob")
    with ThreadPoolExecutor(max_workers=2) as pool:
        for disturbed in [pool.submit(disturb, target) for target in TARGETS]:
            disturbed.result()
    losses = jobs.losses("calm", *(f"on-{target}" for target in TARGETS))
    assert len(set(losses.values())) == 1, losses
    assert jobs.kinds() == {"calm": KINDS["pytorchjob"]} | {f"on-{target}": kind for target, kind in KINDS.items()}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("option", "value", "ranks"), [("--spares", "1", [[], [0], [1]]), ("--elastic", "1:2", [[], [0]])]
)
def test_a_jobset_trains_on_without_a_pod_that_is_lost(
    flk: Any,
    kubectl: Any,
    image: str,
    no_jobs_stay: None,
    eventually: Callable[..., Any],
    option: str,
    value: str,
    ranks: list[list[int]],
) -> None:
    """Its spare takes the place at once; an elastic JobSet goes on with one pod. Both end with their first pod."""
    jobs = Jobs(flk, kubectl, eventually, "--image", image, "--target", "jobset", option, value)
    jobs.submit("lasts")
    assert jobs.lose("lasts") == ranks
    assert flk("scale", "lasts", "1").code == 2
    assert jobs.losses("lasts")


@pytest.mark.soak
@pytest.mark.promise("Clusters: A job needs no operator: auto takes the best kind that the cluster serves")
@pytest.mark.timeout(3600, func_only=True)
def test_auto_trains_the_same_while_operators_are_removed_in_turn(
    trainer: None, cluster: Any, flk: Any, kubectl: Any, image: str, eventually: Callable[..., Any]
) -> None:
    """In a cluster with all operators, with Trainer only, with JobSet only, and without any."""
    if os.environ.get("FLK_TEST_DISPOSABLE") != "yes":
        pytest.skip("FLK_TEST_DISPOSABLE=yes is not set: this test removes all operators from the cluster")
    jobs = Jobs(flk, kubectl, eventually, "--image", image)
    losses = {}
    for target, kind in KINDS.items():
        jobs.submit(f"on-{target}")
        assert jobs.kinds()[f"on-{target}"] == kind
        jobs.disturb(f"on-{target}")
        losses |= jobs.losses(f"on-{target}")
        if target in OPERATORS:
            # Before its controller, which alone ends its finalizers.
            kubectl("delete", kind, "--all")
            remove(cluster, *OPERATORS[target])
            eventually(f"{kind} is not served", lambda kind=kind: kind not in served(cluster))
    jobs.submit("calm")
    assert len(set((losses | jobs.losses("calm")).values())) == 1, losses
