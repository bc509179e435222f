"""The benchmarks' arithmetic: intervals, goals, the order of measurements, and what the runner reports.

Of those with injected faults also which moments they draw, and what of flk's answers counts as right.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import diagnosis
import failures
import fault_kinds
import measure
import run_all
from fault_kinds import DIFFERENT_CALLS, FAULTS, GROUPS, Fault
from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.contract.record import Attempt, JobRecord
from measure import Goal, Interval, Report, Result, Verdict, at_least, at_most, median_interval

BENCHMARKS = Path(run_all.__file__).parent
HANG_LINES = (
    "[pod 0] no rank has made progress for 5 s (limit 5 s in phase training): rank 3 did not reach all_reduce 8\n",
    "[pod 0] rank 3 in pod-1: is at fault_1_train.py:8 in fail\n",
    "[pod 0]   fault_1_train.py:8 in fail: time.sleep(1000)\n",
    "[pod 0] ranks 0-2: each is in all_reduce 812\n",
    "[pod 0]   train.py:8 in main: run.step()\n",
)


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


# Injected faults


def fault(name: str) -> Fault:
    (found,) = (each for each in FAULTS if each.name == name)
    return found


def record(*attempts: Attempt) -> str:
    return f"[pod 0] flk-record {JobRecord('running', 0, attempts=list(attempts)).to_json()}\n"


# failures.py


def test_kills_come_anywhere_in_their_period_and_hit_each_launcher() -> None:
    drawn = [each for seed in range(300) for each in failures.kills("killed ranks and launchers", 300, 8, seed)]
    ranks = [each.moment % failures.RANK_EVERY for each in drawn if not each.of_launcher]
    launchers = [each for each in drawn if each.of_launcher]
    tenths = {int(10 * moment / failures.RANK_EVERY) for moment in ranks}
    beside_a_checkpoint = sum(moment % 10 < 1 for moment in ranks) / len(ranks)
    assert (len(ranks), len(launchers), len(tenths)) == (900, 300, 10)
    assert 0.05 < beside_a_checkpoint < 0.15  # the peers save in every tenth step
    assert {each.victim for each in launchers} == {0, 1}
    assert min(each.moment for each in drawn) >= 1  # measured from the first step on


def test_nothing_is_killed_without_failures_and_a_short_training_has_its_kills() -> None:
    assert failures.kills(failures.NONE, 300, 8, 1) == []
    assert [each.of_launcher for each in failures.kills("killed ranks", 60, 4, 1)] == [False]
    assert sorted(each.of_launcher for each in failures.kills("killed ranks and launchers", 60, 4, 1)) == [False, True]


def report_of_failures(*disturbed: failures.Training | None) -> list[measure.Result]:
    report = measure.Report("failures", argparse.Namespace(json=None))
    calm = failures.Training(10.0, {1: {"a"}, 2: {"b"}})
    runs: dict[tuple[str, str], list[failures.Training | None]] = {
        ("flk", "killed ranks"): list(disturbed),
        ("torchrun", "killed ranks"): [failures.Training(20.0)] * len(disturbed),
        **{(name, failures.NONE): [calm] * len(disturbed) for name in ("flk", "torchrun")},
    }
    failures.report_of(report, runs, ["torchrun"], "killed ranks", at_most(1.02), failures.Sizes(2, 8, 100))
    return report.results


def test_other_losses_and_trainings_without_an_end_are_rows_that_miss_their_goal() -> None:
    right, other = ({1: {"a"}, 2: {"b"}}, {1: {"a"}, 2: {"b", "c"}})
    for losses, differ, verdict in ((right, 0, Verdict.MET), (other, 1, Verdict.MISSED)):
        ended, same, ours, relative, absolute = report_of_failures(failures.Training(10.1, losses))
        assert (ended.verdict, same.ours, same.verdict) == (Verdict.MET, differ, verdict)
        assert "steps of 100 ms" in ours.what
        assert (relative.ratio, absolute.ours, absolute.theirs, absolute.unit) == (10.1 / 20, 10.1, 20.0, "s")
    (ended,) = report_of_failures(None)
    assert (ended.ours, ended.verdict) == (1, Verdict.MISSED)


# diagnosis.py


def test_the_time_is_that_of_the_statement_that_is_judged() -> None:
    said = diagnosis.Said()
    failure = Failure(Kind.LOST, 2, pod_name="pod-2", message="lost the connection to all other pods")
    other = Failure(Kind.LOST, 0, pod_name="pod-0", message="lost the connection to pod 2")
    said.note(f"[pod 2] attempt 1 ended: {other.summary}\n", 1.0)
    said.note(f"[pod 0] attempt 1 ended: {failure.summary[:20]}…\n", 2.0)
    said.note(record(Attempt(0, 0.0, 3.0, failure)), 3.0)
    said.note(record(Attempt(0, 0.0, 3.0, failure), Attempt(1, 4.0)), 4.0)
    assert said.failure(0) == failure
    assert said.first_said(0, failure) == 2.0
    assert said.first_said(0, other) == 1.0


def test_the_source_of_a_fault_counts_on_the_stack_of_its_own_rank_only() -> None:
    named = Failure(Kind.HANG, 1, 3, pod_name="pod-1", message="did not reach all_reduce")
    hang = fault("hang in the loop")
    assert diagnosis.matches(hang, named, 3, HANG_LINES)
    assert not diagnosis.matches(hang, named, 2, HANG_LINES)
    other = dataclasses.replace(named, rank=2)
    assert not diagnosis.matches(hang, dataclasses.replace(other, traceback="time.sleep(1000)"), 3, ())


@pytest.mark.parametrize("name", ["other collective", "collective of one rank", "sizes that differ between ranks"])
def test_a_collective_that_does_not_match_takes_flks_own_words(name: str) -> None:
    row = fault(name)
    code = "\n".join(row.code.splitlines())
    stack = [HANG_LINES[1], *(f"[pod 0]   fault_1_train.py:8 in fail: {line}\n" for line in row.code.splitlines())]
    silent = Failure(Kind.HANG, 1, 3, pod_name="pod-1", message="did not reach all_reduce 8", traceback=code)
    assert not diagnosis.matches(row, silent, 3, stack)
    aborted = Failure(Kind.SIGNAL, 1, 3, pod_name="pod-1", signal=6, message=f"{DIFFERENT_CALLS}, as where")
    assert diagnosis.matches(row, aborted, 3, stack)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("launcher killed", Kind.CONTAINER_KILLED), ("cut both ways", Kind.LOST), ("pod stands still", Kind.LOST)],
)
def test_a_killed_launcher_is_no_lost_pod(name: str, kind: Kind) -> None:
    right = [
        each for each in (Kind.LOST, Kind.CONTAINER_KILLED) if diagnosis.matches(fault(name), Failure(each, 0), 0, ())
    ]
    assert right == [kind]


def test_each_group_has_its_shares_and_what_cannot_be_wrong_is_in_none() -> None:
    report = measure.Report("diagnosis", argparse.Namespace(json=None))
    slow, between = fault("slow rank, by processor, files or sleep"), fault("sizes that differ between ranks")
    outcomes = [
        diagnosis.Outcome(slow, 0, 1.0, True),
        diagnosis.Outcome(between, 0, 1.0, True, False),
        diagnosis.Outcome(fault("launcher killed"), 0, None),
        *[diagnosis.Outcome(fault("missing file"), 0, 1.0, True, True)] * 2,
    ]
    diagnosis.report_of(report, outcomes)
    shares = {each.what: (each.ours, each.theirs) for each in report.results}
    soon = f"faults named within {diagnosis.SOON:g} s of the limit"
    assert shares == {
        "faults whose rank or pod is right, 4 kinds": (3, 4),
        "faults whose cause is right, 4 kinds": (2, 4),
        f"{soon}, 4 kinds": (4, 5),
        "faults whose rank or pod is right, ranks that end, 1 kinds": (2, 2),
        "faults whose cause is right, ranks that end, 1 kinds": (2, 2),
        f"{soon}, ranks that end, 1 kinds": (2, 2),
        "faults whose cause is right, hangs, 1 kinds": (0, 1),
        f"{soon}, hangs, 1 kinds": (1, 1),
        "faults whose rank or pod is right, pods and network, 1 kinds": (0, 1),
        "faults whose cause is right, pods and network, 1 kinds": (0, 1),
        f"{soon}, pods and network, 1 kinds": (0, 1),
        "faults whose rank or pod is right, slow ranks, 1 kinds": (1, 1),
        f"{soon}, slow ranks, 1 kinds": (1, 1),
    }


class Launchers:
    """A job whose launchers end when they are told to, and whose record is given."""

    def __init__(self, said: diagnosis.Said, looks: int) -> None:
        self.said, self.looks = said, looks

    def restart_pods(self) -> bool:
        self.looks -= 1
        return self.looks > 0

    def end(self) -> None:
        self.looks = 0


def watched(said: diagnosis.Said, looks: int = 1000) -> tuple[bool, list[str]]:
    found = diagnosis.Diagnosis(None, Path(), 2)  # type: ignore[arg-type]
    goes_on = found._watch(Launchers(said, looks), 0.05)  # type: ignore[arg-type]
    return goes_on, found.false_alarms


def test_the_end_of_a_job_and_of_its_latest_attempt_are_alarms() -> None:
    said = diagnosis.Said()
    said.note(record(Attempt(0, 0.0)), 1.0)
    assert watched(said) == (True, [])
    assert watched(said, looks=1) == (False, ["the job has ended"])
    failure = Failure(Kind.EXIT, 0, 1, pod_name="pod-0", exit_code=3)
    said.note(record(Attempt(0, 0.0, 2.0, failure)), 2.0)
    assert watched(said) == (False, [failure.summary])


@pytest.mark.parametrize(("looks", "right"), [(1, True), (1000, False)])
def test_a_job_that_neither_trains_again_nor_ends_counts_as_wrong(
    looks: int, *, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(_: diagnosis.Diagnosis) -> None:
        raise diagnosis.NotTrainingError("the job does not train")

    found = diagnosis.Diagnosis(None, Path(), 2)  # type: ignore[arg-type]
    found._job = Launchers(diagnosis.Said(), looks)  # type: ignore[assignment]
    monkeypatch.setattr(diagnosis.Diagnosis, "_training_job", never)
    outcome = found._after_recovery(diagnosis.Outcome(fault("missing file"), 0, 1.0, True, True))
    assert outcome.verdicts == {"rank": right, "cause": right}
    assert found._job is None


def test_false_alarms_are_judged_from_enough_hours_on_and_have_a_bound(capsys: pytest.CaptureFixture[str]) -> None:
    assert measure.rate_bound(0, 2) == pytest.approx(1.498, abs=0.001)
    assert measure.rate_bound(3, 1) == pytest.approx(7.754, abs=0.001)
    report = measure.Report("diagnosis", argparse.Namespace(json=None))
    for events, hours in ((0, 1.9), (0, 2.0), (1, 2.0)):
        report.rate("false alarms", events, hours, 2.0, at_most(0))
    assert [each.verdict for each in report.results] == [Verdict.NOT_JUDGED, Verdict.MET, Verdict.MISSED]
    assert "false alarms: 0 in 2.00 hours, so that the true rate is at most 1.5\n" in capsys.readouterr().out


def test_faults_come_by_the_parts_of_their_groups_and_each_kind_in_turn() -> None:
    faults = diagnosis.in_turn([], random.Random(1))
    found = [next(faults) for _ in range(10 * 15)]
    groups = Counter(next(name for name, row in GROUPS.items() if each in row) for each in found)
    assert groups == {name: 10 * part for name, part in diagnosis.PARTS.items()}
    assert {each.name for each in found} >= {each.name for each in GROUPS["hangs"]}
    only = diagnosis.in_turn(["missing file"], random.Random(1))
    assert {next(only).name for _ in range(3)} == {"missing file"}


@pytest.mark.parametrize(
    ("main", "words", "said"),
    [
        (diagnosis.main, ["--faults", "0"], "--faults: must be at least 1 (is 0)"),
        (diagnosis.main, ["--only", "typo"], "has no kind 'typo'"),
        (failures.main, ["--only", "typo"], "invalid choice: 'typo'"),
        (failures.main, ["--ranks", "3"], "must be a multiple of 2"),
    ],
)
def test_options_that_measure_nothing_are_refused_at_once(
    main: Callable[[], int],
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmark", *words])
    with pytest.raises(SystemExit):
        main()
    assert said in capsys.readouterr().err
