"""The table of options of a job: a field for each, with its type, check, default, text, flag, variable and chart value.

It is the only description of the job file: its JSON schema and the file that `flk init` writes come from it, and so do
the flags, the chart's values and the reference. To add an option is to add a row.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import Field

from flk.spec import mounts
from flk.spec.diloco import DiLoCo
from flk.spec.fabric import fabrics
from flk.spec.fields import (
    DEFAULT_TARGET,
    NO_GANG,
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
    MemoryPath,
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
from flk.spec.options import Form, Option
from flk.spec.parts import Nodes, PodSettings, Resources
from flk.units import duration_text
from flk_runtime.contract import pod_env, user_env
from flk_runtime.contract.strategies import AUTO, STRATEGIES

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
            help="container image with torch. Default: $FLK_IMAGE, else flk's own image",
            example="team/train:1.0",
            empty="defaults.image, else flk's own image for CPUs or GPUs",
        ),
    ] = Field(default=None, description="container image with torch")
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
            help="package that pip installs before the ranks start: torchmetrics>=1.4",
            example="[torchmetrics>=1.4]",
        ),
    ] = Field(default=None, description="packages that pip installs in each pod before the ranks start, once")
    requirements: Annotated[
        CodeFile | None,
        Option(
            "FILE",
            help="file of requirements, which pip installs before the ranks start",
            example="requirements.txt",
            variable=pod_env.REQUIREMENTS,
        ),
    ] = Field(
        default=None,
        description="file of requirements, which pip installs too: a path in the code, or an absolute one in the image",
    )
    setup: Annotated[
        ShellCommand | None,
        Option(
            "COMMAND",
            help="shell command that runs once in each pod, before the ranks start",
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
            help="arguments that the script gets after its own in every attempt but the first: --resume=auto",
            example="--resume=auto",
            variable=pod_env.ON_RESTART,
        ),
    ] = Field(
        default=None,
        description="arguments that the script gets after its own in later attempts, as a shell reads them",
    )
    preload: Annotated[
        Modules | None,
        Option(
            "MODULES",
            help="modules that are imported once for the ranks of all attempts, and not by each: 'transformers timm'",
            example="transformers timm",
            variable=pod_env.PRELOAD,
        ),
    ] = Field(
        default=None,
        description="modules of installed packages that are imported once for the ranks of all attempts; left out: "
        "torch, and large packages of training that the script imports at its top",
    )
    accelerate_config: Annotated[
        CodeFile | None,
        Option(
            "FILE",
            help="configuration of accelerate, whose variables the script gets as from accelerate launch",
            example="accelerate.yaml",
            variable=pod_env.ACCELERATE_CONFIG,
        ),
    ] = Field(
        default=None,
        description="file of accelerate config, whose variables the script gets as from accelerate launch: a path in "
        "the code, or an absolute one in the image",
    )
    replicas: Annotated[int, Option("N", Form.NUMBER, empty="1, or MAX of an elastic job")] = Field(
        default=1, ge=1, le=MOST_REPLICAS, description="number of pods"
    )
    elastic: Annotated[
        Annotated[Elastic, Elastic.SHORT] | None,
        Option(
            "MIN:MAX",
            help="train with MIN to MAX pods, as many as there are. --replicas is then how many are created, MAX "
            "by default",
            example="{min: 2, max: 4, batch: keep}",
        ),
    ] = Field(
        default=None,
        description="the job trains with MIN to MAX pods, as many as there are; replicas, MAX by default, is how many "
        "are created; left out: a fixed number",
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
        default=Resources(), description="what each pod requests"
    )
    strategy: Annotated[
        Strategy,
        Option(
            "NAME",
            help=f"parallelism strategy: {', '.join(name for name in STRATEGIES if name != AUTO)}, or auto: the ranks "
            "choose one at their start",
            example=user_env.STRATEGY.default,
            variable=user_env.STRATEGY,
        ),
    ] = Field(default=user_env.STRATEGY.default, description=f"how the model is parallelized: {', '.join(STRATEGIES)}")
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
            help="option of strategy diloco: inner=full_shard, workers=4, every=100, dtype=int8",
            example="{inner: full_shard, workers: 4, every: 100, dtype: int8}",
            not_in_chart="flk submit makes the Secret with which the workers authenticate each other",
        ),
    ] = Field(default=None, description="workers and rounds of strategy diloco")
    fabric: Annotated[
        FabricName,
        Option(
            "NAME",
            example="auto",
            variable=user_env.FABRIC,
            empty="defaults.fabric, else auto",
        ),
    ] = Field(default="auto", description=f"preset for the network between GPUs: {', '.join(fabrics())}")
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
        Option("DURATION", help="time that the job may take: 75s, 1h30m", example="2h", variable=pod_env.DEADLINE),
    ] = Field(default=None, description="time that the job may take, from its start: 75s, 1h30m; left out: no limit")
    idle_timeout: Annotated[
        Seconds | None,
        Option(
            "DURATION",
            help="time in which no GPU of the job does anything, after which it ends: 30m",
            example="30m",
            variable=pod_env.IDLE_TIMEOUT,
        ),
    ] = Field(
        default=None,
        description="time in which no GPU of the job does anything, after which it ends: 30m; left out: never",
    )
    ttl: Annotated[
        Seconds | None,
        Option("DURATION", help="time after its end after which the job is deleted: 12h, 7d", example="7d"),
    ] = Field(default=None, description="time after its end after which the job is deleted: 12h, 7d; left out: never")
    stuck_after: Annotated[
        Seconds | None,
        Option("DURATION", help="time that pods may wait for a node before the job counts as stuck", example="30m"),
    ] = Field(
        default=None,
        description="time that pods may wait for a node before the job counts as stuck: 30m; left out: until the "
        "scheduler or an autoscaler says that there will be none",
    )
    hang_timeout: Annotated[
        HangTimeout | None,
        Option(
            "DURATION",
            help="time without progress that counts as a hang, also by phase: 10m,save=1h; 0: never. Default: learned "
            "for each phase",
            example="10m",
            variable=user_env.HANG_TIMEOUT,
        ),
    ] = Field(
        default=None,
        description="time without progress of any rank after which the attempt ends as a hang: 10m, also by phase: "
        "step=5m,save=20m; 0: never; left out: learned for each phase",
    )
    grace: Annotated[
        Seconds,
        Option(
            "DURATION",
            help=f"time that the ranks have to save and end when their pod is stopped: 30s, 5m. Default: {_GRACE}",
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
            help="where checkpoints go: a PersistentVolumeClaim, as PVC:/PATH, or s3://BUCKET/PREFIX",
            example="my-pvc:/checkpoints",
        ),
    ] = Field(
        default=None,
        description="where checkpoints go: a PersistentVolumeClaim, as PVC:/PATH, or s3://BUCKET/PREFIX; left out: the "
        "pods keep them in memory",
    )
    save_every: Annotated[
        SaveEvery | None,
        Option("STEPS|auto", Form.NUMBER, example="100", variable=user_env.SAVE_EVERY),
    ] = Field(default=None, description=user_env.SAVE_EVERY.meaning)
    store_every: Annotated[
        SaveEvery | None,
        Option("STEPS|auto", Form.NUMBER, example="1000", variable=user_env.STORE_EVERY),
    ] = Field(default=None, description=user_env.STORE_EVERY.meaning)
    memory_path: Annotated[
        MemoryPath | None,
        Option(
            "PATH",
            help="local disk on which pods keep the checkpoints that they keep in memory else, for a state that is too "
            "large: a path of a hostpath: volume, or one where no volume is",
            example="/nvme",
            variable=pod_env.MEMORY_PATH,
        ),
    ] = Field(
        default=None,
        description="folder on a local disk in which the pods keep their checkpoints: below the path of a hostpath: "
        "volume, or on a volume of the pod's own; left out: in memory",
    )
    keep: Annotated[int | None, Option("N", Form.NUMBER, example="2", variable=user_env.KEEP)] = Field(
        default=None,
        ge=1,
        le=2**31 - 1,
        description=f"how many of the newest checkpoints stay; left out: {user_env.KEEP.default}",
    )
    keep_every: Annotated[int | None, Option("STEPS", Form.NUMBER, example="1000", variable=user_env.KEEP_EVERY)] = (
        Field(default=None, ge=1, le=2**31 - 1, description="checkpoints whose step is a multiple of this stay too")
    )
    metrics: Annotated[
        Sinks | None,
        Option(
            "SINKS",
            help="where the metrics go besides the log: tensorboard:/PATH, mlflow, wandb, or none. Default: mlflow "
            "with MLFLOW_TRACKING_URI, wandb with WANDB_PROJECT",
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
    queue_priority: Annotated[
        ObjectName | None, Option("NAME", help="WorkloadPriorityClass of the job in its queue", example="high")
    ] = Field(default=None, description="WorkloadPriorityClass by which Kueue orders the jobs of the queue")
    target: Annotated[
        TargetName | None,
        Option(
            "KIND",
            help="what the job becomes: pytorchjob, trainjob, jobset, job, or auto for what the cluster serves. "
            f"Default: {DEFAULT_TARGET}",
            example=DEFAULT_TARGET,
        ),
    ] = Field(
        default=None,
        description="what the job becomes: pytorchjob, trainjob, jobset or job; auto: what the cluster serves; "
        f"left out: {DEFAULT_TARGET}",
    )
    gang: Annotated[
        GangName | None,
        Option(
            "SCHEDULER",
            help="start all pods together or none: native, volcano, coscheduling, or auto for what the cluster has. "
            f"Default: {NO_GANG}",
            example=NO_GANG,
        ),
    ] = Field(
        default=None,
        description="who starts all pods together or none: native, volcano or coscheduling; auto: what the cluster "
        f"has; left out: {NO_GANG}",
    )
    topology: Annotated[
        Topology | None,
        Option(
            "KEY[:preferred]",
            help="label of nodes whose value all pods' nodes must have in common, or should: a rack or a block",
            example="topology.kubernetes.io/rack:preferred",
        ),
    ] = Field(
        default=None,
        description="label of nodes by which all pods run close together, in one rack for example: KEY, KEY:preferred",
    )
    env: Annotated[
        dict[Variable, Text],
        Option(
            "K=V",
            Form.VARIABLE,
            help="variable of every rank; K alone takes its value from this shell",
            example='{LEARNING_RATE: "3e-4"}',
        ),
    ] = Field(default_factory=dict, description="environment of every rank")
    secrets: Annotated[
        dict[Variable, SecretKey],
        Option("VAR=SECRET:KEY", Form.PAIR, ("--secret",), "variable from a Secret", "{WANDB_API_KEY: wandb:key}"),
    ] = Field(default_factory=dict, description="environment from Secrets: VARIABLE: SECRET:KEY")
    volumes: Annotated[
        list[Mount],
        Option("VOLUME", Form.LIST, ("--volume",), f"what to mount: {mounts.FORMS}", "[my-data:/data]"),
    ] = Field(default_factory=list, description=f"what to mount, each as one of {mounts.FORMS}")
    claims: Annotated[
        list[ObjectName],
        Option(
            "TEMPLATE",
            Form.LIST,
            ("--claim",),
            "ResourceClaimTemplate by which each pod claims devices (dynamic resource allocation)",
            "[one-gpu]",
        ),
    ] = Field(
        default_factory=list,
        description="ResourceClaimTemplates by which each pod claims devices (dynamic resource allocation)",
    )
    nodes: Annotated[Nodes, Option(example="{selector: {pool: gpu}, tolerations: [nvidia.com/gpu:NoSchedule]}")] = (
        Field(default=Nodes(), description="which nodes the pods may run on")
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
            empty="defaults.records, else the ConfigMap of records.enabled",
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
            help="YAML file that is merged into the pod template, last",
            example="{spec: {runtimeClassName: nvidia}}",
        ),
    ] = Field(default_factory=dict, description="metadata and spec that are merged into the pod template, last")
    ship: Annotated[
        Ship,
        Option(
            "PATTERN",
            Form.LIST,
            help="more files to ship with the code",
            example="[config/*.yaml]",
            not_in_chart="Helm reads files only with --set-file: job.script and job.files are what is shipped",
        ),
    ] = Field(default=True, description="false: the code is in the image; a list: patterns of more files to ship")
