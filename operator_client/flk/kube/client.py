"""ApiClient: requests to one API server, with all retries.

A call ends in bounded time, which a `RetryPolicy` states. A request to create an object is not sent again after a lost
answer before `find_created` has looked whether the object exists.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.parse import urlencode

import urllib3
from urllib3.exceptions import ConnectTimeoutError, HTTPError

from flk.errors import ApiError, FlkError, ForbiddenError, MissingApiError
from flk.kube.credentials import Access
from flk.kube.discovery import GROUPS, RECENT, Discovery, in_version
from flk.kube.errors import (
    RETRIED,
    error_from_connection,
    error_from_response,
    is_final,
    not_an_api_server,
    status_object,
)
from flk.kube.kubeconfig import connection_options
from flk.kube.resources import Document, Object, RequestTarget, Resource
from flk_runtime.contract import foreign
from flk_runtime.contract.values import dataclass

MOMENT: Final = 2.0  # seconds that a request has after the client's time is over: a healthy server may take as long
PAGE: Final = 500  # objects in one answer to a list request
LINE_LIMIT: Final = 1 << 24  # bytes of a line of a stream; an object has at most 3 MiB
FindCreated = Callable[[], Object | None]

_DISCOVERY: Final = ("v2", "v2beta1")  # versions of the aggregated discovery; the second until Kubernetes 1.29
_METHODS: Final = {"get": "GET", "list": "GET", "watch": "GET", "create": "POST", "delete": "DELETE", "patch": "PATCH"}


class UnendedLine(bytes):
    """A final line without a newline; the rest may still arrive."""


@dataclass(frozen=True)
class RetryPolicy:
    """How long one call may take. All values are in seconds.

    How long an answer may take depends on the request: a list may be of thousands of objects, and admission webhooks
    may hold a write for 30 seconds.
    """

    connect_timeout: float = 3.0  # until a connection is open
    read_timeout: float = 5.0  # until the first byte of an answer, and between two of its bytes
    list_timeout: float = 30.0  # the same for list
    write_timeout: float = 35.0  # the same for create, patch and delete
    unreachable_budget: float = 7.0  # for all attempts together, while the server does not answer
    busy_budget: float = 30.0  # for all attempts together, while the server answers 429 or 5xx
    backoffs: tuple[float, ...] = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0)  # before the second attempt, the third, …

    @classmethod
    def within(cls, seconds: float | None) -> RetryPolicy:
        """Return the policy that limits a call to ``seconds`` in total, retries included; 0 means no limit."""
        if seconds is None:
            return cls()
        limit = seconds or 86_400.0
        return cls(min(limit, 30.0), limit, limit, limit, limit, limit)


class ApiClient:
    """Requests to one API server. Many threads may use one client."""

    def __init__(
        self, access: Access, *, retries: RetryPolicy | None = None, sleep: Callable[[float], None] | None = None
    ) -> None:
        self.access = access
        self.retries = retries or RetryPolicy.within(connection_options().request_timeout)
        self._sleep = sleep or time.sleep
        self._skew = 0.0
        self._end = float("inf")  # the time.monotonic() at which requests should have ended
        self._answered = False  # whether the server has
        self._discovery = Discovery(self._answer, access.context)

    def with_deadline(self, timeout: float | None) -> ApiClient:
        """Return a client of the same server whose requests end soon after ``timeout`` seconds from now.

        A request that starts after the deadline still gets MOMENT seconds. None and 0 mean no deadline: ``--timeout 0``
        asks for the state now.
        """
        client = copy.copy(self)
        if timeout:
            client._end = time.monotonic() + timeout
            client._discovery = self._discovery.asked_by(client._answer)
        return client

    def may_wait(self) -> bool:
        """Whether an outage of the server may be waited for: it has answered before, and there is time left."""
        return self._answered and time.monotonic() < self._end

    def now(self) -> float:
        """Return the time by the server's clock, in seconds since the epoch. Times in objects are by that clock."""
        return time.time() + self._skew

    def call(
        self,
        verb: str,
        target: RequestTarget,
        *,
        query: Mapping[str, Any] | None = None,
        body: Any = None,
        find_created: FindCreated | None = None,
    ) -> Object:
        """Send a request until it is answered, and return the answer's JSON.

        ``find_created`` is called when it is unknown whether an object was created, or when its name exists already. It
        returns the object if this request has created it, None if there is none, or raises.
        A kind of objects that is not served in its first version is asked for in the one that the cluster serves.
        Raises ApiError or one of its subclasses, or JobNotFoundError.
        """
        asked = self._discovery.chosen(target)
        try:
            return self._answer(verb, asked, query=query, body=in_version(body, asked), find_created=find_created)
        except MissingApiError as missing:
            try:
                served = self._discovery.look_up(target, RECENT)
            except ForbiddenError:
                raise missing from None
            if served == asked:
                if isinstance(asked, Document) or not self._discovery.names(asked.resource):
                    raise missing from None
                # Its discovery names the kind: it has just started, or reads the definition of the kind anew.
                self._sleep(self.retries.backoffs[0])
            return self._answer(verb, served, query=query, body=in_version(body, served), find_created=find_created)

    def serves(self, resource: Resource) -> bool:
        """Return whether the cluster serves a kind of objects, as it has told within the last minute."""
        return self._discovery.serves(resource)

    def ask_what_is_served(self) -> None:
        """Have `serves` tell what the cluster serves now, or has served a few seconds ago."""
        self._discovery.ask()

    def served(self, resource: Resource) -> Resource:
        """Return a kind of objects in the version in which flk uses it in this cluster.

        Raises MissingApiError if the cluster does not serve it, or only in versions that flk does not know.
        """
        return self._discovery.look_up(RequestTarget(resource)).resource

    def _answer(
        self,
        verb: str,
        target: RequestTarget,
        *,
        query: Mapping[str, Any] | None = None,
        body: Any = None,
        find_created: FindCreated | None = None,
    ) -> Object:
        retries, began, failures = self.retries, time.monotonic(), 0
        longest = {"get": retries.read_timeout, "list": retries.list_timeout}.get(verb, retries.write_timeout)
        while True:
            unknown, pause, budget, timeout = False, 0.0, retries.unreachable_budget, longest
            if verb in ("get", "list"):
                timeout = max(0.5, min(longest, max(budget, longest) - (time.monotonic() - began)))
            try:
                reply = self._send(verb, target, query, body, timeout=timeout)
            except HTTPError as error:
                problem: FlkError = error_from_connection(error, self.access.context)
                if is_final(error):
                    raise problem from None
                unknown = not isinstance(error, ConnectTimeoutError)  # a refused connection is one too
            else:
                if reply.status < 300:
                    return self._json(reply)
                problem = error_from_response(reply.status, reply.data, verb, target, self.access.context)
                if reply.status == 404 and verb == "delete" and failures:
                    return {}  # an earlier attempt, whose answer was lost, has deleted it
                if not (reply.status in RETRIED or (reply.status == 409 and find_created)):
                    raise problem
                unknown, budget = reply.status != 429, retries.busy_budget
                pause = _retry_after(reply)
            if find_created and unknown:
                created = find_created()
                if created is not None:
                    return created
            failures += 1
            pause = max(pause, retries.backoffs[min(failures, len(retries.backoffs)) - 1])
            spent, left = time.monotonic() - began, self._end - time.monotonic()
            if failures > len(retries.backoffs) or spent + pause > budget or pause > left:
                problem.args = (f"{problem} (tried {failures} times in {spent:.0f} s)",)
                raise problem
            self._sleep(pause)

    def list_all(self, target: RequestTarget, query: Mapping[str, Any] | None = None) -> tuple[list[Object], str]:
        """Return all objects of a collection, read page by page, and the version from which a watch goes on."""
        items: list[Object] = []
        token = None
        while True:
            try:
                page = self.call("list", target, query={**(query or {}), "limit": PAGE, "continue": token})
            except ApiError as error:
                if error.status != 410 or token is None:
                    raise
                items, token = [], None  # the version of the first page has expired
                continue
            items += page.get("items") or []
            meta = page.get("metadata") or {}
            token = meta.get("continue")
            if not token:
                return items, str(meta.get("resourceVersion") or "")

    def watch(
        self, target: RequestTarget, query: Mapping[str, Any], version: str, idle: float
    ) -> AbstractContextManager[Iterator[bytes]]:
        """Stream the changes of a collection after ``version``, one JSON document a line."""
        watching = {**query, "watch": "true", "allowWatchBookmarks": "true", "resourceVersion": version}
        return self.stream("watch", target, query=watching, idle=idle)

    @contextmanager
    def stream(
        self, verb: str, target: RequestTarget, *, query: Mapping[str, Any], idle: float
    ) -> Iterator[Iterator[bytes]]:
        """Stream the lines of an answer without their ends, in one attempt.

        A last line without an end is an `UnendedLine`. It is dropped if the connection breaks, and always in a watch,
        which resumes from its last event. The end of a line of more than 16 MiB is dropped, too.
        Raises UnreachableError if the connection breaks, and if nothing comes for ``idle`` seconds.
        """
        target = self._discovery.chosen(target)
        try:
            reply = self._send(verb, target, query, None, timeout=idle, whole=False)
        except HTTPError as error:
            raise error_from_connection(error, self.access.context) from None
        try:
            if reply.status >= 300:
                raise error_from_response(reply.status, reply.read(), verb, target, self.access.context)
            yield self._lines(reply, goes_on=verb == "watch")
        except HTTPError as error:
            raise error_from_connection(error, self.access.context) from None
        finally:
            reply.close()

    def _lines(self, reply: Any, *, goes_on: bool) -> Iterator[bytes]:
        pending = bytearray()
        try:
            for chunk in reply.stream(1 << 16, decode_content=True):
                first, *lines = chunk.split(b"\n")
                pending += first[: LINE_LIMIT - len(pending)]
                for line in lines:
                    yield bytes(pending)
                    pending = bytearray(line[:LINE_LIMIT])
        except HTTPError as error:
            raise error_from_connection(error, self.access.context) from None
        if pending and not goes_on:
            yield UnendedLine(pending)

    def _send(
        self,
        verb: str,
        target: RequestTarget,
        query: Mapping[str, Any] | None,
        body: Any,
        *,
        timeout: float,
        whole: bool = True,
    ) -> Any:
        """Send a request once, and once more with new credentials if the server refuses the old ones."""
        timeout = min(timeout, max(MOMENT, self._end - time.monotonic()))
        given = {key: value for key, value in (query or {}).items() if value is not None}
        for attempt in (1, 2):
            credentials = self.access.headers()
            url = self.access.server + target.path + ("?" + urlencode(given) if given else "")
            headers = credentials.copy()
            headers["Accept"] = _accepted(target)
            headers["User-Agent"] = "flk"
            if verb in ("get", "list"):
                headers["Accept-Encoding"] = "gzip"
            if body is not None:
                headers["Content-Type"] = _content_type(verb, target)
            reply = self.access.pool.request(
                _METHODS[verb],
                url,
                body=None if body is None else json.dumps(body),
                headers=headers,
                timeout=urllib3.Timeout(connect=min(self.retries.connect_timeout, timeout), read=timeout),
                retries=False,
                redirect=False,  # another server must not get the credentials
                preload_content=whole,
            )
            if reply.status != 401 or attempt == 2:
                break
            reply.drain_conn()
            self.access.renew(credentials)
        self._answered = True
        self._set_clock(reply.headers.get("Date"))
        return reply

    def _set_clock(self, date: str | None) -> None:
        with suppress(ValueError):
            self._skew = parsedate_to_datetime(date or "").timestamp() - time.time()

    def _json(self, reply: Any) -> Object:
        try:
            # An answer has at most 500 objects, and is the API server's own; its numbers may be any of JSON.
            data = json.loads(reply.data)
        except foreign.ERRORS:
            data = None
        if not isinstance(data, dict) or not _holds_objects(data):
            raise not_an_api_server(self.access.context, reply.status)
        return data


def _holds_objects(data: Object) -> bool:
    """Return whether an answer that may be a list is one of objects: they have metadata."""
    items = data.get("items") or []
    every = [data, *items] if isinstance(items, list) else [items]
    return all(isinstance(each, dict) and isinstance(each.get("metadata", {}), dict | None) for each in every)


def _content_type(verb: str, target: RequestTarget) -> str:
    """Return the type of a request's body. A strategic merge adds to lists; the API server has it for its own kinds."""
    if verb != "patch":
        return "application/json"
    return f"application/{'merge' if target.resource.group else 'strategic-merge'}-patch+json"


def _accepted(target: RequestTarget) -> str:
    """Return the types of answers that are understood, the best first."""
    if target.resource.subresource:
        return "*/*"
    if isinstance(target, Document) and target.document == GROUPS:  # all kinds in one answer
        forms = [f"application/json;g=apidiscovery.k8s.io;v={v};as=APIGroupDiscoveryList" for v in _DISCOVERY]
        return ",".join([*forms, "application/json"])
    kind = "PartialObjectMetadata" if target.name else "PartialObjectMetadataList"
    metadata = f"application/json;as={kind};g=meta.k8s.io;v=v1,"
    return metadata * target.metadata_only + "application/json"


def _retry_after(reply: Any) -> float:
    """Return the seconds that the server asks to wait before the next attempt."""
    details = status_object(reply.data).get("details") or {}
    value: Any = reply.headers.get("Retry-After") or details.get("retryAfterSeconds")
    try:
        return max(0.0, float(value))
    except (TypeError, ValueError):
        return 0.0
