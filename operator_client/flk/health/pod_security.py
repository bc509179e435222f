"""The Pod Security Standards `baseline` and `restricted`, as a table of rules on a pod's spec.

After https://kubernetes.io/docs/concepts/security/pod-security-standards. The rules are those that a manifest of flk
with a patch can break. Profiles of AppArmor, SELinux and Windows are not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from flk.kube import Object

_BASELINE_CAPABILITIES: Final = frozenset(
    [
        "AUDIT_WRITE",
        "CHOWN",
        "DAC_OVERRIDE",
        "FOWNER",
        "FSETID",
        "KILL",
        "MKNOD",
        "NET_BIND_SERVICE",
        "SETFCAP",
        "SETGID",
        "SETPCAP",
        "SETUID",
        "SYS_CHROOT",
    ]
)
_SAFE_SYSCTLS: Final = frozenset(
    [
        "kernel.shm_rmid_forced",
        "net.ipv4.ip_local_port_range",
        "net.ipv4.ip_unprivileged_port_start",
        "net.ipv4.tcp_syncookies",
        "net.ipv4.ping_group_range",
        "net.ipv4.ip_local_reserved_ports",
        "net.ipv4.tcp_keepalive_time",
        "net.ipv4.tcp_fin_timeout",
        "net.ipv4.tcp_keepalive_intvl",
        "net.ipv4.tcp_keepalive_probes",
    ]
)
_RESTRICTED_VOLUMES: Final = frozenset(
    ["configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"]
)


def violations(spec: Object, level: str) -> list[str]:
    """Return what in a pod's spec a level forbids, each as a short phrase; empty if the pod complies."""
    rules = {"baseline": _BASELINE, "restricted": (*_BASELINE, *_RESTRICTED)}.get(level, ())
    return [phrase for rule in rules for phrase in rule(spec)]


def _containers(spec: Object) -> list[Object]:
    return [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]


def _security(item: Object) -> Object:
    return item.get("securityContext") or {}


def _host_namespaces(spec: Object) -> Iterator[str]:
    yield from (f"{field}: true" for field in ("hostNetwork", "hostPID", "hostIPC") if spec.get(field))


def _privileged(spec: Object) -> Iterator[str]:
    yield from (f"container {c.get('name')} is privileged" for c in _containers(spec) if _security(c).get("privileged"))


def _baseline_capabilities(spec: Object) -> Iterator[str]:
    for container in _containers(spec):
        added = set((_security(container).get("capabilities") or {}).get("add") or []) - _BASELINE_CAPABILITIES
        if added:
            yield f"container {container.get('name')} adds capabilities {', '.join(sorted(added))}"


def _host_paths(spec: Object) -> Iterator[str]:
    yield from (f"volume {v.get('name')} is a hostPath" for v in spec.get("volumes") or [] if "hostPath" in v)


def _host_ports(spec: Object) -> Iterator[str]:
    for container in _containers(spec):
        if any(port.get("hostPort") for port in container.get("ports") or []):
            yield f"container {container.get('name')} uses a hostPort"


def _unconfined(spec: Object) -> Iterator[str]:
    for item in (spec, *_containers(spec)):
        if (_security(item).get("seccompProfile") or {}).get("type") == "Unconfined":
            yield "a seccompProfile is Unconfined"


def _sysctls(spec: Object) -> Iterator[str]:
    unsafe = {str(sysctl.get("name")) for sysctl in _security(spec).get("sysctls") or []} - _SAFE_SYSCTLS
    yield from (f"sysctl {name} is set" for name in sorted(unsafe))


def _proc_mount(spec: Object) -> Iterator[str]:
    for container in _containers(spec):
        if _security(container).get("procMount", "Default") != "Default":
            yield f"container {container.get('name')} changes procMount"


def _volume_types(spec: Object) -> Iterator[str]:
    for volume in spec.get("volumes") or []:
        kinds = {key for key in volume if key != "name"} - _RESTRICTED_VOLUMES - {"hostPath"}
        yield from (f"volume {volume.get('name')} is of the kind {kind}" for kind in sorted(kinds))


def _escalation(spec: Object) -> Iterator[str]:
    for container in _containers(spec):
        if _security(container).get("allowPrivilegeEscalation") is not False:
            yield f"container {container.get('name')} does not set allowPrivilegeEscalation: false"


def _root(spec: Object) -> Iterator[str]:
    for container in _containers(spec):
        own, pod = _security(container), _security(spec)
        if own.get("runAsNonRoot", pod.get("runAsNonRoot")) is not True:
            yield f"container {container.get('name')} does not set runAsNonRoot: true"
        if own.get("runAsUser", pod.get("runAsUser")) == 0:
            yield f"container {container.get('name')} runs as user 0"


def _seccomp(spec: Object) -> Iterator[str]:
    for container in _containers(spec):
        profile = _security(container).get("seccompProfile") or _security(spec).get("seccompProfile") or {}
        if profile.get("type") not in ("RuntimeDefault", "Localhost"):
            yield f"container {container.get('name')} sets no seccompProfile"


def _restricted_capabilities(spec: Object) -> Iterator[str]:
    for container in _containers(spec):
        capabilities = _security(container).get("capabilities") or {}
        if "ALL" not in (capabilities.get("drop") or []):
            yield f"container {container.get('name')} does not drop all capabilities"
        added = set(capabilities.get("add") or []) & _BASELINE_CAPABILITIES - {"NET_BIND_SERVICE"}
        if added:
            yield f"container {container.get('name')} adds capabilities {', '.join(sorted(added))}"


_Rule = Callable[[Object], Iterator[str]]
_BASELINE: Final[tuple[_Rule, ...]] = (
    _host_namespaces,
    _privileged,
    _baseline_capabilities,
    _host_paths,
    _host_ports,
    _unconfined,
    _sysctls,
    _proc_mount,
)
_RESTRICTED: Final[tuple[_Rule, ...]] = (_volume_types, _escalation, _root, _seccomp, _restricted_capabilities)
