"""The restart policy: what follows each kind of failure, what the budgets allow, when the next attempt starts."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flk_runtime.contract import ExitCode
from flk_runtime.contract.failure import MEANINGS, Budget, Failure, Kind, Retry
from flk_runtime.contract.record import Attempt
from flk_runtime.launcher.coordinator.policy import QUICK, Decision, Failures, decide, made_progress
from flk_runtime.launcher.records.history import shorten
from flk_runtime.launcher.settings import Limits
from flk_runtime.launcher.transport.messages import Join

RAISED = Failure(Kind.EXCEPTION, 1, rank=2, type="ValueError", message="sample 371 has no label")
OTHER = Failure(Kind.EXCEPTION, 1, rank=2, type="KeyError", message="'x'")
LOST = Failure(Kind.LOST, 3, message="was restarted")
CONTAINER_KILLED = Failure(Kind.CONTAINER_KILLED, 3)
RESIZED = Failure(Kind.RESIZED, 3, message="joined: 3 → 4 pods")
KILLED = Failure(Kind.KILLED, 1, rank=2, signal=signal.SIGKILL)
DURATION = 2 * QUICK  # of an attempt, unless a test says otherwise


def run(
    failures: Iterable[Failure | None],
    limits: Limits,
    *,
    steps: Iterable[int | None] = (),
    duration: float = DURATION,
    restored: int | None = None,
) -> tuple[list[Attempt], Decision]:
    """The attempts of a job that fails in this way, until the policy ends it, and the last decision."""
    history: list[Attempt] = []
    decision = decide(history, limits)
    for failure, step in zip(failures, itertools.chain(steps, itertools.repeat(None)), strict=False):
        number = history[-1].number + 1 if history else 0
        attempt = Attempt(
            number, 0.0, duration, failure, decision.restarts, decision.disruptions, step, restored=restored
        )
        history = [*shorten(history), attempt]
        decision = decide(history, limits)
        if not decision.restart:
            break
    return history, decision


FINAL = "final"
FAILURES = {
    "an exception": (RAISED, "restarts", ExitCode.TRAINING),
    "an exit code": (Failure(Kind.EXIT, 0, rank=0, exit_code=7), "restarts", ExitCode.TRAINING),
    "an early end": (Failure(Kind.EARLY, 0, rank=0, exit_code=0), "restarts", ExitCode.TRAINING),
    "a segmentation fault": (Failure(Kind.SIGNAL, 0, rank=0, signal=signal.SIGSEGV), "restarts", ExitCode.TRAINING),
    "a killed rank": (KILLED, "restarts", ExitCode.TRAINING),
    "a rank that answers SIGTERM": (Failure(Kind.KILLED, 0, rank=0, exit_code=143), "restarts", ExitCode.TRAINING),
    "a rank out of memory": (Failure(Kind.OOM, 0, rank=0), "restarts", ExitCode.INFRASTRUCTURE),
    "ranks that do not meet": (Failure(Kind.RENDEZVOUS, 0, rank=0), "restarts", ExitCode.INFRASTRUCTURE),
    "an address in use": (Failure(Kind.ADDRESS, 0, rank=0), "restarts", ExitCode.TRAINING),
    "a lost connection": (
        Failure(Kind.CONNECTION, 0, rank=0, message="Connection closed by peer"),
        "disruptions",
        ExitCode.INFRASTRUCTURE,
    ),
    "a timeout of a collective": (
        Failure(Kind.TIMEOUT, 0, rank=0, message="Watchdog caught collective operation timeout"),
        "restarts",
        ExitCode.TRAINING,
    ),
    "a lost pod": (LOST, "disruptions", ExitCode.INFRASTRUCTURE),
    "a killed container": (CONTAINER_KILLED, "disruptions", ExitCode.INFRASTRUCTURE),
    "an unkillable rank": (Failure(Kind.UNKILLABLE, 0), "disruptions", ExitCode.INFRASTRUCTURE),
    "an unhealthy node": (Failure(Kind.UNHEALTHY, 0), "disruptions", ExitCode.INFRASTRUCTURE),
    "a lost GPU": (Failure(Kind.GPU, 0, rank=0), "disruptions", ExitCode.INFRASTRUCTURE),
    "a stale file handle": (Failure(Kind.IO, 0, rank=0), "disruptions", ExitCode.INFRASTRUCTURE),
    "storage that does not answer": (Failure(Kind.STORAGE, 0, rank=0), "disruptions", ExitCode.INFRASTRUCTURE),
    "a pod that never joins": (Failure(Kind.ABSENT, 3), FINAL, ExitCode.INFRASTRUCTURE),
    "a checkpoint of another model": (Failure(Kind.MISMATCH, 0, rank=0), FINAL, ExitCode.USAGE),
    "a full disk": (Failure(Kind.DISK_FULL, 0, rank=0), "disruptions", ExitCode.INFRASTRUCTURE),
    "a read-only file system": (Failure(Kind.READ_ONLY, 0, rank=0), "disruptions", ExitCode.INFRASTRUCTURE),
    "a usage error": (Failure(Kind.USAGE, 0), FINAL, ExitCode.USAGE),
    "the deadline": (Failure(Kind.DEADLINE, 0), FINAL, ExitCode.TIMEOUT),
}


@pytest.mark.promise("Recovery: Failures use a budget, and the same one twice without progress is final")
@pytest.mark.parametrize("name", FAILURES)
def test_each_kind_of_failure_uses_its_budget_and_has_its_code(name: str) -> None:
    failure, budget, code = FAILURES[name]
    assert failure.code == code
    _, decision = run([failure], Limits(restarts=3))
    if budget == FINAL:
        assert decision.no_retry_reason == f"not retried: {failure.kind.meaning.reason}"
    else:
        assert decision.restart
        assert (decision.restarts, decision.disruptions) == ((1, 0) if budget == "restarts" else (0, 1))
        _, spent = run([failure], Limits(restarts=0, disruptions=0))
        assert spent.no_retry_reason == f"not retried: the job allows no {budget}"


def test_the_table_says_of_each_kind_who_retries_or_why_nobody_does() -> None:
    for kind, meaning in MEANINGS.items():
        assert bool(meaning.reason) == (meaning.retried_by is Retry.NOBODY)
        assert kind is Kind.RESIZED or (meaning.budget is Budget.NONE) == (meaning.retried_by is Retry.NOBODY)
        assert not meaning.final_after or meaning.budget is not Budget.NONE
    assert list(MEANINGS) == sorted(MEANINGS, key=lambda each: MEANINGS[each].precedence)  # as the page shows them


def test_attempts_that_went_further_than_is_known_of_them_are_no_failures_at_one_step() -> None:
    """Of launchers that were all killed at once, the record has the step after which their ranks began."""

    def killed(number: int, began: int) -> Attempt:
        return Attempt(number, 0.0, 60.0, CONTAINER_KILLED, step=began, restored=began)

    assert decide([killed(0, 100), killed(1, 150)], Limits()).restart
    assert not decide([killed(0, 100), killed(1, 100)], Limits()).restart


@pytest.mark.parametrize("type_", ["SyntaxError", "ModuleNotFoundError"])
def test_code_that_cannot_start_is_not_retried(type_: str) -> None:
    failure = replace(RAISED, type=type_)
    history, decision = run([failure] * 3, Limits(restarts=3), duration=2.0)
    assert (len(history), decision.no_retry_reason) == (1, "not retried: the code fails in this way at each start")
    assert len(run([failure] * 3, Limits(restarts=3), steps=[5, 5], duration=2.0)[0]) == 2  # it has begun before
    assert len(run([failure] * 3, Limits(restarts=2, retry_same=True), duration=2.0)[0]) == 3
    after_training = run([LOST, failure, failure], Limits(restarts=3), steps=[50_000, None, None], duration=2.0)
    assert len(after_training[0]) > 2  # a replacement node may lack what the script imports


def test_a_library_that_a_node_lacks_is_not_the_code() -> None:
    lacks = replace(RAISED, type="ImportError", message="libcuda.so.1: cannot open shared object file")
    assert len(run([lacks] * 2, Limits(restarts=1), duration=2.0)[0]) == 2
    gone = replace(RAISED, type="ImportError", message="cannot import name 'Model' from 'models'")
    assert len(run([gone] * 2, Limits(restarts=1), duration=2.0)[0]) == 1


@pytest.mark.parametrize(
    "failure", [CONTAINER_KILLED, Failure(Kind.OOM, 0, rank=0), Failure(Kind.HANG, 0, rank=0, message="no step")]
)
def test_ranks_that_began_and_made_no_step_have_made_no_progress_however_long_it_took(failure: Failure) -> None:
    history, decision = run([failure] * 9, Limits(restarts=5), restored=0)
    assert len(history) == 2
    assert decision.no_retry_reason == "not retried: failed twice with the same error"
    assert run([failure] * 3, Limits(restarts=5))[1].restart  # a script that tells no steps may have made some


def test_ranks_that_lose_their_connections_at_one_step_are_final_at_the_tenth_time() -> None:
    full = "NCCL error: ncclSystemError: Error while creating shared memory segment: No space left on device"
    failure = Failure(Kind.CONNECTION, 0, rank=0, type="DistBackendError", message=full)
    history, decision = run([failure] * 20, Limits(), steps=[7] * 20)
    assert len(history) == 10
    assert decision.no_retry_reason == "not retried: failed 10 times at step 7 with the same error"
    assert run([failure] * 20, Limits(), steps=itertools.count(7))[1].restart


@pytest.mark.parametrize(
    ("kind", "type_"), [(Kind.STORAGE, "StorageError"), (Kind.IO, "StorageError"), (Kind.DISK_FULL, "OSError")]
)
@pytest.mark.parametrize("duration", [1.0, 2 * QUICK])  # of attempts that could not restore: they have made no progress
def test_storage_that_is_away_or_full_is_final_at_the_tenth_time(duration: float, kind: Kind, type_: str) -> None:
    away = Failure(kind, 0, rank=0, type=type_, message="the server answered 503")
    history, decision = run([away] * 20, Limits(restarts=0), duration=duration)
    assert (len(history), history[-1].disruptions) == (10, 9)
    assert decision.no_retry_reason == "not retried: failed 10 times with the same error"
    temporary = [replace(away, message=f"No space left on device: '/ckpt/tmp{name}'") for name in "abcdefghijklmnop"]
    assert len(run(temporary, Limits(), duration=duration)[0]) == (10 if kind is Kind.DISK_FULL else 16)
    history, decision = run([away] * 20, Limits(), steps=itertools.count(100))
    assert len(history) == 20
    assert decision.restart  # each attempt comes further before a save fails
    assert run([*[away] * 9, LOST, away], Limits())[1].restart
    own = replace(away, type="OSError")  # of the script, which may have trained for hours
    assert kind is not Kind.IO or run([own] * 20, Limits())[1].restart


def test_a_change_of_size_uses_neither_restarts_nor_disruptions_and_delays_nothing() -> None:
    history, decision = run([RESIZED] * 30, Limits(restarts=0, disruptions=0), duration=1.0)
    assert len(history) == 21  # as many as are kept, and the last one
    assert decision == Decision(0, 0, 0.0)
    history, decision = run([LOST, RESIZED, RAISED, RESIZED], Limits(restarts=3))
    assert (decision.restarts, decision.disruptions, decision.delay) == (1, 1, 0.0)


def test_a_disruption_leaves_the_restarts_and_a_failure_the_disruptions() -> None:
    history, decision = run([LOST, RAISED, LOST, OTHER, RAISED, LOST, OTHER], Limits(restarts=3))
    assert [(attempt.restarts, attempt.disruptions) for attempt in history] == [
        (0, 0), (0, 1), (1, 1), (1, 2), (2, 2), (3, 2), (3, 3),
    ]  # fmt: skip
    assert decision.no_retry_reason == "not retried: all 3 restarts are used"
    assert (
        run([LOST, LOST, LOST], Limits(disruptions=1))[1].no_retry_reason == "not retried: its only disruption is used"
    )


def test_counts_outlive_the_attempts_that_a_shortened_history_drops() -> None:
    history, decision = run([LOST] * 200, Limits(disruptions=150))
    assert history[-1].number == 150
    assert len(history) < 30
    assert decision.no_retry_reason == "not retried: all 150 disruptions are used"


@pytest.mark.parametrize(
    ("steps", "attempts", "where"),
    [
        ((120, 120), 2, " at step 120"),
        ((120, 100), 2, " at step 100"),  # resumed from a checkpoint, and did not come as far
        ((120, 121, 121), 3, " at step 121"),
        ((120, 130, 140, 150), 4, None),  # each one comes further: the budget decides
        ((None, 5, 5), 3, " at step 5"),
        ((5, None), 2, ""),  # failed before its first step
    ],
)
def test_the_same_failure_twice_without_progress_is_final(
    steps: tuple[int | None, ...], attempts: int, where: str | None
) -> None:
    failures = [replace(RAISED, rank=number, message=f"sample {number} has no label") for number in range(4)]
    history, decision = run(failures, Limits(restarts=3), steps=steps, restored=0)
    assert len(history) == attempts
    expected = "all 3 restarts are used" if where is None else f"failed twice{where} with the same error"
    assert decision.no_retry_reason == f"not retried: {expected}"
    again = run(failures, Limits(restarts=3, retry_same=True), steps=steps, restored=0)[1]
    assert again.no_retry_reason.endswith("are used")


def test_an_attempt_that_stays_where_it_began_has_made_no_progress() -> None:
    attempt = Attempt(0, 0.0, 2 * QUICK, RAISED, step=40, restored=40)
    assert not made_progress(None, attempt)
    assert made_progress(None, replace(attempt, step=41))


def test_fewer_steps_may_be_progress_of_a_script_that_does_not_say_where_it_began() -> None:
    assert len(run([RAISED] * 4, Limits(restarts=3), steps=(120, 100, 80), duration=QUICK + 1)[0]) == 4
    assert len(run([RAISED] * 4, Limits(restarts=3), steps=(120, 120), duration=QUICK + 1)[0]) == 2
    assert len(run([RAISED] * 4, Limits(restarts=3), steps=(120, 100), duration=QUICK - 1)[0]) == 2


def test_without_steps_only_quick_attempts_count_as_without_progress() -> None:
    assert len(run([RAISED] * 4, Limits(restarts=3), duration=QUICK - 1)[0]) == 2
    assert len(run([RAISED] * 4, Limits(restarts=3), duration=QUICK + 1)[0]) == 4


@pytest.mark.parametrize("failure", [KILLED, LOST, Failure(Kind.IO, 0, rank=0), Failure(Kind.RENDEZVOUS, 0, rank=0)])
def test_what_may_pass_by_itself_is_retried_although_it_is_the_same(failure: Failure) -> None:
    history, decision = run([failure] * 9, Limits(restarts=3, disruptions=3), steps=[7] * 9, duration=1.0)
    assert len(history) == 4
    assert decision.no_retry_reason.endswith("are used")


@pytest.mark.parametrize("between", [OTHER, LOST])
def test_the_same_failure_counts_only_if_it_comes_twice_in_a_row(between: Failure) -> None:
    assert run([RAISED, between, RAISED], Limits(restarts=5), steps=[7, 7, 7])[1].restart


def test_equal_failures_may_differ_in_numbers_addresses_and_rank() -> None:
    first = replace(RAISED, message="bad tensor at 0x7f3a, sample 371 on 10.0.0.1:4711")
    again = replace(first, rank=0, pod=0, time=5.0, message="bad tensor at 0x1b, sample 2 on 10.0.0.2:99", count=3)
    assert first.signature == again.signature
    for other in (OTHER, KILLED, replace(first, message="bad label")):
        assert other.signature != first.signature


def test_a_long_attempt_with_progress_renews_both_budgets() -> None:
    limits = Limits(restarts=1, disruptions=1, reset=3600)
    short = [Attempt(0, 0.0, 9.0, RAISED, 0, 0, 5), Attempt(1, 9.0, 20.0, OTHER, 1, 1, 9)]
    assert not decide(short, limits).restart
    for step, expected in ((9, (1, 0)), (None, None), (5, None)):
        history = [short[0], Attempt(1, 9.0, 4000.0, OTHER, 1, 1, step)]
        decision = decide(history, limits)
        assert (decision.restarts, decision.disruptions) == (expected or (1, 1))
        assert decision.restart == (expected is not None)
    assert not decide([short[0], Attempt(1, 9.0, 4000.0, OTHER, 1, 1, 9)], replace(limits, reset=0.0)).restart


def test_the_first_restart_is_immediate_and_quick_failures_in_a_row_wait_longer_each_time() -> None:
    limits = Limits(restarts=100)
    delays = [run([KILLED] * number, limits, duration=1.0)[1].delay for number in range(1, 11)]
    assert delays == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert run([KILLED] * 9, replace(limits, backoff=0), duration=1.0)[1].delay == 0
    assert run([KILLED] * 9, limits, duration=QUICK)[1].delay == 0  # it tells no steps, and may have made some
    assert run([KILLED] * 9, limits, duration=QUICK, restored=0)[1].delay == 60
    assert run([LOST] * 3, limits, duration=QUICK, steps=[7] * 3)[1].delay == 1
    assert run([KILLED] * 9, limits, duration=1.0, steps=range(1, 10))[1].delay == 0  # each attempt comes further


def test_an_address_in_use_is_tried_again_after_a_second() -> None:
    assert run([Failure(Kind.ADDRESS, 0, rank=0)], Limits(restarts=3))[1].delay == 1
    assert run([Failure(Kind.ADDRESS, 0, rank=0)], Limits(restarts=3, backoff=0))[1].delay == 0


RETRIED = [kind for kind in Kind if kind.meaning.budget]
ANY = st.builds(
    Failure,
    kind=st.sampled_from(RETRIED),
    pod=st.integers(0, 3),
    rank=st.none() | st.integers(0, 7),
    type=st.sampled_from(["", "ValueError", "OSError"]),
    message=st.sampled_from(["", "sample 1", "sample 2", "timeout"]),
    signal=st.none() | st.sampled_from([int(signal.SIGKILL), int(signal.SIGSEGV)]),
    exit_code=st.none() | st.integers(0, 143),
)
LIMITS = st.builds(
    Limits,
    restarts=st.integers(0, 5),
    disruptions=st.integers(0, 30),
    reset=st.just(0.0) | st.floats(1, 1e4),
    backoff=st.floats(0, 100),
    retry_same=st.booleans(),
)


@given(st.lists(st.tuples(ANY, st.none() | st.integers(0, 50), st.floats(0, 2e4)), min_size=60, max_size=60), LIMITS)
def test_any_history_ends_within_its_budgets_and_is_judged_alike_by_who_knows_less_of_it(
    failures: list[tuple[Failure, int | None, float]], limits: Limits
) -> None:
    history: list[Attempt] = []
    decision = decide(history, limits)
    renewed = False
    for number, (failure, step, duration) in enumerate(failures):
        renewed |= limits.reset > 0 and duration >= limits.reset
        attempt = Attempt(number, 100.0, 100.0 + duration, failure, decision.restarts, decision.disruptions, step)
        history.append(attempt)
        decision = decide(history, limits)
        assert decide(shorten(history), limits) == decision  # what the launcher of a new pod 0 gets from the others
        assert 0 <= decision.delay <= limits.backoff
        assert decision.restarts <= limits.restarts
        assert decision.disruptions <= limits.disruptions
        if not decision.restart:
            assert decision.no_retry_reason.startswith("not retried: ")
            break
    else:
        assert renewed
    assert renewed or len(history) <= limits.restarts + limits.disruptions + 1


ATTEMPT = Attempt(2, 100.0, step=4)
PLACES = {0: ("train-0", "node-a"), 1: ("train-1", "node-b")}
LOST_POD = Failure(Kind.LOST, 1, attempt=2, message="lost the connection to pod 0")
JOINED = {1: Join("train-1", "node-c", step=6)}


def explained(failures: Failures, *, joined: dict[int, Join], replaced: list[int]) -> Attempt:
    return failures.explain(ATTEMPT, joined, PLACES, replaced)


def test_a_lost_pod_has_the_names_that_it_had_in_the_attempt() -> None:
    failures = Failures()
    failures.add(LOST_POD)
    named = replace(LOST_POD, pod_name="train-1", node="node-b")
    assert explained(failures, joined={}, replaced=[]).failure == named
    assert explained(failures, joined=JOINED, replaced=[]).failure == named


def test_a_lost_pod_with_another_launcher_was_restarted() -> None:
    failures = Failures()
    failures.add(LOST_POD)
    failure = explained(failures, joined=JOINED, replaced=[1]).failure
    assert failure == replace(LOST_POD, pod_name="train-1", node="node-b", message="was restarted")


def test_a_closed_connection_means_a_killed_container_unless_the_pod_has_reported_a_failure() -> None:
    failures = Failures()
    failures.add_closed(1)
    failures.add(LOST_POD)
    failure = explained(failures, joined=JOINED, replaced=[1]).failure
    assert failure
    assert (failure.kind, failure.message) == (Kind.CONTAINER_KILLED, "")
    failures.clear()
    failures.add(LOST_POD)
    failures.add_closed(1)
    failure = explained(failures, joined=JOINED, replaced=[1]).failure
    assert failure
    assert failure.kind is Kind.LOST


def test_pod_0_is_lost_if_every_other_pod_has_lost_the_connection_to_it() -> None:
    places = {**PLACES, 2: ("train-2", "node-c")}
    joined = {**JOINED, 2: Join("train-2", "node-c")}
    failures = Failures()
    failures.add(replace(LOST_POD, time=8.0))
    first = failures.explain(ATTEMPT, joined, places, []).failure
    assert first
    assert (first.pod, first.node) == (1, "node-b")  # the link of one pod broke
    failures.add(replace(LOST_POD, pod=2, time=7.0))
    cause = failures.explain(ATTEMPT, joined, places, []).failure
    assert cause
    assert (cause.kind, cause.pod, cause.node, cause.time) == (Kind.LOST, 0, "node-a", 7.0)
    assert cause.summary == "train-0 lost the connection to all other pods"
    failures.add(replace(LOST_POD, pod=0, time=9.0))  # it stood still, and its own launcher connected again
    assert failures.explain(ATTEMPT, {0: Join("train-0", "node-a"), **joined}, places, []).failure == cause
    one_restarted = failures.explain(ATTEMPT, joined, places, [2]).failure
    assert one_restarted
    assert (one_restarted.pod, one_restarted.message) == (2, "was restarted")
    failures.add(Failure(Kind.EXCEPTION, 1, 1, attempt=2, type="ValueError"))
    raised = failures.explain(ATTEMPT, joined, places, []).failure
    assert raised
    assert raised.kind is Kind.EXCEPTION


def test_pods_that_do_not_come_back_are_lost_themselves() -> None:
    """The nodes of all other pods fail at once: the leader runs on, and its node is healthy."""
    places = {**PLACES, 2: ("train-2", "node-c")}
    for closed in ((), (1, 2)):
        failures = Failures()
        for pod in closed:
            failures.add_closed(pod)
        failures.add(replace(LOST_POD, time=7.0), replace(LOST_POD, pod=2, time=8.0))
        for joined in (
            {},
            {0: Join("train-0", "node-a")},
            {0: Join("train-0", "node-a"), 2: Join("train-2", "node-c")},
        ):
            failure = failures.explain(ATTEMPT, joined, places, []).failure
            assert failure
            assert (failure.kind, failure.pod, failure.node) == (Kind.LOST, 1, "node-b")


def test_the_step_is_the_most_that_any_pod_has_reached() -> None:
    failures = Failures()
    failures.add(replace(LOST_POD, step=5))
    assert explained(failures, joined={}, replaced=[]).step == 5
    assert explained(failures, joined=JOINED, replaced=[]).step == 6


def test_failures_of_other_attempts_do_not_count() -> None:
    failures = Failures()
    failures.add(replace(LOST_POD, attempt=1))
    assert explained(failures, joined=JOINED, replaced=[]) is ATTEMPT
    raised = Failure(Kind.EXCEPTION, 0, 0, attempt=2, type="ValueError")
    failures.add(LOST_POD, raised)
    assert explained(failures, joined=JOINED, replaced=[]).failure == raised
    assert [each.attempt for each in failures] == [1, 2, 2]
