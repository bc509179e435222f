"""The chart in a cluster: a release trains to its end, and an upgrade, a rollback and an uninstallation leave nothing.

Each namespace enforces Pod Security `restricted`.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from flk.targets import TARGETS
from flk_runtime.contract import VERSION
from tests.support.chart import CHART, ROOT, prepared
from tests.support.commands import WITHOUT_TORCH
from tests.support.commands import helm as helm_command

SMALL = ["--set", "job.enabled=true", "--set", "job.resources.cpu=100m"]
TRAINING = 400  # seconds that a small training may take on a machine that does much else
SUM = """
import torch
import torch.distributed as dist
dist.init_process_group()
total = torch.ones(1)
dist.all_reduce(total)
print(f"{total.item():.0f} ranks")
dist.destroy_process_group()
"""
# Everything that a release or its job can leave in a namespace.
KINDS = "pytorchjobs,pods,services,configmaps,secrets,serviceaccounts,roles,rolebindings,jobs,persistentvolumeclaims"


@pytest.fixture
def helm(kubeconfig: Path, namespace: str) -> Any:
    """Runs helm in the test's namespace; gives its exit code and all it printed."""
    prepared()

    def run(*args: str) -> tuple[int, str]:
        # Without `uninstall --wait`: Helm 4's can end while an object is still there (helm/helm#32081).
        done = helm_command(*args, "--kubeconfig", str(kubeconfig), "--namespace", namespace, timeout=TRAINING)
        return done.code, done.stdout + done.stderr

    return run


def wait_for(kubectl: Any, job: str, condition: str) -> None:
    kubectl("wait", f"pytorchjob/{job}", f"--for=condition={condition}", f"--timeout={TRAINING}s", timeout=TRAINING + 9)


def names(kubectl: Any) -> set[str]:
    # Kubernetes puts its own certificate and account into every namespace; Events end by themselves.
    found = set(kubectl("get", KINDS, "-o", "name").split())
    return found - {"configmap/kube-root-ca.crt", "serviceaccount/default"}


@pytest.mark.promise("Clusters: A chart's release trains a script on an image that has only torch, and leaves nothing")
@pytest.mark.promise("Clusters: The same job trains as a PyTorchJob, a TrainJob, a JobSet and a Job")
@pytest.mark.parametrize(
    "name", ["trainjob", *(pytest.param(name, marks=pytest.mark.soak) for name in ("jobset", "job"))]
)  # a PyTorchJob trains below
def test_a_plain_torch_image_trains_as_each_target(
    name: str,
    helm: Any,
    kubectl: Any,
    flk: Any,
    eventually: Any,
    request: pytest.FixtureRequest,
    torch_image: str,
    tmp_path: Path,
) -> None:
    target = TARGETS[name]
    if name in ("trainjob", "jobset"):
        request.getfixturevalue("trainer")
    (tmp_path / "train.py").write_text(SUM)
    size = ["--set", "job.replicas=2", "--set", "job.resources.cpu=100m", "--set", f"job.image={torch_image}"]
    script = ["--set", f"job.target={name}", "--set-file", f"job.script={tmp_path}/train.py"]
    code, text = helm("install", "sum", str(CHART), "--set", "job.enabled=true", *size, *script)
    assert code == 0, text
    assert f"{target.kind} sum trains" in text
    waited = flk("wait", "sum", "--timeout", f"{TRAINING}s", timeout=TRAINING + 60)
    assert waited.code == 0, waited.stderr
    assert "[rank 1] 2 ranks" in flk("logs", "sum").stdout
    assert helm("uninstall", "sum")[0] == 0
    eventually("nothing is left", lambda: not names(kubectl))


def objects(kubectl: Any) -> set[str]:
    """The names without Helm's own Secrets, of which each revision of a release has one."""
    return {name for name in names(kubectl) if not name.startswith("secret/sh.helm.release.")}


@pytest.mark.promise("Clusters: A chart's release trains a script on an image that has only torch, and leaves nothing")
@pytest.mark.promise("Jobs: A script runs without an image build, since code and runtime travel with the job")
def test_a_release_with_a_script_of_200_kilobytes_runs_it_and_leaves_nothing(
    helm: Any, kubectl: Any, torch_image: str, tmp_path: Path, eventually: Any
) -> None:
    # An image with torch and nothing of flk, and a script from this machine. Real source compresses as that of users.
    sources = "".join(path.read_text() for path in sorted((ROOT / "operator_client" / "flk").rglob("*.py")))
    large = "print('trained')\n" + "".join(f"# {line}\n" for line in sources[:200_000].splitlines())
    assert len(large) > 200_000
    (tmp_path / "train.py").write_text(large)
    script = ["--set", "job.env.FLK_START=spawn", "--set-file", f"job.script={tmp_path}/train.py"]
    code, text = helm("install", "gpt", str(CHART), *SMALL, "--set", f"job.image={torch_image}", *script)
    assert code == 0, text
    assert "PyTorchJob gpt trains" in text
    assert "flk logs gpt" in text
    wait_for(kubectl, "gpt", "Succeeded")
    assert "[rank 0] trained" in kubectl("logs", "gpt-worker-0")
    assert helm("uninstall", "gpt")[0] == 0
    eventually("nothing is left", lambda: not names(kubectl))


@pytest.mark.promise("Clusters: A chart's release trains a script on an image that has only torch, and leaves nothing")
@pytest.mark.soak
def test_upgrade_and_rollback_replace_the_job_and_leave_nothing(
    helm: Any, kubectl: Any, eventually: Any, torch_image: str, tmp_path: Path
) -> None:
    """From a chart of another version, which has an object that this one does not have."""
    previous = tmp_path / "flk"
    shutil.copytree(CHART, previous, ignore=shutil.ignore_patterns("__pycache__"))
    metadata = (previous / "Chart.yaml").read_text()
    (previous / "Chart.yaml").write_text(metadata.replace(f"ersion: {VERSION}", "ersion: 0.0.1"))
    (previous / "templates" / "old.yaml").write_text(
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: {{ .Release.Name }}-old}\n"
    )
    (tmp_path / "train.py").write_text("print('trained')\n")
    values = [
        *SMALL,
        "--set",
        "job.env.FLK_START=spawn",
        "--set",
        f"job.image={torch_image}",
        "--set-file",
        f"job.script={tmp_path}/train.py",
    ]
    assert helm("install", "gpt", str(previous), *values)[0] == 0
    wait_for(kubectl, "gpt", "Succeeded")
    before = objects(kubectl)
    uid = kubectl("get", "pytorchjob/gpt", "-o", "jsonpath={.metadata.uid}")

    # A job cannot be changed, neither by another version of flk nor by other values.
    code, text = helm("upgrade", "gpt", str(CHART), *values)
    assert code != 0
    assert "job gpt exists with another version, and a job cannot be changed: set job.name to another name" in text
    assert objects(kubectl) == before
    code, text = helm("upgrade", "gpt", str(previous), *values, "--set", "job.strategy=none")
    assert code != 0
    assert "job gpt exists with another spec" in text
    # What is not of the job can.
    subjects = json.dumps([{"kind": "User", "name": "ada"}])
    code, text = helm("upgrade", "gpt", str(previous), *values, "--set-json", f"rbac.subjects={subjects}")
    assert code == 0, text
    assert kubectl("get", "pytorchjob/gpt", "-o", "jsonpath={.metadata.uid}") == uid

    code, text = helm("upgrade", "gpt", str(CHART), *values, "--set", "job.name=second")
    assert code == 0, text
    wait_for(kubectl, "second", "Succeeded")
    assert "trained" in kubectl("logs", "second-worker-0")
    kubectl("wait", "pod/gpt-worker-0", "--for=delete", "--timeout=60s")
    # The account, role and binding of the release, and what belongs to the job, under its new name.
    of_release = {name for name in before if name.endswith("/gpt-flk")}
    of_job = {name.replace("/gpt", "/second") for name in before - of_release} - {"configmap/second-old"}
    assert objects(kubectl) == of_release | of_job

    assert helm("rollback", "gpt", "1")[0] == 0
    wait_for(kubectl, "gpt", "Succeeded")
    kubectl("wait", "pod/second-worker-0", "--for=delete", "--timeout=60s")
    assert objects(kubectl) == before
    assert helm("uninstall", "gpt")[0] == 0
    eventually("nothing is left", lambda: not names(kubectl))


# Has flk print each request that it sends.
TRACED = """
import sys, urllib3
plain = urllib3.PoolManager.request

def request(pool, method, url, **options):
    outcome = "no answer"
    try:
        reply = plain(pool, method, url, **options)
        outcome = reply.status
        return reply
    finally:
        sys.stderr.write(f"sent {method} {url}: {outcome}\\n")

urllib3.PoolManager.request = request
"""
REQUEST = re.compile(
    r"sent (?P<method>[A-Z]+) https://[^/]+/(?:api|apis/(?P<group>[a-z0-9.-]+))/v[a-z0-9]+/namespaces/[^/]+"
    r"/(?P<resource>[a-z]+)(?P<name>/[^/?: ]+)?(?P<subresource>/[a-z]+)?(?P<query>\?\S*)?: (?P<outcome>\S+)"
)
METHODS = {"POST": "create", "PATCH": "patch", "DELETE": "delete", "PUT": "update"}


def rights_used(stderr: str, own: str) -> set[tuple[str, str, str]]:
    """The API group, resource and verb of each request to a namespace that TRACED has printed; ``own`` is the target.

    None was forbidden, but `flk doctor` also asks whether Pod Security allows a pod, for the Deployment of the operator
    and for cluster-autoscaler's status, and other commands ask for jobs of other targets. They do without the answer.
    """
    used = set()
    for request in REQUEST.finditer(stderr):
        if request["outcome"] == "no":  # answer: it is sent again
            continue
        if request["outcome"] == "403":
            others = {"deployments", *(target.plural for target in TARGETS.values() if target.name != own)}
            optional = "/pods?dryRun=All" in request[0] or request["name"] == "/cluster-autoscaler-status"
            assert optional or request["resource"] in others, request[0]
            continue
        verb = METHODS.get(request["method"]) or ("get" if request["name"] else "list")
        if verb == "list" and "watch=true" in (request["query"] or ""):
            verb = "watch"
        used.add((request["group"] or "", request["resource"] + (request["subresource"] or ""), verb))
    return used


@pytest.mark.promise("Clusters: The roles give what the commands need, and no more")
@pytest.mark.parametrize(
    "name", ["pytorchjob", *(pytest.param(name, marks=pytest.mark.soak) for name in ("trainjob", "jobset", "job"))]
)
def test_role_has_every_right_that_commands_use_and_no_other(
    name: str,
    helm: Any,
    kubectl: Any,
    flk: Any,
    request: pytest.FixtureRequest,
    image: str,
    tmp_path: Path,
    eventually: Any,
) -> None:
    """As the release's ServiceAccount, with nothing but its Role."""
    target = TARGETS[name]
    if name == "trainjob":
        request.getfixturevalue("trainer")
    taint = {"key": "spot", "operator": "Exists", "effect": "NoSchedule"}
    values = ["--set-json", f"defaults.tolerations={json.dumps([taint])}", "--set", f"rbac.targets={{{name}}}"]
    assert helm("install", "site", str(CHART), *values)[0] == 0
    rules = kubectl.json("get", "role", "site-flk")["rules"]
    kubeconfig = Path(flk.env["KUBECONFIG"])
    config = yaml.safe_load(kubeconfig.read_text())
    config["users"] = [{"name": config["users"][0]["name"], "user": {"token": kubectl("create", "token", "site-flk")}}]
    kubeconfig.write_text(json.dumps(config))
    (tmp_path / "train.py").write_text("print('trained')\n")
    fields = {
        "queue": "team",
        "volumes": ["data:/data"],
        "pods": {"service_account": "trainer"},
        "resources": {"cpu": 1},
    }
    (tmp_path / "full.yaml").write_text(json.dumps({"command": "train.py", "target": name, **fields}))
    used: set[tuple[str, str, str]] = set()

    def run(*command: str, code: int = 0) -> str:
        result = flk(*command, cwd=tmp_path, timeout=TRAINING)
        assert result.code == code, result.stderr
        used.update(rights_used(result.stderr, name))
        return str(result.stdout)

    flk.before = TRACED
    small = ["--target", name, "--cpu", "10m", "--image", image, *WITHOUT_TORCH]
    run("submit", "train.py", "--name", "brief", *small)
    run("wait", "brief")
    run("logs", "brief")
    # No node takes these pods: their claim is missing. So nothing waits for them.
    assert run("submit", "train.py", "--name", "mine", "--replicas", "2", "--volume", "data:/data", *small) == "mine\n"
    (role,) = target.replicas(kubectl.json("get", f"{target.plural}.{target.group}", "mine")).values()
    assert taint in role.template["spec"]["tolerations"]
    eventually("the list reads the claim", lambda: "ClaimMissing" in run("list"))
    for command in ("status", "why", "restart", "suspend", "resume", "delete"):
        run(command, "mine")
    run("doctor", "full.yaml", code=104)
    # There is no Kueue here, where flk submit refuses such a job.
    kubectl("create", "-f", "-", stdin=flk("render", "--file", "full.yaml", "--name", "queued", cwd=tmp_path).stdout)
    run("why", "queued")
    run("delete", "queued")

    granted = {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert used == granted
    refused = subprocess.run(["kubectl", "--kubeconfig", kubeconfig, "get", "secrets"], capture_output=True, text=True)
    assert refused.returncode != 0
    assert "forbidden" in refused.stderr


@pytest.mark.promise("Causes: A job that is gone is still known")
def test_records_outlive_pods_and_job(
    helm: Any, kubectl: Any, flk: Any, namespace: str, image: str, tmp_path: Path, eventually: Any
) -> None:
    """Nobody follows the job, and it is deleted behind flk's back."""
    assert helm("install", "site", str(CHART), "--set", "records.enabled=true")[0] == 0
    script = "import os, time\nprint('step 7', flush=True)\ntime.sleep(3)\nif os.environ['RANK'] == '1':\n    raise "
    (tmp_path / "train.py").write_text(script + "ValueError('no label')\ntime.sleep(600)\n")
    common = ["--image", image, "--cpu", "10m", *WITHOUT_TORCH]
    submit = ["submit", "train.py", "--name", "brief", "--replicas", "2", "--restarts", "1", *common]
    assert flk(*submit, cwd=tmp_path).code == 0
    (tmp_path / "sleep.py").write_text("import time\ntime.sleep(600)\n")
    assert flk("submit", "sleep.py", "--name", "endless", *common, cwd=tmp_path).code == 0

    def kept() -> str:
        return str(kubectl("get", "configmap", "site-flk-records", "-o", "jsonpath={.data}"))

    eventually("the end is on record", lambda: r"\"outcome\":\"failed\"" in kept())
    eventually("the other job is on record", lambda: '"endless.' in kept())
    kubectl("delete", "pytorchjob", "brief", "endless", "--cascade=foreground", timeout=200)

    answer = json.loads(flk("why", "brief", "-o", "json").stdout)
    assert (answer["code"], answer["cause"]["exit_code"]) == ("ExceptionRaised", 100)
    assert "rank 1 in brief-worker-1 raised ValueError: no label" in answer["summary"]
    state = json.loads(flk("status", "brief", "-o", "json").stdout)
    assert (state["phase"], state["code"], len(state["attempts"])) == ("Failed", 100, 2)
    assert "[rank 0] step 7" in flk("logs", "brief").stdout
    assert json.loads(flk("why", "endless", "-o", "json").stdout)["code"] == "Deleted"

    account = f"--as=system:serviceaccount:{namespace}:default"
    for verb, what, allowed in (
        ("patch", "configmap/site-flk-records", True),
        ("delete", "configmap/site-flk-records", False),
        ("patch", "configmap/site-flk-defaults", False),
        ("list", "configmaps", False),
        ("get", "secrets", False),
    ):
        config = ["--kubeconfig", str(kubectl.kubeconfig)]
        asked = subprocess.run(["kubectl", *config, "auth", "can-i", verb, what, account], capture_output=True)
        assert (asked.returncode == 0) is allowed, (verb, what)
