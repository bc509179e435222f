"""The benchmarks' arithmetic: intervals, goals, the order of measurements, and what the runner reports."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

import fault_kinds
import measure
import run_all
from measure import Goal, Interval, Report, Result, Verdict, at_least, at_most, median_interval

BENCHMARKS = Path(run_all.__file__).parent


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


def test_ratio_is_the_median_of_the_ratios_of_the_rounds() -> None:
    # Only the peer is slow in the second round, and both sides are in the third. The ratio of the medians would be 0.1.
    found = Result.of("b", "flk / peer", [1.0, 1.0, 10.0], [2.0, 20.0, 10.0], at_most(0.5), "s")
    assert (found.ratio, found.interval.low, found.interval.high) == (0.5, 0.05, 1.0)
    assert (found.ours, found.theirs, found.rounds) == (1.0, 10.0, 3)


@pytest.mark.parametrize(
    ("hits", "count", "span", "verdict"),
    [
        (198, 200, "0.964 to 0.997", Verdict.MET),
        (192, 200, "0.923 to 0.980", Verdict.UNDECIDED_MEETS),
        (170, 200, "0.794 to 0.893", Verdict.MISSED),
        (72, 72, "72 trials", Verdict.NOT_JUDGED),  # Wilson's interval begins at 0.9493
        (73, 73, "0.950 to 1.000", Verdict.MET),
    ],
)
def test_a_share_has_its_interval_and_is_judged_where_it_could_meet_the_goal(
    hits: int, count: int, span: str, verdict: Verdict
) -> None:
    report = Report("b", argparse.Namespace(json=None))
    report.share("faults that are named", hits, count, at_least(0.95))
    (found,) = report.results
    assert (found.span, found.verdict, found.ratio) == (span, verdict, hits / count)


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


def test_the_faults_of_the_diagnosis_are_forty_kinds_whose_code_is_valid() -> None:
    names = [fault.name for fault in fault_kinds.FAULTS]
    assert len(set(names)) == len(names) >= 40
    for fault in fault_kinds.FAULTS:
        assert bool(fault.code) != (fault.act is not fault_kinds.Act.NONE), fault.name
        compile(fault.module, fault.name, "exec")


# The runner of all benchmarks


def test_every_benchmark_makes_as_many_rounds_as_a_verdict_takes() -> None:
    for name in run_all.NAMES:
        text = (BENCHMARKS / f"{name}.py").read_text()
        (rounds,) = re.findall(r"measure\.parser\(__doc__, rounds=(\d+)\)", text)
        enough = median_interval(range(int(rounds))).coverage >= measure.CONFIDENCE
        assert enough or "report.compare(" not in text, name


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


def test_the_runner_can_write_the_file_of_results() -> None:
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
