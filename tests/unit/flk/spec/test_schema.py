"""The job file's schema and template: what the model accepts, they accept, and what they show is accepted."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from flk.errors import UsageError
from flk.spec import file as jobfile
from flk.spec import schema
from flk.spec.fields import split_command
from flk.spec.job import Job, validated

# Of a file, whose command may come from the command line.
SCHEMA = schema.schema_of(Job) | {"required": []}
GOLDEN = Path(__file__).parents[1] / "manifest" / "golden"


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.job.yaml")), ids=lambda path: path.name)
def test_the_schema_accepts_job_files(path: Path) -> None:
    jsonschema.validate(jobfile.read(str(path)), SCHEMA)


@pytest.mark.parametrize(
    "text",
    [
        "replicas: 0",
        "replica: 1",
        "replicas: '4'",
        "resources: {mem: 1}",
        "fabric: x",
        "strategy: zero3",
        "env: {A: 1}",
        "ship: 3",
    ],
)
def test_the_schema_refuses_mistakes(text: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(yaml.safe_load(text), SCHEMA)


BOTH: dict[str, tuple[list[str], list[str]]] = {
    "name: {}": (["a", "gpt-2"], ["Gpt", "2", "a-", "a.b"]),
    "image: {}": (["torch", "r.io:5000/a/b:1.2", "a@sha256:" + "0" * 64], ["Torch", "a b", "'a:'"]),
    "queue: {}": (["team.a"], ["a" * 64, "team_a"]),
    "resources: {{cpu: {}}}": (["4", "0.5", "'500m'"], ["'4 cores'", "-1", "0", "true"]),
    "resources: {{extended: {{{}: 1}}}}": (["amd.com/gpu", "rdma/hca"], ["gpu", "nvidia.com/gpu", "a.kubernetes.io/b"]),
    "resources: {{extended: {{amd.com/gpu: {}}}}}": (["1"], ["0", "'1'"]),
    "deadline: {}": (["90", "'90'", "1h30m", "2d1s"], ["0", "''", "1.5h", "90x", "1s1h"]),
    "hang_timeout: {}": (
        ["0", "0s", "10m", "600", "'600'"],
        ["-1", "soon", "1s1h", "step=5m", "''", "true"],
    ),
    "elastic: {}": (
        ["'2:4'", "{min: 2, max: 4, batch: scale}"],
        ["'2'", "'0:4'", "{min: 2}", "{min: 1, max: 2, batch: x}"],
    ),
    "checkpoint: {}": (
        ["a:/b", "s3://models/gpt/", "{address: 's3://models'}", "{volume: s3, path: /b}"],
        ["a", "a:b", "gs://a/b", "s3:///a", "s3:/a", "{volume: a}", "A:/b", "a:/b:c"],
    ),
    "volumes: [{}]": (["a:/b//c", "a.b:/c"], ["a", "a:b", "a:/", "a:/b:c"]),
    "secrets: {{A: {}}}": (["s:k", "s.t:k_1"], ["s", "'s:'", "S:k", "s:a b"]),
    "env: {{{}: x}}": (["A", "a_B", "FLK_SEED", "RANKS"], ["1A", "RANK", "PET_X", "FLK_X", "A B", "a.b", "a-b"]),
    "topology: {}": (["rack", "a.b/c:preferred"], ["a b", "rack:often", "-a"]),
    "nodes: {{selector: {{{}: a}}}}": (["pool", "a.b/c_d"], ["a b", "a/b/c", "A.b/c"]),
    "nodes: {{selector: {{a: {}}}}}": (["b", "''", "a_b.c"], ["-b", "a b", "b" * 64, "1"]),
    "nodes: {{tolerations: [{}]}}": (
        ["a", "a=b:NoSchedule", "{operator: Exists}"],
        ["=b", "a:Never", "{effect: Never}"],
    ),
    "pods: {{labels: {{{}: a}}}}": (["team", "a.b/c"], ["flk.dev/x", "kueue.x-k8s.io/queue-name", "a b"]),
    "pods: {{pull_secrets: [{}]}}": (["registry"], ["Registry", "a_b"]),
}


@pytest.mark.parametrize(
    ("text", "valid"),
    [(form.format(v), v in both[0]) for form, both in BOTH.items() for v in [*both[0], *both[1]]],
)
def test_the_schema_accepts_what_the_model_accepts(text: str, valid: bool) -> None:
    """The model refuses more: whether a text is right is said once, by it."""
    data = yaml.safe_load(text) | ({"replicas": 2} if text.startswith("elastic") else {})
    assert jsonschema.Draft202012Validator(SCHEMA).is_valid(data) or not valid
    try:
        validated({"command": "train.py", **data})
    except UsageError:
        assert not valid
    else:
        assert valid


def test_the_template_shows_every_field_and_all_of_it_is_valid() -> None:
    text = schema.template("train.py", 4)
    job = validated(jobfile.mapping(text, "flk.yaml"))
    assert (job.command, job.replicas) == (["train.py"], 4)
    everything = re.sub(rf"^# ((?:{'|'.join(Job.model_fields)}): )", r"\1", text, flags=re.MULTILINE)
    data = jobfile.mapping(everything, "flk.yaml")
    assert set(data) == set(Job.model_fields)
    validated(data)
    jsonschema.validate(data, SCHEMA)


@given(st.one_of(st.text(min_size=1), st.text(" '\"#:\\\\~${}[]-.,0e1xnul\n\t\x85\u2028", min_size=1)))
@example("my train.py")
@example("it's.py")
@example("a #1.py")
@example("a: b.py")
@example("null")
@example("1e5")
@example("010")
@example("\U0001f600 \x7f.py")
@example("a" * 200 + " " + "b" * 200)
def test_the_template_runs_exactly_the_script(script: str) -> None:
    data = jobfile.mapping(schema.template(script, 1), "flk.yaml")
    assert split_command(data["command"]) == [script]


@pytest.mark.parametrize("script", ["train.py", "train", "./src/my-train_2.py", "/flk/work/train.py", "ä.py"])
def test_the_template_shows_a_plain_name_as_it_is(script: str) -> None:
    assert f"\ncommand: {script}\n" in schema.template(script, 1)


def test_the_schema_has_no_second_form_of_a_rule() -> None:
    assert '"pattern":' not in json.dumps(SCHEMA)
