"""What a resumed run has already is not written again."""

from __future__ import annotations

import math

import torch

from flk_sinks.sink import Row, Written, flat, scalars


def test_a_step_that_is_done_again_is_left_out_name_by_name() -> None:
    written = Written({"loss": 10, "val": 5})
    rows = [Row(5, 0.0, {"loss": 1.0, "val": 2.0}), Row(10, 0.0, {"loss": 1.0, "val": 3.0}), Row(11, 0.0, {"new": 1.0})]
    assert written.missing(rows) == [Row(10, 0.0, {"val": 3.0}), Row(11, 0.0, {"new": 1.0})]
    written.add(written.missing(rows))
    assert written.missing(rows) == []


def test_numbers_are_taken_from_mappings_tensors_and_arrays_of_one_element() -> None:
    line = {"step": 3, "loss": torch.tensor([[1.5]]), "part": {"a": 1, "b": {"c": True}}, "bad": math.inf}
    line |= {"text": "0", "many": [1.0, 2.0], "tensor": torch.ones(2), "nothing": None}
    assert scalars(line) == {"step": 3.0, "loss": 1.5, "part/a": 1.0, "part/b/c": 1.0, "bad": math.inf}


def test_texts_and_lists_keep_their_names() -> None:
    assert dict(flat({"a": {"b": "x"}, "c": [1, 2]})) == {"a/b": "x", "c": [1, 2]}
