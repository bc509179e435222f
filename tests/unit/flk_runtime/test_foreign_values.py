"""Wherever network, a file or another pod gives the runtime a value: any value is read, or refused by the known error.

In bounded processor time and memory.
"""

from __future__ import annotations

import base64
import contextlib
import json
import resource
import signal
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flk_diloco.messages import MESSAGES as diloco
from flk_runtime.contract import log_format
from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.contract.record import (
    ArchivedRecord,
    Attempt,
    Goodput,
    JobRecord,
    QuarantinedNode,
    SlowRank,
    Standstill,
)
from flk_runtime.contract.telemetry import PodUsage, Sample, Telemetry, pack_telemetry, unpack_telemetry
from flk_runtime.launcher.processes.ranks import from_report
from flk_runtime.launcher.records.archive import _updated
from flk_runtime.launcher.records.history import former_attempts
from flk_runtime.launcher.records.ledger import Ledger
from flk_runtime.launcher.replication.exchange import MESSAGES as replication
from flk_runtime.launcher.transport.messages import MESSAGES as rendezvous
from flk_runtime.shared.memory_messages import MESSAGES as memory
from flk_runtime.wire import MessageError, Registry

SECONDS, MEMORY = 60, 2 << 30  # of processor time, and bytes of addresses, that a reader may take for all values

FAILURE = Failure(Kind.EXCEPTION, 0, 1, "gpt-worker-0", "node-a", 0, 1e9, "ValueError", "no label")
RECORD = JobRecord(
    "running",
    0,
    3,
    FAILURE,
    [Attempt(0, 1e9, 1e9 + 5, FAILURE, 1, 2, 7, "0-1", 3, "memory")],
    slow=[SlowRank(3, "gpt-worker-1", "node-a", 2.5)],
    standstill=Standstill(7.5, "rank 1 sleeps", "gpt-worker-1"),
    quarantine=[QuarantinedNode("node-a", "gpt-worker-1 was lost", 9.5)],
    goodput=Goodput(9.5, {"computing": 7.0, "starting": 1.5}, 1, 7),
)
TELEMETRY = Telemetry(9.0, 0, 100, [Sample(1.0, 0, 3, loss=2.0)], pods=[PodUsage(0, "gpt-worker-0", "n", 1.0)])
ENTRY = ArchivedRecord("gpt", "uid", 2, 4, 1e9, 1e9, RECORD, 7, 0.1, ["x"], pack_telemetry(TELEMETRY))
LINE = {"step": 3, "total": 10, "loss": 0.5, "progress": 30, "eta_s": 7, "mfu": 0.1}
REPORT = {"type": "ValueError", "message": "no label", "traceback": "x", "kind": "exception", "time": 1e9}


def use_record(text: str) -> None:
    record = JobRecord.from_json(text)
    if record:
        record.to_json(4096)
        Ledger(0.0, 1e9).resume(record.goodput or Goodput(0.0, {}))


def use_entry(text: str) -> None:
    _updated(text)
    entry = ArchivedRecord.from_json(text)
    if entry:
        former_attempts(entry, "gpt-worker-0", entry.start)
        unpack_telemetry(entry.telemetry)
        entry.to_json()


def use_telemetry(text: str) -> None:
    unpack_telemetry(text)
    unpack_telemetry(base64.b64encode(zlib.compress(text.encode(errors="surrogatepass"))).decode())


def use_line(text: str) -> None:
    for line in (text, text.encode(errors="surrogatepass")):
        found = log_format.parse_metrics(line)
        if found:
            _ = found.finite(), found.diverged(None)


def use_report(text: str) -> None:
    found = from_report(Failure(Kind.EXIT, 0), text.encode(errors="surrogatepass"))
    if found:
        _ = found[0].summary, found[0].signature
        JobRecord("failed", 1, failure=found[0]).to_json(4096)


def use_message(registry: Registry[Any], name: str) -> Callable[[str], None]:
    def use(text: str) -> None:
        for data in (text, f"[{json.dumps(name)},{text}]"):
            with contextlib.suppress(MessageError):
                registry.encode(registry.decode(data.encode(errors="surrogatepass")))

    return use


READERS: dict[str, tuple[Any, Callable[[str], object]]] = {
    "record": (json.loads(RECORD.to_json()), use_record),
    "record in a log": (
        json.loads(RECORD.to_json()),
        lambda text: log_format.parse_record(f"[pod 0] flk-record {text}"),
    ),
    "mark of an attempt in a log": (3, lambda text: log_format.parse_attempt(f"[pod 0] flk-attempt {text}")),
    "entry of a ConfigMap": (json.loads(ENTRY.to_json()), use_entry),
    "telemetry": ({"time": 1, "history": {"time": [1], "step": [2], "attempt": [0]}, "pods": []}, use_telemetry),
    "line of metrics": (LINE, use_line),
    "report of a rank": (REPORT, use_report),
    "rendezvous": ({"attempt": 0, "failure": REPORT | {"pod": 1}}, use_message(rendezvous, "FailureReport")),
    "a status": (
        {"status": {"attempt": 0, "ranks": [[0, 7, 0.5, 0.5, 0.5, 0.5, 3, 2]], "usage": vars(TELEMETRY.pods[0])}},
        use_message(rendezvous, "Heartbeat"),
    ),
    "the start of an attempt": (
        {"number": 0, "master_address": "x", "master_port": 1, "history": [], "order": "0-1", "readers": [1]},
        use_message(rendezvous, "AttemptStarted"),
    ),
    "replication": ({"shard": [["a", 1, 2, 3], 0], "keep": ["a", 1, 2, 3]}, use_message(replication, "Put")),
    "memory": ({"sizes": {"0": 7}, "counts_third": True}, use_message(memory, "Reserve")),
    "diloco": (
        {"worker": 1, "layout": {"sizes": [1], "wait": 1.0}, "versions": [1], "digest": "", "incarnation": "x"},
        use_message(diloco, "Hello"),
    ),
}
# As they stand in a text: json.dumps writes none of the first ones.
ODD = [
    "[" * 100_000,
    "[" * 100_000 + "]" * 100_000,
    '{"a":' * 100_000,
    "[" * 60 + "]" * 60,
    "9" * 5_000,
    "-" + "9" * 400,
    "NaN",
    "-Infinity",
    "1e999",
    "1e300",
    '"' + "x" * 500_000 + '"',
    "[" + "[]," * 50_000 + "[]]",
    *map(json.dumps, [2**62, 10**9, -1, 0, 0.5, True, None, "", "x", "0-99999999999", "5-1", "9" * 5_000, "\ud800"]),
    *map(
        json.dumps, [[], [[]], {}, {"a": 1}, {"9" * 5_000: 1}, [[1, 2]], "running", "exception", "\x1b]52;c;aGk=\x07"]
    ),
]
MARK = "a place for an odd value"


def places(value: Any) -> Iterator[Any]:
    """The same JSON, with one value in it replaced by MARK, one after the other."""
    yield MARK
    if isinstance(value, dict):
        yield {**value, MARK: 1}
        for key, inner in value.items():
            yield from ({**value, key: each} for each in places(inner))
    elif isinstance(value, list):
        yield [*value, MARK]
        for index, inner in enumerate(value):
            yield from ([*value[:index], each, *value[index + 1 :]] for each in places(inner))


@pytest.fixture
def bounded() -> Iterator[None]:
    """Have a reader that takes too much memory or processor time fail."""

    def late(*_: object) -> None:
        raise AssertionError(f"it took {SECONDS} seconds of processor time")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGPROF, late)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, before[1]))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, handler)
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("name", READERS)
def test_any_value_in_any_place_is_read_or_refused(name: str) -> None:
    good, use = READERS[name]
    use(json.dumps(good))
    everywhere = list(places(good))

    @settings(max_examples=60, derandomize=True, database=None, deadline=None)
    @given(st.sampled_from(everywhere), st.sampled_from(ODD), st.booleans())
    def read(place: Any, odd: str, cut: bool) -> None:
        text = json.dumps(place).replace(json.dumps(MARK), odd)
        use(text[: len(text) // 2] if cut else text)

    read()


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("name", READERS)
def test_any_text_is_read_or_refused(name: str) -> None:
    for text in [*ODD, "", "\x00", "\ud800", '{"step":', '{"step": 1, "loss": ' + "[" * 50_000, "{" * 100_000]:
        READERS[name][1](text)
