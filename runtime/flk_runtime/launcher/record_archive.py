"""RecordArchive: keeps the record of the job in a ConfigMap, for when its pods, or the job itself, are gone.

The launcher of pod 0 writes one entry of a ConfigMap that all jobs of the namespace share: when an attempt begins or
the job ends, and else every few minutes. It has the right to read and patch that object only. Nothing of the job
depends on it: without the right, or without an API server, the job runs on.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from flk_runtime.contract import log_format, pod_layout
from flk_runtime.contract.record import ArchivedRecord, JobRecord, entry_key
from flk_runtime.launcher.settings import Settings
from flk_runtime.shared.progress import ProgressPage

INTERVAL: Final = 300.0  # seconds after which the progress alone is written
_PAUSE: Final = 2.0  # seconds between two writes at least
_RETRY: Final = 30.0  # seconds after a write that failed
_TIMEOUT: Final = 5.0  # seconds for one request
_LINES, _LINE_LIMIT = 30, 300  # last lines that are kept, and characters of each
LIMIT: Final = 900_000  # bytes of all entries: an object of the API may have 1 MiB
_ERRORS: Final = (OSError, http.client.HTTPException, ValueError, KeyError)  # of a request and of its answer


class RecordArchive:
    """Writes the newest record and progress in a thread of its own. All methods return at once, except `flush`."""

    def __init__(
        self,
        settings: Settings,
        last_lines: Callable[[int], list[str]],
        log: Callable[[str], None],
        *,
        folder: str = "",
        telemetry: Callable[[], str] = str,
    ) -> None:
        """``folder`` holds token, ca.crt and namespace. A line about the first failure is given to ``log``.

        ``telemetry`` returns the packed telemetry of the job; it is called in the thread.
        """
        self._settings = settings
        self._last_lines = last_lines
        self._log = log
        self._telemetry = telemetry
        self._folder = Path(folder or pod_layout.API_FOLDER)
        self.created = time.time()
        """When the job's first launcher of pod 0 started, in seconds since the epoch, as far as was read."""
        self._entry: ArchivedRecord | None = None
        self._changed = False  # the record, which is written soon, as opposed to the progress
        self._puts = 0  # how often the record has changed
        self._written = 0.0  # time.monotonic
        self._told = False  # that it cannot be written
        self._made_room = False
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None

    def put_record(self, record: JobRecord) -> None:
        """Write a record soon."""
        settings = self._settings
        with self._condition:
            made = self._entry or ArchivedRecord(
                settings.job, settings.job_uid, settings.pods, settings.processes, self.created, 0.0, record
            )
            self._entry, self._changed = replace(made, record=record), True
            self._puts += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="record archive", daemon=True)
                self._thread.start()
            self._condition.notify_all()

    def put_progress(self, page: ProgressPage, record: JobRecord) -> None:
        """Write a rank's progress and the record with the next record, or when the last write is some minutes ago."""
        with self._condition:
            if self._entry:
                step = None if page.step < 0 else page.step
                seconds = round(page.step_seconds, 6) or None
                self._entry = replace(self._entry, record=record, step=step, step_seconds=seconds)

    def flush(self, seconds: float) -> None:
        """Wait at most ``seconds`` until the latest record is written."""
        with self._condition:
            self._condition.wait_for(lambda: not self._changed or self._told, seconds)

    def read(self) -> ArchivedRecord | None:
        """The entry that former launchers of this job have kept; None if there is none, or it cannot be read now."""
        if not self._settings.job_uid:
            return None  # it may be another job's of the same name
        with contextlib.suppress(*_ERRORS):
            data: dict[str, str] = json.loads(self._request("GET")).get("data") or {}
            entry = ArchivedRecord.from_json(data.get(entry_key(self._settings.job, self._settings.job_uid), ""))
            if entry:
                self.created = min(self.created, entry.created)
            return entry
        return None

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._changed, max(0.0, self._written + INTERVAL - time.monotonic()))
                entry, was_changed, puts = self._entry, self._changed, self._puts
            if entry is None:
                continue
            lines = [line[:_LINE_LIMIT] for line in self._last_lines(10 * _LINES) if not log_format.is_record(line)]
            entry = replace(entry, updated=time.time(), lines=lines[-_LINES:], telemetry=self._telemetry())
            failure = self._write(entry)
            with self._condition:
                self._written = time.monotonic()
                if failure and not self._told:
                    self._log(f"the record of the job is not kept in ConfigMap {self._settings.records}: {failure}")
                self._told = bool(failure)
                self._changed = self._puts > puts or (was_changed and bool(failure))
                self._condition.notify_all()
            time.sleep(_RETRY if failure else _PAUSE)

    def _write(self, entry: ArchivedRecord) -> str:
        """Write an entry. Returns why that failed; empty if it did not."""
        text = entry.to_json()
        try:
            dropped = {} if self._made_room else dict.fromkeys(self._oldest(entry.key, len(text)))
            self._request("PATCH", {"data": {**dropped, entry.key: text}})
            self._made_room = True
        except urllib.error.HTTPError as error:
            self._made_room = False  # it may have become full
            return f"the API server answers {error.code} {error.reason}"
        except _ERRORS as error:  # URLError is an OSError
            return str(getattr(error, "reason", None) or error)
        return ""

    def _oldest(self, own: str, size: int) -> list[str]:
        """Return the keys of the oldest entries, as many as have to be removed so that an entry of this size fits."""
        data: dict[str, str] = json.loads(self._request("GET")).get("data") or {}
        entries = {key: text for key, text in data.items() if key != own}
        total = size + sum(len(key) + len(text.encode()) for key, text in entries.items())
        found = []
        for key in sorted(entries, key=lambda key: _updated(entries[key])):
            if total <= LIMIT:
                break
            total -= len(key) + len(entries[key].encode())
            found.append(key)
        return found

    def _request(self, method: str, body: Any = None) -> bytes:
        """Send a request about the ConfigMap, and return the answer. Raises one of _ERRORS."""
        folder = self._folder
        host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
        host = f"[{host}]" if ":" in host else host
        namespace, token = ((folder / name).read_text().strip() for name in ("namespace", "token"))  # it is renewed
        path = f"/api/v1/namespaces/{namespace}/configmaps/{self._settings.records}"
        request = urllib.request.Request(
            f"https://{host}:{port}{path}?fieldManager=flk",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/merge-patch+json"},
        )
        context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        handlers = (urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
        with urllib.request.build_opener(*handlers).open(request, timeout=_TIMEOUT) as answer:
            return bytes(answer.read())


def _updated(text: str) -> float:
    entry = ArchivedRecord.from_json(text)
    return entry.updated if entry else 0.0
