"""One request to the API server, as often as it takes: all retries are here, and all errors get their words here.

A call ends in bounded time. While the server says nothing at all, that is ``SILENCE``; while it answers "later" (429,
5xx), ``PATIENCE``. A request to create something whose outcome is unknown (a lost reply) is not sent again before its
``settle`` has looked whether it was done.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.parse import quote, urlencode

import urllib3
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    LocationParseError,
    NewConnectionError,
    SSLError,
    TimeoutError,
)

from flk.errors import (
    ApiError,
    ConflictError,
    FlkError,
    ForbiddenError,
    JobNotFoundError,
    MissingApiError,
    NoConfigError,
    UnreachableError,
)
from flk.kube import credentials as kubeconfig

RETRIED: Final = frozenset({429, 500, 502, 503, 504})
BACKOFFS: Final = (0.2, 0.5, 1.0, 2.0, 4.0)  # seconds before the second attempt, the third, …
SILENCE: Final = 7.0  # seconds until a server that does not answer is given up
PATIENCE: Final = 30.0  # seconds until a server that answers "later" is given up
CONNECT: Final = 3.0  # seconds for one connection
ANSWER: Final = 5.0  # seconds until the first byte of one answer, and between two of its bytes

PAGE: Final = 500  # objects in one answer, so that each comes soon

Object = dict[str, Any]

_METHODS: Final = {"get": "GET", "list": "GET", "watch": "GET", "create": "POST", "delete": "DELETE", "patch": "PATCH"}
_INSTALL: Final = (
    "install Kubeflow's training operator: kubectl apply --server-side -k "
    "'github.com/kubeflow/trainer.git/manifests/overlays/standalone?ref=v1.9.3'"
)


@dataclass(frozen=True)
class Resource:
    """A kind of object, as its URL names it. ``sub`` is a part of the object: ``log``."""

    group: str
    version: str
    plural: str
    sub: str = ""

    @property
    def full(self) -> str:
        """The name that ``kubectl auth can-i`` takes."""
        return (f"{self.plural}.{self.group}" if self.group else self.plural) + (f"/{self.sub}" if self.sub else "")

    def path(self, namespace: str | None, name: str | None = None) -> str:
        """Path of the collection or of one object, in a namespace or (None) in all."""
        root = f"/apis/{self.group}" if self.group else "/api"
        parts = [f"{root}/{self.version}", *(["namespaces", namespace] if namespace else []), self.plural]
        return "/".join(parts + ([quote(name, safe="")] if name else []) + ([self.sub] if self.sub else []))


@dataclass(frozen=True)
class Target:
    """What a request is about. Without a namespace: all of them; without a name: the collection."""

    resource: Resource
    namespace: str | None = None
    name: str | None = None

    def __str__(self) -> str:
        place = f" in namespace {self.namespace}" if self.namespace else " in any namespace"
        return f"{self.resource.full}{f' {self.name}' if self.name else ''}{place}"


Settle = Callable[[], dict[str, Any] | None]


class Api:
    """Requests to one API server."""

    def __init__(self, access: kubeconfig.Access, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self.access = access
        self._sleep = sleep
        self._skew = 0.0

    @property
    def host(self) -> str:
        """The server, as messages name it."""
        return self.access.server

    def now(self) -> float:
        """Seconds since the epoch by the server's clock, which made the times in its objects."""
        return time.time() + self._skew

    def call(
        self,
        verb: str,
        target: Target,
        *,
        query: Mapping[str, Any] | None = None,
        body: Any = None,
        settle: Settle | None = None,
    ) -> dict[str, Any]:
        """Send a request until it is answered, and return the answer's JSON.

        ``settle`` is asked when the outcome of a creation is unknown, or something of that name exists already: it
        returns the object if the request has been done, None if it has not, or raises.
        """
        began, failures, renewed = time.monotonic(), 0, False
        while True:
            left = SILENCE - (time.monotonic() - began)
            unknown, pause, limit = False, 0.0, SILENCE
            try:
                reply = self._send(verb, target, query, body, answer=max(0.5, min(ANSWER, left)))
            except HTTPError as error:
                problem: FlkError = self._silent(error)
                if isinstance(error, SSLError | LocationParseError):
                    raise problem from None
                unknown = not isinstance(error, ConnectTimeoutError)  # which a refused connection is too
            else:
                if reply.status < 400:
                    return self._json(reply)
                problem = complaint(reply.status, reply.data, verb, target, self.access)
                if reply.status == 401 and not renewed:
                    renewed, self.access = True, kubeconfig.load(_name(self.access))
                    continue
                if reply.status == 404 and verb == "delete" and failures:
                    return {}  # the attempt before, whose answer was lost, has done it
                if not (reply.status in RETRIED or (reply.status == 409 and settle)):
                    raise problem
                unknown, limit = reply.status != 429, PATIENCE
                pause = _retry_after(reply)
            if settle and unknown:
                done = settle()
                if done is not None:
                    return done
            failures += 1
            pause = max(pause, BACKOFFS[min(failures, len(BACKOFFS)) - 1])
            spent = time.monotonic() - began
            if failures > len(BACKOFFS) or spent + pause > limit:
                problem.args = (f"{problem} (tried {failures} times in {spent:.0f} s)",)
                raise problem
            self._sleep(pause)

    def list_all(self, target: Target, query: Mapping[str, Any] | None = None) -> tuple[list[Object], str]:
        """All objects of a collection, page by page, and the version that a watch goes on from."""
        items: list[Object] = []
        token = None
        while True:
            try:
                page = self.call("list", target, query={**(query or {}), "limit": PAGE, "continue": token})
            except ApiError as error:
                if error.status != 410 or token is None:
                    raise
                items, token = [], None  # the list was too long for its age: begin again
                continue
            items += page.get("items") or []
            meta = page.get("metadata") or {}
            token = meta.get("continue")
            if not token:
                return items, str(meta.get("resourceVersion") or "")

    def watch(
        self, target: Target, query: Mapping[str, Any], version: str, idle: float
    ) -> AbstractContextManager[Iterator[bytes]]:
        """What changes in a collection after ``version``, one JSON document a line."""
        asked = {**query, "watch": "true", "allowWatchBookmarks": "true", "resourceVersion": version}
        return self.stream("watch", target, query=asked, idle=idle)

    @contextmanager
    def stream(self, verb: str, target: Target, *, query: Mapping[str, Any], idle: float) -> Iterator[Iterator[bytes]]:
        """The lines of an answer as they come, without their ends; one attempt. A line without an end is not given.

        Raises UnreachableError when the connection breaks, and when nothing comes for ``idle`` seconds.
        """
        try:
            reply = self._send(verb, target, query, None, answer=idle, whole=False)
        except HTTPError as error:
            raise self._silent(error) from None
        try:
            if reply.status >= 400:
                raise complaint(reply.status, reply.read(), verb, target, self.access)
            yield self._lines(reply)
        except HTTPError as error:
            raise self._silent(error) from None
        finally:
            reply.close()

    def _lines(self, reply: Any) -> Iterator[bytes]:
        rest: list[bytes] = []
        try:
            for chunk in reply.stream(1 << 16, decode_content=True):
                first, *lines = chunk.split(b"\n")
                rest.append(first)
                for line in lines:
                    yield b"".join(rest)
                    rest = [line]
        except HTTPError as error:
            raise self._silent(error) from None

    def _send(
        self,
        verb: str,
        target: Target,
        query: Mapping[str, Any] | None,
        body: Any,
        *,
        answer: float,
        whole: bool = True,
    ) -> Any:
        url = self.host + target.resource.path(target.namespace, target.name)
        given = {key: value for key, value in (query or {}).items() if value is not None}
        if given:
            url += "?" + urlencode(given)
        headers = {"Accept": "*/*" if target.resource.sub else "application/json", "User-Agent": "flk"}
        headers |= self.access.headers()
        if body is not None:
            kind = "application/merge-patch+json" if verb == "patch" else "application/json"
            headers["Content-Type"] = kind
        reply = self.access.pool.request(
            _METHODS[verb],
            url,
            body=None if body is None else json.dumps(body),
            headers=headers,
            timeout=urllib3.Timeout(connect=min(CONNECT, answer), read=answer),
            retries=False,
            redirect=False,
            preload_content=whole,
        )
        self._set_clock(reply.headers.get("Date"))
        return reply

    def _set_clock(self, date: str | None) -> None:
        if date:
            try:
                self._skew = parsedate_to_datetime(date).timestamp() - time.time()
            except ValueError:
                return

    def _json(self, reply: Any) -> dict[str, Any]:
        try:
            data = json.loads(reply.data)
        except ValueError:
            data = None
        if not isinstance(data, dict):
            raise ApiError(
                f"{self.host} did not answer as a Kubernetes API server does",
                hint="check the server's address: kubectl config view",
                status=reply.status,
            )
        return data

    def _silent(self, error: HTTPError) -> ApiError:
        if isinstance(error, LocationParseError):
            return NoConfigError(f"the server {self.host!r} of context {self.access.context} is not an address")
        if isinstance(error, SSLError):
            return UnreachableError(
                f"cannot trust the API server {self.host}: {_reason(error)}",
                hint="the kubeconfig's certificate-authority must be the one that signed the server's certificate",
            )
        refused = isinstance(error, NewConnectionError)
        silent = isinstance(error, TimeoutError) and not refused
        what = "does not answer" if silent else f"cannot be reached: {_reason(error)}"
        return UnreachableError(
            f"the API server {self.host} of context {self.access.context} {what}",
            hint="is the cluster up, and are VPN or proxy as it needs them? kubectl cluster-info asks the same server",
        )


def complaint(status: int, data: bytes, verb: str, target: Target, access: kubeconfig.Access) -> FlkError:
    """An error's answer in words. Only the API server's own messages are shown: other text may hold secrets."""
    reply = _status(data)
    said = " ".join(str(reply.get("message", "")).split())
    details = reply.get("details") or {}
    resource, place = target.resource, f" in namespace {target.namespace}" if target.namespace else ""
    if status == 401:
        return NoConfigError(
            f"the API server {access.server} does not accept the credentials of context {access.context}",
            hint="they may have expired: log in to the cluster again",
            status=status,
        )
    if status == 403 and ("cannot " in said or not said):
        where = f" -n {target.namespace}" if target.namespace else " -A"
        context = "" if access.context == kubeconfig.IN_CLUSTER else f" --context {access.context}"
        return ForbiddenError(
            f"no permission to {verb} {resource.full}{place or ' in all namespaces'}"
            + (f" (as {_user(said)})" if _user(said) else ""),
            hint="ask the cluster's administrator for it; this shows whether you have it: "
            f"kubectl auth can-i {verb} {resource.full}{where}{context}",
            status=status,
        )
    if status == 404:
        if not reply and resource.group == "kubeflow.org":
            return MissingApiError(
                f"the cluster of context {access.context} has no PyTorchJobs (API {resource.group}/{resource.version})",
                hint=_INSTALL,
                status=status,
            )
        if details.get("kind") == "namespaces":
            return ApiError(
                f"there is no namespace {details.get('name')} in the cluster of context {access.context}",
                hint="kubectl get namespaces lists those there are",
                status=status,
            )
        if resource.plural == "pytorchjobs" and target.name:
            return JobNotFoundError(
                f"there is no job {target.name}{place}", hint=f"flk list -n {target.namespace} lists those there are"
            )
        return ApiError(f"not found: {target}", status=status)
    if status == 409:
        return ConflictError(said or f"{target} is there already, or was changed meanwhile", status=status)
    causes = [
        f"{cause.get('field')}: {' '.join(str(cause.get('message')).split())}"
        for cause in details.get("causes") or []
        if isinstance(cause, dict) and cause.get("field") and str(cause.get("message")) not in said
    ]
    why = "; ".join([said, *causes]) if said else f"HTTP status {status}"
    if status in RETRIED:
        return ApiError(f"the API server {access.server} failed to {verb} {target}: {why}", status=status)
    return ApiError(f"the API server refused to {verb} {target}: {why}", status=status)


def _status(data: bytes) -> dict[str, Any]:
    try:
        reply = json.loads(data)
    except ValueError:
        return {}
    return reply if isinstance(reply, dict) and reply.get("kind") == "Status" else {}


def _user(said: str) -> str:
    """The user that a message of the API server's authorizer names."""
    _, _, rest = said.partition('User "')
    return rest.partition('"')[0]


def _retry_after(reply: Any) -> float:
    value: Any = reply.headers.get("Retry-After") or (_status(reply.data).get("details") or {}).get("retryAfterSeconds")
    try:
        return max(0.0, float(value))
    except (TypeError, ValueError):
        return 0.0


def _reason(error: BaseException) -> str:
    """The innermost cause, which is what people recognise: Connection refused, certificate has expired."""
    seen: BaseException = error
    while inner := (seen.__cause__ or seen.__context__ or getattr(seen, "original_error", None)):
        seen = inner
    return str(getattr(seen, "strerror", None) or getattr(seen, "verify_message", None) or seen)


def _name(access: kubeconfig.Access) -> str | None:
    return None if access.context == kubeconfig.IN_CLUSTER else access.context
