"""PodReader: reads the log of one pod to its end, over broken connections and restarts of its container."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterable
from typing import Final

from flk.errors import ApiError, ForbiddenError
from flk.jobs.client import JobClient
from flk.jobs.logs.lines import LineFilter, LogLine
from flk.jobs.logs.position import LogPosition
from flk.kube import Object

IDLE: Final = 240.0  # seconds without a line after which a log is requested again: its connection may be dead
_BACKOFFS: Final = (0.2, 0.5, 1.0, 2.0, 5.0)  # seconds between requests that bring no new line


class _Container(enum.Enum):
    RUNNING = "running, or about to be restarted"
    ENDED = "ended, and its log is complete"
    GONE = "gone: the name has no pod, or another one"


class PodReader:
    """A thread that passes the lines of one pod to ``put`` until the pod has ended or ``closed`` is set.

    ``error`` is what ended it early. ``fresh`` is False for a pod that replaces another: its log is read from the
    start, whatever the options say.
    """

    def __init__(
        self,
        client: JobClient,
        pod: Object,
        chosen: LineFilter,
        put: Callable[[Iterable[LogLine]], None],
        closed: threading.Event,
        *,
        fresh: bool,
    ) -> None:
        self.error: Exception | None = None
        self._client, self._pod, self._filter, self._put, self._closed = client, pod, chosen, put, closed
        self._name = str(pod["metadata"]["name"])
        self._position = LogPosition()
        self._query = chosen.options.query() if fresh else {}
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"flk-log-{self._name}")
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether lines may still come."""
        return self._thread.is_alive()

    def join(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for the last line."""
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            self._read()
        except Exception as error:  # of any kind: the thread that prints raises it
            self.error = error

    def _read(self) -> None:
        idle = 0  # requests in a row that brought no new line
        while not self._closed.is_set():
            container = self._container()
            if container == _Container.GONE:
                return  # a request by the name would read the log of the pod that has it now
            new_lines = False
            try:
                # After the container's end, one more request reads what a broken stream may have missed.
                follow = container == _Container.RUNNING
                with self._client.stream_log(self._name, IDLE, follow=follow, timestamps=True, **self._query) as lines:
                    for line in lines:
                        text = self._position.accept(line)
                        if text is not None:
                            new_lines = True
                            self._put(self._filter.shown(self._pod, [text]))
                        if self._closed.is_set():
                            return
                if container == _Container.ENDED:
                    return
            except ForbiddenError:
                raise
            except ApiError as error:
                if error.status == 404 or (container == _Container.ENDED and error.status == 400):
                    return
            idle = 0 if new_lines else idle + 1
            self._closed.wait(_BACKOFFS[min(idle, len(_BACKOFFS) - 1)])
            since = self._position.resume()
            if since:
                self._query = {"sinceTime": since}

    def _container(self) -> _Container:
        try:
            pod = self._client.find_pod(self._name)
        except ForbiddenError:
            raise
        except ApiError:
            return _Container.RUNNING
        if pod is None or pod["metadata"]["uid"] != self._pod["metadata"]["uid"]:
            return _Container.GONE
        ended = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
        return _Container.ENDED if ended else _Container.RUNNING
