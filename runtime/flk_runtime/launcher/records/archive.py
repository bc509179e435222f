"""RecordArchive: keeps the record of the job in a place that outlives its pods: a ConfigMap, or a file on a volume.

The launcher of pod 0 writes it when an attempt begins or the job ends, and else every few minutes. Where all launchers
of a job have ended at once, the next ones go on with it. Nothing of the job depends on it: without the right, or
without an API server or a volume that answers, the job runs on.

All jobs of the namespace share the ConfigMap, the only object that the launcher may read and patch. The file is in the
folder of the job's checkpoints.
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

from flk_runtime.contract import foreign, log_format, pod_layout
from flk_runtime.contract.record import ArchivedRecord, JobRecord, entry_key
from flk_runtime.contract.status import RankStatus
from flk_runtime.launcher.settings import Settings
from flk_runtime.system.host import write_synced

INTERVAL: Final = 300.0  # seconds after which the progress alone is written
_RETRY: Final = 30.0  # seconds after a write that failed, if the record has not changed
_LINES, _LINE_LIMIT = 30, 300  # last lines that are kept, and characters of each
_TOO_LARGE: Final = (413, 422)  # codes of the API server for an object of more than 1 MiB
TIMEOUT: Final = 5.0  # seconds for one request
ERRORS: Final = (OSError, http.client.HTTPException, ValueError, KeyError)  # of a request and of what is in its answer
_FILE: Final = ".flk-record.json"


class RecordArchive:
    """Writes the newest record and progress in a thread of its own. All methods return at once, except `flush`."""

    def __init__(
        self,
        settings: Settings,
        place: ConfigMap | Folder,
        last_lines: Callable[[int], list[str]],
        log: Callable[[str], None],
        *,
        telemetry: Callable[[], str] = str,
    ) -> None:
        """A line about the first failure is given to ``log``.

        ``telemetry`` returns the packed telemetry of the job; it is called in the thread.
        """
        self._settings = settings
        self._place = place
        self._last_lines = last_lines
        self._log = log
        self._telemetry = telemetry
        self.created = time.time()
        """When the job's first launcher of pod 0 started, in seconds since the epoch, as far as was read."""
        self._entry: ArchivedRecord | None = None
        self._puts, self._tried = 0, 0  # how often the record has changed, and how often when a write was tried last
        self._due = 0.0  # when it is written though the record has not changed, by time.monotonic
        self._told = False  # that it cannot be written
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None

    def put_record(self, record: JobRecord) -> None:
        """Write a record soon."""
        settings = self._settings
        with self._condition:
            made = self._entry or ArchivedRecord(
                settings.job,
                settings.job_uid,
                settings.pods,
                settings.processes,
                self.created,
                0.0,
                record,
                start=settings.started,
            )
            self._entry = replace(made, record=record)
            self._puts += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="record archive", daemon=True)
                self._thread.start()
            self._condition.notify_all()

    def put_progress(self, rank: RankStatus, record: JobRecord) -> None:
        """Write a rank's progress and the record with the next record, or when the last write is some minutes ago."""
        with self._condition:
            if self._entry:
                step = None if rank.step < 0 else rank.step
                self._entry = replace(self._entry, record=record, step=step, step_seconds=rank.step_seconds)

    def flush(self, seconds: float) -> None:
        """Wait at most ``seconds`` until a write of the latest record has been tried."""
        with self._condition:
            self._condition.wait_for(lambda: self._tried == self._puts, seconds)

    def read(self) -> ArchivedRecord | None:
        """The entry that former launchers of this job have kept; None if there is none, or it cannot be read now.

        One that cannot be understood is ignored, with a line in the log.
        """
        settings = self._settings
        if not settings.job_uid:
            return None  # it may be another job's of the same name
        if isinstance(self._place, Folder):
            self._log(f"reading the record of the job in {self._place.name}")  # a volume may never answer
        try:
            text = self._place.read(entry_key(settings.job, settings.job_uid))
        except ERRORS:
            return None
        if not text:
            return None
        entry = ArchivedRecord.from_json(text)
        if entry is None:
            self._log(f"ignored the record of the job in {self._place.name}: it is damaged")
            return None
        if entry.key != entry_key(settings.job, settings.job_uid):
            return None  # of another job with this folder
        self.created = min(self.created, entry.created)
        return entry

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._puts > self._tried, max(0.0, self._due - time.monotonic()))
                entry, puts = self._entry, self._puts
            if entry is None:
                continue
            lines = [line[:_LINE_LIMIT] for line in self._last_lines(10 * _LINES) if not log_format.is_record(line)]
            entry = replace(entry, updated=time.time(), lines=lines[-_LINES:], telemetry=self._telemetry())
            failure = ""
            try:
                self._place.write(entry.key, entry.to_json())
            except ERRORS as error:  # URLError is an OSError
                failure = str(error)
            with self._condition:
                if failure and not self._told:
                    self._log(f"the record of the job is not kept in {self._place.name}: {failure}")
                self._told = bool(failure)
                self._tried, self._due = puts, time.monotonic() + (_RETRY if failure else INTERVAL)
                self._condition.notify_all()


class ConfigMap:
    """Entries of a ConfigMap. The older half of them makes room where the API server finds it too large."""

    def __init__(self, name: str, folder: str = "") -> None:
        """``folder`` holds token, ca.crt and namespace."""
        self.name = f"ConfigMap {name}"
        self._object = name
        self._folder = Path(folder or pod_layout.API_FOLDER)

    def read(self, key: str) -> str:
        return self._data().get(key, "")

    def write(self, key: str, text: str) -> None:
        try:
            self._request("PATCH", {"data": {key: text}})
        except urllib.error.HTTPError as error:
            if error.code not in _TOO_LARGE:
                raise
            entries = self._data()
            others = sorted(entries.keys() - {key}, key=lambda other: _updated(entries[other]))
            self._request("PATCH", {"data": {**dict.fromkeys(others[: (len(others) + 1) // 2]), key: text}})

    def _data(self) -> dict[str, str]:
        return foreign.read(dict[str, str], foreign.parse_object(self._request("GET")).get("data") or {})

    def _request(self, method: str, body: Any = None) -> bytes:
        """Send a request about the ConfigMap, and return the answer. Raises one of `ERRORS`."""
        folder = self._folder
        host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
        host = f"[{host}]" if ":" in host else host
        namespace = (folder / "namespace").read_text().strip()
        token = (folder / "token").read_text().strip()  # it is read anew each time, since the kubelet renews it
        request = urllib.request.Request(
            f"https://{host}:{port}/api/v1/namespaces/{namespace}/configmaps/{self._object}?fieldManager=flk",
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/merge-patch+json", "Authorization": f"Bearer {token}"},
            method=method,
        )
        context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        # No proxy: the server is in the cluster.
        handlers = (urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
        with urllib.request.build_opener(*handlers).open(request, timeout=TIMEOUT) as answer:
            return bytes(answer.read())


class Folder:
    """A file in a folder on a volume. It is replaced by that of another job with this folder."""

    def __init__(self, path: str) -> None:
        self.name = f"folder {path}"
        self._path = Path(path)

    def read(self, key: str) -> str:
        with contextlib.suppress(FileNotFoundError), open(self._path / _FILE) as stream:
            return stream.read(foreign.LIMIT)
        return ""

    def write(self, key: str, text: str) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        part = self._path / f"{_FILE}.part"
        part.unlink(missing_ok=True)  # a link of another job would lead elsewhere
        write_synced(part, text.encode(), is_new=True)
        part.replace(self._path / _FILE)


def _updated(text: str) -> float:
    entry = ArchivedRecord.from_json(text)
    return entry.updated if entry else 0.0
