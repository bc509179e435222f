"""The benchmarks' arithmetic: intervals, goals, the order of measurements, and what the runner reports."""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import diloco_loss
import gpu_memory
import measure
import run_all
from measure import Goal, Interval, Report, Result, Verdict, alternate, at_least, at_most, median_interval

BENCHMARKS = Path(run_all.__file__).parent


@pytest.mark.parametrize(
    ("count", "outside", "coverage"),
    [  # coverage: 1 - 2 P(Binomial(count, 1/2) <= outside), as in tables of the sign test
        (1, 0, 0.0),
        (5, 0, 0.9375),
        (6, 0, 0.96875),
        (8, 0, 0.9921875),
        (9, 1, 0.9609375),
        (10, 1, 0.978515625),
        (20, 5, 0.9586),
        (120, 48, 0.9647),
    ],
)
def test_interval_lies_between_the_order_statistics_of_the_sign_test(count: int, outside: int, coverage: float) -> None:
    interval = median_interval(range(count))
    assert (interval.low, interval.high) == (outside, count - 1 - outside)
    assert interval.coverage == pytest.approx(coverage, abs=5e-5)


@pytest.mark.parametrize("count", range(1, 13))
def test_coverage_is_the_share_of_all_ways_to_lie_about_the_median(count: int) -> None:
    interval = median_interval(range(count))
    held = 0
    for above in itertools.product((False, True), repeat=count):  # whether each value is above the true median
        below = above.count(False)
        held += interval.low < below <= interval.high
    assert interval.coverage == held / 2**count


@given(st.lists(st.floats(-1e6, 1e6), min_size=6, max_size=60))
def test_interval_holds_the_median_of_the_sample_in_any_order(values: list[float]) -> None:
    interval = median_interval(values)
    assert interval.coverage >= measure.CONFIDENCE
    assert min(values) <= interval.low <= sorted(values)[len(values) // 2] <= interval.high <= max(values)
    assert interval == median_interval(list(reversed(values)))


def test_no_values_have_no_interval() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        median_interval([])


def result(low: float, high: float, goal: Goal, coverage: float = 0.96) -> Result:
    return Result("b", "flk / peer", "s", 1.0, 2.0, (low + high) / 2, Interval(low, high, coverage), 6, goal)


@pytest.mark.parametrize(
    ("low", "high", "goal", "verdict"),
    [
        (0.4, 0.5, at_most(0.5), Verdict.MET),
        (0.4, 0.58, at_most(0.5), Verdict.UNDECIDED_MEETS),
        (0.5, 0.6, at_most(0.5), Verdict.UNDECIDED_MISSES),  # the interval touches the goal
        (0.51, 0.6, at_most(0.5), Verdict.MISSED),
        (0.99, 1.1, at_least(0.98), Verdict.MET),
        (0.97, 1.1, at_least(0.98), Verdict.UNDECIDED_MEETS),
        (0.90, 0.98, at_least(0.98), Verdict.UNDECIDED_MISSES),
        (0.90, 0.97, at_least(0.98), Verdict.MISSED),
    ],
)
def test_the_interval_judges_the_goal_and_the_median_is_said_where_it_does_not(
    low: float, high: float, goal: Goal, verdict: Verdict
) -> None:
    assert result(low, high, goal).verdict is verdict


@pytest.mark.parametrize(("rounds", "said"), [(1, "1 round"), (5, "5 rounds")])
def test_too_few_rounds_judge_no_goal_and_have_no_interval(rounds: int, said: str) -> None:
    found = Result.of("b", "flk / peer", [9.0] * rounds, [1.0] * rounds, at_most(0.5), "s")
    assert found.verdict is Verdict.NOT_JUDGED
    assert f"| 9.000 ({said}) | at most 0.5 | not judged: too few rounds |" in run_all.table("here", [found])
    assert str(found).startswith(f"ratio flk / peer 9.000 ({said}) goal at most 0.5 ")


@pytest.mark.parametrize(
    ("ratio", "verdict"), [(0.83, Verdict.MISSED), (0.84, Verdict.MET), (1.2, Verdict.MET), (1.21, Verdict.MISSED)]
)
def test_a_prediction_may_be_neither_too_high_nor_too_low(ratio: float, verdict: Verdict) -> None:
    found = Result.computed("b", "predicted / published", ratio, 1.0, measure.within_factor(1.2), "s")
    assert found.verdict is verdict
    assert f"| {ratio:.3f} (computed) | within a factor of 1.2 | {verdict} |" in run_all.table("here", [found])
    assert str(found).endswith(f"goal within a factor of 1.2 (closer to 1 is better): {verdict}")


@pytest.mark.parametrize(("ours", "verdict"), [(11.0, Verdict.MET), (12.1, Verdict.MISSED)])
def test_what_is_computed_needs_no_rounds_and_has_no_interval(ours: float, verdict: Verdict) -> None:
    found = Result.computed("b", "prediction / publication", ours, 10.0, at_most(1.2), "s")
    assert found.verdict is verdict
    assert Result.from_json(found.to_json()) == found
    assert str(found).startswith(f"ratio prediction / publication {ours / 10:.3f} (computed) goal at most 1.2 ")
    assert f"| {ours / 10:.3f} (computed) | at most 1.2 | {verdict} |" in run_all.table("here", [found])


def test_ratio_is_the_median_of_the_ratios_of_the_rounds() -> None:
    # Only the peer is slow in the second round, and both sides are in the third. The ratio of the medians would be 0.1.
    found = Result.of("b", "flk / peer", [1.0, 1.0, 10.0], [2.0, 20.0, 10.0], at_most(0.5), "s")
    assert (found.ratio, found.interval.low, found.interval.high) == (0.5, 0.05, 1.0)
    assert (found.ours, found.theirs, found.rounds) == (1.0, 10.0, 3)


def test_rounds_of_both_sides_must_be_as_many() -> None:
    with pytest.raises(ValueError, match="zip"):
        Result.of("b", "flk / peer", [1.0], [1.0, 2.0], at_most(1), "s")


def test_lines_of_results() -> None:
    assert (
        str(result(0.45, 0.5, at_most(0.5)))
        == "ratio flk / peer 0.475 (0.450 to 0.500) goal at most 0.5 (lower is better): met"
    )
    assert (
        str(result(0.9, 1, at_least(0.98)))
        == "ratio flk / peer 0.950 (0.900 to 1.000) goal at least 0.98 (higher is better): "
        "undecided, the median misses it"
    )


def test_results_come_back_from_json() -> None:
    first = result(0.45, 0.5, at_least(0.98))
    assert Result.from_json(first.to_json()) == first


def test_order_alternates_and_warm_up_is_not_kept() -> None:
    calls: list[str] = []

    def case(name: str) -> Callable[[], int]:
        def once() -> int:
            calls.append(name)
            return len(calls)

        return once

    values = alternate({"a": case("a"), "b": case("b")}, 3, warmup=1, show=None)
    assert "".join(calls) == "ba" + "ab" + "ba" + "ab"
    assert values == {"a": [3, 6, 7], "b": [4, 5, 8]}


def test_a_machine_without_git_has_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert measure.environment().startswith("commit unknown, load average ")


def test_exit_code_of_a_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = argparse.Namespace(json=tmp_path / "results")
    report = Report("b", options)
    report.compare("flk / peer", [1.0] * 6, [2.0] * 6, at_most(0.5), "s")
    assert report.finish() == 0
    report.compare("slow / peer", [3.0] * 6, [2.0] * 6, at_most(0.5), "s")
    assert report.finish() == 1
    output = capsys.readouterr().out
    assert "commit " in output
    assert "load average " in output
    assert output.endswith(
        "ratio flk / peer 0.500 (0.500 to 0.500) goal at most 0.5 (lower is better): met\n"
        "ratio slow / peer 1.500 (1.500 to 1.500) goal at most 0.5 (lower is better): missed\n"
    )
    written = [Result.from_json(line) for line in options.json.read_text().splitlines()]
    assert written == report.results


# What takes the memory of a GPU


def test_tensors_that_are_live_at_the_peak_are_told_by_their_line() -> None:
    def event(action: str, address: int, mebi: int, file: str = "") -> dict[str, object]:
        frames = [
            {"filename": f"/x/{name}", "line": 7, "name": "call"} for name in (file, "other.py")[bool(not file) :]
        ]
        return {"action": action, "addr": address, "size": mebi << 20, "frames": frames}

    block = {"address": 1, "size": 1 << 30, "state": "active_allocated"}
    before = {"segments": [{"stream": 0, "total_size": 1 << 30, "blocks": [block]}]}
    free = {"address": 9, "size": 128 << 20, "state": "inactive"}
    after = {
        "segments": [{"stream": 0, "total_size": 2 << 30, "blocks": [block, free]}],
        "device_traces": [
            [
                event("segment_alloc", 2, 1024),
                event("alloc", 2, 512, "gpu_models.py"),
                event("alloc", 3, 512, "gpu_models.py"),
                event("free_requested", 2, 512),
                event("free_completed", 2, 512),
                event("alloc", 4, 256),
                event("free_completed", 4, 256),
                event("free_completed", 1, 1024),
            ]
        ],
    }
    assert list(gpu_memory.peak_of(before, after)) == [
        "live at the peak: 2.000 GiB in 3 tensors",
        "    1.000 GiB =    1 x   1024.00 MiB  before the step",
        "    1.000 GiB =    2 x    512.00 MiB  gpu_models.py:7 call",
        "    0.000 GiB in 0 other tensors",
        "segments that this step got from the device: 1, 1.000 GiB",
        "stream 0: 2.000 GiB reserved; free blocks after the step: 1 x 128 MiB",
    ]


# The runner of all benchmarks


def test_runner_knows_every_benchmark() -> None:
    shared = {"example", "launch", "llama", "measure", "measured", "run_all", "simulated_launchers", "small_models"}
    shared |= {"torchft_gpt", "torchtitan_cpu", "gpu_memory", "gpu_models", "gpu_ranks"}
    assert set(run_all.NAMES) == {path.stem for path in BENCHMARKS.glob("*.py")} - shared


def test_every_benchmark_prints_its_help() -> None:
    for name in run_all.NAMES:
        text = (BENCHMARKS / f"{name}.py").read_text()
        assert f"python benchmarks/{name}.py [--rounds " in text
        assert "Goal" in text.partition('"""\n')[0]


def test_every_benchmark_makes_as_many_rounds_as_a_verdict_takes() -> None:
    for name in run_all.NAMES:
        text = (BENCHMARKS / f"{name}.py").read_text()
        (rounds,) = re.findall(r"measure\.parser\(__doc__, rounds=(\d+)\)", text)
        enough = median_interval(range(int(rounds))).coverage >= measure.CONFIDENCE
        assert enough or "report.compare(" not in text, name


def test_diloco_loss_has_a_result_of_each_encoding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(diloco_loss, "train", lambda *_: 1.0)
    monkeypatch.setattr(sys, "argv", ["diloco_loss.py"])
    assert diloco_loss.main() == 0
    judged = "/ DDP 1.000 (1.000 to 1.000) goal at most 1.01 (lower is better): met\n"
    found = capsys.readouterr().out
    assert f"in fp16, every 50 steps {judged}" in found
    assert f"in int8, every 100 steps {judged}" in found


def test_runner_goes_on_after_a_miss_and_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    slow = result(0.6, 0.7, at_most(0.5))
    outcomes = {"cli": ([slow], 1), "start": ([], 2), "submit": ([], measure.SKIPPED)}
    calls: list[str] = []

    def run(name: str, rounds: int | None) -> tuple[list[Result], int]:
        calls.append(name)
        return outcomes.get(name, ([result(0.3, 0.4, at_most(0.5))], 0))

    monkeypatch.setattr(run_all, "run", run)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{run_all.BEGIN}\n\n### cli\n\nold\n\n### start\n\nkept\n\n{run_all.END}\nafter\n")
    assert run_all.main(["--write", str(page)]) == 1
    assert calls == list(run_all.NAMES)
    ending = "not measured, because this machine could not run them: submit\n"
    assert capsys.readouterr().out.endswith(f"{slow}\nfailed: start ended with 2\n{ending}")
    text = page.read_text()
    assert text.startswith(f"before\n{run_all.BEGIN}\n\n### cli\n\nMeasured on commit ")
    assert "| flk / peer | 1 / 2 s | 0.650 (0.600 to 0.700) | at most 0.5 | missed |\n\n### start\n\nkept\n" in text
    assert "old" not in text
    assert "### submit" not in text
    assert text.endswith(f" |\n\n{run_all.END}\nafter\n")


def test_runner_replaces_the_tables_of_the_named_benchmarks_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run_all, "run", lambda name, rounds: ([result(0.3, 0.4, at_most(0.5))], 0))
    page = tmp_path / "page.md"
    page.write_text(f"{run_all.BEGIN}\n\n### cli\n\nkept\n\n### loop\n\nold\n\n{run_all.END}\n")
    assert run_all.main(["loop", "start", "--write", str(page)]) == 0
    text = page.read_text()
    assert re.findall(r"^### (\w+)\n\n(\w+)", text, re.MULTILINE) == [
        ("cli", "kept"),
        ("start", "Measured"),
        ("loop", "Measured"),
    ]


def test_runner_names_rows_of_a_page_that_were_not_measured_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    every = [replace(result(0.3, 0.4, at_most(0.5)), what=f"flk / {peer}") for peer in ("this", "that")]
    monkeypatch.setattr(run_all, "run", lambda name, rounds: (every, 0))
    page = tmp_path / "page.md"
    page.write_text(f"{run_all.BEGIN}\n\n{run_all.END}\n")
    assert run_all.main(["cli", "loop", "--write", str(page)]) == 0
    del every[0]
    assert run_all.main(["loop", "--write", str(page)]) == 1
    assert capsys.readouterr().out.endswith("\n\nnot measured, and no more on the page: flk / this\n")
    assert page.read_text().count("flk / this") == 1


def test_page_without_a_place_for_the_table() -> None:
    with pytest.raises(ValueError, match="has no lines"):
        run_all.replaced("no markers", {})


def test_benchmarks_documentation_has_a_place_for_the_table() -> None:
    page = (BENCHMARKS / "results.md").read_text()
    assert run_all.replaced(page, {}) == page


def test_each_goal_that_a_page_does_not_meet_has_its_reason_and_a_plan() -> None:
    page = (BENCHMARKS / "results.md").read_text()
    verdicts = "|".join(re.escape(str(each)) for each in Verdict if each is not Verdict.MET)
    others = re.findall(rf"^\| (.+?) \|.* \| (?:{verdicts}) \|$", page, re.MULTILINE)
    section = page.partition("\n## Goals that are not met\n")[2].partition("\n## ")[0]
    begins = re.findall(r"^\| `(.+?)` \| .+? \| .+? \|$", section, re.MULTILINE)
    assert others
    assert not [what for what in others if not what.startswith(tuple(begins))], "the page does not say why"
    assert not [begin for begin in begins if not any(what.startswith(begin) for what in others)], "the goal is met"


def test_runner_refuses_unknown_names() -> None:
    done = subprocess.run(["python3", str(BENCHMARKS / "run_all.py"), "speed"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "there is no benchmark speed (there are cli, " in done.stderr


def test_hosted_refuses_a_run_that_ends_in_its_warm_up() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "hosted.py"), "--steps", "20"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "--steps 20: the first 20 steps are not measured, so expected more" in done.stderr
