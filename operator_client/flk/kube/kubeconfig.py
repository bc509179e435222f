"""Read the kubeconfig files that kubectl would read, and select one context, as the command line says.

Messages name files, contexts and commands, and never values: those may be tokens.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from flk.errors import NoConfigError, NoKubeconfigError
from flk.user.commands import Commands, Connection
from flk_runtime.contract import foreign
from flk_runtime.contract.values import dataclass, field, replace

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # of a pod

_CLUSTER_PATHS: Final = ("certificate-authority",)
_USER_PATHS: Final = ("client-certificate", "client-key", "tokenFile")
# The types of what flk reads of clusters, users and contexts, as kubectl takes them. Other tools may keep more there.
_TYPES: Final[dict[str, type]] = {
    **dict.fromkeys((*_CLUSTER_PATHS, *_USER_PATHS), str),
    **dict.fromkeys(("certificate-authority-data", "client-certificate-data", "client-key-data"), str),
    **dict.fromkeys(("server", "tls-server-name", "proxy-url", "token", "as", "cluster", "user", "namespace"), str),
    "insecure-skip-tls-verify": bool,  # not "false" in quotes, which would be true
    "as-groups": list,
    "extensions": list,
    "exec": dict,
}
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is ten times as fast, where it is there


@dataclass(frozen=True)
class ConnectionOptions:
    """Options of all connections of this process, as kubectl's global flags have them: set before the first one."""

    connection: Connection = field(default_factory=Connection)  # --context is not in it: each client has its own
    request_timeout: float | None = None  # seconds for one request with all its attempts; 0: no limit of flk's own


_options = ConnectionOptions()


def connection_options() -> ConnectionOptions:
    """Return the options of this process."""
    return _options


def set_connection_options(options: ConnectionOptions) -> None:
    """Set the options of connections that are opened from now on."""
    global _options
    _options = options


@dataclass(frozen=True)
class Context:
    """One context of a kubeconfig with the cluster and the user that it names, or the service account of this pod.

    ``cluster`` and ``user`` have the keys of a kubeconfig. Relative paths in them are resolved.
    """

    name: str
    namespace: str
    cluster: Mapping[str, Any]
    user: Mapping[str, Any] = field(repr=False)
    files: tuple[Path, ...] = ()
    # The choices of the command line, for the commands that are suggested.
    connection: Connection = field(default_factory=Connection)

    @property
    def server(self) -> str:
        """Address of the API server, without a slash at the end. As in kubectl, one without a scheme is of HTTP."""
        server = str(self.cluster["server"]).rstrip("/")
        return server if "://" in server else f"http://{server}"

    @property
    def is_secure(self) -> bool:
        """Whether the connection is encrypted. As kubectl, flk sends no credentials over another one."""
        return self.server.lower().startswith("https:")

    @property
    def named(self) -> Connection:
        """The connection with the context's name even if it is the default, for commands that others may be given."""
        return replace(self.connection, context=self.name if self.files else "")


def config_view() -> str:
    """Return the kubectl command that shows the kubeconfig that the command line chooses."""
    return Commands(connection=connection_options().connection).kubectl("config view", namespaced=False)


def shown_by_kubectl() -> str:
    """Return the hint for a kubeconfig that cannot be used."""
    return f"{config_view()} shows what kubectl reads from it"


def load(name: str | None = None) -> Context:
    """Return the context of that name (default: the current one); in a pod without one, its service account.

    As kubectl, flk takes the service account if no file has a current context: tools leave such files behind. Raises
    NoConfigError if there is neither, or if a file or the context cannot be used.
    """
    options = connection_options().connection
    given = options.kubeconfig
    if given and not os.path.exists(os.path.expanduser(given)):
        raise NoConfigError(f"there is no kubeconfig: {given} does not exist", hint="check --kubeconfig")
    named = [given] if given else [p for p in os.environ.get("KUBECONFIG", "").split(os.pathsep) if p]
    # Of Path, `exists` raises where a folder is another user's, and `expanduser` for a user without a home.
    wanted = [Path(os.path.expanduser(p)) for p in named or ["~/.kube/config"]]
    contents = {path: content for path in wanted if os.path.exists(path) and (content := _read(path))}
    chosen = name or any(content.get("current-context") for content in contents.values())
    if os.environ.get("KUBERNETES_SERVICE_HOST") and not chosen:
        return replace(_service_account(), connection=options)
    if not any(content.get("contexts") for content in contents.values()):
        state = "has no context" if any(map(os.path.exists, wanted)) else "does not exist"
        raise NoKubeconfigError(
            f"there is no kubeconfig: {', '.join(map(str, wanted))} {state}",
            hint="set KUBECONFIG to the file that your cluster's administrator or provider gave you",
        )
    return replace(_selected(contents, name), connection=replace(options, context=name or ""))


def _selected(contents: Mapping[Path, Mapping[str, Any]], name: str | None) -> Context:
    files = ", ".join(map(str, contents))
    name = name or next((str(c["current-context"]) for c in contents.values() if c.get("current-context")), None)
    contexts = _entries(contents, "contexts", "context")
    if not name:
        hint = f"name one with --context; known contexts: {', '.join(contexts) or 'none'}"
        raise NoConfigError(f"{files} has no current context", hint=hint)
    if name not in contexts:
        near = difflib.get_close_matches(name, list(contexts), n=1)
        hint = f"did you mean {near[0]}?" if near else f"known contexts: {', '.join(contexts) or 'none'}"
        raise NoConfigError(f"{files} has no context {name!r}", hint=hint)
    context = contexts[name]
    clusters = _entries(contents, "clusters", "cluster", _CLUSTER_PATHS)
    users = _entries(contents, "users", "user", _USER_PATHS)
    cluster, user = clusters.get(context.get("cluster"), {}), users.get(context.get("user"), {})
    if context.get("user") and context["user"] not in users:
        raise NoConfigError(f"context {name} in {files} names a user that is not there", hint=shown_by_kubectl())
    if not cluster.get("server"):
        raise NoConfigError(f"context {name} in {files} names no cluster that has a server", hint=shown_by_kubectl())
    return Context(name, str(context.get("namespace") or "default"), cluster, user, tuple(contents))


def _read(path: Path) -> dict[str, Any]:
    """Return the mapping in a file, empty if the file is empty."""
    try:
        # As in kubectl, the first document counts, and PowerShell may have written it, in UTF-16.
        data = next(yaml.load_all(path.read_bytes(), _Loader), None)
    except OSError as error:
        raise NoConfigError(f"the kubeconfig {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, *foreign.ERRORS):
        raise NoConfigError(f"the kubeconfig {path} is not YAML", hint=shown_by_kubectl()) from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise NoConfigError(f"the file {path} is not a kubeconfig: it must be a mapping", hint=shown_by_kubectl())
    return data


def _entries(
    contents: Mapping[Path, Mapping[str, Any]], group: str, kind: str, paths: Sequence[str] = ()
) -> dict[Any, dict[str, Any]]:
    """Return all entries of one group by their names. The first of several entries with one name counts."""
    found: dict[Any, dict[str, Any]] = {}
    for file, content in contents.items():
        items = content.get(group) or []
        for item in items if isinstance(items, list) else [items]:
            if not isinstance(item, dict) or not isinstance(item.get("name"), str):
                raise NoConfigError(
                    f"the kubeconfig {file} has an entry without a name in {group}", hint=shown_by_kubectl()
                )
            value = item.get(kind)
            entry = dict(value) if isinstance(value, dict) else {}
            for key, given in entry.items():
                if given is not None and not isinstance(given, _TYPES.get(key, object)):
                    problem = f"the kubeconfig {file} has a value of another type at {key} of {kind} {item['name']!r}"
                    raise NoConfigError(problem, hint=shown_by_kubectl())
            entry |= _resolved(entry, paths, file.parent)
            found.setdefault(item["name"], entry)
    return found


def _resolved(entry: Mapping[str, Any], paths: Sequence[str], folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield the file names in an entry, which are relative to the folder of its kubeconfig."""
    for key in paths:
        if entry.get(key):
            yield key, str(folder / str(entry[key]))
    plugin = entry.get("exec")
    if isinstance(plugin, dict) and os.sep in str(plugin.get("command", "")):
        yield "exec", {**plugin, "command": str(folder / str(plugin["command"]))}


def _service_account() -> Context:
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    token, authority = SERVICE_ACCOUNT / "token", SERVICE_ACCOUNT / "ca.crt"
    if not token.is_file():
        raise NoConfigError(
            "there is no kubeconfig with a current context, and this pod has no service account token",
            hint="set KUBECONFIG or --context, or automountServiceAccountToken: true in this pod",
        )
    try:
        namespace = (SERVICE_ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
    except OSError:
        namespace = "default"
    server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    cluster = {"server": server, "certificate-authority": str(authority)}
    return Context("in-cluster", namespace, cluster, {"tokenFile": str(token)})
