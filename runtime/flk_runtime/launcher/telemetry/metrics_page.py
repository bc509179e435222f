"""MetricsPage: a launcher's metrics of its job, over HTTP in the text format of Prometheus.

Every launcher serves it at /metrics of the port FLK_METRICS_PORT, if that is set. The page is made when it is asked
for, in a thread of its own, from values that the launcher's loop has left; the job does not depend on it.

How many lines all pods of a job serve is bounded: in a job of more than RANKS_LIMIT ranks only those of pod 0 have
lines. What pod 0 says of all ranks, such as the slowest and the median, has as many lines as in a small job.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from flk_runtime.contract.failure import Kind
from flk_runtime.contract.record import Goodput, JobRecord
from flk_runtime.contract.status import RankStatus
from flk_runtime.contract.telemetry import RANKS_LIMIT, PodUsage, Telemetry, latest_sample
from flk_runtime.launcher.settings import Settings
from flk_runtime.wire import listen, reason
from flk_runtime.wire.listener import LOOPBACK

_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PATIENCE: Final = 30.0  # seconds for which a client may neither send nor take anything
_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})  # in values of labels
_PROGRESS: Final = 60.0  # seconds without news of an attempt after which none runs

# A row for each metric, with its help. Those whose names end with _total are counters, the others gauges.
METRICS: Final = {
    # Of the job. Pod 0 has them.
    "flk_making_progress": "1 while ranks make progress; 0 while none does, or no attempt runs.",
    "flk_attempts_total": "Attempts of all ranks that have begun.",
    "flk_restarts_total": "Attempts that followed failures of the training code.",
    "flk_disruptions_total": "Attempts that followed disruptions.",
    "flk_failures_total": "Attempts that a failure has ended, by its kind.",
    "flk_slow_ranks": "Ranks that the others wait for.",
    "flk_goodput_ratio": "Time of steps whose result was kept, as a share of all time.",
    "flk_time_seconds": "Time of the job by what it went into.",
    "flk_total_steps": "Optimizer steps of the whole job.",
    "flk_loss": "Loss, as rank 0 has printed it.",
    "flk_samples_per_second": "Samples that all ranks train on in a second.",
    "flk_tokens_per_second": "Tokens that all ranks train on in a second.",
    "flk_mfu_ratio": "Model FLOPs utilisation.",
    "flk_data_wait_ratio": "Share of the time in which rank 0 waited for data.",
    "flk_communication_ratio": "Share of the time in which a collective was under way.",
    "flk_median_step_seconds": "Duration of a step of the median rank.",
    "flk_slowest_work_seconds": "Work in a step of the rank that works longest.",
    # Of ranks.
    "flk_step": "Optimizer steps done.",
    "flk_saved_step": "Step of the latest checkpoint.",
    "flk_stored_step": "Step of the latest checkpoint in storage.",
    # Of pods.
    "flk_pod_gpu_busy_ratio": "Share of the time in which a kernel ran, as a mean of the GPUs of the pod.",
}
# The metrics of the fields of RankStatus and Sample that have one.
_OF_RANK: Final = {
    "step": "flk_step",
    "saved": "flk_saved_step",
    "stored": "flk_stored_step",
}
_OF_SAMPLES: Final = {
    "loss": "flk_loss",
    "samples_per_s": "flk_samples_per_second",
    "tokens_per_s": "flk_tokens_per_second",
    "mfu": "flk_mfu_ratio",
    "data_wait": "flk_data_wait_ratio",
    "communication": "flk_communication_ratio",
    "step_seconds": "flk_median_step_seconds",
}
Add = Callable[[str, Iterable[tuple[Mapping[str, object], "float | None"]]], None]


class PodServer(ThreadingHTTPServer):
    """Listens on IPv4 and IPv6, where the pod has both."""

    def server_bind(self) -> None:
        self.socket.close()
        self.socket = listen(*self.server_address)
        self.server_port = int(self.socket.getsockname()[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a request that has failed: a client that resets its connection would be a traceback."""


class MetricsPage:
    """The metrics of one pod. Methods return at once."""

    def __init__(
        self, settings: Settings, log: Callable[[str], None], telemetry: Callable[[], Telemetry] | None = None
    ) -> None:
        """Start to serve. A port that cannot be opened is one line for ``log``.

        ``telemetry`` returns the measurements of the job; None: another pod has them.
        """
        self._telemetry = telemetry
        self._leads = settings.pod == 0
        self._details = self._leads or settings.world_size <= RANKS_LIMIT
        self._job = {"namespace": settings.namespace, "job": settings.job, "pod": settings.pod_name}
        self._node = {"node": settings.node}
        self._usage: PodUsage | None = None
        self._causes: dict[int, str] = {}  # kinds of the failures that ended attempts, by number: records keep the last
        self._record: JobRecord | None = None
        self._goodput: Goodput | None = None
        self._told_at = 0.0  # when the launcher last told of an attempt that runs, by time.monotonic
        self._ranks: list[RankStatus] = []  # that have made a step
        page = self

        class Handler(BaseHTTPRequestHandler):
            timeout = _PATIENCE

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
            server = PodServer((LOOPBACK if settings.pod_ip == LOOPBACK else "", settings.metrics_port), Handler)
        except OSError as error:
            log(f"metrics are not served at port {settings.metrics_port}: {reason(error)}")
            return
        threading.Thread(target=server.serve_forever, name="flk-metrics", daemon=True).start()

    def put_record(self, record: JobRecord) -> None:
        """Show this record of the job; the launcher of pod 0 has it."""
        self._record, self._goodput = record, record.goodput
        ended = {each.number: str(each.failure.kind) for each in record.attempts if each.failure}
        self._causes = {**self._causes, **ended}

    def put_progress(
        self, ranks: Sequence[RankStatus], goodput: Goodput | None = None, usage: PodUsage | None = None
    ) -> None:
        """Show how far the ranks of this pod are, and what the pod uses.

        ``goodput`` is the job's. The launcher calls this every few seconds while an attempt runs.
        """
        self._told_at = time.monotonic()
        self._usage = usage
        self._goodput = goodput
        self._ranks = [rank for rank in ranks if rank.step >= 0]

    def text(self) -> str:
        """Return the page. A metric without a value yet is left out."""
        lines: list[str] = []

        def add(name: str, values: Iterable[tuple[Mapping[str, object], float | None]]) -> None:
            samples = [
                f"{name}{_labels({**self._job, **more})} {value:.12g}" for more, value in values if value is not None
            ]
            if samples:
                kind = "counter" if name.endswith("_total") else "gauge"
                lines.extend((f"# HELP {name} {METRICS[name]}", f"# TYPE {name} {kind}", *samples))

        if self._leads:
            self._add_record(add)
        if self._telemetry:
            self._add_telemetry(add, self._telemetry())
        if self._details:
            for field, name in _OF_RANK.items():
                add(name, (({"rank": rank.rank, **self._node}, getattr(rank, field)) for rank in self._ranks))
        if gpus := self._usage.gpus if self._usage else []:
            add("flk_pod_gpu_busy_ratio", [(self._node, sum(gpu.busy for gpu in gpus) / len(gpus))])
        return "\n".join(lines) + "\n"

    def _add_record(self, add: Add) -> None:
        """Add what the records of the job say."""
        runs = bool(self._told_at) and time.monotonic() - self._told_at < _PROGRESS
        record = self._record
        add("flk_making_progress", [({}, runs and not (record and record.standstill))])
        if record:
            # A record has only the latest attempts.
            add("flk_attempts_total", [({}, record.attempts[-1].number + 1 if record.attempts else 0)])
            add("flk_restarts_total", [({}, record.restarts)])
            add("flk_disruptions_total", [({}, record.disruptions)])
            kinds = list(self._causes.values())
            # All kinds are there from the beginning: a counter that begins with 1 has not increased.
            add("flk_failures_total", (({"kind": kind}, kinds.count(kind)) for kind in map(str, Kind)))
            add("flk_slow_ranks", [({}, len(record.slow))])
        if goodput := self._goodput:
            add("flk_goodput_ratio", [({}, goodput.share)])
            add("flk_time_seconds", (({"cause": cause}, seconds) for cause, seconds in goodput.seconds.items()))

    def _add_telemetry(self, add: Add, telemetry: Telemetry) -> None:
        """Add what the launcher of pod 0 knows of all ranks. The number of lines does not grow with the job."""
        add("flk_total_steps", [({}, telemetry.total_steps)])
        sample = latest_sample(telemetry.history)
        if sample is None or sample.attempt != telemetry.attempt:
            return
        attempt = {"attempt": telemetry.attempt + 1}
        if telemetry.diverged is not None:
            sample = replace(sample, loss=math.nan)
        for field, name in _OF_SAMPLES.items():
            add(name, [(attempt, getattr(sample, field))])
        add("flk_slowest_work_seconds", [({**attempt, "rank": sample.slowest_rank}, sample.slowest_seconds)])


def _labels(labels: Mapping[str, object]) -> str:
    """The labels of a line; one without a value is left out. Without Kubernetes, a job may have any name."""
    return (
        "{"
        + ",".join(
            f'{name}="{str(value).translate(_ESCAPES)}"' for name, value in labels.items() if value not in ("", None)
        )
        + "}"
    )
