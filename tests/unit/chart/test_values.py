"""The values of the chart: wrong ones are refused, and the schema knows what flk.yaml knows."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from flk import labels
from flk.spec import defaults as namespace_defaults
from flk.targets import TARGETS
from flk.targets.rendezvous import authenticates
from flk_runtime.contract import pod_env, user_env
from scripts.chart import FILES
from scripts.chart.values import described
from tests.support.chart import CHART, ROOT, prepared, template
from tests.support.commands import helm

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())


def test_launchers_authenticate_each_other_by_a_secret() -> None:
    several = {"enabled": True, "replicas": 2}
    secret = template({"job": several}).one("Secret")
    assert secret["metadata"]["name"] == "gpt-rendezvous"
    assert len(base64.b64decode(secret["data"]["secret"])) == 43
    assert template({"job": several, "rendezvousSecret": False}).of_kind("Secret") == []


@pytest.mark.parametrize(
    ("job", "has_secret"),
    [
        ({"replicas": 1}, False),
        ({"replicas": 1, "checkpoint": "claim:/checkpoints"}, False),  # `flk submit` makes one for the UID
        ({"replicas": 2}, True),
    ],
    ids=["one pod", "a volume", "two pods"],
)
def test_the_chart_makes_a_secret_for_the_jobs_whose_launchers_need_one(job: dict[str, Any], has_secret: bool) -> None:
    chart = template({"job": {"enabled": True, **job}})
    assert bool(chart.of_kind("Secret")) is authenticates(chart.one("PyTorchJob")) is has_secret


def test_the_notes_of_an_installation_warn_of_what_the_cluster_lacks(tmp_path: Path) -> None:
    def notes(**job: str) -> str:
        values = tmp_path / "values.json"
        values.write_text(json.dumps({"job": {"enabled": True, **job}}))
        done = helm("install", "gpt", str(prepared()), "--dry-run=client", "--values", str(values))
        assert done.code == 0, done.stderr
        return done.stdout.partition("NOTES:")[2]

    assert "WARNING: this cluster serves no PyTorchJob (kubeflow.org/v1)" in notes()
    assert "queue" not in notes()
    assert "WARNING: nobody starts a job in queue gold: this cluster serves no API of Kueue" in notes(queue="gold")


def test_records_may_be_read_and_patched_and_nothing_else() -> None:
    records = {"enabled": True, "serviceAccounts": ["default", "trainer"]}
    job = {"enabled": True, "name": "train"}
    chart = template({"job": job, "records": records})
    (config,) = (c for c in chart.of_kind("ConfigMap") if labels.RECORDS in c["metadata"]["labels"])
    name = config["metadata"]["name"]
    assert "data" not in config
    (role,) = (role for role in chart.of_kind("Role") if role["metadata"]["name"] == name)
    rule = {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": [name], "verbs": ["get", "patch"]}
    assert role["rules"] == [rule]
    (binding,) = (binding for binding in chart.of_kind("RoleBinding") if binding["metadata"]["name"] == name)
    assert [subject["name"] for subject in binding["subjects"]] == ["default", "trainer"]
    (defaults,) = (c for c in chart.of_kind("ConfigMap") if labels.DEFAULTS in c["metadata"]["labels"])
    read = namespace_defaults.parse([("defaults", defaults["data"][labels.DEFAULTS_KEY])])
    assert read.records == name
    pod = chart.one("PyTorchJob")["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    assert {"name": pod_env.RECORDS, "value": name} in pod["containers"][0]["env"]


def test_no_defaults_no_config_map_and_no_job_unless_enabled() -> None:
    assert template({}).kinds() == ["Role", "RoleBinding", "ServiceAccount"]
    assert template({"rbac": {"create": False}}).kinds() == []


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "misspelt value": ({"job": {"replicsa": 4}}, "replicsa"),
    "misspelt block": ({"jobs": {}}, "jobs"),
    "no replicas": ({"job": {"replicas": 0}}, "replicas"),
    "replicas as text": ({"job": {"replicas": "4"}}, "replicas"),
    "upper case": ({"job": {"name": "Gpt"}}, "name"),
    "newline": ({"job": {"name": "gpt\n"}}, "name"),
    "too long with its replicas": ({"job": {"enabled": True, "name": "a" * 54, "replicas": 11}}, "too long"),
    "unknown strategy": ({"job": {"strategy": "zero3"}}, "strategy"),
    "quotes in a command as text": ({"job": {"command": "train.py 'a b'"}}, "command"),
    "an option of jobs in another form": ({"job": {"elastic": "1:4"}}, "elastic"),
    "a variable twice": (
        {"job": {"enabled": True, "env": {"A": "1"}, "secrets": {"A": "s:k"}}},
        "job.secrets.A: is in env too",
    ),
    "two volumes at one path": (
        {"job": {"enabled": True, "volumes": ["a:/data", "b:/data/"]}},
        "job.volumes: two volumes are mounted at /data",
    ),
    "checkpoint in other storage": ({"job": {"checkpoint": "gs://bucket/a"}}, "checkpoint"),
    "checkpoint that lacks a slash": ({"job": {"checkpoint": "s3:/bucket/a"}}, "checkpoint"),
    "a Secret as a volume": ({"job": {"volumes": ["secret:/etc/x"]}}, "volumes"),
    "bytes of memory": ({"job": {"resources": {"memory": 16}}}, "memory"),
    "bytes of memory as text": ({"job": {"resources": {"memory": "16"}}}, "memory"),
    "patch of the job": ({"job": {"patch": {"kind": "Pod"}}}, "patch"),
    "torchrun": ({"job": {"enabled": True, "command": ["/bin/torchrun", "a.py"]}}, "not with /bin/torchrun"),
    "a manifest that is not YAML": ({"job": {"enabled": True, "manifest": "kind: Job\n---\na: [\n"}}, "job.manifest: "),
    "checkpoint in no bucket": ({"job": {"checkpoint": "s3:///a"}}, "checkpoint"),
    "relative mount": ({"job": {"volumes": ["claim:data"]}}, "volumes"),
    "number as environment": ({"job": {"env": {"A": 1}}}, "env"),
    "plain secret": ({"job": {"secrets": {"A": "value"}}}, "secrets"),
    "patch that removes the container": (
        {"job": {"enabled": True, "patch": {"spec": {"containers": None}}}},
        "job.patch: leaves no container named pytorch, in which the training runs",
    ),
    "patch of another shape": (
        {"job": {"enabled": True, "patch": {"spec": {"volumes": 3}}}},
        "job.patch.spec.volumes: must be a list, as in the pod template (is 3)",
    ),
    "unknown default": ({"defaults": {"fabrik": "auto"}}, "fabrik"),
    "subject without a name": ({"rbac": {"subjects": [{"kind": "Group"}]}}, "subjects"),
    "two ports of metrics": (
        {"podMonitor": {"enabled": True}, "job": {"enabled": True, "env": {"FLK_METRICS_PORT": "9500"}}},
        "podMonitor.port: is 9400, and job.env.FLK_METRICS_PORT is 9500",
    ),
}


def test_numbers_of_the_command_line_mean_what_those_of_a_file_do() -> None:
    """``--set`` gives integers, and a file of values floating-point numbers."""
    job = {"enabled": True, "command": ["-m", "w"], "name": "gpt"}
    numbers = {"replicas": 100000, "processes": 2}
    given = [word for name, value in numbers.items() for word in ("--set", f"job.{name}={value}")]
    chart = template({"job": job}, *given)
    assert chart.one("PyTorchJob") == template({"job": job | numbers}).one("PyTorchJob")


@pytest.mark.parametrize(("values", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_wrong_values_are_refused_by_name(values: dict[str, Any], says: str) -> None:
    chart = template(values)
    assert chart.code != 0
    assert says in chart.stderr


def test_release_whose_name_is_no_jobs_name_is_refused() -> None:
    assert template({"job": {"enabled": True}}, release="1gpt").code != 0
    assert template({"job": {"enabled": True, "name": "gpt"}}, release="1gpt").code == 0


@pytest.mark.promise("Clusters: The chart renders what flk render prints")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_generated_files_are_up_to_date(path: Path) -> None:
    assert path.read_text() == FILES[path](), "run python -m scripts.chart"


def test_values_have_the_defaults_of_their_schema_and_fit_it() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(values, SCHEMA)
    for path, value in described():
        found = values
        for name in path.split("."):
            found = found[name]
        assert "default" not in value or found == value["default"], path


def test_the_schema_refuses_the_reserved_names_of_variables() -> None:
    check = jsonschema.Draft7Validator(SCHEMA)
    names = [*user_env.RESERVED_NAMES, *(f"{prefix}X" for prefix in user_env.RESERVED_PREFIXES), *user_env.SETTABLE]
    for name in map(str, [*names, "LR", "RANKS", "MY_RANK", "PETS"]):
        assert check.is_valid({"job": {"env": {name: "1"}}}) != user_env.is_reserved(name), name


def test_defaults_of_the_site_are_those_of_flk() -> None:
    fields = namespace_defaults.NamespaceDefaults.model_fields.keys()
    assert set(SCHEMA["properties"]["defaults"]["properties"]) == fields


def test_role_of_the_chart_is_the_role_of_k8s() -> None:
    subjects = [{"kind": "Group", "name": "researchers"}, {"kind": "ServiceAccount", "name": "ci", "namespace": "ci"}]
    chart = template({"rbac": {"subjects": subjects, "targets": list(TARGETS)}})
    role, binding = yaml.safe_load_all((ROOT / "k8s" / "rbac.yaml").read_text())
    assert chart.one("Role")["rules"] == role["rules"]
    bound = chart.one("RoleBinding")["subjects"]
    assert binding["subjects"][0] in bound
    assert subjects[1] in bound
