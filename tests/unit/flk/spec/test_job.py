"""The job: every mistake is one line with the field's path; nothing is guessed and nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flk
from flk.errors import UsageError
from flk.manifest.environment import environment
from flk.spec import names
from flk.spec.fields import TORCH_STRATEGIES
from flk.spec.job import SIZE_LIMIT, Job, validated
from flk_runtime.contract import pod_env, user_env
from flk_runtime.contract.options import STRATEGIES


def error_of(**fields: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        validated({"command": "train.py"} | fields, source="flk.yaml")
    return caught.value


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"replicas": 0}, "flk.yaml: replicas: must be at least 1 (is 0)"),
        ({"replicas": -1}, "flk.yaml: replicas: must be at least 1 (is -1)"),
        ({"replicas": "4"}, "flk.yaml: replicas: must be a whole number (is '4')"),
        ({"replicas": True}, "flk.yaml: replicas: must be a whole number (is true)"),
        ({"replicas": 1.5}, "flk.yaml: replicas: must be a whole number (is 1.5)"),
        ({"replica": 4}, "flk.yaml: replica: unknown key"),
        ({"memory": "4Gi"}, "flk.yaml: memory: unknown key"),
        ({"resources": {"mem": "4Gi"}}, "flk.yaml: resources.mem: unknown key"),
        ({"resources": [1]}, "flk.yaml: resources: must be a mapping of keys to values (is [1])"),
        ({"resources": {"memory": "4GB"}}, "flk.yaml: resources.memory: must be a number of bytes like 512Mi or 16Gi (is '4GB')"),  # noqa: E501
        ({"command": []}, "flk.yaml: command: names no script"),
        ({"command": ""}, "flk.yaml: command: names no script"),
        ({"command": ["-m"]}, "flk.yaml: command: -m needs a module"),
        ({"command": "'a"}, "flk.yaml: command: must be words as a shell reads them: no closing quotation (is \"'a\")"),
        ({"command": ["a.py", 3]}, "flk.yaml: command[1]: must be text (is the number 3)"),
        (
            {"command": "python train.py"},
            "flk.yaml: command: begins with the script or with -m, not with python: flk starts the ranks itself",
        ),
        (
            {"command": "-m torch.distributed.run --nproc-per-node 2 w.py"},
            "flk.yaml: command: begins with the script or with -m, not with torch.distributed.run: flk starts the "
            "ranks itself",
        ),
        (
            {"resources": {"memory": 8}},
            "flk.yaml: resources.memory: must be at least 1Mi; without a unit it is a number of bytes (is '8')",
        ),
        (
            {"volumes": ["c:/data:ro"], "checkpoint": "c:/data/ck"},
            "flk.yaml: volumes: /data/ck is inside of c:/data:ro, which is read-only, so that no folder can be made "
            "there to mount it: choose another path",
        ),
        (
            {"volumes": ["c:/keys/data", "secret:k:/keys"]},
            "flk.yaml: volumes: /keys/data is inside of secret:k:/keys, which is read-only, so that no folder can be "
            "made there to mount it: choose another path",
        ),
        ({"env": {"LR": 1}}, "flk.yaml: env.LR: must be text (is the number 1)"),
        ({"env": {"A\n": "1"}}, "flk.yaml: env.A\n: must be letters, digits and '_', and not start with a digit (is 'A\\n')"),  # noqa: E501
        ({"env": {"A": "\0"}}, "flk.yaml: env.A: must not contain a NUL character"),
        ({"env": {"FLK_PREFLIGHT": "-shm"}}, "flk.yaml: env.FLK_PREFLIGHT: FLK_PREFLIGHT=-shm: expected on or off"),
        ({"env": {"A": "1"}, "secrets": {"A": "s:k"}}, "flk.yaml: secrets.A: A is in env too"),
        ({"secrets": {"A": "s"}}, "flk.yaml: secrets.A: must be SECRET:KEY, the name of a Secret and a key in it"),
        ({"volumes": ["data"]}, "flk.yaml: volumes[0]: must be one of PVC:/PATH[:ro], nfs://SERVER/PATH:/PATH[:ro], secret:NAME:/PATH, configmap:NAME:/PATH, hostpath:/PATH:/PATH[:ro] (is 'data')"),  # noqa: E501
        ({"volumes": ["a:/x", "b:/x/"]}, "flk.yaml: volumes: two volumes are mounted at /x"),
        ({"volumes": ["a:/x"], "checkpoint": "b:/x"}, "flk.yaml: volumes: two volumes are mounted at /x"),
        (
            {"checkpoint": {"volume": "a"}},
            "flk.yaml: checkpoint: path is missing: write PVC:/PATH or s3://BUCKET/PREFIX",
        ),
        (
            {"checkpoint": "./ckpt"},
            "flk.yaml: checkpoint: must be PVC:/PATH or s3://BUCKET/PREFIX (is './ckpt'); `flk run` has a folder for "
            "each PVC, .flk/volumes/PVC",
        ),
        (
            {"checkpoint": "gs://bucket/a"},
            "flk.yaml: checkpoint.address: must be s3://BUCKET/PREFIX, where the prefix is names of letters, digits, "
            "'-', '_', '.' and '=' (is 'gs://bucket/a')",
        ),
        ({"checkpoint": "s3:/b"}, "flk.yaml: checkpoint: must be s3://BUCKET/PREFIX, with two slashes (is 's3:/b'); for a PersistentVolumeClaim named s3 write {volume: s3, path: /PATH}"),  # noqa: E501
        (
            {"checkpoint": "s3://bucket/a//b"},
            "flk.yaml: checkpoint.address: must be s3://BUCKET/PREFIX, where the prefix is names of letters, digits, "
            "'-', '_', '.' and '=' (is 's3://bucket/a//b')",
        ),
        (
            {"checkpoint": {"volume": "a", "path": "/b", "address": "s3://bucket"}},
            "flk.yaml: checkpoint: has an address in S3 and a volume: leave out one of the two",
        ),
        ({"keep": 0}, "flk.yaml: keep: must be at least 1 (is 0)"),
        ({"fabric": "ib"}, "flk.yaml: fabric: must be one of auto, socket, efa, tcpx, tcpxo, gib, infiniband, roce (is 'ib')"),  # noqa: E501
        ({"strategy": "dp"}, "flk.yaml: strategy: must be one of none, ddp, no_shard, shard_grad_op, full_shard, hybrid_shard, hybrid_shard_zero2, auto, diloco (is 'dp')"),  # noqa: E501
        ({"deadline": "0s"}, "flk.yaml: deadline: must be at least one second (is '0s')"),
        ({"queue": "A"}, "flk.yaml: queue: must be lower-case letters, digits, '-' and '.', and start and end with a letter or digit (is 'A')"),  # noqa: E501
        ({"ship": "x"}, "flk.yaml: ship: must be true, false, runtime or a list of patterns (is 'x')"),
        ({"patch": {"containers": []}}, "flk.yaml: patch.containers: a pod template has only metadata and spec"),
        ({"patch": {"spec": float("nan")}}, "flk.yaml: patch: contains a value that JSON does not have"),
        (
            {"nodes": {"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]}},
            "flk.yaml: nodes.tolerations[0]: with the operator Exists it has no value",
        ),
        ({"nodes": {"tolerations": ["a:Never"]}}, "flk.yaml: nodes.tolerations[0].effect: must be one of NoSchedule, PreferNoSchedule, NoExecute (is 'Never')"),  # noqa: E501
        (
            {"replicas": 0, "restarts": -1, "env": {"A": 1, "B": 2}},
            "flk.yaml: replicas: must be at least 1 (is 0)\n"
            "flk.yaml: restarts: must be at least 0 (is -1)\n"
            "flk.yaml: env.A: must be text (is the number 1)\n"
            "flk.yaml: env.B: must be text (is the number 2)",
        ),
        (
            {"queue_priority": "high", "volumes": ["a:/x", "b:/x"], "env": {"A": "1"}, "secrets": {"A": "s:k"}},
            "flk.yaml: queue_priority: needs a queue\n"
            "flk.yaml: secrets.A: A is in env too\n"
            "flk.yaml: volumes: two volumes are mounted at /x",
        ),
        (
            {"resources": {"cpu": 2, "cpu_limit": 1, "memory": "2Gi", "memory_limit": "1Gi"}},
            "flk.yaml: resources.cpu_limit: is 1, less than cpu, which is 2\n"
            "flk.yaml: resources.memory_limit: is 1Gi, less than memory, which is 2Gi",
        ),
        ({"ship": ["a", 1], "save_every": "x", "elastic": {"mn": 1, "max": 2}}, (
            "flk.yaml: elastic.mn: unknown key\n"
            "flk.yaml: save_every: must be a number of steps from 1 to 2147483647 (is 'x')\n"
            "flk.yaml: ship[1]: must be text (is the number 1)"
        )),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_each_mistake_is_one_line_with_its_path(fields: dict[str, Any], message: str) -> None:
    assert str(error_of(**fields)) == message


@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        ({"replica": 4}, "did you mean replicas?"),
        ({"memory": "4Gi"}, "did you mean resources.memory?"),
        ({"resources": {"mem": "4Gi"}}, "did you mean resources.memory?"),
        ({"env": {"LR": True}}, "put the value in quotes"),
        ({"env": {"VERSION": 1.1}}, "put the value in quotes"),
        ({"replicas": "four"}, ""),
    ],
)
def test_a_mistake_comes_with_what_was_likely_meant(fields: dict[str, Any], hint: str) -> None:
    assert error_of(**fields).hint == hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("replicas: 010", "replicas: must be a whole number (is '010')"),
        ("replicas: 1_000", "replicas: must be a whole number (is '1_000')"),
        ("replicas: 1:30", "replicas: must be a whole number (is '1:30')"),
        ("replicas: yes", "replicas: must be a whole number (is 'yes')"),
        ("deadline: 1:30", "deadline: must be a duration like 75s, 30m or 1h30m (is '1:30')"),
        ("ship: no", "ship: must be true, false, runtime or a list of patterns (is 'no')"),
        ("env: {VERSION: 1.10}", "env.VERSION: must be text (is the number 1.1)"),
    ],
)
def test_values_that_versions_of_yaml_read_differently_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "flk.yaml"
    path.write_text(f"command: a.py\n{text}\n")
    with pytest.raises(UsageError) as caught:
        flk.Job.from_file(path)
    assert str(caught.value) == f"{path}: {message}"
    assert "1.1" not in caught.value.hint


def test_a_name_that_is_too_long_says_how_long_it_may_be() -> None:
    assert "with 11 replicas it may have 53 characters, not 54" in str(error_of(name="a" * 54, replicas=11))
    assert validated({"command": "a.py", "name": "a" * 53, "replicas": 11}).name == "a" * 53


def test_a_job_that_cannot_be_recorded_is_refused() -> None:
    half = "x" * (SIZE_LIMIT // 2)
    assert str(error_of(env={"A": half, "B": half})).startswith("flk.yaml: the job has")


@pytest.mark.parametrize("text", [*STRATEGIES, *TORCH_STRATEGIES, "full-shard"])
def test_strategies_as_flk_and_torch_write_them(text: str) -> None:
    strategy = validated({"command": "a.py", "strategy": text}).strategy
    assert strategy == text.lower().lstrip("_").replace("-", "_")
    assert strategy in STRATEGIES


def test_processes_follow_the_gpus() -> None:
    def processes(**fields: Any) -> int:
        return validated({"command": "a.py"} | fields).processes_per_pod

    assert processes() == 1
    assert processes(resources={"gpu": 8}) == 8
    assert processes(resources={"gpu": 8}, processes=2) == 2


def test_the_python_api_takes_what_the_job_file_takes() -> None:
    job = flk.Job(command="train.py --lr 1", checkpoint="c:/p", deadline="1m", nodes={"tolerations": ["a"]})  # type: ignore[arg-type]
    assert job.command == ["train.py", "--lr", "1"]
    assert job.deadline == 60
    assert job.checkpoint is not None
    assert (job.checkpoint.volume, job.checkpoint.path) == ("c", "/p")
    assert job.nodes.tolerations[0].operator == "Exists"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train.py \\\n  --lr 1 \\\n  --name x\n", ["train.py", "--lr", "1", "--name", "x"]),
        ('train.py "it\'s \\\nx" y\\\nz', ["train.py", "it's x", "yz"]),
        ("train.py 'a\\\nb' \\\\ c", ["train.py", "a\\\nb", "\\", "c"]),
    ],
)
def test_a_command_on_several_lines_is_one_line_to_a_shell(text: str, words: list[str]) -> None:
    assert validated({"command": text}).command == words
    assert pod_env.ON_RESTART.read({"FLK_ON_RESTART": text}) == tuple(words)


def test_a_job_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "flk.yaml"
    path.write_text("command: train.py\nreplicas: 4\nresources:\n  # gpu: 1\n")
    assert flk.Job.from_file(path) == flk.Job(command=["train.py"], replicas=4)


def test_changed_checks_again_and_keeps_what_was_said() -> None:
    job = validated({"command": "a.py", "name": "n", "replicas": 2})
    assert job.changed(replicas=3).model_fields_set == {"command", "name", "replicas"}
    with pytest.raises(UsageError, match="replicas: must be at least 1"):
        job.changed(replicas=0)


def test_named_makes_a_name_once() -> None:
    job = validated({"command": "a.py"}).named()
    assert job.name is not None
    assert job.named() is job


def test_the_environment_of_every_rank() -> None:
    job = validated(
        {
            "command": "a.py",
            "name": "n",
            "replicas": 4,
            "processes": 2,
            "fabric": "socket",
            "deadline": "1m",
            "hang_timeout": 0,
            "save_every": 5,
            "store_every": 50,
            "metrics": "wandb,tensorboard:s3://b/c",
            "checkpoint": "c:/p",
            "env": {"NCCL_NET": "IB", "A": "$(B)"},
        }
    )
    assert environment(job) == {
        user_env.JOB: "n",
        pod_env.PODS: "4",
        pod_env.PROCESSES: "2",
        pod_env.RESTARTS: "3",
        pod_env.DISRUPTIONS: "100",
        pod_env.GRACE: "30",
        user_env.STRATEGY: "ddp",
        user_env.FABRIC: "socket",
        user_env.CHECKPOINT: "/p/n",
        pod_env.DEADLINE: "60",
        user_env.HANG_TIMEOUT: "0",
        user_env.SAVE_EVERY: "5",
        user_env.STORE_EVERY: "50",
        user_env.METRICS: "wandb,tensorboard:s3://b/c",
        "NCCL_NET": "IB",  # the user's wins
        "NCCL_IB_DISABLE": "1",
        "A": "$(B)",
    }


@given(st.dictionaries(st.text(), st.text()))
def test_whatever_the_environment_is_it_is_taken_or_refused_in_one_line(env: dict[str, str]) -> None:
    try:
        job = validated({"command": "a.py", "name": "n", "env": env})
    except UsageError:
        return
    assert env.items() <= environment(job).items()
    for name in env:
        assert names.variable(name) == name


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda s: st.lists(s) | st.dictionaries(st.sampled_from(["replicas", "env", "nodes", "ship", "volumes", "checkpoint", "resources", "patch", "command", "deadline", "x"]), s)))  # fmt: skip  # noqa: E501
def test_any_data_is_a_job_or_a_usage_error(data: Any) -> None:
    fields = data if isinstance(data, dict) else {"nodes": data, "env": data, "patch": data, "ship": data}
    try:
        job = validated({"command": "a.py"} | fields)
    except UsageError:
        return
    assert Job.model_validate_json(job.model_dump_json()) == job
