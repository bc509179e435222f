"""PyTorchJobs of other origins become job files whose pods train the same, or are refused by field."""

from __future__ import annotations

import copy
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from flk.errors import UsageError
from flk.manifest import Bundle
from flk.manifest.convert import convert, job_file
from flk.manifest.pod import pod_template
from flk.spec.job import validated
from tests.support.commands import Run

WORKDIR = '"$(readlink /proc/$PPID/cwd)"'  # of the image, in which the launcher is that runs a setup command


def manifest(roles: Any = None, *, container: Any = None, pod: Any = None, spec: Any = None, **metadata: Any) -> str:
    """A PyTorchJob with a Master and three Workers, whose pods are equal."""
    main = {"name": "pytorch", "image": "team/train:1", "command": ["python", "/opt/train.py"], **(container or {})}
    role = {"restartPolicy": "OnFailure", "template": {"spec": {"containers": [main], **(pod or {})}}}
    counts = roles or {"Master": 1, "Worker": 3}
    replicas = {name: {**copy.deepcopy(role), "replicas": count} for name, count in counts.items()}
    job = {"pytorchReplicaSpecs": replicas, **(spec or {})}
    return yaml.safe_dump(
        {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": "old", **metadata}, "spec": job}
    )


def fields(text: str) -> dict[str, Any]:
    return convert(text, "old.yaml").fields


def test_a_master_and_workers_are_replicas_of_one_rank_each() -> None:
    assert fields(manifest()) == {
        "name": "old",
        "replicas": 4,
        "image": "team/train:1",
        "image_pull_policy": "IfNotPresent",
        "command": ["/opt/train.py"],
        "processes": 1,
        "setup": f"ln -sf {WORKDIR}/* .",
        "ship": "runtime",
    }


def test_an_image_that_may_change_is_pulled_each_time_as_by_kubernetes() -> None:
    for image, policy in {
        "a": "Always",
        "r:5000/a": "Always",
        "a:latest": "Always",
        f"a@sha256:{64 * '0'}": "IfNotPresent",
    }.items():
        assert fields(manifest(container={"image": image}))["image_pull_policy"] == policy


# the command and its folder; the script and its arguments; ranks of a pod (None: by its GPUs)
COMMANDS: dict[str, tuple[list[str], str | None, list[str], int | None]] = {
    "torchrun": (["torchrun", "/opt/train.py", "--lr=1"], None, ["/opt/train.py", "--lr=1"], None),
    "underlines in options": (["torchrun", "--use_env", "--nproc_per_node", "2", "/a.py"], None, ["/a.py"], 2),
    "processes": (["torchrun", "--nproc_per_node=2", "--nnodes", "4", "/a.py"], None, ["/a.py"], 2),
    "end of the options": (["torchrun", "--nproc_per_node", "2", "--", "/a.py", "b"], None, ["/a.py", "b"], 2),
    "module": (["python3", "-u", "-m", "team.train", "-v"], None, ["-m", "team.train", "-v"], 1),
    "module of torchrun": (["torchrun", "--standalone", "-m", "team.train"], None, ["-m", "team.train"], None),
    "old launcher": (
        ["python", "-m", "torch.distributed.launch", "--nproc_per_node", "8", "--use_env", "/a.py"],
        None,
        ["/a.py"],
        8,
    ),
    "old launcher of one rank, which it tells its number": (
        ["python", "-m", "torch.distributed.launch", "--nproc_per_node=1", "/a.py", "-v"],
        None,
        ["/a.py", "--local-rank=0", "-v"],
        1,
    ),
    "working folder": (["python", "train.py"], "/app", ["/app/train.py"], 1),
    "shell": (["bash", "-c", "cd /app && exec python train.py --lr 1"], None, ["/app/train.py", "--lr", "1"], 1),
    "rank by the shell": (
        ["sh", "-c", "torchrun --nnodes=$PET_NNODES --node_rank $RANK --nproc_per_node ${PET_NPROC_PER_NODE} /a.py -v"],
        None,
        ["/a.py", "-v"],
        None,
    ),
    "rank by Kubernetes": (["torchrun", "--nproc-per-node=$(PET_NPROC_PER_NODE)", "/a.py"], None, ["/a.py"], None),
    "old launcher of one rank by the operator": (
        ["sh", "-c", "export PET_NPROC_PER_NODE=1 && python -m torch.distributed.launch --use_env /a.py"],
        None,
        ["/a.py"],
        1,
    ),
    "accelerate as a module": (
        ["python", "-m", "accelerate.commands.launch", "--num-processes", "8", "/a.py"],
        None,
        ["-m", "flk_hosts.accelerate_launch", "/a.py"],
        8,
    ),
    "accelerate for all machines": (
        ["/opt/bin/accelerate", "launch", "--num_machines=4", "--num_processes", "16", "/a.py", "--machine_rank", "5"],
        None,
        ["-m", "flk_hosts.accelerate_launch", "/a.py", "--machine_rank", "5"],
        4,
    ),
    "accelerate by the shell": (
        [
            *("sh", "-c"),
            "accelerate launch --config_file /c --num_processes=$(( 8 * $WORLD_SIZE )) --num_machines $WORLD_SIZE "
            "--machine_rank=$RANK --main_process_ip ${MASTER_ADDR} --main_process_port 1 --use_fsdp -m team.train",
        ],
        None,
        ["-m", "flk_hosts.accelerate_launch", "--config_file", "/c", "--use_fsdp", "-m", "team.train"],
        None,
    ),
    "accelerate with a file that may say more": (
        ["accelerate", "launch", "--num_processes=8", "--config_file=/c", "/a.py"],
        None,
        ["-m", "flk_hosts.accelerate_launch", "--config_file=/c", "/a.py"],
        None,
    ),
    "value that is empty": (["torchrun", "--rdzv_id=", "/a.py", "b"], None, ["/a.py", "b"], None),
    "quotes": (
        ["sh", "-c", """torchrun /a.py '/d/{0..9}.tar' --x='a;b' "--y={\\"c\\": 1}" "*" """],
        None,
        ["/a.py", "/d/{0..9}.tar", "--x=a;b", '--y={"c": 1}', "*"],
        None,
    ),
    "ends of lines after a backslash": (
        ["sh", "-c", "torchrun \\\n  --nproc_per_node 2 \\\n  /a.py \"b\\\nc\" 'd\\\ne'"],
        None,
        ["/a.py", "bc", "d\\\ne"],
        2,
    ),
    "output of commands": (
        [
            "sh",
            "-c",
            "torchrun --rdzv_endpoint=$(hostname -i):1 --rdzv_id `cat /x y` --nproc_per_node 2 /a.py '~/b' ~c",
        ],
        None,
        ["/a.py", "~/b", "~c"],
        2,
    ),
    "folder above": (
        ["python", "../b/a.py", "--x=/c/../d", "..."],
        "/app",
        ["/app/../b/a.py", "--x=/c/../d", "..."],
        1,
    ),
    "folder after other commands": (
        ["bash", "--login", "-c", "set -e; # it's\ngit clone x /b && cd /b || exit 1\n cd src && torchrun a.py"],
        None,
        ["/b/src/a.py"],
        None,
    ),
    "folder in the working folder": (
        ["bash", "-euo", "pipefail", "-c", "cd b; python a.py"],
        "/app",
        ["/app/b/a.py"],
        1,
    ),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_the_program_that_starts_ranks_is_left_out(case: str) -> None:
    command, folder, words, processes = COMMANDS[case]
    job = fields(manifest(container={"command": command[:1], "args": command[1:], "workingDir": folder}))
    assert (job["command"], job.get("processes")) == (words, processes)


def test_commands_before_the_script_are_the_setup_which_their_shell_runs() -> None:
    before = "set -e\ntest -d /data && pip install 'einops>0' && cd /app"
    setup = f"{before}\n true"
    job = fields(manifest(container={"command": ["bash", "-ec", f"{before}\nexec python train.py"]}))
    assert job["setup"] == (f"(cd {WORKDIR} && {shlex.join(['bash', '-ec', setup])}) && ln -sf /app/* .")
    assert job["command"] == ["/app/train.py"]
    assert "patch" not in job


@pytest.mark.parametrize(
    "before",
    [
        "DEBIAN_FRONTEND=noninteractive apt-get install x",
        "accelerate config default",
        "wget 'http://x/y?a=1&b=2'",
        "python -c 'import a; a.b()'",
        "echo x > /data/x && \n rm y",
        r"find . -exec rm {} \;",
    ],
)
def test_a_command_that_leaves_its_shell_as_it_is_becomes_the_setup(before: str) -> None:
    container = {"command": ["sh", "-c", f"{before} && python a.py"], "workingDir": "/app"}
    setup = shlex.join(["sh", "-c", before])
    assert fields(manifest(container=container))["setup"] == f"(cd /app && {setup}) && ln -sf /app/* ."


def test_the_variables_that_a_shell_exports_are_those_of_the_ranks() -> None:
    text = "export LR=1 URL='http://x?a=1&b=2' PET_NPROC_PER_NODE=2\nOMP_NUM_THREADS=4 torchrun /a.py"
    job = fields(manifest(container={"command": ["sh", "-c", text], "env": [{"name": "LR", "value": "0"}]}))
    assert (job["command"], job["processes"]) == (["/a.py"], 2)
    assert job["env"] == {"LR": "1", "URL": "http://x?a=1&b=2", "OMP_NUM_THREADS": "4"}
    assert job["setup"] == f"ln -sf {WORKDIR}/* ."


def test_a_file_that_a_shell_writes_keeps_the_lines_that_look_like_comments() -> None:
    text = "cat > /tmp/a.c <<EOF\n#include <a.h>\nEOF\ntorchrun /a.py"
    assert "#include <a.h>" in fields(manifest(container={"command": ["sh", "-c", text]}))["setup"]


def test_the_lines_of_a_file_that_a_shell_writes_are_no_commands() -> None:
    text = "cat > /tmp/a <<EOF\ncd /data\nexport A=1\nexec b\nb & c\nEOF\npython /code/a.py"
    job = fields(manifest(container={"command": ["sh", "-c", text]}))
    assert ("env" in job, f"ln -sf {WORKDIR}/* ." in job["setup"]) == (False, True)


@pytest.mark.parametrize("before", ["cat > /tmp/a <<'EOF'\n# a\nEOF", "echo $((1 << 2)) # don't", "cat <<< x"])
def test_a_comment_after_a_command_is_none_of_its_words(before: str) -> None:
    command = ["sh", "-c", f"# it's\n{before}\npython /a.py --lr 1  # the training"]
    assert fields(manifest(container={"command": command}))["command"] == ["/a.py", "--lr", "1"]


@pytest.mark.parametrize("first", [{"value": "1"}, {"valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}])
def test_of_two_variables_of_a_name_the_last_one_counts_as_in_kubernetes(first: Any) -> None:
    env = [{"name": "A", **first}, {"name": "A", "value": "2"}]
    job = fields(manifest(container={"env": env}))
    assert (job["env"], "patch" in job) == ({"A": "2"}, False)
    secret = {"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    assert fields(manifest(container={"env": [*env, secret]}))["secrets"] == {"A": "s:k"}


def test_what_torchrun_and_kueue_are_told_becomes_fields() -> None:
    command = ["torchrun", "--nnodes=2:4", "--max-restarts", "7", "/a.py"]
    env = [{"name": "PET_NPROC_PER_NODE", "value": "8"}]
    marks = {"kueue.x-k8s.io/queue-name": "research", "kueue.x-k8s.io/priority-class": "high"}
    job = fields(manifest(container={"command": command, "env": env}, labels=marks))
    assert (job["elastic"], job["restarts"], job["processes"]) == ({"min": 2, "max": 4}, 7, 8)
    assert (job["queue"], job["queue_priority"]) == ("research", "high")


@pytest.mark.parametrize(
    ("requests", "limits"),
    [
        ({"memory": "200Mi"}, {}),  # with a limit, the pod would be out of memory where it was not
        ({"ephemeral-storage": "1Gi"}, {"ephemeral-storage": "9Gi"}),
        ({}, {"hugepages-2Mi": "5120Mi"}),
        ({}, {"vpc.amazonaws.com/efa": 0}),
    ],
)
def test_amounts_that_no_field_of_a_job_has_stay_as_they_are(requests: Any, limits: Any) -> None:
    job = fields(manifest(container={"resources": {"requests": {"cpu": 1, **requests}, "limits": limits}}))
    assert job["resources"] == {"cpu": "1"}
    (main,) = job["patch"]["spec"]["containers"]
    assert main["resources"] == {kind: of for kind, of in (("limits", limits), ("requests", requests)) if of}


def test_a_command_without_a_folder_runs_where_the_image_does() -> None:
    relative = fields(manifest(container={"command": ["python", "src/train.py"]}))
    assert (relative["command"], relative["setup"]) == (["src/train.py"], f"ln -sf {WORKDIR}/* .")
    text = "pip install -r requirements.txt; cd 'my src'; torchrun train.py"
    shell = fields(manifest(container={"command": ["sh", "-c", text]}))
    assert shell["command"] == ["train.py"]
    before = shlex.join(["sh", "-c", "pip install -r requirements.txt; cd 'my src'; true"])
    assert shell["setup"] == f"(cd {WORKDIR} && {before}) && ln -sf {WORKDIR}/'my src'/* ."


def test_a_variable_with_a_known_value_is_replaced_as_by_kubernetes_and_by_a_shell() -> None:
    env = [{"name": "LR", "value": "1"}, {"name": "GPUS", "value": "2"}, {"name": "NAMES", "value": "a b"}]
    plain = fields(manifest(container={"command": ["python", "/a.py", "--lr=$(LR)", "$(NAMES)"], "env": env}))
    assert plain["command"] == ["/a.py", "--lr=1", "a b"]
    text = "export LR=3 && torchrun --nproc_per_node=${GPUS:-1} /a.py --lr=$LR --size ${GPUS}"
    shell = fields(manifest(container={"command": ["sh", "-c", text], "env": env}))
    assert (shell["command"], shell["processes"]) == (["/a.py", "--lr=3", "--size", "2"], 2)


@pytest.mark.parametrize("between", ["&&", ";", "\n", "&& \n", ";\n"])
def test_a_setup_whose_last_command_fails_ends_the_job_where_the_shell_would_not_go_on(between: str) -> None:
    job = fields(manifest(container={"command": ["sh", "-c", f"true; false {between} python /a.py"]}))
    setup = job["setup"].partition(" && ")[2].rpartition(") && ")[0]
    assert subprocess.run(["sh", "-c", setup], check=False).returncode == (1 if "&&" in between else 0)


@pytest.mark.parametrize("word", ["'$LR'", "$NAMES", "$KEY", "$LATER", r"\$LR", r'"\$LR"', "\"don't\" '$LR'", "$$$$LR"])
def test_a_variable_that_a_shell_may_replace_otherwise_is_refused(word: str) -> None:
    env = [
        {"name": "LR", "value": "1"},
        {"name": "NAMES", "value": "a b"},
        {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "wandb", "key": "key"}}},
    ]
    container = {"command": ["sh", "-c", f"LATER=1 python /a.py {word}"], "env": env}
    with pytest.raises(UsageError, match="a job's arguments are as they are written"):
        convert(manifest(container=container), "old.yaml")


def test_the_variables_that_flk_sets_are_left_out_and_no_others() -> None:
    env = [{"name": name, "value": "1"} for name in ("PYTHONUNBUFFERED", "PET_NNODES", "RANK", "NNODES", "NODE_RANK")]
    assert fields(manifest(container={"env": env}))["env"] == {"NNODES": "1", "NODE_RANK": "1"}


def test_the_queue_of_an_object_around_the_job_is_that_of_the_job() -> None:
    metadata = {"labels": {"kueue.x-k8s.io/queue-name": "research", "kueue.x-k8s.io/priority-class": "high"}}
    outer = {"kind": "AppWrapper", "metadata": metadata, "spec": {"template": yaml.safe_load(manifest())}}
    job = fields(yaml.safe_dump(outer))
    assert (job["queue"], job["queue_priority"]) == ("research", "high")


def test_labels_of_one_role_are_left_out_unless_pods_are_selected_by_them() -> None:
    data = yaml.safe_load(manifest())
    templates = {name: role["template"] for name, role in data["spec"]["pytorchReplicaSpecs"].items()}
    for name, template in templates.items():
        template["metadata"] = {"labels": {"app": "llm", "team.dev/role": name}}
    templates["Master"]["metadata"]["annotations"] = {"prometheus.io/scrape": "true"}
    found = convert(yaml.safe_dump(data), "old.yaml")
    assert found.fields["patch"]["metadata"] == {"labels": {"app": "llm"}}
    for place in ("labels.team.dev/role", "annotations.prometheus.io/scrape"):
        assert f"metadata.{place} is left out: Master and Worker differ in it" in found.notes
    term = {"labelSelector": {"matchLabels": {"team.dev/role": "Master"}}, "topologyKey": "kubernetes.io/hostname"}
    for template in templates.values():
        template["spec"]["affinity"] = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    with pytest.raises(UsageError, match=r"Master and Worker differ in patch.metadata.labels.team.dev/role"):
        convert(yaml.safe_dump(data), "old.yaml")


def test_what_a_job_has_fields_for_becomes_these_and_the_rest_is_the_patch() -> None:
    env = [
        {"name": "LR", "value": 1},
        {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "wandb", "key": "key"}}},
        {"name": "HERE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "MASTER_ADDR", "value": "old-master-0"},
    ]
    resources = {"requests": {"cpu": 1}, "limits": {"cpu": 2, "memory": "4Gi", "nvidia.com/gpu": 8, "rdma/ib": 1}}
    container = {"env": env, "resources": resources, "volumeMounts": [{"name": "data", "mountPath": "/data"}]}
    pod = {"nodeSelector": {"pool": "gpu"}, "volumes": [{"name": "data", "hostPath": {"path": "/data"}}]}
    policy = {"cleanPodPolicy": "All", "backoffLimit": 5, "ttlSecondsAfterFinished": 60, "activeDeadlineSeconds": 90}
    spec = {"runPolicy": policy, "nprocPerNode": "2"}
    queued = {"kueue.x-k8s.io/queue-name": "research"}
    found = convert(manifest(container=container, pod=pod, spec=spec, labels=queued, namespace="team"), "old.yaml")
    job = found.fields
    assert {name: job[name] for name in ("restarts", "ttl", "deadline", "queue", "env", "secrets")} == {
        "restarts": 5,
        "ttl": 60,
        "deadline": 90,
        "queue": "research",
        "env": {"LR": "1"},
        "secrets": {"KEY": "wandb:key"},
    }
    amounts = {"cpu": "1", "cpu_limit": "2", "memory": "4Gi", "gpu": 8, "extended": {"rdma/ib": 1}}
    assert job["resources"] == amounts
    main = {"name": "pytorch", "volumeMounts": container["volumeMounts"], "env": [env[2]]}
    assert job["patch"] == {"spec": {**pod, "containers": [main]}}
    assert found.notes[:1] == ["the namespace is no field: flk submit -n team"]
    assert "the variable MASTER_ADDR is left out: flk's launcher sets it" in found.notes


def test_pods_are_those_of_the_manifest_but_for_what_flk_sets() -> None:
    resources = {"requests": {"cpu": "1", "memory": "4Gi"}, "limits": {"memory": "4Gi", "nvidia.com/gpu": "8"}}
    container = {
        "resources": resources,
        "env": [{"name": "LR", "value": "1"}],
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
    }
    pod = {
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "initContainers": [{"name": "fetch", "image": "busybox:1"}],
        "hostNetwork": True,
    }
    converted = fields(manifest(container=container, pod=pod))
    spec = pod_template(
        validated(yaml.safe_load(job_file(convert(manifest(container=container, pod=pod), "-")))), Bundle(), []
    )["spec"]
    assert converted["replicas"] == 4
    main = spec["containers"][0]
    assert {name: spec[name] for name in pod if name != "volumes"} == {n: v for n, v in pod.items() if n != "volumes"}
    assert pod["volumes"][0] in spec["volumes"]
    assert container["volumeMounts"][0] in main["volumeMounts"]
    assert container["env"][0] in main["env"]
    assert main["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert main["resources"]["limits"] == resources["limits"]
    assert main["resources"]["requests"] == {**resources["requests"], "nvidia.com/gpu": "8"}
    assert main["command"][-2:] == ["--", "/opt/train.py"]


def test_an_elastic_job_keeps_its_limits_and_loses_its_autoscaler() -> None:
    policy = {
        "minReplicas": 1,
        "maxReplicas": 4,
        "maxRestarts": 9,
        "rdzvBackend": "c10d",
        "metrics": [{"type": "Resource"}],
    }
    found = convert(manifest({"Worker": 2}, spec={"elasticPolicy": policy}), "old.yaml")
    assert found.fields["elastic"] == {"min": 1, "max": 4}
    assert (found.fields["replicas"], found.fields["restarts"]) == (2, 9)
    assert any("metrics are left out" in note for note in found.notes)


@pytest.mark.parametrize(("bound", "sizes"), [("min", {"min": 2, "max": 4}), ("max", {"min": 4, "max": 6})])
def test_the_bound_that_an_elastic_job_lacks_is_its_number_of_pods(bound: str, sizes: dict[str, int]) -> None:
    spec = {"elasticPolicy": {f"{bound}Replicas": sizes[bound]}}
    assert fields(manifest({"Worker": 4}, spec=spec))["elastic"] == sizes


@pytest.mark.parametrize(("seconds", "grace"), [(300, 295), (3, 1)])
def test_the_grace_period_of_a_pod_is_that_of_its_ranks(seconds: int, grace: int) -> None:
    job = fields(manifest(pod={"terminationGracePeriodSeconds": seconds}))
    assert (job["grace"], "patch" in job) == (grace, False)


def test_a_mode_with_a_leading_zero_is_octal_as_for_kubectl() -> None:
    volumes = [{"name": "code", "configMap": {"name": "code", "defaultMode": "MODE"}}]
    text = manifest(pod={"volumes": volumes}).replace("MODE", "0755")
    (volume,) = yaml.safe_load(job_file(convert(text, "old.yaml")))["patch"]["spec"]["volumes"]
    assert volume["configMap"]["defaultMode"] == 0o755


def test_a_port_without_a_name_takes_not_the_place_of_flks() -> None:
    ports = [{"name": "pytorchjob-port", "containerPort": 23456}, {"containerPort": 8888}]
    spec = pod_template(validated(fields(manifest(container={"ports": ports}))), Bundle(), [])["spec"]
    (port,) = [port for port in spec["containers"][0]["ports"] if port["name"] == "pytorchjob-port"]
    assert [each["containerPort"] for each in spec["containers"][0]["ports"]] == [port["containerPort"], 8888]


def test_a_null_is_as_if_it_were_not_there() -> None:
    spec = {
        "runPolicy": {"backoffLimit": None},
        "nprocPerNode": None,
        "elasticPolicy": {"maxRestarts": 9, "nProcPerNode": 2, "minReplicas": None},
    }
    job = fields(manifest(container={"command": ["torchrun", "/a.py"], "imagePullPolicy": None}, spec=spec))
    assert (job["restarts"], job["processes"], job["image_pull_policy"]) == (9, 2, "IfNotPresent")
    assert "elastic" not in job


def test_volumes_with_the_names_of_flks_own_stay_volumes_of_the_manifest() -> None:
    volumes = [
        {"name": "work", "hostPath": {"path": "/work"}},
        {"name": "checkpoint", "persistentVolumeClaim": {"claimName": "kept"}},
        {"name": "shm", "hostPath": {"path": "/dev/shm"}},
    ]
    mounts = [{"name": "work", "mountPath": "/work"}, {"name": "checkpoint", "mountPath": "/kept"}]
    mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    init = {"name": "fetch", "image": "busybox:1", "volumeMounts": [{"name": "work", "mountPath": "/to"}]}
    text = manifest(container={"volumeMounts": mounts}, pod={"volumes": volumes, "initContainers": [init]})
    spec = pod_template(validated(fields(text)), Bundle(), [])["spec"]
    sources = {volume.pop("name"): volume for volume in spec["volumes"]}
    assert sources["work"] == sources["checkpoint"] == {"emptyDir": {}}
    assert sources["work-data"] == {"hostPath": {"path": "/work"}}
    assert sources["checkpoint-data"] == {"persistentVolumeClaim": {"claimName": "kept"}}
    assert sources["shm"] == {"hostPath": {"path": "/dev/shm"}}
    mounted = {mount["mountPath"]: mount["name"] for mount in spec["containers"][0]["volumeMounts"]}
    assert (mounted["/work"], mounted["/kept"]) == ("work-data", "checkpoint-data")
    assert spec["initContainers"][0]["volumeMounts"][0]["name"] == "work-data"


def test_a_renamed_volume_gets_a_free_name_wherever_it_is_used() -> None:
    volumes = [{"name": name, "hostPath": {"path": f"/{name}"}} for name in ("work", "work-data", "shm")]
    container = {
        "volumeDevices": [{"name": "work", "devicePath": "/dev/a"}],
        "volumeMounts": [{"name": "work-data", "mountPath": "/b"}, {"name": "shm", "mountPath": "/c"}],
    }
    spec = pod_template(validated(fields(manifest(container=container, pod={"volumes": volumes}))), Bundle(), [])[
        "spec"
    ]
    paths = {volume["name"]: volume["hostPath"]["path"] for volume in spec["volumes"] if "hostPath" in volume}
    assert paths == {"work-data-data": "/work", "work-data": "/work-data", "shm-data": "/shm"}
    main = spec["containers"][0]
    assert main["volumeDevices"][0]["name"] == "work-data-data"
    names = {mount["mountPath"]: mount["name"] for mount in main["volumeMounts"]}
    assert (names["/b"], names["/c"], names["/dev/shm"]) == ("work-data", "shm-data", "shm")


def test_lists_without_volumes_leave_those_of_flk() -> None:
    text = manifest(container={"volumeMounts": [None]}, pod={"volumes": []})
    spec = pod_template(validated(fields(text)), Bundle(), [])["spec"]
    assert {mount["name"] for mount in spec["containers"][0]["volumeMounts"]} <= {v["name"] for v in spec["volumes"]}
    assert {"work", "shm"} <= {volume["name"] for volume in spec["volumes"]}


@pytest.mark.parametrize("name", ["serviceAccountName", "serviceAccount"])
def test_whether_pods_with_a_service_account_get_its_token_is_decided_by_kubernetes(name: str) -> None:
    spec = pod_template(validated(fields(manifest(pod={name: "reader"}))), Bundle(), [])["spec"]
    assert spec[name] == "reader"
    assert "automountServiceAccountToken" not in spec


@pytest.mark.parametrize(
    ("pod", "container"),
    [
        ({"runAsUser": 0}, None),
        ({"fsGroup": 2000}, None),
        (None, {"privileged": True}),
        ({"runAsNonRoot": True}, {"capabilities": {"add": ["IPC_LOCK"]}}),
    ],
)
def test_a_security_context_of_the_manifest_is_not_mixed_with_flks(pod: Any, container: Any) -> None:
    text = manifest(pod={"securityContext": pod}, container={"securityContext": container})
    converted = validated(yaml.safe_load(job_file(convert(text, "-"))))
    spec = pod_template(converted, Bundle(), [])["spec"]
    assert spec.get("securityContext") == pod
    main = spec["containers"][0].get("securityContext") or {}
    assert {name: value for name, value in main.items() if value != {}} == (container or {})


def test_a_setup_that_runs_as_another_user_than_the_manifests_is_said() -> None:
    container = {"command": ["sh", "-c", "wget http://x && python /a.py"]}
    said = "setup runs as user 10001"
    assert any(note.startswith(said) for note in convert(manifest(container=container), "-").notes)
    pod = {"securityContext": {"runAsUser": 0}}
    for text in (manifest(), manifest(container=container, pod=pod)):
        assert not any(note.startswith(said) for note in convert(text, "-").notes)


@pytest.mark.parametrize(("path", "said"), [("/data", True), ("/data/a", True), ("/data/a/b", False), ("/dat", False)])
def test_a_folder_in_a_volume_is_said_to_be_left(path: str, said: bool) -> None:
    container = {"workingDir": "/data/a", "volumeMounts": [{"name": "data", "mountPath": path}]}
    notes = convert(manifest(container=container), "-").notes
    assert any(f"ranks start in /flk/work, not in the volume at {path}: " in note for note in notes) == said


def test_what_the_metadata_of_one_role_has_besides_labels_is_left_out() -> None:
    data = yaml.safe_load(manifest())
    worker = data["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    worker["metadata"] = {"namespace": "t", "finalizers": ["a/b"], "creationTimestamp": None, "name": "x"}
    found = convert(yaml.safe_dump(data), "old.yaml")
    assert "patch" not in found.fields
    assert "template.metadata is left out: finalizers, namespace" in found.notes


def test_nothing_is_lost_of_the_names_of_jobs_and_of_what_a_role_has() -> None:
    data = yaml.safe_load(manifest())
    data["metadata"] = {"generateName": "gpt-"}
    assert "metadata.generateName is left out: gpt-" in convert(yaml.safe_dump(data), "old.yaml").notes
    data["spec"]["pytorchReplicaSpecs"]["Worker"]["replica"] = 4
    with pytest.raises(UsageError, match=r"Worker\.replica: is no field of a role"):
        convert(yaml.safe_dump(data), "old.yaml")


def test_claims_of_devices_stay_as_they_are() -> None:
    claims = [{"name": "gpu"}]
    job = fields(manifest(container={"resources": {"claims": claims, "limits": {"cpu": 1}}}))
    assert job["patch"]["spec"]["containers"][0]["resources"] == {"claims": claims}


def test_what_a_scheduling_policy_has_is_named() -> None:
    policy = {"schedulingPolicy": {"queue": "research", "minAvailable": 2}}
    found = convert(manifest(spec={"runPolicy": policy}), "old.yaml")
    assert found.fields["gang"] == "auto"
    assert any(
        "schedulingPolicy became gang: auto" in n and n.endswith("without minAvailable, queue") for n in found.notes
    )


@pytest.mark.parametrize(
    ("option", "spec"), [([], {"nprocPerNode": "auto"}), (["--nproc-per-node=auto"], {}), ([], {})]
)
def test_ranks_by_the_cpus_of_a_node_are_said_to_be_one(option: list[str], spec: dict[str, Any]) -> None:
    for gpus, said in (({}, True), ({"nvidia.com/gpu": 2}, False), ({"amd.com/gpu": 2}, False)):
        container = {"command": ["torchrun", *option, "/a.py"], "resources": {"limits": gpus}}
        found = convert(manifest(container=container, spec=spec), "old.yaml")
        assert "processes" not in found.fields
        assert any("nprocPerNode auto became one rank" in note for note in found.notes) == said


@pytest.mark.parametrize(
    ("processes", "command", "ranks"),
    [
        ("cpu", ["torchrun", "--nproc_per_node=2", "/a.py"], 2),
        ("1", ["python", "-m", "torch.distributed.launch", "/a.py"], 1),
    ],
)
def test_the_number_of_ranks_that_the_manifest_has_at_another_place_counts(
    processes: str, command: list[str], ranks: int
) -> None:
    job = fields(manifest(container={"command": command}, spec={"nprocPerNode": processes}))
    assert job["processes"] == ranks


def test_two_dollars_are_one_as_in_kubernetes() -> None:
    env = [{"name": "PRICE", "value": "1$$2"}, {"name": "LR", "value": "3"}]
    job = fields(manifest(container={"command": ["sh", "-c", "python /a.py $$LR"], "env": env}))
    assert (job["command"], job["env"]["PRICE"]) == (["/a.py", "3"], "1$2")


def test_a_job_inside_of_another_object_is_found() -> None:
    wrapped = {"kind": "AppWrapper", "spec": {"components": [{"template": yaml.safe_load(manifest())}]}}
    assert fields(f"kind: ConfigMap\n---\n{yaml.safe_dump(wrapped)}")["replicas"] == 4


# what is said of commands before the script
BEFORE: dict[str, tuple[str, ...]] = {
    "ranks do not see what a shell before them does: give it as env or workingDir": (
        *(
            "source /env.sh",
            ". /env.sh",
            "conda activate team",
            "cd $HOME",
            "cd ~",
            "cd",
            "test -d /a || cd /b",
        ),
        *("export A=`hostname`", "export A=$B", "export A", "A=1"),
        *("read A < /a", "declare -x A=5", "let A=A+1", "readonly A=1", "mapfile A < /a", "printf -v A x"),
    ),
    "is a training before the last command: make a job of each": (
        *("torchrun /b.py", "A=1 accelerate launch /b.py", "python -m torch.distributed.run /b.py"),
        *("timeout 9 python -m torch.distributed.run /b.py", "python -W ignore -m torch.distributed.run /b.py"),
        "python -m torch.distributed.launch --nproc_per_node=2 /b.py",
    ),
    "is a shell program of its own": ("if true; then cd /b; fi", "for x in a; do b; done", "ulimit -l 1", "umask 0"),
}


@pytest.mark.parametrize(("sentence", "before"), [(told, before) for told, all_ in BEFORE.items() for before in all_])
def test_a_command_whose_effect_the_ranks_would_miss_is_refused(sentence: str, before: str) -> None:
    with pytest.raises(UsageError) as caught:
        convert(manifest(container={"command": ["sh", "-c", f"{before} && python /a.py"]}), "old.yaml")
    assert f"command: {before.partition(';')[0]}: {sentence}" in str(caught.value)


SHAPES: dict[str, tuple[tuple[Any, ...], Any]] = {
    "Worker: must be a mapping": ((), 5),
    "Worker.template.spec.containers: none of 0 is named pytorch": ((), {}),
    "containers[0]: must be a mapping": (("template", "spec", "containers"), ["x"]),
    ".env: must be a list": (("template", "spec", "containers", 0, "env"), {"A": "b"}),
    ".env: a variable has no name": (("template", "spec", "containers", 0, "env"), [{"name": ["b"]}]),
    ".resources: must be a mapping": (("template", "spec", "containers", 0, "resources"), ["cpu"]),
    ".volumeMounts: must be a list": (("template", "spec", "containers", 0, "volumeMounts"), {"a": "/a"}),
    ".volumes[0]: must be a mapping": (("template", "spec", "volumes"), ["x"]),
    ".command: must be a list": (("template", "spec", "containers", 0, "command"), "python /a.py"),
    ".command: runs a shell script": (("template", "spec", "containers", 0, "command"), ["bash", "train.sh"]),
}


@pytest.mark.parametrize("sentence", SHAPES)
def test_a_foreign_shape_is_refused_by_its_path(sentence: str) -> None:
    path, value = SHAPES[sentence]
    data = yaml.safe_load(manifest({"Worker": 2}))
    *above, last = ("spec", "pytorchReplicaSpecs", "Worker", *path)
    node: Any = data
    for key in above:
        node = node[key]
    node[last] = value
    with pytest.raises(UsageError) as caught:
        convert(yaml.safe_dump(data), "old.yaml")
    assert sentence in str(caught.value)


# what differs in the manifest, and the sentence of the refusal
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "image's program": ({"container": {"command": None}}, "command: is that of the image, which flk does not know"),
    "arguments alone": (
        {"container": {"command": None, "args": ["--lr=1"]}},
        "command: has arguments only, of the program that the image starts",
    ),
    "another program under torchrun": (
        {"container": {"command": ["torchrun", "--no_python", "train", "/a.py"]}},
        "command: --no-python starts another program than a Python script",
    ),
    "old launcher of several ranks": (
        {"container": {"command": ["python", "-m", "torch.distributed.launch", "--nproc_per_node=2", "/a.py"]}},
        "command: torch.distributed.launch gives each rank its --local-rank: add --use-env",
    ),
    "option of Python": (
        {"container": {"command": ["python", "-W", "ignore", "/a.py"]}},
        "command: has no script and no module before -W, an option that a job cannot give to Python",
    ),
    "another program": (
        {"container": {"command": ["mpirun", "x"]}},
        "command: starts mpirun: a job starts a Python script",
    ),
    "variable for accelerate": (
        {"container": {"command": ["accelerate", "launch", "/a.py", "--lr=$(LR)"]}},
        "command: --lr=$(LR): a job's arguments are as they are written",
    ),
    "variable": (
        {"container": {"command": ["sh", "-c", "python /a.py --lr=$LR"]}},
        "command: --lr=$LR: a job's arguments are as they are written",
    ),
    "another command after the script": (
        {"container": {"command": ["sh", "-c", "torchrun --nnodes 2 /a.py | tee /log"]}},
        "command: |: a job's arguments are as they are written",
    ),
    "in the background": (
        {"container": {"command": ["sh", "-c", "tensorboard &\npython /a.py"]}},
        "command: is a shell program of its own",
    ),
    "braces without quotes": (
        {"container": {"command": ["sh", "-c", "torchrun /a.py '{1,2}' {0,1}"]}},
        "command: {0,1}: a job's arguments are as they are written",
    ),
    "home of the user": (
        {"container": {"command": ["sh", "-c", "python ~/a.py"]}},
        "command: ~/a.py: a job's arguments are as they are written",
    ),
    "ranks that a command counts": (
        {"container": {"command": ["sh", "-c", "torchrun --nproc_per_node $(nvidia-smi -L | wc -l) /a.py"]}},
        "command: --nproc-per-node: must be a number (is '$(nvidia-smi -L | wc -l)')",
    ),
    "computed number of ranks": (
        {"container": {"command": ["sh", "-c", "torchrun --nproc_per_node=$(nproc) /a.py"]}},
        "command: --nproc-per-node: must be a number (is '$(nproc)')",
    ),
    "not a number": (
        {"container": {"resources": {"limits": {"nvidia.com/gpu": "$GPUS"}}}},
        "resources: nvidia.com/gpu: must be a number (is '$GPUS')",
    ),
    "a rank for each CPU": (
        {"container": {"command": ["torchrun", "/a.py"]}, "spec": {"nprocPerNode": "cpu"}},
        "spec.nprocPerNode: must be a number (is 'cpu'",
    ),
    "no command": ({"container": {"command": ["sh", "-c", "exec"]}}, "command: is a shell program of its own"),
    "a change of the shell on a condition": (
        {"container": {"command": ["sh", "-c", "[ -f /x ] && export LR=2; python /a.py"]}},
        "command: is a shell program of its own",
    ),
    "script above the folder of the image": (
        {"container": {"command": ["sh", "-c", "cd src && python ../train.py"]}},
        "command: ../train.py: ranks start in a folder of their own: give the full path",
    ),
    "file above the folder": (
        {"container": {"command": ["python", "/a.py", "--config=../a.yaml"]}},
        "command: --config=../a.yaml: ranks start in a folder of their own",
    ),
    "unknown field": ({"spec": {"successPolicy": "AllWorkers"}}, "spec.successPolicy: has no counterpart in a job"),
    "unknown role": ({"roles": {"Worker": 1, "PS": 1}}, "spec.pytorchReplicaSpecs.PS: is no role of a PyTorchJob"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_job_cannot_have_is_refused_by_its_field(case: str) -> None:
    changes, sentence = REFUSED[case]
    with pytest.raises(UsageError) as caught:
        convert(manifest(**changes), "old.yaml")
    assert sentence in str(caught.value)
    assert str(caught.value).startswith("old.yaml: spec.")


def test_a_value_that_a_shell_computes_is_refused_as_it_is_written() -> None:
    text = "torchrun --max-restarts=$((1 + 2)) /a.py"
    with pytest.raises(UsageError, match=r"restarts: must be a whole number \(is '\$\(\(1 \+ 2\)\)'\)"):
        convert(manifest(container={"command": ["sh", "-c", text]}), "old.yaml")


def test_roles_that_differ_are_refused_with_the_place() -> None:
    data = yaml.safe_load(manifest())
    pod = data["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    pod["containers"][0]["command"] = ["python", "/b.py"]
    pod["nodeSelector"] = {"pool": "gpu"}
    with pytest.raises(UsageError) as caught:
        convert(yaml.safe_dump(data), "old.yaml")
    for place in ("command", "patch.spec.nodeSelector.pool"):
        assert f"Master and Worker differ in {place}: all pods of a job are equal" in str(caught.value)


@pytest.mark.parametrize("text", ["kind: Job\n", "kind: PyTorchJob\nspec: 5\n"])
def test_a_file_without_a_pytorchjob_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"old\.yaml: has 0 PyTorchJobs: expected one"):
        convert(text, "old.yaml")


def test_a_name_of_a_volume_that_is_no_text_is_left_to_the_api_server() -> None:
    mounts = [{"name": [5], "mountPath": "/x"}]
    job = fields(manifest(container={"volumeMounts": mounts}))
    assert job["patch"]["spec"]["containers"][0]["volumeMounts"] == mounts


def test_the_command_prints_a_job_file_that_submit_takes(run: Run, tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(manifest())
    code, out, _ = run("convert", str(tmp_path / "old.yaml"))
    assert code == 0
    (tmp_path / "flk.yaml").write_text(out)
    code, out, _ = run("render", "--file", str(tmp_path / "flk.yaml"))
    assert code == 0
    assert "replicas: 4" in out
