"""Devices and nodes that report a fault themselves: conditions and taints of nodes, devices in the status of pods."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from flk.health.cause import Cause, Find, Found, Match, condition_evidence, event_evidence, names, tell
from flk.health.cluster import Cluster, Level, Pods, Result, Unreadable
from flk.health.ending import job_failure
from flk.health.resources import FAULT_TAINT, taint_text
from flk.health.scheduling import scheduler_says, unschedulable
from flk.kube import Object
from flk.observe.model import Evidence, PodPhase
from flk.observe.needs import suspects
from flk.observe.pods import conditions, one_line
from flk.observe.view import JobView

_EVICTED: Final = "DeletionByDeviceTaintManager"
# Types of conditions that are True when something is broken, by who writes them.
_BROKEN: Final = re.compile(
    "|".join(
        (
            # node-problem-detector, also as GKE runs it
            r"KernelDeadlock|Read[Oo]nly(Root)?File[Ss]ystem|XfsShutdown|CperHardwareErrorFatal|CorruptDockerOverlay2",
            r"Frequent\w+Restart|FrequentUnregisterNetDevice|(Kubelet|ContainerRuntime)Unhealthy|\w*X(id|ID)\w*Errors?",
            # AKS
            r"(Kubelet|ContainerRuntime|FilesystemCorruption)Problem|GPUMissing|NVLinkStatusInactive|IBLinkFlapping",
            r"UnhealthyNvidia\w+",
            # NVSentinel and DCGM
            r"Gpu\w+(Watch|Error)|SysLogs\w+|NVSwitch(Down|FatalError)|DCGMError",
            # Nebius
            r"Nebius\w+Error",
        )
    )
)
# Types of conditions that are False when something is broken: of EKS.
_READY: Final = re.compile(r"(AcceleratedHardware|ContainerRuntime|Kernel|Networking|Storage)Ready")


def _faults(node: Object) -> Iterator[tuple[str, Evidence]]:
    """Yield the faults that a node reports: a few words, and where they were read."""
    source = f"node {node['metadata']['name']}"
    for kind, condition in conditions(node).items():
        pattern = {"True": _BROKEN, "False": _READY}.get(str(condition.get("status")))
        if pattern is not None and pattern.fullmatch(kind):
            why = ": ".join(filter(None, (condition.get("reason"), one_line(condition.get("message")))))
            text = f"reports {kind}" + (f" ({why})" if why else "")
            yield text, condition_evidence(source, condition, f"{condition.get('status')}: {why}")
    for taint in (node.get("spec") or {}).get("taints") or []:
        if FAULT_TAINT.match(str(taint.get("key"))):
            text = taint_text(taint)
            yield f"has the taint {text}", Evidence(source, text, "spec.taints")


def _faulty_node(view: JobView) -> Found | None:
    for name, pod in suspects(view).items():
        node = view.seen.nodes.get(name)
        for text, evidence in _faults(node) if node else ():
            return Found(_with_end(view, f"{pod}: node {name} {text}"), _remedy(view, name), [evidence], [pod])
    return None


def _unhealthy_device(view: JobView) -> Found | None:
    for name, pod in [*view.objects.items(), *view.replaced_pods.items()]:
        if name in view.objects and pod is not view.objects[name] and _runs(view, name):
            continue  # another pod has taken its place
        node = str((pod.get("spec") or {}).get("nodeName") or "")
        gone = conditions(pod).get("DisruptionTarget") or {}
        if gone.get("reason") == _EVICTED:
            text = f"{name} had to leave a device that is tainted: {one_line(gone.get('message'))}"
            return Found(text, _remedy(view, node), [condition_evidence(f"pod {name}", gone)], [name])
        for status in (pod.get("status") or {}).get("containerStatuses") or []:
            for resource in status.get("allocatedResourcesStatus") or []:
                for device in resource.get("resources") or []:
                    if device.get("health") != "Unhealthy":
                        continue
                    said = f": {one_line(device['message'])}" if device.get("message") else ""
                    text = f"{name}: device {device.get('resourceID')} ({resource.get('name')}) is unhealthy{said}"
                    path = f"status.containerStatuses[{status.get('name')}].allocatedResourcesStatus"
                    evidence = Evidence(f"pod {name}", f"{device.get('resourceID')}: Unhealthy{said}", path)
                    return Found(_with_end(view, text), _remedy(view, node), [evidence], [name])
    return None


def _runs(view: JobView, name: str) -> bool:
    return any(pod.name == name and pod.is_up for pod in view.pods)


def _with_end(view: JobView, text: str) -> str:
    """Return the sentence with the failure that the job ended with."""
    failure = job_failure(view)
    return f"{text}; {failure.summary}" if failure else text


def _remedy(view: JobView, node: str) -> str:
    cordon = view.kubectl_of_cluster(f"cordon {node or 'NODE'}")
    keeps = f"{cordon} keeps jobs off the node; have it checked"
    return f"{keeps}, then {view.flk('restart')}" if view.failed else keeps


CAUSES: Final = (
    Cause(
        "DeviceUnhealthy",
        _unhealthy_device,
        cured_by="a device that recovers, or another attempt on other nodes",
        goes_on=True,
    ),
    Cause(
        "NodeFaulty",
        _faulty_node,
        cured_by="a node that recovers, or another attempt on other nodes",
    ),
)


_KINDS: Final = {"resourceclaimtemplates": "ResourceClaimTemplate", "resourceclaims": "ResourceClaim"}
_MISSING: Final = re.compile(r'resourceclaim(template)?(?:\.resource\.k8s\.io)? "([^"]+)" not found')
_CLASS_MISSING: Final = re.compile(r"device class (\S+) does not exist")


def before(cluster: Cluster, pods: Pods) -> Iterator[Result]:
    """Check that the cluster knows claims of devices, and that the templates and claims that the pods name exist."""
    if not pods.device_claims:
        return
    served = cluster.devices
    if isinstance(served, Unreadable):
        if served.missing:
            remedy = served.remedy or "claims of devices need Kubernetes 1.34; leave out --claim"
            yield Result("devices", Level.FAILED, served.reason, remedy)
        else:
            yield Result("devices", Level.UNKNOWN, f"{served.reason}")
        return
    fine: list[str] = []
    for plural, name in pods.device_claims:
        kind, item = _KINDS[plural], cluster.named.get((plural, name))
        if not isinstance(item, Unreadable):
            fine.append(name)
        else:
            remedy = f"create it ({cluster.commands.kubectl('apply -f FILE')}), or correct --claim"
            missing, unread = f"there is no {kind} {name}", f"{kind} {name} cannot be read"
            yield item.result("devices", missing, remedy, "DeviceClaimMissing", unread=unread)
    if fine:
        yield Result("devices", Level.OK, f"claims exist: {', '.join(fine)}")


def _missing(view: JobView) -> Match | None:
    """Find pods whose claim cannot be made, which no condition tells, or whose claim the scheduler does not find."""
    pods = [pod for pod in view.pods if pod.phase == PodPhase.PENDING and not pod.reason]
    for pod in pods:
        for event in reversed(view.pod_events.get(pod.name, [])):
            match = _MISSING.search(one_line(event.get("message")))
            if match and event.get("reason") == "FailedResourceClaimCreation":
                return Match(names(pods), [event_evidence(event)], (match[0], *match.groups("")))
    return scheduler_says(_MISSING)(view)


def _not_allocated(view: JobView) -> Match | None:
    found = unschedulable(view)
    if found is None or found[1].kind != "claims":
        return None
    pods, reason, evidence = found
    return Match(names(pods), evidence, (reason.text,))


def _kind(trace: Match) -> str:
    return _KINDS["resourceclaimtemplates" if trace[1] else "resourceclaims"]


_FIND_MISSING: Final[Find] = tell(
    _missing,
    lambda view, trace: (
        f"{trace} cannot be scheduled: the {_kind(trace)} {trace[2]} does not exist in namespace {view.namespace}"
    ),
    lambda view, trace: (
        f"{view.kubectl(f'get {_kind(trace).lower()}s')} shows those that exist; create it, and the pods go on, or "
        "correct --claim and submit again"
    ),
)
CLAIMS: Final = (
    Cause(
        "DeviceClaimMissing",
        _FIND_MISSING,
        grace=30,
    ),
    Cause(
        "DeviceClassMissing",
        tell(
            scheduler_says(_CLASS_MISSING),
            lambda view, trace: f"{trace}: the DeviceClass {trace[1]} does not exist, which a claim names",
            lambda view, trace: (
                f"{view.kubectl_of_cluster('get deviceclasses')} shows those that exist; install the driver of the "
                "devices, or correct the class in the template"
            ),
        ),
        grace=60,
    ),
    Cause(
        "NotEnoughDevices",
        tell(
            _not_allocated,
            lambda view, trace: f"{trace}: no node has the devices free that it claims ({trace[0]})",
            lambda view, trace: (
                f"{view.flk('wait')} waits for other jobs to end; {view.kubectl_of_cluster('get resourceslices')} "
                f"shows the devices of the nodes, and {view.kubectl('get resourceclaims')} who has them"
            ),
        ),
        grace=60,
        cured_by="other jobs that end",
    ),
)
