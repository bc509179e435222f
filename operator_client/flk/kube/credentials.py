"""Which API server to talk to, as whom, and in which namespace: what kubectl would take from the same files.

Files and credentials (plugins included) are read by the kubernetes package. Its errors are not passed on: the names
that it gives to parts of a kubeconfig contain the parts themselves, tokens included.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from flk.errors import NoConfigError

_POOL: Final = 256  # connections that are kept: one for each pod whose log is followed
IN_CLUSTER: Final = "in-cluster"
_NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_CHECK: Final = "kubectl config view shows what kubectl reads from it"


@dataclass(frozen=True)
class Access:
    """A way to the API server: its address, a pool of connections, and headers that say who asks."""

    context: str
    namespace: str
    server: str
    pool: Any  # urllib3.PoolManager, with the certificates of the context
    configuration: Any  # kubernetes.client.Configuration, which renews tokens by itself

    def headers(self) -> dict[str, str]:
        """Headers with the credentials, renewed where they have expired."""
        with _told() as told:
            settings = self.configuration.auth_settings()
        if told:
            raise NoConfigError(f"the credentials of context {self.context} cannot be renewed: {told[0]}")
        return {s["key"]: s["value"] for s in settings.values() if s["in"] == "header" and s["value"]}


def load(context: str | None = None) -> Access:
    """The access that ``context`` (default: the current one) describes; in a pod without kubeconfig, the pod's own."""
    wanted = [Path(p).expanduser() for p in os.environ.get("KUBECONFIG", "").split(os.pathsep) if p]
    wanted = wanted or [Path("~/.kube/config").expanduser()]
    files = [path for path in wanted if path.exists()]
    if not files:
        if context is None and os.environ.get("KUBERNETES_SERVICE_HOST"):
            return _in_cluster()
        raise NoConfigError(
            f"there is no kubeconfig: {', '.join(map(str, wanted))} does not exist",
            hint="set KUBECONFIG to the file that your cluster's administrator or provider gave you",
        )
    contents = {path: _read(path) for path in files}
    name = context or next((c["current-context"] for c in contents.values() if c.get("current-context")), None)
    contexts = _named(contents, "contexts", "context")
    shown = ", ".join(map(str, files))
    if not name:
        known = f"it has {', '.join(contexts)}" if contexts else "it has none"
        raise NoConfigError(f"{shown} has no current context", hint=f"name one with --context; {known}")
    if name not in contexts:
        near = difflib.get_close_matches(str(name), list(contexts), n=1)
        known = f"did you mean {near[0]}?" if near else f"it has {', '.join(contexts) or 'none'}"
        raise NoConfigError(f"{shown} has no context {name!r}", hint=known)
    parts = contexts[name]
    cluster = _named(contents, "clusters", "cluster").get(parts.get("cluster"))
    if not cluster or not cluster.get("server"):
        raise NoConfigError(f"context {name} in {shown} names no cluster that has a server", hint=_CHECK)
    users = _named(contents, "users", "user")
    if parts.get("user") and parts["user"] not in users:
        raise NoConfigError(f"context {name} in {shown} names a user that is not there", hint=_CHECK)
    configuration = _configuration(files, name, users.get(parts.get("user")) or {})
    return _access(name, str(parts.get("namespace") or "default"), configuration)


def _read(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise NoConfigError(f"the kubeconfig {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise NoConfigError(f"the kubeconfig {path} is not YAML", hint=_CHECK) from None
    if not isinstance(data, dict):
        raise NoConfigError(f"the kubeconfig {path} is empty or no kubeconfig", hint=_CHECK)
    return data


def _named(contents: Mapping[Path, dict[str, Any]], group: str, kind: str) -> dict[Any, dict[str, Any]]:
    """All entries of one group by their names; of several with one name the first counts."""
    found: dict[Any, dict[str, Any]] = {}
    for path, content in contents.items():
        for item in content.get(group) or []:
            if not isinstance(item, dict) or not isinstance(item.get("name"), str):
                raise NoConfigError(f"the kubeconfig {path} has an entry without a name in {group}", hint=_CHECK)
            value = item.get(kind)
            found.setdefault(item["name"], value if isinstance(value, dict) else {})
    return found


def _configuration(files: list[Path], context: str, user: Mapping[str, Any]) -> Any:
    from kubernetes.client import Configuration
    from kubernetes.config.config_exception import ConfigException
    from kubernetes.config.kube_config import KubeConfigLoader, KubeConfigMerger

    configuration = Configuration()
    plugin = user.get("exec")
    try:
        merged = KubeConfigMerger(os.pathsep.join(map(str, files))).config
        with _told() as told:
            KubeConfigLoader(merged, active_context=context, config_base_path=None).load_and_set(configuration)
    except (ConfigException, OSError, ValueError, TypeError, KeyError, AttributeError):
        raise NoConfigError(f"context {context} in {', '.join(map(str, files))} is not usable", hint=_CHECK) from None
    if plugin and not (configuration.api_key or configuration.cert_file):
        reason = told[0] if told else "it gave no credentials"
        command = plugin.get("command") if isinstance(plugin, dict) else None
        raise NoConfigError(
            f"the credentials plugin {command} of context {context} failed: {reason}",
            hint=(plugin.get("installHint") if isinstance(plugin, dict) else "") or f"is {command} installed?",
        )
    return configuration


def _in_cluster() -> Access:
    from kubernetes.client import Configuration
    from kubernetes.config import ConfigException, load_incluster_config

    configuration = Configuration()
    try:
        load_incluster_config(client_configuration=configuration)
    except (ConfigException, OSError):
        raise NoConfigError(
            "there is no kubeconfig, and this pod has no service account token",
            hint="set KUBECONFIG, or automountServiceAccountToken: true in this pod",
        ) from None
    try:
        namespace = _NAMESPACE_FILE.read_text(encoding="utf-8").strip()
    except OSError:
        namespace = "default"
    return _access(IN_CLUSTER, namespace, configuration)


def _access(context: str, namespace: str, configuration: Any) -> Access:
    from kubernetes.client.rest import RESTClientObject

    configuration.connection_pool_maxsize = _POOL
    try:
        pool = RESTClientObject(configuration).pool_manager
    except (OSError, ValueError):
        raise NoConfigError(f"the certificates of context {context} cannot be used", hint=_CHECK) from None
    return Access(context, namespace, str(configuration.host), pool, configuration)


@contextmanager
def _told() -> Iterator[list[str]]:
    """Collects what the kubernetes package only logs: that a credentials plugin failed, and why."""
    lines: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.ERROR:
                text = record.getMessage().strip()
                lines.append(" ".join(text.split())[:300])

    root, handler = logging.getLogger(), Collector()
    root.addHandler(handler)
    try:
        yield lines
    finally:
        root.removeHandler(handler)
