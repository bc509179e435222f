"""Where the launcher of pod 0 keeps the job's record for when its pods are gone: a ConfigMap, or a file on a volume.

All jobs of the namespace share the ConfigMap, the only object that the launcher may read and patch. The file is in the
folder of the job's checkpoints. `send` sends a request to a server in the cluster, with a token of the pod.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import ssl
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Final, Protocol

from flk_runtime.contract import foreign, pod_layout
from flk_runtime.contract.record import ArchivedRecord

LIMIT: Final = 900_000  # bytes of all entries of a ConfigMap: an object of the API may have 1 MiB
TIMEOUT: Final = 5.0  # seconds for one request, and for reading a file
ERRORS: Final = (OSError, http.client.HTTPException, ValueError, KeyError)  # of a request and of what is in its answer
_FILE: Final = ".flk-record-{key}.json"


class Place(Protocol):
    """A place for entries, by their keys. The methods take seconds at most, or raise one of `ERRORS`."""

    name: str  # for messages

    def read(self, key: str) -> str:
        """The entry; empty if there is none."""

    def write(self, key: str, text: str) -> None: ...


class ConfigMap:
    """Entries of a ConfigMap. The oldest make room."""

    def __init__(self, name: str, folder: str = "") -> None:
        """``folder`` holds token, ca.crt and namespace."""
        self.name = f"ConfigMap {name}"
        self._object = name
        self._folder = Path(folder or pod_layout.API_FOLDER)
        self._made_room = False

    def read(self, key: str) -> str:
        return self._data().get(key, "")

    def write(self, key: str, text: str) -> None:
        try:
            dropped = {} if self._made_room else dict.fromkeys(self._oldest(key, len(text)))
            self._request("PATCH", {"data": {**dropped, key: text}})
            self._made_room = True
        except urllib.error.HTTPError:
            self._made_room = False  # it may have become full
            raise

    def _oldest(self, own: str, size: int) -> list[str]:
        """Return the keys of the oldest entries, as many as have to be removed so that an entry of this size fits."""
        entries = {key: text for key, text in self._data().items() if key != own}
        total = size + sum(len(key) + len(text.encode()) for key, text in entries.items())
        found = []
        for key in sorted(entries, key=lambda key: _updated(entries[key])):
            if total <= LIMIT:
                break
            total -= len(key) + len(entries[key].encode())
            found.append(key)
        return found

    def _data(self) -> dict[str, str]:
        data = foreign.parse_object(self._request("GET")).get("data") or {}
        return foreign.read(dict[str, str], data)

    def _request(self, method: str, body: Any = None) -> bytes:
        """Send a request about the ConfigMap, and return the answer. Raises one of `ERRORS`."""
        folder = self._folder
        host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
        host = f"[{host}]" if ":" in host else host
        namespace = (folder / "namespace").read_text().strip()
        return send(
            f"https://{host}:{port}/api/v1/namespaces/{namespace}/configmaps/{self._object}?fieldManager=flk",
            None if body is None else json.dumps(body).encode(),
            method=method,
            content_type="application/merge-patch+json",
            token=folder / "token",
            authority=str(folder / "ca.crt"),
        )


class Folder:
    """A file in a folder on a volume. Files of former jobs with this folder are removed."""

    def __init__(self, path: str) -> None:
        self.name = f"folder {path}"
        self._path = Path(path)

    def read(self, key: str) -> str:
        found: list[str] = []

        def look() -> None:
            with contextlib.suppress(OSError, UnicodeDecodeError), open(self._file(key)) as stream:
                found.append(stream.read(foreign.LIMIT))

        thread = threading.Thread(target=look, name="record", daemon=True)  # a system call may never return
        thread.start()
        thread.join(TIMEOUT)
        return found[0] if found else ""

    def write(self, key: str, text: str) -> None:
        file = self._file(key)
        self._path.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        part.unlink(missing_ok=True)  # a link of another job would lead elsewhere
        with open(part, "x") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(file)
        for other in self._path.glob(_FILE.format(key="*")):
            if other != file:
                with contextlib.suppress(OSError):
                    other.unlink()

    def _file(self, key: str) -> Path:
        return self._path / _FILE.format(key=key)


def describe(error: Exception) -> str:
    """What one of `ERRORS` says, for people."""
    if isinstance(error, urllib.error.HTTPError):
        return f"the API server answers {error.code} {error.reason}"
    return str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error)


def _updated(text: str) -> float:
    entry = ArchivedRecord.from_json(text)
    return entry.updated if entry else 0.0


def send(
    url: str, body: bytes | None, *, method: str, content_type: str, token: Path | None, authority: str | None
) -> bytes:
    """Send a request, and return the answer. Raises one of ERRORS.

    ``token`` is the file of the token, and ``authority`` the file of who has signed the certificates.
    """
    headers = {"Content-Type": content_type}
    if token:  # it is read anew each time, since the kubelet renews it
        headers["Authorization"] = f"Bearer {token.read_text().strip()}"
    request = urllib.request.Request(url, body, headers, method=method)  # noqa: S310
    context = ssl.create_default_context(cafile=authority) if url.startswith("https:") else None
    # No proxy: the server is in the cluster.
    handlers = (urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    with urllib.request.build_opener(*handlers).open(request, timeout=TIMEOUT) as answer:
        return bytes(answer.read())
