"""Tests of flk_runtime.parallel.lost_changes."""

from __future__ import annotations

import pytest
import torch

from flk_runtime.errors import SetupError
from flk_runtime.parallel import lost_changes
from flk_runtime.parallel.lost_changes import LostChanges


def changed_uncounted(tensor: torch.Tensor) -> None:
    with torch.autograd._unsafe_preserve_version_counter(tensor):
        tensor.mul_(2)


def test_a_changed_copy_is_named_by_its_line_and_forgotten() -> None:
    lost, whole = LostChanges(), torch.ones(4)
    copies = [whole[:1].clone(), whole[1:].clone()]
    lost.add(copies, whole)
    changed_uncounted(copies[1])
    with pytest.raises(SetupError, match=r"test_lost_changes\.py:\d+ changes a part of a sharded tensor in place"):
        lost.check()
    lost.check()


def test_copies_that_are_read_views_and_changes_of_plain_tensors_are_no_lost_changes() -> None:
    lost, whole = LostChanges(), torch.ones(4)
    view, read, plain = whole[1:], whole[:2].clone(), whole[2:].clone()
    for each in (view, read, plain):
        lost.add(each, whole)
    changed_uncounted(view)
    plain.zero_()
    lost.check()


def test_many_copies_are_compared_when_further_ones_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_changes, "_LIMIT", 20)
    lost, whole = LostChanges(), torch.ones(4)
    copy = whole.clone()
    lost.add(copy, whole)
    changed_uncounted(copy)
    with pytest.raises(SetupError, match="and the part is a copy"):
        lost.add(whole[:2].clone(), whole)
