"""The model of a job: the user's request from flags and flk.yaml, checked completely.

The API server accepts what these checks accept, so a mistake is reported before anything is created. The model is the
only description of the job file: its JSON schema and the file that `flk init` writes come from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final

from pydantic import Field, ValidationError, model_validator

from flk.spec import file, mounts, names
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
from flk.spec.validation import usage_error
from flk.units import duration_text
from flk_runtime.contract import VERSION, pod_env, user_env
from flk_runtime.contract.preflight import parse_preflight
from flk_runtime.contract.strategies import AUTO, DILOCO, STRATEGIES

DEFAULT_IMAGE: Final = {"cpu": f"flktrain/flk:{VERSION}-cpu", "cuda": f"flktrain/flk:{VERSION}-cuda"}
_GRACE: Final = duration_text(int(pod_env.GRACE.default))
# The job is recorded in an annotation of its object in the cluster, and all annotations of one may have 256 KiB.
SIZE_LIMIT: Final = 200_000
MOST_REPLICAS: Final = 100_000  # an indexed Job has at most so many pods; a cluster, 150,000


class Job(StrictModel):
    """A training job: ``replicas`` pods with ``processes`` ranks each, all running ``command``.

    A job is data. `flk.render` returns its manifests and `flk.submit` creates them.
    """

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
        Option(
            "POLICY",
            help=f"when nodes pull the image: {', '.join(PULL_POLICIES)}. Default: {PULL_POLICIES[0]}",
            example=PULL_POLICIES[0],
        ),
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
    diloco: Annotated[
        DiLoCo | None,
        Option(
            "KEY=VALUE",
            Form.NUMBERS,
            help="option of strategy diloco: inner=full_shard, workers=4, every=100, dtype=int8",
            example="{inner: full_shard, workers: 4, every: 100, dtype: int8}",
            not_in_chart="flk submit makes the Secret by which the workers recognise each other",
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
        Option(
            "STEPS|auto",
            Form.NUMBER,
            help="steps between two checkpoints, or auto: computed from what a save costs",
            example="100",
            variable=user_env.SAVE_EVERY,
        ),
    ] = Field(default=None, description="steps between two checkpoints; auto: computed from what a save costs")
    store_every: Annotated[
        SaveEvery | None,
        Option(
            "STEPS|auto",
            Form.NUMBER,
            help="steps between two checkpoints in storage, where memory keeps those of --save-every",
            example="1000",
            variable=user_env.STORE_EVERY,
        ),
    ] = Field(
        default=None,
        description="steps between two checkpoints in storage, where the memory of the pods keeps those of save_every; "
        "auto: computed; left out: every checkpoint is stored",
    )
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

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: Any) -> Any:
        """An elastic job has all the pods that it may have, unless ``replicas`` says otherwise."""
        if not isinstance(data, dict) or data.get("elastic") is None or data.get("replicas") is not None:
            return data
        elastic = data["elastic"]
        most = elastic.partition(":")[2] if isinstance(elastic, str) else None
        if isinstance(elastic, dict | Elastic):
            most = str(elastic.get("max") if isinstance(elastic, dict) else elastic.max)
        return data | ({"replicas": int(most)} if most and most.isdecimal() and int(most) else {})

    @model_validator(mode="after")
    def _check(self) -> Job:
        if self.name is not None:
            _check_field("name", names.job_name, self.name, self.most_pods, self.target_or_default)
        self._check_pods()
        _check_command(self.command)
        if self.queue_priority and not self.queue:
            raise ValueError("queue_priority: needs a queue")
        for name in self.env.keys() & self.secrets.keys():
            raise ValueError(f"secrets.{name}: is in env too")
        _check_field(f"env.{user_env.PREFLIGHT}", parse_preflight, self.env.get(user_env.PREFLIGHT, "on"))
        paths = [mounts.Mount.parse(mount).path for mount in self.volumes]
        if self.checkpoint and self.checkpoint.path:
            paths.append(self.checkpoint.path)
        for path in paths:
            if paths.count(path) > 1:
                raise ValueError(f"volumes: two volumes are mounted at {path}")
        over = self.memory_mount
        if over and (over.kind != mounts.HOST_PATH or over.read_only):
            raise ValueError(
                f"memory_path: {self.memory_path} is on the volume {over}, which is no local disk that pods write to: "
                "choose a path of a hostpath: volume, or one where no volume is"
            )
        resources = self.resources
        huge = [name for name in fabrics()[self.fabric].pod_limits(resources.gpu) if name.startswith("hugepages-")]
        if huge and not (resources.memory or resources.cpu):
            raise ValueError(
                f"resources.memory: is missing: fabric {self.fabric} requests {huge[0]}, "
                "which Kubernetes accepts only with memory or cpu"
            )
        if self.strategy == DILOCO and (self.elastic or self.spares):
            raise ValueError(
                f"{'elastic' if self.elastic else 'spares'}: workers of strategy {DILOCO} come and go anyway"
            )
        if self.replicas % self.workers:
            raise ValueError(f"diloco.workers: must divide replicas, {self.replicas} (is {self.workers})")
        for key in self.patch.keys() - {"metadata", "spec"}:
            raise ValueError(f"patch.{key}: a pod template has only metadata and spec")
        try:
            json.dumps(self.patch, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            raise ValueError("patch: contains a value that JSON does not have") from None
        size = len(self.model_dump_json())
        if size > SIZE_LIMIT:
            raise ValueError(
                f"the job has {size:,} bytes and may have at most {SIZE_LIMIT:,}: put large values in a file"
            )
        return self

    def _check_pods(self) -> None:
        elastic = self.elastic
        if elastic is None:
            return
        if self.spares:
            raise ValueError("spares: an elastic job goes on with fewer pods, so it has none: leave out one of the two")
        if not elastic.min <= self.replicas <= elastic.max:
            raise ValueError(
                f"replicas: must be from {elastic.min} to {elastic.max} in this elastic job (is {self.replicas})"
            )

    @classmethod
    def from_file(cls, path: str | Path) -> Job:
        """Return the job that a job file describes; ``-`` is stdin. Raises UsageError with the file and the field."""
        return validated(file.job_fields(str(path)), source=file.source_name(str(path)))

    @property
    def processes_per_pod(self) -> int:
        """Ranks in each pod."""
        return self.processes if self.processes is not None else max(1, self.resources.accelerators)

    @property
    def memory_mount(self) -> mounts.Mount | None:
        """The volume of the job on which `memory_path` is; None if the pods have one of their own there."""
        found = [mounts.Mount.parse(volume) for volume in self.volumes]
        if self.checkpoint and self.checkpoint.claim:
            found.append(mounts.Mount(mounts.CLAIM, *self.checkpoint.claim))
        inside = [each for each in found if f"{self.memory_path or ''}/".startswith(f"{each.path}/")]
        return max(inside, key=lambda each: len(each.path), default=None)

    @property
    def created_pods(self) -> int:
        """Pods that are created, spares included."""
        return self.replicas + self.spares

    @property
    def least_pods(self) -> int:
        """The least number of pods with which the job trains."""
        return self.elastic.min if self.elastic else self.replicas

    @property
    def most_pods(self) -> int:
        """The most pods that the job may have, spares included."""
        return (self.elastic.max if self.elastic else self.replicas) + self.spares

    @property
    def workers(self) -> int:
        """Workers of strategy diloco among which the pods are divided; 1 under the other strategies."""
        if self.strategy != DILOCO:
            return 1
        return (self.diloco and self.diloco.workers) or self.replicas

    @property
    def world_size(self) -> int:
        """Ranks in the whole job."""
        return self.replicas * self.processes_per_pod

    @property
    def image_or_default(self) -> str:
        """The image that the pods run: the job's own, or flk's image for CPUs or GPUs."""
        return self.image or DEFAULT_IMAGE["cuda" if self.resources.gpu else "cpu"]

    @property
    def target_or_default(self) -> str:
        """The kind of object that the job becomes in the cluster: ``auto``, or the name of a target."""
        return self.target or DEFAULT_TARGET

    def named(self) -> Job:
        """Return this job, with a generated name if it has none."""
        if self.name is not None:
            return self
        return self.changed(name=names.default_name(self.command, self.most_pods, self.target_or_default))

    def changed(self, **fields: Any) -> Job:
        """Return a copy with other values for ``fields``. Raises UsageError if the new job is not valid."""
        return validated({name: getattr(self, name) for name in self.model_fields_set} | fields)


def validated(data: Mapping[str, Any], *, where: Mapping[str, str] | None = None, source: str = "") -> Job:
    """Return the job that plain data describes.

    Raises UsageError with the path of a wrong field. ``where`` maps paths to the flags that set them, and ``source``
    names the file of all others.
    """
    try:
        return Job.model_validate(data)
    except ValidationError as error:
        raise usage_error(error, Job, where=where or {}, source=source) from None


def _check_field(field: str, check: Callable[..., object], *values: Any) -> None:
    """Run ``check`` with ``values`` and put the field's name before its error."""
    try:
        check(*values)
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from None


def _check_command(command: list[str]) -> None:
    if not command or not command[0]:
        raise ValueError("command: names no script")
    first = PurePosixPath(command[0]).name
    if first == "torchrun" or (first.startswith("python") and not first.endswith(".py")):
        raise ValueError(f"command: begins with the script or with -m, not with {first}: flk starts the ranks itself")
    if command[0] == "-m":
        if len(command) < 2:
            raise ValueError("command: -m needs a module")
        _check_field("command", names.module, command[1])
    elif command[0].startswith("-"):
        raise ValueError(f"command: begins with the script or with -m (is {command[0]!r})")
