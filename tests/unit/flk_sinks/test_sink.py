"""What a resumed run has already is not written again."""

from __future__ import annotations

from flk_sinks.sink import Row, Written


def test_a_step_that_is_done_again_is_left_out_name_by_name() -> None:
    written = Written({"loss": 10, "val": 5})
    rows = [Row(5, 0.0, {"loss": 1.0, "val": 2.0}), Row(10, 0.0, {"loss": 1.0, "val": 3.0}), Row(11, 0.0, {"new": 1.0})]
    assert written.missing(rows) == [Row(10, 0.0, {"val": 3.0}), Row(11, 0.0, {"new": 1.0})]
    written.add(written.missing(rows))
    assert written.missing(rows) == []
