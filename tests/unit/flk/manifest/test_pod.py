"""The pod template: settings of pods, volumes, and the patch."""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from flk.errors import UsageError
from flk.manifest.pod import START, patched
from flk.spec.hardware import GPU_TYPES
from flk.spec.mounts import SOURCES, Mount
from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.contract.record import JobRecord
from tests.support.commands import Run


@pytest.fixture
def pod(run: Run) -> Callable[..., Any]:
    """The spec of the pods of a PyTorchJob with these flags."""

    def spec(*flags: str) -> Any:
        Path("train.py").write_text("")
        code, stdout, stderr = run("render", "train.py", "--name", "gpt", *flags, "-o", "json")
        assert code == 0, stderr
        return json.loads(stdout)["items"][0]["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]

    return spec


def test_pods_go_to_nodes_that_can_run_the_image_where_that_is_known(pod: Callable[..., Any]) -> None:
    amd64, arm64 = {"kubernetes.io/arch": "amd64"}, {"kubernetes.io/arch": "arm64"}
    assert pod()["nodeSelector"] == amd64
    assert pod("--node-selector", "pool=a")["nodeSelector"] == amd64 | {"pool": "a"}
    assert pod("--node-selector", "kubernetes.io/arch=arm64")["nodeSelector"] == arm64  # of a registry of one's own
    assert "nodeSelector" not in pod("--image", "team/train:1")


def test_each_form_of_a_volume_reaches_the_pod(pod: Callable[..., Any]) -> None:
    forms = {
        "data:/data": {"persistentVolumeClaim": {"claimName": "data"}},
        "nfs://fs.example.com/export/:/nfs:ro": {"nfs": {"server": "fs.example.com", "path": "/export"}},
        "secret:keys:/keys": {"secret": {"secretName": "keys"}},
        "configmap:settings:/settings": {"configMap": {"name": "settings"}},
        "hostpath:/mnt/ssd:/ssd": {"hostPath": {"path": "/mnt/ssd", "type": "Directory"}},
        "data:/again:ro": {"persistentVolumeClaim": {"claimName": "data"}},
    }
    spec = pod(*(word for form in forms for word in ("--volume", form)))
    volumes = {volume.pop("name"): volume for volume in spec["volumes"]}
    mounts = {mount["mountPath"]: mount for mount in spec["containers"][0]["volumeMounts"]}
    for text, source in forms.items():
        mount = Mount.parse(text)
        assert volumes[mounts[mount.path]["name"]] == source
        assert mounts[mount.path].get("readOnly", False) == (text.endswith(":ro") or SOURCES[mount.kind].read_only)
    assert mounts["/data"]["name"] == mounts["/again"]["name"]


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("secret:a:/b:ro", "secret:a:/b"),
        ("hostpath:/a//b/:/c/:ro", "hostpath:/a/b:/c:ro"),
        ("nfs://10.0.0.1/:/x", "nfs://10.0.0.1/:/x"),
        ("nfs:/x", "nfs:/x"),  # a PersistentVolumeClaim may have this name
    ],
)
def test_a_volume_has_one_text(text: str, normal: str) -> None:
    assert str(Mount.parse(text)) == normal == str(Mount.parse(normal))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--volume", "data"], "--volume: must be one of PVC:/PATH[:ro], nfs://SERVER/PATH:/PATH[:ro], secret:NAME:"),
        (["--volume", "secret:/x"], "--volume: must be secret:NAME:/PATH (is 'secret:/x')"),
        (["--volume", "hostpath:/x:ro"], "--volume: must be hostpath:/PATH:/PATH[:ro] (is 'hostpath:/x:ro')"),
        (["--volume", "hostpath:x:/y"], "--volume: what follows hostpath: must be an absolute path (is 'x')"),
        (["--volume", "hostpath:/a/../b:/y"], "--volume: what follows hostpath: must not contain '..'"),
        (["--volume", "nfs://:/y"], "--volume: what follows nfs:// must begin with the name or address of a server"),
        (["--volume", "nfs://h/a:y"], "--volume: the path must be an absolute path (is 'y')"),
        (["--volume", "configmap:A:/y"], "--volume: what follows configmap: must be lower-case letters"),
        (["--volume", "data:relative:ro"], "--volume: the path must be an absolute path (is 'relative')"),
        (["--volume", "data:/x:rw"], "--volume: must be one of PVC:/PATH[:ro], nfs://SERVER/PATH:/PATH[:ro], "),
        (["--volume", "nfs:h/a:/y"], "--volume: must be one of PVC:/PATH[:ro], nfs://SERVER/PATH:/PATH[:ro], "),
        (["--volume", "nfs://h/a:/y:rw"], "--volume: must be nfs://SERVER/PATH:/PATH[:ro] (is 'nfs://h/a:/y:rw')"),
        (["--volume", "secret:k:/flk/work/k"], "--volume: the path must not be below /flk"),
        (["--volume", "a:/x", "--volume", "secret:b:/x/"], "volumes: two volumes are mounted at /x"),
        (["--volume", "a:/x:ro", "--checkpoint", "b:/x"], "volumes: two volumes are mounted at /x"),
        (["--image-pull-policy", "always"], "must be one of IfNotPresent, Always, Never (is 'always')"),
        (["--cpu", "4", "--cpu-limit", "2"], "--cpu-limit: is 2, less than cpu, which is 4"),
        (["--memory", "4Gi", "--memory-limit", "4G"], "--memory-limit: is 4G, less than memory, which is 4Gi"),
        (["--ephemeral-storage", "1GB"], "--ephemeral-storage: must be a number of bytes like 512Mi or 16Gi"),
        (["--volume", "/data:/x:ro"], "for a folder of the node must be hostpath:/data:/x:ro (is '/data:/x:ro')"),
        (["--gpu", "H100"], "--gpu: must be a number of GPUs, or TYPE:N like H100:8 (is 'H100')"),
        (["--gpu", "H100:0"], "--gpu: must be a number of GPUs, or TYPE:N like H100:8 (is 'H100:0')"),
        (["--gpu", "H100:1025"], "--gpu: must be at most 1024 (is 1025)"),
        (["--gpu", "K80:1"], "--gpu: flk knows no GPUs of type K80, only A10, A100"),
    ],
)
def test_a_wrong_value_is_refused_in_one_line(run: Run, flags: list[str], message: str) -> None:
    Path("train.py").write_text("")
    code, stdout, stderr = run("render", "train.py", *flags)
    assert code == 2
    assert stdout == ""
    assert stderr.startswith(f"error: {flags[0]}") or message in stderr
    assert message in stderr


def test_limits_and_requests_differ_where_the_job_says_so(pod: Callable[..., Any]) -> None:
    flags = ("--memory", "8Gi", "--memory-limit", "12Gi", "--cpu-limit", "4", "--ephemeral-storage", "50Gi")
    container = pod(*flags, "--image-pull-policy", "Always")["containers"][0]
    assert container["imagePullPolicy"] == "Always"
    assert container["resources"] == {
        "limits": {"cpu": "4", "memory": "12Gi", "ephemeral-storage": "50Gi"},
        "requests": {"memory": "8Gi", "ephemeral-storage": "50Gi"},
    }


def test_a_type_of_gpus_is_an_affinity_to_nodes_with_one_of_the_known_labels(pod: Callable[..., Any]) -> None:
    spec = pod("--gpu", "h100:8", "--topology", "rack")
    assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert "podAffinity" in spec["affinity"]
    required = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    terms = [term["matchExpressions"] for term in required["nodeSelectorTerms"]]  # one of them has to match
    found = {expression["key"]: expression["values"] for (expression,) in terms}
    assert found["nvidia.com/gpu.product"][0] == "NVIDIA-H100-80GB-HBM3"
    assert found["karpenter.k8s.aws/instance-gpu-name"] == ["h100"]
    assert found == GPU_TYPES["H100"]


def rendered(run: Run, *flags: str) -> Any:
    Path("train.py").write_text("")
    code, stdout, stderr = run("render", "train.py", "--name", "gpt", *flags, "-o", "json")
    assert code == 0, stderr
    return json.loads(stdout)["items"][0]


def test_flags_reach_the_manifest(run: Run) -> None:
    job = rendered(
        run,
        *("--label", "team=vision", "--annotation", "example.com/note=a b", "--service-account", "trainer"),
        *("--pull-secret", "registry", "--pull-secret", "mirror", "--priority-class", "high"),
    )
    template = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    for metadata in (job["metadata"], template["metadata"]):
        assert metadata["labels"]["team"] == "vision"
        assert metadata["labels"]["flk.dev/job"] == "gpt"
        assert metadata["annotations"]["example.com/note"] == "a b"
    assert template["spec"]["serviceAccountName"] == "trainer"
    assert template["spec"]["imagePullSecrets"] == [{"name": "registry"}, {"name": "mirror"}]
    assert template["spec"]["priorityClassName"] == "high"
    assert template["spec"]["automountServiceAccountToken"] is False


@pytest.mark.parametrize("strength", ["required", "preferred"])
def test_the_topology_of_a_job_is_told_to_the_scheduler_and_to_kueue(run: Run, strength: str) -> None:
    job = rendered(run, "--queue", "gold", "--topology", f"example.com/rack:{strength}")
    template = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    assert template["metadata"]["annotations"][f"kueue.x-k8s.io/podset-{strength}-topology"] == "example.com/rack"
    assert f"{strength}DuringSchedulingIgnoredDuringExecution" in template["spec"]["affinity"]["podAffinity"]


def test_an_image_without_python_leaves_a_record_of_a_usage_error(tmp_path: Path) -> None:
    env = {"FLK_POD_INDEX": "1", "FLK_POD_NAME": "gpt-worker-1", "FLK_NODE_NAME": "n", "FLK_TERMINATION_LOG": "log"}
    words = ["/bin/sh", "-c", START, "flk", "no-such-python", "-u"]
    done = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "[pod 1] error: the image has no no-such-python\n")
    failure = Failure(Kind.USAGE, 1, pod_name="gpt-worker-1", node="n", message="the image has no no-such-python")
    record = JobRecord("failed", 2, failure=failure, no_retry_reason=f"not retried: {Kind.USAGE.meaning.reason}")
    assert (tmp_path / "log").read_text() == record.to_json()


CASES: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("patches.yaml").read_text())
NULL = st.none()
SCALARS = st.booleans() | st.integers(-9, 9) | st.sampled_from(["", "x", "y"])
KEYS = st.sampled_from(["a", "b", "name", "mountPath", "env"])
BASES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3))
PATCHES = st.recursive(
    SCALARS | NULL, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3)
)
MAPPINGS = st.dictionaries(KEYS, BASES, max_size=4)
PATCH_MAPPINGS = st.dictionaries(KEYS, PATCHES, max_size=4)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_patch_is_merged_or_refused_as_its_case_says(case: dict[str, Any]) -> None:
    if "error" in case:
        with pytest.raises(UsageError) as caught:
            patched(case["base"], case["patch"])
        assert str(caught.value).startswith("patch" + case["error"])
    else:
        assert patched(case["base"], case["patch"]) == case["result"]


def merged(base: Any, patch: Any) -> Any:
    """The result of a patch; generated patches that are refused do not count as examples."""
    try:
        return patched(base, patch)
    except UsageError:
        assume(False)


def nulls(value: Any) -> int:
    """The number of keys that are null, at any depth."""
    if isinstance(value, dict):
        return sum((item is None) + nulls(item) for item in value.values())
    return sum(map(nulls, value)) if isinstance(value, list) else 0


@given(MAPPINGS, PATCH_MAPPINGS)
def test_arguments_are_not_changed(base: dict[str, Any], patch: dict[str, Any]) -> None:
    before = copy.deepcopy((base, patch))
    merged(base, patch)
    assert (base, patch) == before


@given(MAPPINGS, PATCH_MAPPINGS)
def test_no_key_of_the_result_is_null(base: dict[str, Any], patch: dict[str, Any]) -> None:
    assert nulls(merged(base, patch)) == 0


@given(MAPPINGS, PATCH_MAPPINGS)
def test_keys_are_those_of_both_without_the_removed_ones(base: dict[str, Any], patch: dict[str, Any]) -> None:
    removed = {key for key, value in patch.items() if value is None}
    assert merged(base, patch).keys() == (base.keys() | patch.keys()) - removed
