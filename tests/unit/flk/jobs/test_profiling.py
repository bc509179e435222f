"""The summary of a trace of torch's profiler: own times, shares of the steps, a GPU."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from flk.errors import ApiError
from flk.jobs.profiling import read_trace, summarize


def span(name: str, begin: float, end: float, category: str = "cpu_op", thread: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": end - begin, "pid": 9, "tid": thread}


STEPS = [
    span("ProfilerStep#1", 0, 100, "user_annotation"),
    span("ProfilerStep#2", 100, 300, "user_annotation"),
]
ON_CPU = [
    span("enumerate(DataLoader)#_SingleProcess.__next__", 0, 20, "user_annotation"),
    span("aten::linear", 20, 80),
    span("aten::addmm", 30, 70),
    span("aten::copy_", 40, 50),
    span("aten::linear", 120, 160),
    span("gloo:all_reduce", 150, 250, "user_annotation", thread=2),
    span("aten::mul", 310, 900),  # after the last step
    {"ph": "M", "name": "process_name"},
]


def test_own_times_and_shares() -> None:
    found = summarize([*STEPS, *ON_CPU])
    assert found is not None
    assert (found.steps, found.seconds, found.longest) == (2, 300e-6, 200e-6)
    assert [(each.name, each.calls, round(each.seconds * 1e6)) for each in found.cpu] == [
        ("aten::linear", 2, 60),
        ("aten::addmm", 1, 30),
        ("enumerate(DataLoader)#_SingleProcess.__next__", 1, 20),
        ("aten::copy_", 1, 10),
    ]
    assert found.communication == pytest.approx(1 / 3)
    assert found.data_wait == pytest.approx(20 / 300)
    assert found.outside == pytest.approx(1 - 120 / 300)
    assert (found.gpu_busy, found.gpu) == (None, [])


def test_on_a_gpu_kernels_are_what_communicates() -> None:
    kernels = [
        span("ncclDevKernel_AllReduce", 40, 100, "kernel", thread=7),
        span("gemm", 0, 50, "kernel", thread=8),
        span("Memcpy HtoD", 200, 230, "gpu_memcpy", thread=8),
        span("ProfilerStep#1", 0, 100, "gpu_user_annotation", thread=7),
    ]
    found = summarize([*STEPS, *ON_CPU, *kernels])
    assert found is not None
    assert found.steps == 2
    assert found.communication == pytest.approx(0.2)
    assert found.gpu_busy == pytest.approx(130 / 300)
    assert [each.name for each in found.gpu] == ["ncclDevKernel_AllReduce", "gemm", "Memcpy HtoD"]


def test_a_trace_without_a_step_has_no_summary() -> None:
    assert summarize(ON_CPU) is None


@pytest.mark.parametrize(
    "content",
    [b"", b"no gzip", gzip.compress(b"{}"), gzip.compress(b"[1]")],
    ids=["empty", "text", "an object", "a list"],
)
def test_a_file_that_is_no_trace(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.json.gz"
    path.write_bytes(content)
    with pytest.raises(ApiError, match="is no trace of torch's profiler"):
        read_trace(path)
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": STEPS}).encode()))
    assert read_trace(path) == STEPS
