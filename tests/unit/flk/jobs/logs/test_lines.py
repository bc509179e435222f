"""Folding: equal lines of several ranks become one, no line is lost, and each rank's lines keep their order."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from flk.jobs.logs.lines import Folder, LogLine


def line(rank: int, message: str) -> LogLine:
    return LogLine(message, tag=f"[rank {rank}] ", rank=rank)


def folded(lines: list[tuple[int, str]], **how: float) -> list[str]:
    folder = Folder(delay=float("inf"), **how)  # type: ignore[arg-type]
    return [shown.text for one in lines for shown in folder.add(line(*one))] + [shown.text for shown in folder.rest()]


def test_equal_lines_of_all_ranks_are_one() -> None:
    lines = [(rank, text) for rank in range(8) for text in ("epoch 1", "epoch 2")]
    assert folded(lines) == ["[ranks 0-7] epoch 1", "[ranks 0-7] epoch 2"]


def test_a_line_of_its_own_stays_at_its_place() -> None:
    lines = [(0, "a"), (0, "x"), (0, "b"), (1, "a"), (1, "b"), (2, "a")]
    assert folded(lines) == ["[ranks 0-2] a", "[rank 0] x", "[ranks 0-1] b"]


def test_equal_lines_of_one_rank_stay_as_many_as_they_are() -> None:
    assert folded([(0, "a"), (0, "a"), (1, "a")]) == ["[ranks 0-1] a", "[rank 0] a"]


def test_lines_wait_for_a_moment_only() -> None:
    now = [0.0]
    folder = Folder(delay=0.3, clock=lambda: now[0])
    assert list(folder.add(line(0, "a"))) == []
    now[0] = 0.4
    assert [shown.text for shown in folder.due()] == ["[rank 0] a"]
    assert list(folder.rest()) == []


def test_notes_and_lines_of_launchers_are_not_mixed_with_those_of_ranks() -> None:
    folder = Folder(delay=float("inf"))
    lines = [LogLine("a", note=True), line(0, "a"), LogLine("a", tag="[pod 0] "), LogLine("a", tag="[pod 1] ")]
    assert [x for one in lines for x in folder.add(one)] == []
    assert [shown.text for shown in folder.rest()] == ["a", "[rank 0] a", "[pods 0-1] a"]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc")), max_size=60), st.integers(1, 20))
def test_every_rank_has_its_lines_in_their_order(lines: list[tuple[int, str]], held: int) -> None:
    shown = folded(lines, held=held)
    for rank in range(4):
        of_rank = []
        for text in shown:
            match = re.fullmatch(r"\[ranks? ([0-9,-]+)\] (.)", text)
            assert match
            ends = [part.split("-") for part in match[1].split(",")]
            if any(int(part[0]) <= rank <= int(part[-1]) for part in ends):
                of_rank.append(match[2])
        assert of_rank == [text for owner, text in lines if owner == rank]
