"""The causes that tests produce in a cluster: how to produce each, and what flk must say about it.

Those of jobs that have not started are here, and those of others in `ending_causes`.
"""

import base64

from flk_runtime.contract import ExitCode
from tests.support.cause_cases import Case, Expected, env_from, job, python, with_volume
from tests.support.ending_causes import ENDING, LAUNCHED, RANKS

# The head of a program for another processor: ELF, 64 bits, little endian, AArch64.
FOREIGN_PROGRAM = base64.b64encode(
    b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00\xb7\x00\x01\x00\x00\x00" + bytes(100)
).decode()
STARTING = (
    Case(
        "name-invalid",
        Expected("ImagePullFailed", "cannot be pulled (InvalidImageName)", "InvalidImageName", "correct --image"),
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
        Expected("ImagePullFailed", "example.invalid", "no such host", "correct --image"),
        job("registry-unknown", image="example.invalid/team/train:1"),
    ),
    Case(
        "image-for-another-platform",
        Expected("WrongArchitecture", "another processor architecture", "no match for platform", "build"),
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
        Expected("ImagePullFailed", "cannot be pulled (ErrImageNeverPull)", "pull policy of Never", "correct --image"),
        job("image-never-pulled", image="example.invalid/a:1", container={"imagePullPolicy": "Never"}),
    ),
    Case(
        "no-python",
        Expected(
            "CommandNotFound", "has no program python9", "executable file not found", "Python 3.10", ExitCode.USAGE
        ),
        job("no-python", command=["python9", "train.py"], policy="ExitCode"),
    ),
    Case(
        "no-program",
        Expected("CommandNotFound", "has no program torchrunner", "torchrunner", "correct the command", ExitCode.USAGE),
        job("no-program", command=["torchrunner", "train.py"], policy="OnFailure"),
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
        "wrong-architecture",
        Expected("WrongArchitecture", "another processor architecture", "exec format error", "--platform"),
        with_volume("wrong-architecture", {"configMap": {"name": "foreign", "defaultMode": 0o755}}, ["/data/program"]),
    ),
    Case(
        "secret-missing",
        Expected("ReferenceMissing", "the Secret absent does not exist", 'secret "absent" not found', "create secret"),
        job("secret-missing", container=env_from({"secretKeyRef": {"name": "absent", "key": "token"}})),
    ),
    Case(
        "key-missing",
        Expected("ReferenceMissing", "Secret present has no key token", "couldn't find key token", "describe secret"),
        job("key-missing", container=env_from({"secretKeyRef": {"name": "present", "key": "token"}})),
    ),
    Case(
        "root",
        Expected("ContainerStartFailed", "non-root policy", "non-root policy", "correct what the message names"),
        job("root", container={"securityContext": {"runAsNonRoot": True, "runAsUser": 0}}),
    ),
    Case(
        "crash-loop",
        Expected(
            "CrashLoop", "ends again and again with exit code 3", "code 3, Error", "--previous", ExitCode.TRAINING
        ),
        job("crash-loop", command=python("print('no data'); raise SystemExit(3)"), policy="OnFailure"),
    ),
)
SCHEDULING = (
    Case(
        "cpu",
        Expected("NotEnoughResources", "no node has 1000 cpu at all", "Insufficient cpu", "--cpu"),
        job("cpu", container={"resources": {"requests": {"cpu": "1000"}}}),
    ),
    Case(
        "gpu",
        Expected("NotEnoughResources", "no node offers nvidia.com/gpu", "Insufficient nvidia", "leave out --gpu"),
        job("gpu", container={"resources": {"limits": {"nvidia.com/gpu": "99"}}}),
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
        "selector",
        Expected("NodeSelectorMismatch", "disk=tape", "affinity/selector", "--node-selector"),
        job("selector", pod={"nodeSelector": {"disk": "tape"}}),
    ),
    Case(
        "affinity",
        Expected("NodeSelectorMismatch", "no node matches the required node affinity", "affinity", "patch"),
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
        Expected("Unschedulable", "match pod affinity rules", "pod affinity", "describe pod"),
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
        Expected(
            "Unschedulable", "scheduling gates", "scheduling gates", "describe pod", ExitCode.RUNNING, stuck=False
        ),
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
        "limit-range",
        Expected("PodRefused", "maximum memory usage", "maximum memory usage", "change what the API server refuses"),
        job("limit-range", container={"resources": {"requests": {"memory": "1Gi"}, "limits": {"memory": "1Gi"}}}),
        namespace="limits",
    ),
    Case(
        "pod-security",
        Expected("PodRefused", "violates PodSecurity", "violates PodSecurity", "change what the API server refuses"),
        job("pod-security"),
        namespace="restricted",
    ),
    Case(
        "refused",
        Expected("PodRefused", "no training on Sundays", "denied request", "change what the API server refuses"),
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
        "suspended",
        Expected("Suspended", "the job is suspended", "true", "resume", ExitCode.RUNNING, stuck=False),
        job("suspended", run_policy={"suspend": True}),
    ),
    Case(
        "queued",
        Expected("WaitingInQueue", "it waits in queue gold", "gold", "install Kueue"),
        job("queued", run_policy={"suspend": True}, labels={"kueue.x-k8s.io/queue-name": "gold"}),
    ),
)
VOLUMES = (
    Case(
        "claim-missing",
        Expected("ClaimMissing", "the PersistentVolumeClaim absent does not exist", "absent", "persistentvolumeclaims"),
        with_volume("claim-missing", {"persistentVolumeClaim": {"claimName": "absent"}}),
    ),
    Case(
        "claim-unbound",
        Expected("ClaimUnbound", "unbound has no volume (storage class nowhere)", "nowhere", "storageclasses"),
        with_volume("claim-unbound", {"persistentVolumeClaim": {"claimName": "unbound"}}),
    ),
    Case(
        "claim-elsewhere",
        Expected("VolumeOnOtherNode", "the volume of local belongs to another node", "node affinity", "ReadWriteMany"),
        with_volume(
            "claim-elsewhere",
            {"persistentVolumeClaim": {"claimName": "local"}},
            nodeSelector={"kubernetes.io/hostname": "OTHER-NODE"},
        ),
    ),
    Case(
        "claim-attached",
        Expected(
            "VolumeOnOtherNode",
            "is attached to another node",
            "Multi-Attach error",
            "ReadWriteMany",
            ExitCode.RUNNING,
            stuck=False,  # for seven minutes, in which Kubernetes may detach it
        ),
        with_volume(
            "claim-attached",
            {"persistentVolumeClaim": {"claimName": "attached"}},
            nodeSelector={"kubernetes.io/hostname": "OTHER-NODE"},
        ),
    ),
    Case(
        "no-folder-of-the-node",
        Expected("MountFailed", "hostPath type check failed", "FailedMount", "describe pod"),
        with_volume("no-folder-of-the-node", {"hostPath": {"path": "/nowhere", "type": "Directory"}}),
    ),
    Case(
        "volume-source-missing",
        Expected("ReferenceMissing", "the Secret absent does not exist", "FailedMount", "create secret"),
        with_volume("volume-source-missing", {"secret": {"secretName": "absent"}}),
    ),
    Case(
        "evicted",
        Expected("Evicted", "evicted", "exceeds the limit", "ephemeral-storage"),
        with_volume(
            "evicted",
            {"emptyDir": {"sizeLimit": "1Mi"}},
            python("open('/data/x', 'wb').write(bytes(8 << 20)); import time; time.sleep(3600)"),
        ),
    ),
)
CASES = (*STARTING, *SCHEDULING, *ADMISSION, *QUEUEING, *VOLUMES, *ENDING, *LAUNCHED, *RANKS)
