"""A fake API server: a real HTTP server that keeps objects in memory, and fails requests as a test tells it to.

It keeps objects by their paths, numbers their versions, and answers create, get, list, patch and delete as Kubernetes
does. ``faults`` are used up, one per request, before it answers normally.
"""

from __future__ import annotations

import json
import re
import threading
import uuid
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

TOKEN = "a-very-secret-token"

# Paths of the objects of kinds, in the namespace that the server has.
JOBS = "/apis/kubeflow.org/v1/namespaces/team/pytorchjobs"
BATCH = "/apis/batch/v1/namespaces/team/jobs"
MAPS = "/api/v1/namespaces/team/configmaps"
SECRETS = "/api/v1/namespaces/team/secrets"
PODS = "/api/v1/namespaces/team/pods"
EVENTS = "/api/v1/namespaces/team/events"
WORKLOADS = "/apis/kueue.x-k8s.io/v1beta1/namespaces/team/workloads"


@dataclass(frozen=True)
class Fault:
    """A fault of one request: what the server does in place of handling it, or after that."""

    status: int = 0  # answered with this status; 0: the connection is closed without an answer
    body: bytes | dict[str, Any] = b""
    headers: dict[str, str] = field(default_factory=dict)
    done: bool = False  # the request is handled all the same
    hang: bool = False  # no answer until the server ends


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: dict[str, str]
    body: Any


def _metadata_of(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer as the API server gives it where only metadata are asked for."""
    kind = {"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata"}
    if "items" not in answer:
        return kind | {"metadata": answer["metadata"]}
    items = [kind | {"metadata": item["metadata"]} for item in answer["items"]]
    return {**answer, "kind": "PartialObjectMetadataList", "items": items}


DISCOVERY_TYPE = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"


def failure(status: int, message: str = "", **details: Any) -> dict[str, Any]:
    """The API server's own form of an error."""
    return {"kind": "Status", "apiVersion": "v1", "code": status, "message": message, "details": details}


def serve(handle: Callable[[BaseHTTPRequestHandler], None]) -> ThreadingHTTPServer:
    """Start a server at a free port of this machine that calls ``handle`` for each request, in a thread of its own."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # or each body would wait 40 ms for the client to acknowledge its headers

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except (ConnectionError, TimeoutError):
                self.close_connection = True

        def answer(self) -> None:
            handle(self)

        do_GET = do_POST = do_DELETE = do_PATCH = answer

        def log_message(self, *_: object) -> None: ...

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return server


class FakeApiServer:
    """An API server of the namespace ``team``. Its fields may be changed while it runs."""

    def __init__(self) -> None:
        self.faults: deque[Fault | None] = deque()
        kinds = (JOBS, MAPS, SECRETS, PODS, EVENTS, WORKLOADS)
        self.objects: dict[str, dict[str, dict[str, Any]]] = {path: {} for path in kinds}
        self.watches: dict[str, deque[list[bytes]]] = defaultdict(deque)
        self.logs: dict[str, deque[bytes]] = {}  # by pod: the answers to successive requests for its log
        self.written: dict[str, str] = {}  # by pod: the log that every request gets, where ``logs`` has nothing
        self.date = ""  # the header Date of answers, by which clients know the server's clock
        self.created: Callable[[dict[str, Any]], None] = lambda item: None  # called with each object that is created
        self.heard: Callable[[Message], None] = lambda headers: None  # called with the headers of each request
        self.documents: dict[str, dict[str, Any]] = {}  # fixed answers by path, such as the documents of API discovery
        # By path: status and message of the error that it always gets, and the details of that, if it has any.
        self.refused: dict[str, tuple[int, str] | tuple[int, str, dict[str, Any]]] = {}
        self.requests: list[Request] = []
        self.version = 100
        self.ended = threading.Event()
        self.server = serve(self._answer)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def close(self) -> None:
        self.ended.set()
        self.server.shutdown()
        self.server.server_close()

    def fail(self, status: int = 0, body: bytes | dict[str, Any] = b"", *, times: int = 1, **how: Any) -> None:
        """Have the next requests fail; ``how`` are the other fields of a Fault."""
        self.faults.extend([Fault(status, body, **how)] * times)

    @staticmethod
    def status(status: int, message: str = "", **details: Any) -> dict[str, Any]:
        """The API server's own form of an error."""
        return failure(status, message, **details)

    def asked(self, method: str) -> list[str]:
        """Paths of all requests of one method."""
        return [request.path for request in self.requests if request.method == method]

    def add(self, kind: str, item: dict[str, Any]) -> dict[str, Any]:
        """Put an object of a kind (``pytorchjobs``, ``pods``, …) into the namespace ``team``."""
        collection = next(path for path in self.objects if path.endswith(f"/{kind}"))
        return self._create(collection, item)

    def delete_all(self) -> None:
        """Delete all objects at once, as when a namespace is emptied."""
        for collection in self.objects.values():
            collection.clear()

    def _create(self, collection: str, item: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        meta = {"uid": str(uuid.uuid4()), "creationTimestamp": "2026-01-01T00:00:00Z", "namespace": "team"}
        made = {**item, "metadata": meta | item["metadata"] | {"resourceVersion": str(self.version)}}
        self.objects[collection][made["metadata"]["name"]] = made
        return made

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        self.heard(handler.headers)
        parts = urlsplit(handler.path)
        length = int(handler.headers.get("Content-Length") or 0)
        body = json.loads(handler.rfile.read(length)) if length else None
        query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        request = Request(handler.command, parts.path, query, body)
        self.requests.append(request)
        fault = self.faults.popleft() if self.faults and parts.path != "/apis" else None
        if fault is None:
            status, answer = self._do(request)
            metadata_only = "as=PartialObjectMetadata" in handler.headers.get("Accept", "")
            self._reply(handler, status, _metadata_of(answer) if metadata_only and status < 300 else answer)
            return
        if fault.done:
            self._do(request)
        if fault.hang:
            self.ended.wait()
        if fault.status:
            self._reply(handler, fault.status, fault.body, fault.headers)
        else:
            handler.close_connection = True

    def _do(self, request: Request) -> tuple[int, Any]:
        path, _, name = request.path.rpartition("/")
        if request.path in self.refused:
            status, message, *details = self.refused[request.path]
            return status, failure(status, message, **(details[0] if details else {}))
        if path == "/api/v1/namespaces":
            absent = failure(404, f'namespaces "{name}" not found', name=name, kind="namespaces")
            return (200, {"metadata": {"name": name}}) if name == "team" else (404, absent)
        if request.path == "/apis" and request.path not in self.documents:
            return 200, self._discovery()
        if request.path in self.documents:
            return 200, self.documents[request.path]
        if request.path in self.objects:
            return self._do_all(request, request.path)
        everywhere = request.path.replace(f"/{name}", f"/namespaces/team/{name}")
        if everywhere in self.objects:
            return self._do_all(request, everywhere)
        if another := re.search("/namespaces/(?!team/)([^/]+)/", request.path):
            return self._do_in_another_namespace(request, another[1], path)
        if name == "log":
            return self._log(path.rpartition("/")[2], request.query)
        if path not in self.objects:
            return 404, b"404 page not found\n"
        found = self.objects[path].get(name)
        if found is None:
            return 404, failure(404, f'"{name}" not found', name=name, kind=path.rpartition("/")[2])
        if request.method == "DELETE":
            self._delete(path, name, found, request.body or {})
        if request.method == "PATCH":
            return self._patch(path, name, found, request)
        return 200, found

    def _discovery(self) -> dict[str, Any]:
        """Return the kinds of which there are collections or documents, as aggregated discovery does."""
        groups: dict[str, dict[str, dict[str, None]]] = defaultdict(lambda: defaultdict(dict))
        for path in (*self.objects, *self.documents):
            parts = path.split("/")[2:]
            if path.startswith("/apis/") and len(parts) > 2:
                groups[parts[0]][parts[1]][parts[4] if parts[2] == "namespaces" else parts[2]] = None
        items = [
            {
                "metadata": {"name": group},
                "versions": [
                    {"version": version, "resources": [{"resource": plural} for plural in plurals]}
                    for version, plurals in versions.items()
                ],
            }
            for group, versions in groups.items()
        ]
        return {"kind": "APIGroupDiscoveryList", "items": items}

    def _patch(self, collection: str, name: str, item: dict[str, Any], request: Request) -> tuple[int, Any]:
        """Merge a patch into an object, as RFC 7396 describes it. A UID in the patch must be the object's.

        The owners of Kubernetes' own objects are merged by their UIDs.
        """
        change = request.body
        uid = change.get("metadata", {}).get("uid", item["metadata"]["uid"])
        if uid != item["metadata"]["uid"]:
            return 409, failure(409, f"the UID in the precondition ({uid}) does not match")
        patched = _merged(item, change)
        if collection.startswith("/api/v1/"):
            every = [meta.get("ownerReferences") or [] for meta in (item["metadata"], change["metadata"])]
            patched["metadata"]["ownerReferences"] = list({o["uid"]: o for each in every for o in each}.values())
        if request.query.get("dryRun"):
            return 200, patched
        self.version += 1
        patched["metadata"]["resourceVersion"] = str(self.version)
        self.objects[collection][name] = patched
        return 200, patched

    def _delete(self, collection: str, name: str, item: dict[str, Any], options: dict[str, Any]) -> None:
        """Delete an object; with foreground propagation it stays, marked, while there are pods that it owns."""
        uid = item["metadata"]["uid"]
        pods = self.objects.get(PODS, {}).values()
        owners = [owner["uid"] for pod in pods for owner in pod["metadata"].get("ownerReferences") or []]
        if (options.get("propagationPolicy") == "Foreground" and uid in owners) or item["metadata"].get("finalizers"):
            item["metadata"].setdefault("deletionTimestamp", "2026-01-01T02:05:10Z")
        else:
            del self.objects[collection][name]

    def _do_in_another_namespace(self, request: Request, namespace: str, path: str) -> tuple[int, Any]:
        """Answer a request about a namespace that does not exist."""
        here = request.path.replace(f"/namespaces/{namespace}/", "/namespaces/team/")
        name = here.rpartition("/")[2]
        if here not in self.objects and here.rpartition("/")[0] not in self.objects:
            return 404, b"404 page not found\n"
        if request.method == "POST":
            return 404, failure(404, f'namespaces "{namespace}" not found', name=namespace, kind="namespaces")
        if here in self.objects:
            return 200, {"kind": "List", "apiVersion": "v1", "items": [], "metadata": {"resourceVersion": "100"}}
        return 404, failure(404, f'"{name}" not found', name=name, kind=path.rpartition("/")[2])

    def _do_all(self, request: Request, collection: str) -> tuple[int, Any]:
        items = self.objects[collection]
        if request.method == "POST":
            meta = request.body["metadata"]
            name = meta.get("name") or f"{meta['generateName']}x"
            if name in items:
                return 409, failure(409, f'"{name}" already exists')
            if request.query.get("dryRun"):
                return 201, request.body
            created = self._create(collection, request.body)
            self.created(created)
            return 201, created
        if request.query.get("watch"):
            script = self.watches[collection]
            if not script:
                self.ended.wait()
            return 200, b"".join(script.popleft()) if script else b""
        chosen = [item for item in items.values() if _selected(item, request.query)]
        # kubectl decodes a list by its kind; a List holds objects of any kind.
        head = {"kind": "List", "apiVersion": "v1"}
        return 200, {**head, "items": chosen, "metadata": {"resourceVersion": str(self.version)}}

    def _log(self, pod: str, query: dict[str, str]) -> tuple[int, Any]:
        if self.logs.get(pod):
            return 200, self.logs[pod].popleft()
        if pod not in self.written or query.get("previous"):
            return 400, failure(400, "container is waiting to start")
        lines = self.written[pod].splitlines(keepends=True)
        lines = lines[max(0, len(lines) - int(query["tailLines"])) :] if "tailLines" in query else lines
        stamp = "2026-01-01T00:00:10.5Z " if query.get("timestamps") else ""
        return 200, "".join(stamp + line for line in lines).encode()

    def _reply(
        self, handler: BaseHTTPRequestHandler, status: int, body: Any, headers: dict[str, str] | None = None
    ) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        handler.send_response_only(status)  # without a Date, which a test may send itself
        discovery = isinstance(body, dict) and body.get("kind") == "APIGroupDiscoveryList"
        form = {"Content-Type": DISCOVERY_TYPE} if discovery else {}  # kubectl reads another form without it
        for key, value in (({"Date": self.date} if self.date else {}) | form | (headers or {})).items():
            handler.send_header(key, value)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)


def _merged(base: Any, change: Any) -> Any:
    if not isinstance(change, dict):
        return change
    merged = dict(base) if isinstance(base, dict) else {}
    for key, value in change.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merged(merged.get(key), value)
    return merged


def _selected(item: dict[str, Any], query: dict[str, str]) -> bool:
    """Whether the selectors of a request choose an object, by (un)equal values and by labels that (do not) exist."""
    labels = item["metadata"].get("labels") or {}
    for term in filter(None, query.get("labelSelector", "").split(",")):
        key, equals, value = term.partition("=")
        if key.startswith("!"):
            if key[1:] in labels:
                return False
        elif key.endswith("!"):
            if labels.get(key[:-1]) == value:
                return False
        elif key not in labels or (equals and labels[key] != value):
            return False
    for term in filter(None, query.get("fieldSelector", "").split(",")):
        path, _, value = term.partition("=")
        found: Any = item
        keys = {"source": "source.component"}  # of events, where they have no path
        for key in keys.get(path, path.removesuffix("!")).split("."):
            found = (found or {}).get(key)
        if ((found or "") == value) == path.endswith("!"):
            return False
    return True


def write_kubeconfig(path: Path, url: str) -> Path:
    """Write a kubeconfig whose context ``fake`` is the namespace ``team`` of the server at ``url``."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "fake",
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": TOKEN}}],
        "contexts": [{"name": "fake", "context": {"cluster": "c", "user": "u", "namespace": "team"}}],
    }
    path.write_text(json.dumps(config))
    path.chmod(0o600)
    return path
