"""The chart carries flk's runtime and the job's code: byte by byte what `flk submit` ships, mounted where it runs."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from flk.manifest import Bundle, render, runtime_archive, to_yaml
from flk.spec import labels
from flk.spec.job import validated
from flk_runtime.contract import pod_layout
from tests.support.chart import CHART, JOB, ROOT, Rendered, template
from tests.support.commands import helm

SCRIPT = "import torch\nprint('é', {{ .Values }}, \"$(HOME)\")\n"  # what Helm, YAML or Kubernetes could change
LARGE_SCRIPT = 200_000  # bytes
RELEASE_LIMIT = 2**20  # bytes: Helm keeps the chart and what it rendered in one Secret


def of_job(chart: Rendered) -> dict[str, Any]:
    return chart.one("PyTorchJob")["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]


def mounted(chart: Rendered, name: str) -> dict[str, bytes]:
    """The files of a volume of a ConfigMap in a pod of the job, by their paths."""
    (volume,) = [volume for volume in of_job(chart)["volumes"] if volume["name"] == name]
    (mount,) = [mount for mount in of_job(chart)["containers"][0]["volumeMounts"] if mount["name"] == name]
    (source,) = volume["projected"]["sources"] if "projected" in volume else [volume]
    (found,) = [c for c in chart.of_kind("ConfigMap") if c["metadata"]["name"] == source["configMap"]["name"]]
    data = {key: text.encode() for key, text in found.get("data", {}).items()}
    data |= {key: base64.b64decode(text) for key, text in found.get("binaryData", {}).items()}
    if "subPath" in mount:
        return {mount["mountPath"]: data[mount["subPath"]]}
    return {f"{mount['mountPath']}/{key}": content for key, content in data.items()}


@pytest.fixture(scope="session")
def chart() -> Rendered:
    return template({"job": {"enabled": True, "replicas": 2, "script": SCRIPT}})


@pytest.mark.promise("Clusters: A chart's release trains a script on an image that has only torch, and leaves nothing")
def test_the_runtime_is_the_one_that_submit_ships(chart: Rendered) -> None:
    archive = f"{pod_layout.SHIP_FOLDER}/{pod_layout.RUNTIME_ARCHIVE}"
    assert mounted(chart, "ship") == {archive: runtime_archive()}
    words = of_job(chart)["containers"][0]["command"]
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
    chart = template({"job": JOB}, chart=copy)
    assert chart.code != 0
    assert "run make chart in flk's checkout" in chart.stderr


def test_the_script_is_in_the_working_folder_of_the_pods(chart: Rendered) -> None:
    assert mounted(chart, "code") == {f"{pod_layout.WORK_FOLDER}/train.py": SCRIPT.encode()}
    digest = hashlib.sha256(SCRIPT.encode()).hexdigest()
    assert chart.one("PyTorchJob")["metadata"]["annotations"][labels.CODE_HASH] == digest
    chart = template({"job": {"enabled": True, "script": "pass\n", "command": ["mine.py", "--steps", "2"]}})
    assert mounted(chart, "code") == {f"{pod_layout.WORK_FOLDER}/mine.py": b"pass\n"}
    assert of_job(chart)["containers"][0]["command"][-3:] == ["mine.py", "--steps", "2"]


def test_code_of_the_image_runs_with_the_runtime_of_the_chart() -> None:
    chart = template({"job": {"enabled": True, "command": ["/opt/team/train.py", "--lr", 0.1, 1000000]}})
    assert "code" not in {volume["name"] for volume in of_job(chart)["volumes"]}
    assert of_job(chart)["containers"][0]["command"][-4:] == ["/opt/team/train.py", "--lr", "0.1", "1000000"]
