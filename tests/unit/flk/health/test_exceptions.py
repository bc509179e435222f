"""Errors in logs: where each begins and ends, and whether it is a consequence of a peer's end."""

from __future__ import annotations

import traceback

from hypothesis import given
from hypothesis import strategies as st

from flk.health.failure import find_errors


def raised(error: BaseException) -> list[str]:
    try:
        raise error
    except BaseException as caught:
        return "".join(traceback.format_exception(caught)).splitlines()


def test_an_exception_between_other_lines() -> None:
    lines = ["step 1", *raised(ValueError("sample 371 has no label")), "bye"]
    (error,) = find_errors(lines)
    assert (error.begin, lines[error.end]) == (1, "bye")
    assert error.summary == "ValueError: sample 371 has no label"
    assert not error.secondary


def test_prefix_of_torch_and_a_qualified_name() -> None:
    lines = [f"[rank1]: {line}" for line in raised(RuntimeError("x"))]
    lines[-1] = "[rank1]: torch.distributed.DistBackendError: NCCL error in: x.cpp:1"
    (error,) = find_errors(lines)
    assert (error.type, error.secondary, error.end) == ("DistBackendError", True, len(lines))


def test_chained_exceptions_are_one() -> None:
    try:
        try:
            raise RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer")
        except RuntimeError as cause:
            raise ValueError("no gradients") from cause
    except ValueError as error:
        lines = "".join(traceback.format_exception(error)).splitlines()
    (found,) = find_errors([*lines, *raised(KeyError("other"))])[:1]
    assert (found.type, found.begin, found.secondary) == ("ValueError", 0, True)
    assert [e.type for e in find_errors([*lines, *raised(KeyError("other"))])] == ["ValueError", "KeyError"]


def test_native_errors() -> None:
    lines = ["Fatal Python error: Segmentation fault", "", "Current thread (most recent call first):"]
    assert [e.summary for e in find_errors(lines)] == ["Fatal Python error: Segmentation fault"]


def test_a_cut_traceback_is_none() -> None:
    assert find_errors(["Traceback (most recent call last):", '  File "train.py", line 1, in <module>']) == []


@given(st.lists(st.sampled_from(["Traceback (most recent call last):", "  x", "ValueError: a", "", "\t", "[rank1]: "])))
def test_any_lines_give_errors_within_them(lines: list[str]) -> None:
    for error in find_errors(lines):
        assert 0 <= error.begin < error.end <= len(lines)
