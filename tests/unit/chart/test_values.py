"""The values of the chart: wrong ones are refused, and the schema knows what flk.yaml knows."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from flk.spec import defaults as namespace_defaults
from flk.spec import labels, names
from flk.targets import TARGETS
from flk.targets.rendezvous import authenticates
from flk_runtime.contract import pod_env, user_env
from scripts.chart import FILES
from tests.support.chart import CHART, JOB, ROOT, merged, template

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())


@pytest.mark.parametrize(
    "job",
    [{"replicas": 1}, {"checkpoint": "claim:/checkpoints"}, {"replicas": 2}],  # for a claim, `flk submit` makes one
    ids=["one pod", "a volume", "two pods"],
)
def test_the_chart_makes_a_secret_for_the_jobs_whose_launchers_need_one(job: dict[str, Any]) -> None:
    chart = template({"job": JOB | job})
    secrets = chart.of_kind("Secret")
    assert bool(secrets) is authenticates(chart.one("PyTorchJob"))
    for secret in secrets:
        assert secret["metadata"]["name"] == "gpt-rendezvous"
        assert len(base64.b64decode(secret["data"]["secret"])) == 43
    assert template({"job": JOB | job, "rendezvousSecret": False}).of_kind("Secret") == []


def test_a_job_without_an_image_runs_in_that_of_the_client() -> None:
    (container,) = template({"job": JOB | {"image": ""}}).one("PyTorchJob")["spec"]["pytorchReplicaSpecs"]["Worker"][
        "template"
    ]["spec"]["containers"]
    assert container["image"] == names.DEFAULT_IMAGE


def test_records_may_be_read_and_patched_and_nothing_else() -> None:
    records = {"enabled": True, "serviceAccounts": ["default", "trainer"]}
    chart = template({"job": JOB | {"name": "train"}, "records": records})
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


def test_a_blank_section_is_one_with_its_defaults() -> None:
    blank = dict.fromkeys(("resources", "nodes", "strategy"))
    others = ("networkPolicy", "records", "defaults", "podMonitor", "prometheusRule", "dashboard", "trainingRuntime")
    chart = template({"job": JOB | blank, "rbac": {"subjects": None}, **dict.fromkeys(others)})
    assert chart.documents == template({"job": JOB}).documents
    assert template({"job": None}).kinds() == template({}).kinds()
    policy = template({"networkPolicy": {"enabled": True, "restrictEgress": None}}).one("NetworkPolicy")
    assert policy["spec"]["policyTypes"] == ["Ingress"]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "misspelt value": ({"job": {"replicsa": 4}}, "replicsa"),
    "misspelt block": ({"jobs": {}}, "jobs"),
    "no replicas": ({"job": {"replicas": 0}}, "replicas"),
    "replicas as text": ({"job": {"replicas": "4"}}, "replicas"),
    "upper case": ({"job": JOB | {"name": "Gpt"}}, "job.name: must be"),
    "newline": ({"job": JOB | {"name": "gpt\n"}}, "job.name: must be"),
    "too long": ({"job": JOB | {"name": "a" * 43}}, "job.name: must be"),
    "unknown strategy": ({"job": {"strategy": "zero3"}}, "strategy"),
    "a command as text": ({"job": {"command": "train.py 'a b'"}}, "command"),
    "no code": ({"job": {"enabled": True}}, "job.script: is empty (--set-file job.script=train.py)"),
    "a module beside a script": ({"job": JOB | {"script": "pass", "command": ["-m", "a"]}}, "must begin with the name"),
    "a script outside": ({"job": JOB | {"script": "pass", "command": ["../a.py"]}}, "must begin with the name"),
    "an option of jobs in another form": ({"job": {"elastic": "1:4"}}, "elastic"),
    "a variable twice": (
        {"job": JOB | {"env": {"A": "1"}, "secrets": {"A": "s:k"}}},
        "job.secrets.A: is in env too",
    ),
    "checkpoint in other storage": ({"job": {"checkpoint": "gs://bucket/a"}}, "checkpoint"),
    "checkpoint that lacks a slash": ({"job": {"checkpoint": "s3:/bucket/a"}}, "checkpoint"),
    "a Secret as a volume": ({"job": {"volumes": ["secret:/etc/x"]}}, "volumes"),
    "bytes of memory": ({"job": {"resources": {"memory": 16}}}, "memory"),
    "bytes of memory as text": ({"job": {"resources": {"memory": "16"}}}, "memory"),
    "patch of the job": ({"job": {"patch": {"kind": "Pod"}}}, "patch"),
    "a manifest of something else": ({"job": {"enabled": True, "manifest": "kind: Pod\n"}}, "job.manifest: must begin"),
    "checkpoint in no bucket": ({"job": {"checkpoint": "s3:///a"}}, "checkpoint"),
    "relative mount": ({"job": {"volumes": ["claim:data"]}}, "volumes"),
    "number as environment": ({"job": {"env": {"A": 1}}}, "env"),
    "plain secret": ({"job": {"secrets": {"A": "value"}}}, "secrets"),
    "patch of a list of flk": (
        {"job": JOB | {"patch": {"spec": {"volumes": []}}}},
        "job.patch.spec.volumes: would replace flk's own, so use job.manifest",
    ),
    "patch that a TrainJob cannot have": (
        {"job": JOB | {"target": "trainjob", "patch": {"spec": {"tolerations": [], "hostNetwork": True}}}},
        "job.patch: a TrainJob cannot set hostNetwork of its pods: choose another job.target",
    ),
    "claim of a TrainJob at two paths": (
        {"job": JOB | {"target": "trainjob", "volumes": ["a:/x"], "checkpoint": "a:/y"}},
        "job.volumes: a TrainJob cannot mount a at two paths",
    ),
    "two volumes at one path": (
        {"job": JOB | {"volumes": ["a:/x", "b:/x/"]}},
        "job.volumes: two volumes are mounted at /x",
    ),
    "a volume at the path of the checkpoint": (
        {"job": JOB | {"volumes": ["a:/x"], "checkpoint": "b:/x"}},
        "job.volumes: two volumes are mounted at /x",
    ),
    "a volume over the code": ({"job": JOB | {"volumes": ["a:/flk/work/"]}}, "job.volumes: /flk/work is a folder that"),
    "a checkpoint over devices": ({"job": JOB | {"checkpoint": "a:/dev"}}, "job.volumes: /dev is a folder that"),
    "a checkpoint inside of a read-only volume": (
        {"job": JOB | {"volumes": ["a:/x:ro"], "checkpoint": "b:/x/y"}},
        "job.volumes: /x/y is inside of /x, which is read-only",
    ),
    "torchrun": ({"job": JOB | {"command": ["torchrun", "a.py"]}}, "job.command: begins with the script or with -m"),
    "Python": ({"job": JOB | {"command": ["/bin/python3.12", "a.py"]}}, "not with /bin/python3.12"),
    "a manifest that is no YAML": ({"job": {"enabled": True, "manifest": "kind: {\n"}}, "job.manifest: error"),
    "unknown default": ({"defaults": {"fabrik": "auto"}}, "fabrik"),
    "subject without a name": ({"rbac": {"subjects": [{"kind": "Group"}]}}, "subjects"),
}


def test_numbers_of_the_command_line_mean_what_those_of_a_file_do() -> None:
    """``--set`` gives integers, and a file of values floating-point numbers."""
    numbers = {"replicas": 100000, "processes": 2}
    given = [word for name, value in numbers.items() for word in ("--set", f"job.{name}={value}")]
    chart = template({"job": JOB}, *given)
    assert chart.one("PyTorchJob") == template({"job": JOB | numbers}).one("PyTorchJob")


@pytest.mark.parametrize(("values", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_wrong_values_are_refused_by_name(values: dict[str, Any], says: str) -> None:
    # Helm takes a tenth of a second: it is asked where the schema alone does not say it.
    wrong = jsonschema.Draft7Validator(SCHEMA).iter_errors(merged(DEFAULTS, values))
    if not any(says in f"{error.json_path} {error.message}" for error in wrong):
        chart = template(values)
        assert chart.code != 0
        assert says in chart.stderr


# Each wording of Helm's: that of 3.18 and before, and that of 4.
NULL = r"job[./]patch[./]spec[./]securityContext('?: got null|: Invalid type\..* given: null)"
PORT = r"job[./]env[./]FLK_METRICS_PORT('?: '{}' does not match pattern|: Does not match pattern) '\^\("


@pytest.mark.parametrize(
    ("job", "says"),
    [
        ({"patch": {"spec": {"securityContext": None}}}, NULL),
        *(({"env": {"FLK_METRICS_PORT": port}}, PORT.replace("{}", port)) for port in ("abc", "0", "70000")),
    ],
)
def test_a_value_that_is_refused_for_what_it_is(job: dict[str, Any], says: str) -> None:
    assert re.search(says, template({"job": JOB | job}).stderr)


def test_release_whose_name_is_no_jobs_name_is_refused() -> None:
    assert template({"job": JOB}, release="1gpt").code != 0
    assert template({"job": JOB | {"name": "gpt"}}, release="1gpt").code == 0


@pytest.mark.promise("Clusters: The chart renders what flk render prints")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_generated_files_are_up_to_date(path: Path) -> None:
    assert path.read_text() == FILES[path](), "run python -m scripts.chart"


def test_the_defaults_fit_the_schema() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(DEFAULTS, SCHEMA)


def test_the_schema_refuses_the_reserved_names_of_variables() -> None:
    check = jsonschema.Draft7Validator(SCHEMA)
    names = [*user_env.RESERVED_NAMES, *(f"{prefix}X" for prefix in user_env.RESERVED_PREFIXES), *user_env.SETTABLE]
    for name in map(str, [*names, "LR", "RANKS", "MY_RANK", "PETS"]):
        assert check.is_valid({"job": {"env": {name: "1"}}}) != user_env.is_reserved(name), name


def test_role_of_the_chart_is_the_role_of_k8s() -> None:
    subjects = [{"kind": "Group", "name": "researchers"}, {"kind": "ServiceAccount", "name": "ci", "namespace": "ci"}]
    chart = template({"rbac": {"subjects": subjects, "targets": list(TARGETS)}})
    role, binding = yaml.safe_load_all((ROOT / "k8s" / "rbac.yaml").read_text())
    assert chart.one("Role")["rules"] == role["rules"]
    bound = chart.one("RoleBinding")["subjects"]
    assert bound == [{"kind": "ServiceAccount", "name": "gpt-flk"}, *subjects]
    assert binding["roleRef"]["kind"] == chart.one("RoleBinding")["roleRef"]["kind"]
