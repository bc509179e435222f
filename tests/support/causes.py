"""The causes that tests produce in a cluster: how to produce each, and what flk must say about it."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any

from flk_runtime.contract.exit_codes import ExitCode

Object = dict[str, Any]
SMALL = {"requests": {"cpu": "10m"}}
IDLE = "import time; time.sleep(3600)"


@dataclass(frozen=True)
class Expected:
    """The expected diagnosis: the code, and words of the sentence, of the evidence and of the remedy."""

    code: str
    sentence: str
    evidence: str
    remedy: str
    exit_code: int = ExitCode.INFRASTRUCTURE
    stuck: bool = True  # `flk wait` ends by itself; otherwise the cause may resolve, and flk keeps waiting


@dataclass(frozen=True)
class Case:
    """One job that does not run or fails, in one of the namespaces of the test."""

    name: str
    expected: Expected
    manifest: Object | None = None  # a PyTorchJob that flk has not made
    job: Object = field(default_factory=dict)  # fields of the job that flk makes
    script: str = IDLE
    namespace: str = "plain"
    pod: Object = field(default_factory=dict)  # fields of the spec of its pods
    sleeping: int | None = None  # index of the pod whose launcher does not start
    without_code: bool = False  # the ConfigMaps are not created
    event: tuple[str, str] | None = None  # reason and message of an event of its operator, which the test sends
    forgotten: bool = False  # events about it and its pods are deleted when it has failed, as after an hour
    lost: str = ""  # name of the pod that is deleted when the job runs
    nvml: str = ""  # what the stand-in for NVIDIA's library says of the GPU in its pod: lost or idle


def job(
    name: str,
    *,
    command: list[str] | None = None,
    image: str = "IMAGE",
    replicas: int = 1,
    policy: str = "Never",
    container: Object | None = None,
    pod: Object | None = None,
    run_policy: Object | None = None,
    labels: Object | None = None,
    notes: Object | None = None,
) -> Object:
    """A PyTorchJob as written without flk. Words in capitals stand for values of the test, such as IMAGE."""
    training = {
        "name": "pytorch",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": command or ["python3", "-c", IDLE],
        "resources": SMALL,
        **(container or {}),
    }
    spec = {"containers": [training], "terminationGracePeriodSeconds": 1, **(pod or {})}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name, "labels": labels or {}},
        "spec": {
            "nprocPerNode": "1",
            "runPolicy": {"cleanPodPolicy": "None", **(run_policy or {})},
            "pytorchReplicaSpecs": {
                "Worker": {
                    "replicas": replicas,
                    "restartPolicy": policy,
                    "template": {"metadata": {"annotations": notes or {}}, "spec": spec},
                }
            },
        },
    }


def _python(text: str) -> list[str]:
    return ["python3", "-c", text]


def _taking(**resources: str) -> Object:
    return {"resources": {"requests": {**SMALL["requests"], **resources}}}


def _env_from(source: Object) -> Object:
    return {"env": [{"name": "TOKEN", "valueFrom": source}]}


def _volume(source: Object, **mount: Any) -> tuple[Object, Object]:
    """A volume of the pod and its mount in the container."""
    return (
        {"volumes": [{"name": "data", **source}]},
        {"volumeMounts": [{"name": "data", "mountPath": "/data", **mount}]},
    )


def _with_volume(
    name: str, source: Object, command: list[str] | None = None, mount: Object | None = None, **how: Any
) -> Object:
    pod, container = _volume(source, **mount or {})
    return job(name, command=command, pod={**pod, **how}, container=container)


def _with_device(name: str, template: str) -> Object:
    """A job whose pods claim a device by a template."""
    claims = {"resourceClaims": [{"name": "device", "resourceClaimTemplateName": template}]}
    return job(name, pod=claims, container={"resources": {**SMALL, "claims": [{"name": "device"}]}})


# The head of a program for another processor: ELF, 64 bits, little endian, AArch64.
FOREIGN_PROGRAM = base64.b64encode(
    b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00\xb7\x00\x01\x00\x00\x00" + bytes(100)
).decode()
CLOSED_CONNECTION = "raise ConnectionResetError('Connection reset by peer')"
# A stand-in for NVIDIA's library, which Python imports at its start: no node of a test has a GPU. The GPU does nothing,
# or has fallen off the bus. The torch of the image says that it is built for GPUs.
NVML = """
import ctypes, importlib.util, os, sys
CODES = {"nvmlEventSetWait_v2": 10, "nvmlDeviceGetHandleByIndex_v2": {"lost": 15}.get(os.environ.get("NVML"), 0)}
class Nvml:
    def __getattr__(self, name):
        return lambda *values: CODES.get(name, 0)
    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = 1
        return 0
class Build:
    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_loader(name, self) if name == "torch.version" else None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        vars(module).update(__version__="2.13.0", cuda="12.8", hip=None, xpu=None, git_version="", debug=False)
load = ctypes.CDLL
ctypes.CDLL = lambda name, *rest, **more: Nvml() if "nvidia-ml" in str(name) else load(name, *rest, **more)
sys.meta_path.insert(0, Build())
"""
# The two ranks of a pod. Another process traces rank 0 and never waits for it, so that it stays after SIGKILL, as one
# does that hangs in a driver; rank 1 waits for it in vain.
TRACED = """
import ctypes, os, pathlib, time
traced, rank = pathlib.Path("traced"), os.getpid()
if os.environ["RANK"] == "0":
    system = ctypes.CDLL(None)
    system.prctl(0x59616D61, ctypes.c_ulong(-1))  # PR_SET_PTRACER: any process
    if not os.fork():
        os.setsid()
        if not os.fork():
            assert system.ptrace(0x4206, rank, None, None) == 0  # PTRACE_SEIZE
            traced.touch()
            time.sleep(600)
        os._exit(0)
    time.sleep(600)
while not traced.exists():
    time.sleep(0.1)
raise RuntimeError("[Rank 1] Watchdog caught collective operation timeout")"""
# What the launcher of a later release may leave: a kind of failure that this client does not know.
NEWER = (
    '{"outcome":"failed","code":100,"failure":{"kind":"melted","pod":0,"rank":0,"pod_name":"newer-worker-0",'
    '"message":"of a newer launcher"}}'
)

STARTING = (
    Case(
        "name-invalid",
        Expected("ImageNameInvalid", "is not a valid name of an image", "InvalidImageName", "correct --image"),
        job("name-invalid", image="Team/Train:1"),
    ),
    Case(
        "image-missing",
        Expected("ImageNotFound", "does not exist in its registry", "not found", "correct --image"),
        job("image-missing", image="REGISTRY/absent:1"),
    ),
    Case(
        "pull-secret-missing",
        Expected(
            "ImageAccessDenied", "the pull secret regcred does not exist", "regcred", "create secret docker-registry"
        ),
        job("pull-secret-missing", image="REGISTRY/private:1", pod={"imagePullSecrets": [{"name": "regcred"}]}),
    ),
    Case(
        "registry-unknown",
        Expected("RegistryUnreachable", "example.invalid", "no such host", "correct the registry's name"),
        job("registry-unknown", image="example.invalid/team/train:1"),
    ),
    Case(
        "image-for-another-platform",
        Expected(
            "ImageForOtherPlatform", "has no variant for the node's architecture", "no match for platform", "build"
        ),
        job("image-for-another-platform", image="REGISTRY/foreign:1"),
    ),
    Case(
        "registry-broken",
        Expected("ImagePullFailed", "cannot be pulled", "500 Internal Server Error", "describe pod"),
        job("registry-broken", image="REGISTRY/broken:1"),
    ),
    Case(
        "registry-busy",
        Expected("RegistryBusy", "429 Too Many Requests", "429", "mirror", ExitCode.RUNNING, stuck=False),
        job("registry-busy", image="REGISTRY/busy:1"),
    ),
    Case(
        "image-never-pulled",
        Expected("ImageNotOnNode", "imagePullPolicy is Never", "ErrImageNeverPull", "load the image"),
        job("image-never-pulled", image="example.invalid/a:1", container={"imagePullPolicy": "Never"}),
    ),
    Case(
        "no-python",
        Expected("PythonMissing", "has no Python", "executable file not found", "choose an image with Python"),
        job("no-python", command=["python9", "train.py"], policy="ExitCode"),
    ),
    Case(
        "not-executable",
        Expected("CommandNotExecutable", "may not be executed", "permission denied", "chmod +x", ExitCode.USAGE),
        job("not-executable", command=["/etc/hostname"]),
    ),
    Case(
        "no-program",
        Expected("CommandNotFound", "has no program torchrunner", "torchrunner", "correct the command", ExitCode.USAGE),
        job("no-program", command=["torchrunner", "train.py"], policy="OnFailure"),
    ),
    Case(
        "no-working-folder",
        Expected("WorkingFolderMissing", "/etc/hostname", "not a directory", "workingDir", ExitCode.USAGE),
        job("no-working-folder", container={"workingDir": "/etc/hostname"}),
    ),
    Case(
        "no-seccomp-profile",
        Expected(
            "ContainerStartFailed", "cannot load seccomp profile", "absent.json", "correct what the message names"
        ),
        job(
            "no-seccomp-profile",
            container={"securityContext": {"seccompProfile": {"type": "Localhost", "localhostProfile": "absent.json"}}},
        ),
    ),
    Case(
        "no-variable-of-a-path",
        Expected("ContainerConfigInvalid", "missing value for ABSENT", "CreateContainerConfigError", "describe pod"),
        _with_volume("no-variable-of-a-path", {"emptyDir": {}}, mount={"subPathExpr": "$(ABSENT)"}),
    ),
    Case(
        "wrong-architecture",
        Expected("WrongArchitecture", "another processor architecture", "exec format error", "--platform"),
        _with_volume("wrong-architecture", {"configMap": {"name": "foreign", "defaultMode": 0o755}}, ["/data/program"]),
    ),
    Case(
        "secret-missing",
        Expected("SecretMissing", "the Secret absent does not exist", 'secret "absent" not found', "create secret"),
        job("secret-missing", container=_env_from({"secretKeyRef": {"name": "absent", "key": "token"}})),
    ),
    Case(
        "key-missing",
        Expected("KeyMissing", "the Secret present has no key token", "couldn't find key token", "describe secret"),
        job("key-missing", container=_env_from({"secretKeyRef": {"name": "present", "key": "token"}})),
    ),
    Case(
        "configmap-missing",
        Expected("ConfigMapMissing", "the ConfigMap absent does not exist", 'configmap "absent"', "create configmap"),
        job("configmap-missing", container=_env_from({"configMapKeyRef": {"name": "absent", "key": "x"}})),
    ),
    Case(
        "root",
        Expected("RunsAsRoot", "runs as root", "non-root policy", "runAsUser"),
        job("root", container={"securityContext": {"runAsNonRoot": True, "runAsUser": 0}}),
    ),
    Case(
        "crash-loop",
        Expected(
            "CrashLoop", "ends again and again with exit code 3", "code 3, Error", "--previous", ExitCode.TRAINING
        ),
        job("crash-loop", command=_python("print('no data'); raise SystemExit(3)"), policy="OnFailure"),
    ),
)
SCHEDULING = (
    Case(
        "cpu",
        Expected("NotEnoughCpu", "no node has 1k cpu at all", "Insufficient cpu", "--cpu"),
        job("cpu", container={"resources": {"requests": {"cpu": "1000"}}}),
    ),
    Case(
        "memory",
        Expected("NotEnoughMemory", "no node has 100Ti memory at all", "Insufficient memory", "--memory"),
        job("memory", container={"resources": {"requests": {"memory": "100Ti"}}}),
    ),
    Case(
        "gpu",
        Expected("NotEnoughGpus", "no node offers nvidia.com/gpu", "Insufficient nvidia.com/gpu", "leave out --gpu"),
        job("gpu", container={"resources": {"limits": {"nvidia.com/gpu": "99"}}}),
    ),
    Case(
        "disk",
        Expected(
            "NotEnoughOfResource",
            "ephemeral-storage",
            "Insufficient ephemeral-storage",
            "--ephemeral-storage",
        ),
        job("disk", container=_taking(**{"ephemeral-storage": "1000Ti"})),
    ),
    Case(
        "port",
        Expected("Unschedulable", "didn't have free ports", "free ports", "describe pod", stuck=False),
        job(
            "port",
            pod={"nodeSelector": {"kubernetes.io/hostname": "OTHER-NODE"}},
            container={"ports": [{"containerPort": 9, "hostPort": "HOST-PORT"}]},
        ),
    ),
    Case(
        "spread",
        Expected("TopologySpreadUnsatisfied", "topology spread", "topology spread constraints", "patch"),
        job(
            "spread",
            pod={
                "topologySpreadConstraints": [
                    {"maxSkew": 1, "topologyKey": "example.com/none", "whenUnsatisfiable": "DoNotSchedule"}
                ]
            },
        ),
    ),
    Case(
        "device-template-missing",
        Expected("DeviceClaimMissing", "ResourceClaimTemplate absent does not exist", "absent", "--claim"),
        _with_device("device-template-missing", "absent"),
    ),
    Case(
        "device-class-missing",
        Expected("DeviceClassMissing", "the DeviceClass absent.example.com does not exist", "absent", "driver"),
        _with_device("device-class-missing", "of-no-class"),
    ),
    Case(
        "no-device",
        Expected("NotEnoughDevices", "no node has the devices free", "allocate", "resourceslices", stuck=False),
        _with_device("no-device", "of-no-driver"),
    ),
    Case(
        "provisioned",
        Expected(
            "ProvisioningRequested",
            "no node can take it yet, and ProvisioningRequest nodes makes its nodes",
            "nodes",
            "describe provisioningrequest nodes",
            ExitCode.RUNNING,
            stuck=False,
        ),
        job(
            "provisioned",
            container=_taking(cpu="1000"),
            notes={"autoscaling.x-k8s.io/consume-provisioning-request": "nodes"},
        ),
    ),
    Case(
        "selector",
        Expected("NodeSelectorMismatch", "disk=tape", "affinity/selector", "--node-selector"),
        job("selector", pod={"nodeSelector": {"disk": "tape"}}),
    ),
    Case(
        "affinity",
        Expected("NodeAffinityMismatch", "no node matches the required node affinity", "affinity", "patch"),
        job(
            "affinity",
            pod={
                "affinity": {
                    "nodeAffinity": {
                        "requiredDuringSchedulingIgnoredDuringExecution": {
                            "nodeSelectorTerms": [
                                {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["moon"]}]}
                            ]
                        }
                    }
                }
            },
        ),
    ),
    Case(
        "taint",
        Expected("TaintNotTolerated", "control-plane", "untolerated taint", "--toleration"),
        job("taint", pod={"nodeSelector": {"node-role.kubernetes.io/control-plane": ""}}),
    ),
    Case(
        "pod-affinity",
        Expected("PodAffinityUnsatisfied", "affinity between pods", "pod affinity", "patch"),
        job(
            "pod-affinity",
            pod={
                "affinity": {
                    "podAffinity": {
                        "requiredDuringSchedulingIgnoredDuringExecution": [
                            {"labelSelector": {"matchLabels": {"app": "none"}}, "topologyKey": "kubernetes.io/hostname"}
                        ]
                    }
                }
            },
        ),
    ),
    Case(
        "scheduler-missing",
        Expected("SchedulerMissing", "the scheduler moonshot", "moonshot", "schedulerName"),
        job("scheduler-missing", pod={"schedulerName": "moonshot"}),
    ),
    Case(
        "gated",
        Expected("SchedulingGated", "example.com/gate", "example.com/gate", "wait", ExitCode.RUNNING, stuck=False),
        job("gated", pod={"schedulingGates": [{"name": "example.com/gate"}]}),
    ),
)
ADMISSION = (
    Case(
        "quota",
        Expected(
            "QuotaExceeded",
            "quota tight has 0 in all: it can never run",
            "exceeded quota: tight",
            "resourcequota tight",
        ),
        job("quota"),
        namespace="quota",
    ),
    Case(
        "quota-without-request",
        Expected("QuotaNeedsRequest", "demands that pods set limits.memory", "must specify limits.memory", "--memory"),
        job("quota-without-request"),
        namespace="demanding",
    ),
    Case(
        "limit-range",
        Expected(
            "LimitRangeViolated", "a LimitRange of the namespace forbids it", "maximum memory usage", "limitrange"
        ),
        job("limit-range", container={"resources": {"requests": {"memory": "1Gi"}, "limits": {"memory": "1Gi"}}}),
        namespace="limits",
    ),
    Case(
        "pod-security",
        Expected("PodSecurityViolated", "Pod Security level restricted", "violates PodSecurity", "patch"),
        job("pod-security"),
        namespace="restricted",
    ),
    Case(
        "service-account",
        Expected(
            "ServiceAccountMissing", "the service account absent does not exist", "absent", "create serviceaccount"
        ),
        job("service-account", pod={"serviceAccountName": "absent"}),
    ),
    Case(
        "priority-class",
        Expected("PriorityClassMissing", "there is no priority class absent", "absent", "get priorityclasses"),
        job("priority-class", pod={"priorityClassName": "absent"}),
    ),
    Case(
        "runtime-class",
        Expected("PodRefused", 'RuntimeClass "absent" not found', "absent", "change what the API server refuses"),
        job("runtime-class", pod={"runtimeClassName": "absent"}),
    ),
    Case(
        "refused",
        Expected(
            "WebhookRefused", "no training on Sundays", "denied request", "change what it objects to", ExitCode.USAGE
        ),
        job("refused"),
        namespace="refusing",
    ),
    Case(
        "webhook-down",
        Expected("WebhookUnavailable", "does not answer", "failed calling webhook", "have it repaired"),
        job("webhook-down"),
        namespace="webhook",
    ),
)
QUEUEING = (
    Case(
        "invalid",  # as an operator of version 1.7 takes it: that of the test leaves it alone
        Expected(
            "JobInvalid",
            "refuses the job: PyTorchReplicaSpecs is invalid",
            "PyTorchJobFailedValidation",
            "correct the manifest",
            ExitCode.USAGE,
        ),
        job("invalid", run_policy={"managedBy": "kueue.x-k8s.io/multikueue"}),
        event=(
            "PyTorchJobFailedValidation",
            "PyTorchJob failed validation because PyTorchReplicaSpecs is invalid: There are 2 containers",
        ),
    ),
    Case(
        "suspended",
        Expected("Suspended", "the job is suspended", "true", "resume", ExitCode.RUNNING, stuck=False),
        job("suspended", run_policy={"suspend": True}),
    ),
    Case(
        "queued",
        Expected("WaitingInQueue", "it waits in queue gold", "gold", "install Kueue", ExitCode.RUNNING, stuck=False),
        job("queued", run_policy={"suspend": True}, labels={"kueue.x-k8s.io/queue-name": "gold"}),
    ),
    Case(
        "elsewhere",
        Expected("ManagedElsewhere", "kueue.x-k8s.io/multikueue", "multikueue", "managedBy"),
        job("elsewhere", run_policy={"managedBy": "kueue.x-k8s.io/multikueue"}),
    ),
)
VOLUMES = (
    Case(
        "claim-missing",
        Expected("ClaimMissing", "the PersistentVolumeClaim absent does not exist", "absent", "persistentvolumeclaims"),
        _with_volume("claim-missing", {"persistentVolumeClaim": {"claimName": "absent"}}),
    ),
    Case(
        "claim-unbound",
        Expected("ClaimUnbound", "unbound has no volume (storage class nowhere)", "nowhere", "storageclasses"),
        _with_volume("claim-unbound", {"persistentVolumeClaim": {"claimName": "unbound"}}),
    ),
    Case(
        "claim-elsewhere",
        Expected("VolumeOnOtherNode", "the volume of local belongs to another node", "node affinity", "ReadWriteMany"),
        _with_volume(
            "claim-elsewhere",
            {"persistentVolumeClaim": {"claimName": "local"}},
            nodeSelector={"kubernetes.io/hostname": "OTHER-NODE"},
        ),
    ),
    Case(
        "claim-attached",
        Expected(
            "VolumeAttachedElsewhere",
            "is attached to another node",
            "Multi-Attach error",
            "ReadWriteMany",
            ExitCode.RUNNING,
            stuck=False,  # for seven minutes, in which Kubernetes may detach it
        ),
        _with_volume(
            "claim-attached",
            {"persistentVolumeClaim": {"claimName": "attached"}},
            nodeSelector={"kubernetes.io/hostname": "OTHER-NODE"},
        ),
    ),
    Case(
        "claim-leaving",
        Expected(
            "ClaimBeingDeleted", "the PersistentVolumeClaim leaving is being deleted", "is being deleted", "describe"
        ),
        _with_volume("claim-leaving", {"persistentVolumeClaim": {"claimName": "leaving"}}),
    ),
    Case(
        "no-folder-of-the-node",
        Expected("MountFailed", "hostPath type check failed", "FailedMount", "describe pod"),
        _with_volume("no-folder-of-the-node", {"hostPath": {"path": "/nowhere", "type": "Directory"}}),
    ),
    Case(
        "volume-source-missing",
        Expected("VolumeSourceMissing", "the Secret absent, which a volume needs", "FailedMount", "create secret"),
        _with_volume("volume-source-missing", {"secret": {"secretName": "absent"}}),
    ),
    Case(
        "evicted",
        Expected("Evicted", "evicted", "exceeds the limit", "ephemeral-storage"),
        _with_volume(
            "evicted",
            {"emptyDir": {"sizeLimit": "1Mi"}},
            _python("open('/data/x', 'wb').write(bytes(8 << 20)); import time; time.sleep(3600)"),
        ),
    ),
)
# Jobs without flk's launcher that end.
ENDING = (
    Case(
        "foreign-exception",
        Expected(
            "ExceptionRaised",
            "rank 2 in foreign-exception-worker-2 raised ValueError: no label",
            "ValueError",
            "logs foreign-exception",
            ExitCode.TRAINING,
        ),
        job(
            "foreign-exception",
            command=_python(
                "import os, time\nif os.environ['HOSTNAME'].endswith('-2'):\n    time.sleep(3)\n"
                f"    raise ValueError('no label')\ntime.sleep(5)\n{CLOSED_CONNECTION}"
            ),
            replicas=3,
        ),
    ),
    Case(
        "signal",
        Expected("KilledBySignal", "was killed by SIGSEGV", "SIGSEGV", "logs signal", ExitCode.TRAINING),
        job("signal", command=["sh", "-c", "kill -SEGV $$; sleep 1; exit 139"]),
    ),
    Case(
        "exit-code",
        Expected("ExitedWithCode", "ended with exit code 17", "17", "logs exit-code", ExitCode.TRAINING),
        job("exit-code", command=["sh", "-c", "exit 17"]),
    ),
    Case(
        "newer",
        Expected("Failed", "of a newer launcher", "of a newer launcher", "logs newer", ExitCode.TRAINING),
        job("newer", command=["sh", "-c", f"echo '{NEWER}' > /dev/termination-log; exit 100"]),
    ),
    Case(
        "no-trace",
        Expected("FailedWithoutTrace", "its pods have left no trace", "no-trace", "flk wait keeps evidence"),
        job("no-trace", command=["sh", "-c", "exit 17"], run_policy={"cleanPodPolicy": "All"}),
        forgotten=True,
    ),
    Case(
        "restart-loop",
        Expected(
            "RestartLoop", "is created again and again", "exited with code 139", "delete", ExitCode.RUNNING, stuck=False
        ),
        job("restart-loop", command=["sh", "-c", "sleep 20; exit 139"], policy="ExitCode"),
    ),
    Case(
        "deadline",
        Expected("DeadlineExceeded", "deadline", "deadline", "--deadline", ExitCode.TIMEOUT),
        job("deadline", run_policy={"activeDeadlineSeconds": 3}, command=_python("import time; time.sleep(6)")),
    ),
    Case(
        "memory-limit",
        Expected("OutOfMemory", "ran out of memory", "memory", "--memory"),
        job(
            "memory-limit",
            command=_python("import os\nx = []\nwhile True:\n    x.append(os.urandom(1 << 20))"),
            container={"resources": {"requests": {"cpu": "10m"}, "limits": {"memory": "40Mi"}}},
        ),
    ),
    Case(
        "disk-full",
        Expected("DiskFull", "No space left on device", "No space left", "larger volume"),
        _with_volume(
            "disk-full",
            {"emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
            _python("open('/data/x', 'wb').write(bytes(8 << 20))"),
        ),
    ),
    Case(
        "read-only",
        Expected("ReadOnlyVolume", "Read-only file system", "Read-only file system", "readOnly"),
        _with_volume("read-only", {"configMap": {"name": "foreign"}}, _python("open('/data/x', 'w')")),
    ),
    Case(
        "import-error",
        Expected("ImportFailed", "No module named 'lightninq'", "lightninq", "add lightninq", ExitCode.TRAINING),
        job("import-error", command=_python("import lightninq")),
    ),
    Case(
        "no-torch",
        Expected("TorchMissing", "No module named 'torch'", "torch", "choose an image with torch", ExitCode.USAGE),
        job("no-torch", command=["python3", "-S", "-c", "import torch"]),
    ),
)
# Jobs that flk's launcher starts.
LAUNCHED = (
    Case(
        "rank-exception",
        Expected(
            "ExceptionRaised",
            "rank 1 in rank-exception-worker-1 raised ValueError: shard 3",
            "ValueError: shard 3",
            "--rank 1",
            ExitCode.TRAINING,
        ),
        job={"replicas": 2, "restarts": 0},
        script="import os, time\nif os.environ['RANK'] == '1':\n    raise ValueError('shard 3')\ntime.sleep(600)",
        namespace="restricted",
    ),
    Case(
        "never-joins",
        Expected("RankNeverJoined", "the launcher of never-joins-worker-0 (rank 0) has not", "waiting for", "logs"),
        job={"replicas": 2},
        sleeping=0,
        namespace="restricted",
    ),
    Case(
        "name-not-resolved",
        Expected("NameNotResolved", "cannot resolve the name name-not-resolved-worker-0", "waiting for", "get service"),
        job={"replicas": 2},
        pod={"dnsPolicy": "None", "dnsConfig": {"nameservers": ["127.0.0.1"]}},
        namespace="restricted",
    ),
    Case(
        "join-timeout",
        Expected("RendezvousTimeout", "never joined", "never joined", "FLK_JOIN_TIMEOUT"),
        job={"replicas": 2, "env": {"FLK_JOIN_TIMEOUT": "15"}},
        sleeping=1,
        namespace="restricted",
    ),
    Case(
        "small-shm",
        Expected("SharedMemoryTooSmall", "was killed by SIGBUS", "train.py", "a larger --shm", ExitCode.TRAINING),
        job={"replicas": 1, "restarts": 0, "resources": {"cpu": "10m", "shm": "4Mi"}},
        script="""import mmap, os
file = os.open("/dev/shm/batch", os.O_RDWR | os.O_CREAT)
os.ftruncate(file, 8 << 20)
mmap.mmap(file, 8 << 20).write(bytes(8 << 20))""",
        namespace="restricted",
    ),
    Case(
        "code-missing",
        Expected("CodeNotMounted", "holds the job's code", "FailedMount", "submit again"),
        job={"replicas": 1},
        without_code=True,
        namespace="restricted",
    ),
)
# What the ranks of flk's launcher end with, or do not get beyond.
RANKS = (
    Case(
        "gpu-memory",
        Expected("GpuOutOfMemory", "CUDA out of memory", "out of memory", "batch", ExitCode.TRAINING),
        job={"replicas": 1, "restarts": 0},
        script="""class OutOfMemoryError(RuntimeError):
    __module__ = "torch"
raise OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")""",
        namespace="restricted",
    ),
    Case(
        "gpu-error",
        Expected("GpuFailed", "uncorrectable ECC error", "CUDA error", "cordon"),
        job={"replicas": 1, "restarts": 0, "disruptions": 0},
        script="raise RuntimeError('CUDA error: uncorrectable ECC error encountered')",
        namespace="restricted",
    ),
    Case(
        "stale-file",
        Expected("VolumeFailed", "Stale file handle", "Stale file handle", "persistentvolumeclaims"),
        job={"replicas": 1, "restarts": 0, "disruptions": 0},
        # Of two files in turn, since the same failure ten times would end the job.
        script="import os\nraise OSError(116, 'Stale file handle', 'ab'[int(os.environ['FLK_ATTEMPT']) % 2])",
        namespace="restricted",
    ),
    Case(
        "address-in-use",
        Expected("AddressInUse", "Address already in use", "Address already in use", "--rank 0", ExitCode.TRAINING),
        job={"replicas": 1, "restarts": 0},
        script="""import socket
one, other = socket.socket(), socket.socket()
one.bind(("127.0.0.1", 0))
one.listen()
other.bind(one.getsockname())""",
        namespace="restricted",
    ),
    Case(
        "setup-fails",
        Expected(
            "InvalidStart", "the setup command ended with exit code 7: no data", "no data", "logs", ExitCode.USAGE
        ),
        job={"replicas": 1, "setup": "echo no data >&2; exit 7"},
        namespace="restricted",
    ),
    Case(
        "setup-silent",
        Expected("NotPrepared", "the setup command wrote nothing for 3 s", "wrote nothing", "logs"),
        job={"replicas": 1, "setup": "sleep 600", "env": {"FLK_JOIN_TIMEOUT": "3"}},
        namespace="restricted",
    ),
    Case(
        "gpu-lost",
        Expected("NodeUnhealthy", "GPU 0 is lost: it has fallen off the bus", "GPU 0 is lost", "cordon"),
        job={"replicas": 1, "restarts": 0, "disruptions": 0},
        nvml="lost",
        namespace="restricted",
    ),
    Case(
        "gpu-idle",
        Expected("GpusIdle", "leaves its GPUs idle", "none of the job was busy", "--idle-timeout", ExitCode.TIMEOUT),
        job={"replicas": 1, "idle_timeout": "1s"},
        nvml="idle",
        namespace="restricted",
    ),
    Case(
        "unkillable",
        Expected("RankUnkillable", "has a rank that survives SIGKILL", "rank 0, process", "cordon"),
        job={"replicas": 1, "processes": 2, "restarts": 0, "disruptions": 0, "env": {"FLK_KILL_TIMEOUT": "1"}},
        script=TRACED,
        namespace="restricted",
    ),
    Case(
        "pod-lost",
        Expected("PodLost", "pod-lost-worker-1", "pod-lost-worker-1", "--max-restarts"),
        job={"replicas": 2, "disruptions": 0},
        lost="pod-lost-worker-1",
        namespace="restricted",
    ),
    Case(
        "standstill",
        Expected("Standstill", "no rank makes progress", "train.py:1", "flk stacks", ExitCode.RUNNING, stuck=False),
        job={"replicas": 1},
        script="import time; time.sleep(3600)",
        namespace="restricted",
    ),
    Case(
        "no-progress",
        Expected("NoProgress", "without a further step", "Stale file", "logs", ExitCode.RUNNING, stuck=False),
        job={"replicas": 1},
        # Of two files in turn, since the same failure ten times would end the job.
        script="import os\nraise OSError(116, 'Stale file handle', 'ab'[int(os.environ['FLK_ATTEMPT']) % 2])",
        namespace="restricted",
    ),
)
CASES = (*STARTING, *SCHEDULING, *ADMISSION, *QUEUEING, *VOLUMES, *ENDING, *LAUNCHED, *RANKS)
