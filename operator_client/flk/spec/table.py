"""The table of options of a job: a field for each, with its type, check, default, text, flag, variable and chart value.

It is the only description of the job file: the file that `flk init` writes comes from it, and so do the flags, the
chart's values and the reference. To add an option is to add a row.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import Field

from flk.spec import mounts
from flk.spec.fields import (
    PULL_POLICIES,
    Arguments,
    Checkpoint,
    CodeFile,
    Command,
    Elastic,
    FabricName,
    GangName,
    HangTimeout,
    Image,
    JobName,
    Modules,
    Mount,
    ObjectName,
    Package,
    PullPolicy,
    Queue,
    SaveEvery,
    Seconds,
    SecretKey,
    ShellCommand,
    Ship,
    Sinks,
    Strategy,
    StrictModel,
    TargetName,
    Text,
    Topology,
    Variable,
)
from flk.spec.hardware import FABRICS
from flk.spec.names import DEFAULT_IMAGE, DEFAULT_TARGET, NO_GANG, TARGETS
from flk.spec.options import Form, Option
from flk.spec.parts import DiLoCo, Nodes, PodSettings, Resources
from flk.spec.units import duration_text
from flk_runtime.contract import pod_env, user_env
from flk_runtime.contract.options import STRATEGIES

_GRACE: Final = duration_text(int(pod_env.GRACE.default))
MOST_REPLICAS: Final = 100_000  # an indexed Job has at most so many pods; a cluster, 150,000


class JobOptions(StrictModel):
    """The options of a job, each checked by itself; `flk.spec.job.Job` checks them together."""

    name: Annotated[
        JobName | None, Option("NAME", example="my-job", variable=user_env.JOB, empty="the name of the release")
    ] = Field(default=None, description="name of the job; left out: the name of the script and five random characters")
    image: Annotated[
        Image | None,
        Option(
            "IMAGE",
            example="team/train:1.0",
            empty=f"defaults.image, else {DEFAULT_IMAGE}",
        ),
    ] = Field(default=None, description=f"container image with torch; left out: $FLK_IMAGE, else {DEFAULT_IMAGE}")
    image_pull_policy: Annotated[
        PullPolicy | None,
        Option("POLICY", example=PULL_POLICIES[0]),
    ] = Field(
        default=None,
        description=f"when nodes pull the image: {', '.join(PULL_POLICIES)}; left out: {PULL_POLICIES[0]}",
    )
    command: Command = Field(
        description="the script and its arguments, or -m and a module; text is split as by a shell"
    )
    pip: Annotated[
        list[Package] | None,
        Option(
            "PACKAGE",
            Form.LIST,
            example="[torchmetrics>=1.4]",
        ),
    ] = Field(default=None, description="packages that pip installs before the ranks start: torchmetrics>=1.4")
    requirements: Annotated[
        CodeFile | None,
        Option(
            "FILE",
            example="requirements.txt",
            variable=pod_env.REQUIREMENTS,
        ),
    ] = Field(
        default=None,
        description="file of requirements that pip installs: a path in the code, or an absolute one in the image",
    )
    setup: Annotated[
        ShellCommand | None,
        Option(
            "COMMAND",
            example="./prepare.sh",
            variable=pod_env.SETUP,
        ),
    ] = Field(
        default=None, description="shell command that runs once in each pod, after pip and before the ranks start"
    )
    on_restart: Annotated[
        Arguments | None,
        Option(
            "ARGUMENTS",
            example="--resume=auto",
            variable=pod_env.ON_RESTART,
        ),
    ] = Field(
        default=None,
        description="arguments that the script gets after its own in every attempt but the first: --resume=auto",
    )
    preload: Annotated[
        Modules | None,
        Option(
            "MODULES",
            example="transformers timm",
            variable=pod_env.PRELOAD,
        ),
    ] = Field(
        default=None,
        description="modules that are imported once for the ranks of all attempts: 'transformers timm'; left out: "
        "torch, and large packages that the script imports at its top",
    )
    replicas: Annotated[int, Option("N", Form.NUMBER, empty="1")] = Field(
        default=1, ge=1, le=MOST_REPLICAS, description="number of pods"
    )
    elastic: Annotated[
        Annotated[Elastic, Elastic.SHORT] | None,
        Option(
            "MIN:MAX",
            example="{min: 2, max: 4, batch: keep}",
        ),
    ] = Field(
        default=None,
        description="train with MIN to MAX pods, as many as there are; replicas, by default MAX, are created",
    )
    spares: Annotated[int, Option("N", Form.NUMBER, example="0")] = Field(
        default=0, ge=0, le=1024, description="more pods, which wait to take the place of one that is lost"
    )
    processes: Annotated[int | None, Option("N", Form.NUMBER, ("--processes", "--nproc-per-node"), example="1")] = (
        Field(
            default=None, ge=1, le=1024, description="ranks in each pod; left out: one for each GPU, one without GPUs"
        )
    )
    resources: Annotated[Resources, Option(example="{cpu: 2, memory: 4Gi, gpu: 0, shm: 1Gi}")] = Field(
        default=Resources.model_construct(), description="what each pod requests"
    )
    strategy: Annotated[
        Strategy,
        Option(
            "NAME",
            example=user_env.STRATEGY.default,
            variable=user_env.STRATEGY,
        ),
    ] = Field(
        default=user_env.STRATEGY.default,
        description=f"how the model is parallelized: {', '.join(STRATEGIES)}; auto: the ranks choose one",
    )
    verify: Annotated[int | None, Option("N", Form.NUMBER, example="5", variable=user_env.VERIFY)] = Field(
        default=None,
        ge=1,
        le=1000,
        description="compare the first N steps with those of the whole model in one process, before the training",
    )
    diloco: Annotated[
        DiLoCo | None,
        Option(
            "KEY=VALUE",
            Form.NUMBERS,
            example="{inner: full_shard, workers: 4, every: 50, dtype: int4}",
        ),
    ] = Field(default=None, description="option of strategy diloco: inner=full_shard, workers=4, every=50, dtype=int4")
    fabric: Annotated[
        FabricName,
        Option(
            "NAME",
            example="auto",
            variable=user_env.FABRIC,
        ),
    ] = Field(default="auto", description=f"preset for the network between GPUs: {', '.join(FABRICS)}")
    restarts: Annotated[
        int, Option("N", Form.NUMBER, ("--restarts", "--max-restarts"), example="3", variable=pod_env.RESTARTS)
    ] = Field(
        default=3, ge=0, le=100_000, description="how often all ranks start again after a failure of the training code"
    )
    disruptions: Annotated[
        int,
        Option("N", Form.NUMBER, ("--disruptions", "--max-disruptions"), example="100", variable=pod_env.DISRUPTIONS),
    ] = Field(
        default=pod_env.DISRUPTIONS.default,
        ge=0,
        le=100_000,
        description="how often all ranks start again after a disruption: a lost or preempted pod, a lost connection",
    )
    deadline: Annotated[
        Seconds | None,
        Option("DURATION", example="2h", variable=pod_env.DEADLINE),
    ] = Field(default=None, description="time that the job may take, from its start: 75s, 1h30m; left out: no limit")
    ttl: Annotated[
        Seconds | None,
        Option("DURATION", example="7d"),
    ] = Field(default=None, description="delete the job so long after its end: 12h, 7d; left out: never")
    stuck_after: Annotated[
        Seconds | None,
        Option("DURATION", example="30m"),
    ] = Field(
        default=None,
        description="time that pods may wait for a node before the job counts as stuck: 30m; left out: until the "
        "scheduler or an autoscaler says that there will be none",
    )
    hang_timeout: Annotated[
        HangTimeout | None,
        Option(
            "DURATION",
            example="10m",
            variable=user_env.HANG_TIMEOUT,
        ),
    ] = Field(
        default=None,
        description="time without progress that counts as a hang: 10m; 0: never; left out: a limit for each phase",
    )
    grace: Annotated[
        Seconds,
        Option(
            "DURATION",
            example=_GRACE,
            variable=pod_env.GRACE,
        ),
    ] = Field(
        default=int(pod_env.GRACE.default),
        description="time that the ranks have to save and end when their pod is stopped: 30s, 5m",
    )
    checkpoint: Annotated[
        Annotated[Checkpoint, Checkpoint.SHORT] | None,
        Option(
            "PLACE",
            example="my-pvc:/checkpoints",
        ),
    ] = Field(
        default=None,
        description="where checkpoints go: PVC:/PATH or s3://BUCKET/PREFIX; left out: the memory of the pods",
    )
    save_every: Annotated[
        SaveEvery | None,
        Option("STEPS", Form.NUMBER, example="100", variable=user_env.SAVE_EVERY),
    ] = Field(default=None, description=user_env.SAVE_EVERY.meaning)
    store_every: Annotated[
        SaveEvery | None,
        Option("STEPS", Form.NUMBER, example="1000", variable=user_env.STORE_EVERY),
    ] = Field(default=None, description=user_env.STORE_EVERY.meaning)
    keep: Annotated[int | None, Option("N", Form.NUMBER, example="2", variable=user_env.KEEP)] = Field(
        default=None,
        ge=1,
        le=2**31 - 1,
        description=f"how many of the newest checkpoints stay; left out: {user_env.KEEP.default}",
    )
    metrics: Annotated[
        Sinks | None,
        Option(
            "SINKS",
            example="tensorboard:/data/curves",
            variable=user_env.METRICS,
        ),
    ] = Field(
        default=None,
        description="where the metrics go besides the log: tensorboard:/PATH, mlflow and wandb, separated by commas, "
        "or none; left out: mlflow with MLFLOW_TRACKING_URI, wandb with WANDB_PROJECT",
    )
    queue: Annotated[Queue | None, Option("NAME", example="my-queue", empty="defaults.queue, else none")] = Field(
        default=None, description="Kueue queue in which the job waits"
    )
    queue_priority: Annotated[ObjectName | None, Option("NAME", example="high")] = Field(
        default=None, description="WorkloadPriorityClass of the job in its queue"
    )
    target: Annotated[
        TargetName | None,
        Option(
            "KIND",
            example=DEFAULT_TARGET,
            empty=DEFAULT_TARGET,
        ),
    ] = Field(
        default=None,
        description=f"what the job becomes: {', '.join(TARGETS)}, or auto: the first that the cluster serves; "
        "left out: the site's, else auto",
    )
    gang: Annotated[
        GangName | None,
        Option(
            "SCHEDULER",
            example=NO_GANG,
        ),
    ] = Field(
        default=None,
        description="start all pods together or none: native, volcano, coscheduling, or auto for what the cluster has; "
        f"left out: {NO_GANG}",
    )
    topology: Annotated[
        Topology | None,
        Option(
            "KEY[:preferred]",
            example="topology.kubernetes.io/rack:preferred",
        ),
    ] = Field(
        default=None,
        description="label whose value all pods' nodes must have in common, or with :preferred should: a rack, a block",
    )
    env: Annotated[
        dict[Variable, Text],
        Option(
            "K=V",
            Form.VARIABLE,
            example='{LEARNING_RATE: "3e-4"}',
        ),
    ] = Field(
        default_factory=dict,
        description="variable of every rank; --env K takes its value from this shell",
    )
    secrets: Annotated[
        dict[Variable, SecretKey],
        Option("VAR=SECRET:KEY", Form.PAIR, ("--secret",), "{WANDB_API_KEY: wandb:key}"),
    ] = Field(default_factory=dict, description="variable of every rank from a Secret: SECRET:KEY")
    volumes: Annotated[
        list[Mount],
        Option("VOLUME", Form.LIST, ("--volume",), "[my-data:/data]"),
    ] = Field(default_factory=list, description=f"what to mount: {mounts.FORMS}")
    nodes: Annotated[Nodes, Option(example="{selector: {pool: gpu}, tolerations: [nvidia.com/gpu:NoSchedule]}")] = (
        Field(default=Nodes.model_construct(), description="which nodes the pods may run on")
    )
    pods: Annotated[
        PodSettings | None,
        Option(
            example="{labels: {team: vision}, service_account: trainer, pull_secrets: [registry], priority_class: high}"
        ),
    ] = Field(
        default=None, description="labels, annotations, service_account, pull_secrets and priority_class of the pods"
    )
    records: Annotated[
        ObjectName | None,
        Option(
            example="my-release-flk-records",
            variable=pod_env.RECORDS,
        ),
    ] = Field(
        default=None,
        description="ConfigMap in which the launchers keep the record of the job, for when its pods are gone",
    )
    patch: Annotated[
        dict[str, Any],
        Option(
            "FILE",
            Form.FILE,
            example="{spec: {runtimeClassName: nvidia}}",
        ),
    ] = Field(
        default_factory=dict, description="YAML (a file on the command line) that is merged into the pod template, last"
    )
    ship: Annotated[
        Ship,
        Option(
            "PATTERN",
            Form.LIST,
            example="[config/*.yaml]",
        ),
    ] = Field(
        default=True,
        description="patterns of more files to ship with the code; in a job file also false, if the code and "
        "flk_runtime are in the image, or runtime, if only the code is",
    )
