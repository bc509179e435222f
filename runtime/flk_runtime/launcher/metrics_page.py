"""MetricsPage: a launcher's metrics of its job, over HTTP in the text format of Prometheus.

Every launcher serves it at /metrics of the port FLK_METRICS_PORT, if that is set. The page is made when it is asked
for, in a thread of its own, from values that the launcher's loop has left; the job does not depend on it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from flk_runtime.contract.record import Goodput, JobRecord
from flk_runtime.launcher.settings import Settings
from flk_runtime.shared.progress import ProgressPage

_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricsPage:
    """The metrics of one pod. Methods return at once."""

    def __init__(self, settings: Settings, log: Callable[[str], None]) -> None:
        """Start to serve. A port that cannot be opened is one line for ``log``."""
        self._labels = f'job="{settings.job}",pod="{settings.pod}"'
        self._record: JobRecord | None = None
        self._goodput: Goodput | None = None
        self._ranks: list[tuple[int, float, int, int]] = []  # of each local rank: step, its seconds, saved, stored step
        page = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                known = self.path.partition("?")[0] == "/metrics"
                text = page.text().encode() if known else b"the metrics are at /metrics\n"
                self.send_response(200 if known else 404)
                self.send_header("Content-Type", _TYPE)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *arguments: object) -> None:
                """Print nothing: the log is for the training."""

        try:
            self._server = _Server(("", settings.metrics_port), Handler)
        except OSError as error:
            log(f"metrics are not served at port {settings.metrics_port}: {error.strerror}")
            return
        threading.Thread(target=self._server.serve_forever, name="flk-metrics", daemon=True).start()

    def put_record(self, record: JobRecord) -> None:
        """Show this record of the job; the launcher of pod 0 has it."""
        self._record, self._goodput = record, record.goodput

    def put_progress(self, pages: Iterable[ProgressPage], goodput: Goodput | None = None) -> None:
        """Show how far the ranks of this pod are, in the order of their local ranks, and the goodput of the job."""
        self._goodput = goodput
        self._ranks = [(page.step, page.step_seconds, page.saved, page.stored) for page in pages]

    def text(self) -> str:
        """Return the page. A metric without a value yet is left out."""
        lines: list[str] = []

        def add(name: str, kind: str, help_text: str, values: Iterable[tuple[str, float]]) -> None:
            samples = [f"{name}{{{self._labels}{more}}} {value:g}" for more, value in values]
            if samples:
                lines.extend((f"# HELP {name} {help_text}", f"# TYPE {name} {kind}", *samples))

        if self._record:
            record = self._record
            attempts = [("", float(len(record.attempts)))]
            add("flk_attempts_total", "counter", "Attempts of all ranks that have begun.", attempts)
            restarts = [("", float(record.restarts))]
            add("flk_restarts_total", "counter", "Attempts that followed failures of the training code.", restarts)
            disruptions = [("", float(record.disruptions))]
            add("flk_disruptions_total", "counter", "Attempts that followed disruptions.", disruptions)
            add("flk_slow_ranks", "gauge", "Ranks that the others wait for.", [("", float(len(record.slow)))])
        if goodput := self._goodput:
            share = [] if goodput.share is None else [("", goodput.share)]
            add("flk_goodput_ratio", "gauge", "Time of steps whose result was kept, as a share of all time.", share)
            times = [(f',cause="{cause}"', seconds) for cause, seconds in goodput.seconds.items()]
            add("flk_time_seconds", "gauge", "Time of the job by what it went into.", times)
        ranks = [(f',local_rank="{number}"', *values) for number, values in enumerate(self._ranks)]
        steps = [(label, float(step)) for label, step, *_ in ranks if step >= 0]
        add("flk_step", "gauge", "Optimizer steps done.", steps)
        seconds = [(label, value) for label, _, value, *_ in ranks if value > 0]
        add("flk_step_seconds", "gauge", "Duration of a step, as a weighted mean of the latest.", seconds)
        saved = [(label, float(step)) for label, _, _, step, _ in ranks if step >= 0]
        add("flk_saved_step", "gauge", "Step of the latest checkpoint.", saved)
        stored = [(label, float(step)) for label, _, _, _, step in ranks if step >= 0]
        add("flk_stored_step", "gauge", "Step of the latest checkpoint in storage.", stored)
        return "\n".join(lines) + "\n"


class _Server(ThreadingHTTPServer):
    """Listens on IPv4 and IPv6, where the pod has both."""

    daemon_threads = True
    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            with contextlib.suppress(OSError):
                self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()
