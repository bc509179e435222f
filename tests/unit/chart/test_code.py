"""The chart carries flk's runtime and the job's code: byte by byte what `flk submit` ships, mounted where it runs."""

from __future__ import annotations

import base64
import gzip
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from flk import labels
from flk.manifest import Bundle, render, runtime_archive, to_yaml
from flk.spec.job import validated
from flk_runtime.contract import pod_env, pod_layout
from flk_runtime.launcher.start import unpack
from tests.support.chart import CHART, ROOT, Rendered, template
from tests.support.commands import helm

SCRIPT = "import torch\nprint('é', {{ .Values }}, \"$(HOME)\")\n"  # what Helm, YAML or Kubernetes could change
LARGE_SCRIPT = 200_000  # bytes
RELEASE_LIMIT = 2**20  # bytes: Helm keeps the chart and what it rendered in one Secret


def of_job(chart: Rendered) -> dict[str, Any]:
    return chart.one("PyTorchJob")["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]


def mounted(chart: Rendered) -> dict[str, bytes]:
    """The files below /flk/ship in a pod of the job, by their paths."""
    config_maps = {c["metadata"]["name"]: c for c in chart.of_kind("ConfigMap")}
    (volume,) = [volume for volume in of_job(chart)["volumes"] if volume["name"] == "ship"]
    files: dict[str, bytes] = {}
    for source in volume["projected"]["sources"]:
        found = config_maps[source["configMap"]["name"]]
        data = {key: text.encode() for key, text in found.get("data", {}).items()}
        data |= {key: base64.b64decode(text) for key, text in found.get("binaryData", {}).items()}
        items = source["configMap"].get("items") or [{"key": key, "path": key} for key in data]
        files |= {item["path"]: data[item["key"]] for item in items}
    return files


@pytest.fixture(scope="session")
def chart() -> Rendered:
    return template({"job": {"enabled": True, "replicas": 2, "script": SCRIPT}})


@pytest.mark.promise("Clusters: A chart's release trains a script on an image that has only torch, and leaves nothing")
def test_the_runtime_is_the_one_that_submit_ships(chart: Rendered) -> None:
    assert mounted(chart)[pod_layout.RUNTIME_ARCHIVE] == runtime_archive()
    words = of_job(chart)["containers"][0]["command"]
    archive = f"{pod_layout.SHIP_FOLDER}/{pod_layout.RUNTIME_ARCHIVE}"
    assert words[words.index("flk") + 1 :] == ["python3", "-u", archive, "--", "train.py"]


def test_a_release_with_a_large_script_fits_its_secret(tmp_path: Path) -> None:
    # Real source, which compresses as that of users does.
    sources = sorted((ROOT / "operator_client" / "flk").rglob("*.py"))
    script = "".join(path.read_text() for path in sources)[:LARGE_SCRIPT]
    assert len(script) == LARGE_SCRIPT
    values = {"job": {"enabled": True, "replicas": 2, "script": script}}
    chart = template(values)
    packed = helm("package", str(CHART), "--destination", str(tmp_path))
    assert packed.code == 0, packed.stderr
    # A release is JSON with the chart's files in base64, the values and the manifests, compressed, and that in base64.
    (package,) = tmp_path.glob("*.tgz")
    with tarfile.open(package) as archive:
        files = [archive.extractfile(member) for member in archive.getmembers() if member.isfile()]
        content = [base64.b64encode(file.read()).decode() for file in files if file]
    release = gzip.compress(json.dumps([content, values, chart.documents]).encode(), 9)
    # What Helm stores has names and times beside it, and YAML in place of JSON: 2.4 % more in a cluster.
    assert len(base64.b64encode(release)) * 1.03 < RELEASE_LIMIT


def test_a_manifest_with_the_runtime_is_as_it_is() -> None:
    job = validated({"name": "gpt", "command": ["train.py"]})
    manifests = render(job, Bundle(runtime=b"another"))
    chart = template({"job": {"enabled": True, "manifest": to_yaml(manifests)}})
    (runtime,) = [m for m in manifests if m["kind"] == "ConfigMap"]
    assert chart.one("ConfigMap") == runtime


def test_without_the_archive_the_chart_says_how_to_make_it(tmp_path: Path) -> None:
    copy = tmp_path / "flk"
    shutil.copytree(CHART, copy, ignore=shutil.ignore_patterns("*.zip"))
    chart = template({"job": {"enabled": True}}, chart=copy)
    assert chart.code != 0
    assert "run make chart in flk's checkout" in chart.stderr


def test_the_code_reaches_the_pods_and_its_hash_fits(chart: Rendered, tmp_path: Path) -> None:
    files = {path.removeprefix("code/"): data for path, data in mounted(chart).items() if path.startswith("code/")}
    assert files == {"train.py": SCRIPT.encode()}
    for name, data in files.items():
        (tmp_path / "code" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "code" / name).write_bytes(data)
    env = {variable["name"]: variable.get("value") for variable in of_job(chart)["containers"][0]["env"]}
    assert env[pod_env.CODE] == f"{pod_layout.SHIP_FOLDER}/code"
    assert unpack(tmp_path / "code", tmp_path / "work", str(env[pod_env.CODE_HASH])) == 1
    assert chart.one("PyTorchJob")["metadata"]["annotations"][labels.CODE_HASH] == env[pod_env.CODE_HASH]


def test_without_script_and_command_the_example_trains() -> None:
    chart = template({"job": {"enabled": True}})
    assert mounted(chart)["code/train.py"] == (ROOT / "examples" / "gpt" / "train.py").read_bytes()
    assert of_job(chart)["containers"][0]["command"][-1] == "train.py"


def test_code_of_the_image_runs_with_the_runtime_of_the_chart() -> None:
    chart = template({"job": {"enabled": True, "command": ["/opt/team/train.py", "--lr", 0.1, 20]}})
    assert not [path for path in mounted(chart) if path.startswith("code/")]
    assert of_job(chart)["containers"][0]["command"][-4:] == ["/opt/team/train.py", "--lr", "0.1", "20"]
    names = {variable["name"] for variable in of_job(chart)["containers"][0]["env"]}
    assert not names & {pod_env.CODE, pod_env.CODE_HASH}


def test_the_command_names_the_script() -> None:
    chart = template({"job": {"enabled": True, "script": "pass\n", "command": "src/mine.py --steps 2"}})
    assert mounted(chart)["code/src/mine.py"] == b"pass\n"
    assert of_job(chart)["containers"][0]["command"][-3:] == ["src/mine.py", "--steps", "2"]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a module beside a script": ({"script": "pass", "command": ["-m", "a"]}, "must begin with the file name"),
    "a script outside": ({"script": "pass", "command": ["../a.py"]}, "must begin with the file name"),
    "a script with a path of the image": ({"script": "pass", "command": ["/a.py"]}, "must begin with the file name"),
}


@pytest.mark.parametrize(("job", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_wrong_code_is_refused(job: dict[str, Any], says: str) -> None:
    chart = template({"job": {"enabled": True, **job}})
    assert chart.code != 0
    assert says in chart.stderr
