"""Devices and nodes that report a fault themselves: conditions and taints of nodes, devices in the status of pods."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from flk.health.cause import Cause, Found, condition_evidence
from flk.health.ending import job_failure
from flk.health.resources import FAULT_TAINT, taint_text
from flk.kube import Object
from flk.observe.model import Evidence
from flk.observe.pods import conditions, one_line
from flk.observe.suspects import suspects
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
