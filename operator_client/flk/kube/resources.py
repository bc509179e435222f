"""Kinds of objects of the Kubernetes API, and the paths of their collections and objects in its URLs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from flk.errors import UsageError

Object = dict[str, Any]  # an object of the API, as its JSON


@dataclass(frozen=True)
class Resource:
    """A kind of objects. ``subresource`` is a part of the object: ``log``.

    ``others`` are further versions of its API that flk knows, the best first: what flk reads and writes is the same in
    them. ApiClient uses the one that the cluster serves.

    Of a kind of objects that are jobs, ``jobs`` is what people call them, and ``install`` says how a cluster gets them.
    """

    group: str
    version: str
    plural: str
    subresource: str = ""
    others: tuple[str, ...] = field(default=(), compare=False)
    jobs: str = field(default="", compare=False)
    install: str = field(default="", compare=False)

    def __str__(self) -> str:
        """Return the name that ``kubectl auth can-i`` takes: ``pods/log``, ``pytorchjobs.kubeflow.org``."""
        name = f"{self.plural}.{self.group}" if self.group else self.plural
        return f"{name}/{self.subresource}" if self.subresource else name

    @property
    def api_version(self) -> str:
        """The ``apiVersion`` of its objects."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def singular(self) -> str:
        """The prefix of an object's name in ``kubectl get -o name``: ``pytorchjob.kubeflow.org``."""
        return self.plural.removesuffix("s") + (f".{self.group}" if self.group else "")

    def path(self, namespace: str | None, name: str | None = None) -> str:
        """Return the path of the collection (``name`` is None) or of one object, in one namespace or (None) in all.

        Raises UsageError for a name that is empty, ``.`` or ``..``: such a path would mean the collection.
        """
        root = f"/apis/{quote(self.group, safe='')}" if self.group else "/api"
        parts = [root, self.version]
        if namespace is not None:
            parts += ["namespaces", _segment("namespace", namespace)]
        parts.append(self.plural)
        if name is not None:
            parts.append(_segment("object", name))
        return "/".join(parts + ([self.subresource] if self.subresource else []))


@dataclass(frozen=True)
class RequestTarget:
    """The object or collection of a request. Without a namespace: all namespaces; without a name: the collection."""

    resource: Resource
    namespace: str | None = None
    name: str | None = None
    metadata_only: bool = False  # the server leaves spec and status out of its answer

    def __str__(self) -> str:
        name = f" {self.name}" if self.name is not None else ""
        return f"{self.resource}{name}{self.location or ' in any namespace'}"

    @property
    def location(self) -> str:
        """`` in namespace team``, or nothing for all namespaces."""
        return "" if self.namespace is None else f" in namespace {self.namespace}"

    @property
    def path(self) -> str:
        """Path of the URL. Raises UsageError for a name that no object has."""
        return self.resource.path(self.namespace, self.name)


@dataclass(frozen=True)
class Document(RequestTarget):
    """A fixed path that is neither a collection nor an object: the server's version, the resources of an API group."""

    document: str = ""

    @property
    def path(self) -> str:
        """Path of the URL."""
        return self.document


def _segment(kind: str, name: str) -> str:
    if name in ("", ".", ".."):
        raise UsageError(f"{name!r} is not the name of {'a namespace' if kind == 'namespace' else 'an object'}")
    return quote(name, safe="")
