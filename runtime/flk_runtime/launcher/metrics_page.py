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
from typing import Final

from flk_runtime.contract.record import Goodput, JobRecord
from flk_runtime.contract.telemetry import PodUsage, Telemetry
from flk_runtime.launcher.settings import Settings
from flk_runtime.shared.progress import ProgressPage

_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Of the whole job, by the fields of Sample that have them.
_OF_SAMPLES: Final = {
    "loss": ("flk_loss", "Loss, as rank 0 has printed it."),
    "samples_per_s": ("flk_samples_per_second", "Samples that all ranks train on in a second."),
    "tokens_per_s": ("flk_tokens_per_second", "Tokens that all ranks train on in a second."),
    "mfu": ("flk_mfu_ratio", "Model FLOPs utilisation."),
    "data_wait": ("flk_data_wait_ratio", "Share of the time in which rank 0 waited for data."),
    "communication": ("flk_communication_ratio", "Share of the time in which a collective was under way."),
    "step_seconds": ("flk_median_step_seconds", "Duration of a step of the median rank."),
}
_LATEST: Final = 20  # samples in which a value is looked for: not every line has all
# Of this pod, by the fields of PodUsage.
_OF_POD: Final = {
    "cpu": ("flk_pod_cpu_cores", "Processors that the pod uses."),
    "cpu_limit": ("flk_pod_cpu_limit_cores", "Processors that the pod may use."),
    "memory": ("flk_pod_memory_bytes", "Memory that counts against the limit of the pod."),
    "memory_limit": ("flk_pod_memory_limit_bytes", "Memory that the pod may use."),
    "received": ("flk_pod_received_bytes_per_second", "Bytes that the pod receives in a second."),
    "sent": ("flk_pod_sent_bytes_per_second", "Bytes that the pod sends in a second."),
    "disk_read": ("flk_pod_disk_read_bytes_per_second", "Bytes that the pod reads from disks in a second."),
    "disk_written": ("flk_pod_disk_written_bytes_per_second", "Bytes that the pod writes to disks in a second."),
}
_OF_GPU: Final = {
    "busy": ("flk_gpu_busy_ratio", "Share of the time in which a kernel ran on the GPU."),
    "memory": ("flk_gpu_memory_bytes", "Memory of the GPU that is used."),
    "memory_total": ("flk_gpu_memory_limit_bytes", "Memory of the GPU."),
    "watts": ("flk_gpu_power_watts", "Power of the GPU."),
    "celsius": ("flk_gpu_temperature_celsius", "Temperature of the GPU."),
}


class MetricsPage:
    """The metrics of one pod. Methods return at once."""

    def __init__(
        self, settings: Settings, log: Callable[[str], None], telemetry: Callable[[], Telemetry] | None = None
    ) -> None:
        """Start to serve. A port that cannot be opened is one line for ``log``.

        ``telemetry`` returns the measurements of the job; None: another pod has them.
        """
        self._telemetry = telemetry
        self._node = f',node="{settings.node}"' if settings.node else ""
        self._usage: PodUsage | None = None
        self._causes: dict[int, str] = {}  # kinds of the failures that ended attempts, by number: records keep the last
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
        ended = {each.number: str(each.failure.kind) for each in record.attempts if each.failure}
        self._causes = {**self._causes, **ended}

    def put_progress(
        self, pages: Iterable[ProgressPage], goodput: Goodput | None = None, usage: PodUsage | None = None
    ) -> None:
        """Show how far the ranks of this pod are, in the order of their local ranks, and what the pod uses.

        ``goodput`` is that of the job.
        """
        self._usage = usage
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
        kinds = list(self._causes.values())
        causes = [(f',kind="{kind}"', float(kinds.count(kind))) for kind in sorted(set(kinds))]
        add("flk_failures_total", "counter", "Attempts that a failure has ended, by its kind.", causes)
        if self._telemetry:
            self._add_job(add, self._telemetry())
        if usage := self._usage:
            for field, (name, help_text) in _OF_POD.items():
                value = getattr(usage, field)
                add(name, "gauge", help_text, [] if value is None else [(self._node, value)])
            for field, (name, help_text) in _OF_GPU.items():
                found = ((number, getattr(gpu, field)) for number, gpu in enumerate(usage.gpus))
                gauges = [(f'{self._node},gpu="{number}"', value) for number, value in found if value is not None]
                add(name, "gauge", help_text, gauges)
        return "\n".join(lines) + "\n"

    def _add_job(self, add: Callable[..., None], telemetry: Telemetry) -> None:
        """Add what the launcher of pod 0 knows of all ranks. The number of lines does not grow with the job."""
        attempt = f',attempt="{telemetry.attempt + 1}"'
        latest = telemetry.history[: -_LATEST - 1 : -1]
        for field, (name, help_text) in _OF_SAMPLES.items():
            found = (getattr(sample, field) for sample in latest if sample.attempt == telemetry.attempt)
            value = next((each for each in found if each is not None), None)
            add(name, "gauge", help_text, [] if value is None else [(attempt, value)])
        slowest = next((sample for sample in latest if sample.slowest_seconds is not None), None)
        if slowest:
            label = f'{attempt},rank="{slowest.slowest_rank}"'
            help_text = "Work in a step of the rank that works longest."
            add("flk_slowest_work_seconds", "gauge", help_text, [(label, slowest.slowest_seconds)])


class _Server(ThreadingHTTPServer):
    """Listens on IPv4 and IPv6, where the pod has both."""

    daemon_threads = True
    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            with contextlib.suppress(OSError):
                self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()
