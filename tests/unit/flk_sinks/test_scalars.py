"""What of a line of metrics is a number."""

from __future__ import annotations

import math

import torch

from flk_sinks.scalars import flat, scalars


def test_numbers_are_taken_from_mappings_tensors_and_arrays_of_one_element() -> None:
    line = {"step": 3, "loss": torch.tensor([[1.5]]), "part": {"a": 1, "b": {"c": True}}, "bad": math.inf}
    line |= {"text": "0", "many": [1.0, 2.0], "tensor": torch.ones(2), "nothing": None}
    assert scalars(line) == {"step": 3.0, "loss": 1.5, "part/a": 1.0, "part/b/c": 1.0, "bad": math.inf}


def test_texts_and_lists_keep_their_names() -> None:
    assert dict(flat({"a": {"b": "x"}, "c": [1, 2]})) == {"a/b": "x", "c": [1, 2]}
