"""Volumes of a job as text: where the files are, the path at which the pods see them, and whether they only read them.

The forms are rows of a table, ``SOURCES``. Checks, schemas, manifests and help read it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from flk.spec import names
from flk_runtime.contract.values import dataclass

READ_ONLY: Final = ":ro"


@dataclass(frozen=True)
class Source:
    """A place that a volume can come from."""

    prefix: str  # before its name in the text
    form: str  # of the whole text, for people
    check: Callable[[str], str]  # of its name
    volume: Callable[[str], dict[str, Any]]  # the volume of a pod
    read_only: bool = False  # whatever the text says


def _export(name: str) -> str:
    server, slash, path = name.partition("/")
    if not re.fullmatch(names.SUBDOMAIN, server):
        raise ValueError(f"must begin with the name or address of a server (is {name!r})")
    return f"{server}{names.folder(slash + path)}"


def _nfs(name: str) -> dict[str, Any]:
    server, slash, path = name.partition("/")
    return {"nfs": {"server": server, "path": slash + path}}


CLAIM: Final = "claim"
HOST_PATH: Final = "hostpath"
SOURCES: Final = {
    CLAIM: Source(
        "",
        "PVC:/PATH[:ro]",
        names.object_name,
        lambda name: {"persistentVolumeClaim": {"claimName": name}},
    ),
    "nfs": Source("nfs://", "nfs://SERVER/PATH:/PATH[:ro]", _export, _nfs),
    "secret": Source(
        "secret:",
        "secret:NAME:/PATH",
        names.object_name,
        lambda name: {"secret": {"secretName": name}},
        read_only=True,
    ),
    "configmap": Source(
        "configmap:",
        "configmap:NAME:/PATH",
        names.object_name,
        lambda name: {"configMap": {"name": name}},
        read_only=True,
    ),
    HOST_PATH: Source(
        "hostpath:",
        "hostpath:/PATH:/PATH[:ro]",
        names.folder,
        lambda name: {"hostPath": {"path": name, "type": "Directory"}},  # otherwise a wrong path is an empty folder
    ),
}
FORMS: Final = ", ".join(source.form for source in SOURCES.values())


@dataclass(frozen=True)
class Mount:
    """A volume at a path of the pods. As text it is one of ``FORMS``."""

    kind: str  # a key of SOURCES
    name: str  # of the claim, the Secret or the ConfigMap; SERVER/PATH of NFS; the path on the node
    path: str
    read_only: bool = False

    @classmethod
    def parse(cls, text: str) -> Mount:
        """Return the mount that a text means. Raises ValueError for anything else."""
        body = text.removesuffix(READ_ONLY)
        kind = next((kind for kind, s in SOURCES.items() if s.prefix and body.startswith(s.prefix)), CLAIM)
        source = SOURCES[kind]
        name, colon, path = body[len(source.prefix) :].partition(":")
        if not colon or ":" in path:
            wanted = source.form if source.prefix else f"one of {FORMS}"
            raise ValueError(f"must be {wanted} (is {text!r})")
        if kind == CLAIM and name.startswith("/"):
            raise ValueError(f"for a folder of the node must be {SOURCES[HOST_PATH].prefix}{text} (is {text!r})")
        what = "the PersistentVolumeClaim" if kind == CLAIM else f"what follows {source.prefix}"
        return cls(
            kind,
            names.checked(what, source.check, name),
            names.checked("the path", names.mount_path, path),
            body != text and not source.read_only,
        )

    def __str__(self) -> str:
        return f"{self.source}:{self.path}{READ_ONLY * self.read_only}"

    @property
    def is_read_only(self) -> bool:
        """Whether pods cannot write there: the text says so, or no volume of this kind can be written."""
        return self.read_only or SOURCES[self.kind].read_only

    @property
    def source(self) -> str:
        """Where the files are, as the text says it: ``my-pvc``, ``nfs://server/path``, ``secret:name``."""
        return SOURCES[self.kind].prefix + self.name
