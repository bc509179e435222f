"""Kinds of objects of the Kubernetes API, and the paths of their collections and objects in its URLs."""

from __future__ import annotations

import re
from typing import Any, Final
from urllib.parse import quote

from flk.errors import UsageError
from flk_runtime.contract.values import dataclass, field

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


_NAME: Final = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_KEY: Final = rf"(?:[a-z0-9](?:[-a-z0-9.]{{0,251}}[a-z0-9])?/)?{_NAME}"
_VALUE: Final = rf"(?:{_NAME})?"
_SPACE: Final = r"[ \t]*"
_VALUES: Final = rf"\({_SPACE}{_VALUE}(?:{_SPACE},{_SPACE}{_VALUE})*{_SPACE}\)"
_REQUIREMENT: Final = "|".join(
    (
        rf"!?{_SPACE}{_KEY}",
        rf"{_KEY}{_SPACE}(?:==?|!=){_SPACE}{_VALUE}",
        rf"{_KEY}[ \t]+(?:in|notin){_SPACE}{_VALUES}",
        rf"{_KEY}{_SPACE}[<>]{_SPACE}[0-9]+",
    )
)
_SELECTOR: Final = rf"{_SPACE}(?:{_REQUIREMENT})(?:{_SPACE},{_SPACE}(?:{_REQUIREMENT}))*{_SPACE}"


def check_selector(selector: str) -> None:
    """Raise UsageError for a label selector that the API server would refuse."""
    if not re.fullmatch(_SELECTOR, selector):
        raise UsageError(
            f"--selector: must be labels as kubectl takes them (is {selector!r})",
            hint="such as -l team=nlp, -l 'team=nlp,!done' or -l 'team in (nlp, vision)'",
        )
