"""Show the logs that are there now, pod by pod, and the kept lines of pods that are gone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from flk.errors import ApiError, ForbiddenError, JobDeletedError, JobNotFoundError, UsageError
from flk.health.failure import LoggedError, find_errors
from flk.jobs.answer import Answer, Lines, answered, get_state, last_answer
from flk.jobs.logs.lines import Folder, LineFilter, LogLine, LogOptions, in_short
from flk.jobs.logs.reader import IDLE
from flk.jobs.wait import raise_for_state
from flk.kube import Object
from flk.observe.client import JobClient
from flk.observe.observation import Observation
from flk.observe.pods import phase_of
from flk.observe.pool import ReadPool
from flk.observe.progress import split_stamp
from flk.observe.reader import Reader, view_of
from flk.observe.view import JobView
from flk.targets import DEFAULT, TARGETS
from flk.units import timestamp
from flk_runtime.contract.failure import Failure
from flk_runtime.contract.quantities import numbered, plural

DUMPED: Final = 8  # pods whose logs are read at once, and held until it is their turn
FOLDED: Final = 100_000  # lines among which equal ones are folded


def dump(client: JobClient, name: str, options: LogOptions) -> Generator[LogLine, None, None]:
    """Yield the lines that are there now, pod by pod; of pods that are gone, the last lines that flk has kept.

    A pod whose log cannot be read gets a note. Raises the error of a pod if no log could be read at all, and
    JobNotFoundError if there is no such job and nothing is kept of one. Raises JobDeletedError after the lines of a job
    that was deleted before it had ended.
    """
    lines = _dumped(client, name, options)
    if not options.fold:
        yield from lines
        return
    folder = Folder(delay=float("inf"), held=FOLDED)
    try:
        for line in lines:
            yield from folder.add(line)
    except JobDeletedError:
        yield from folder.rest()
        raise
    yield from folder.rest()


def _job_or_answer(client: JobClient, name: str) -> Object | Answer:
    """Return the object of a job, or the last answer about one that is gone. Raises JobNotFoundError without both."""
    try:
        return client.get_job(name)
    except JobNotFoundError:
        if last := last_answer(client, name):
            return last
        raise


def _dumped(client: JobClient, name: str, options: LogOptions) -> Iterator[LogLine]:
    job = _job_or_answer(client, name)
    if isinstance(job, Answer):
        when = job.as_of(client.now())
        if job.lines:
            chosen, wanted = choose_kept(client, job, options)
            yield LogLine(f"job {name} is gone; these are its last lines, {when}", note=True)
            for pod in wanted:
                yield from kept_lines(client, job, chosen, pod)
        else:
            yield LogLine(f"job {name} is gone, and flk has kept no lines of it; it was seen last {when}", note=True)
        if job.state.was_deleted:  # before it had ended
            raise_for_state(job.state, client)
        return
    chosen = LineFilter.of(JobView(Observation(job)), options)
    every = client.pods_of(job)
    pods = [pod for pod in every if chosen.wants(pod)]
    found = {chosen.base_name(pod["metadata"]["name"]) for pod in pods}
    last = last_answer(client, name, job["metadata"]["uid"])
    read: dict[str, Lines] = {}  # whole logs, whose last lines are kept
    shown = False
    for line in _read(client, sorted(pods, key=chosen.order), chosen, read):
        shown = True
        yield line
    view = view_of(client, Observation(job, every, client.now()), Reader(client))
    state = answered(client, view, lines=read).state
    if pods and not shown and all(phase_of(pod) == "Pending" for pod in pods):
        yield LogLine(f"there is no line yet: job {name} is {state.headline}", note=True)
    gone = [pod for index, pod in enumerate(chosen.names) if pod not in found and chosen.wants_index(index)]
    known = [pod for pod in last.lines if chosen.base_name(pod) in gone] if last else []
    if known and (option := _unanswered(chosen)):
        verb = "is" if len(known) == 1 else "are"
        yield LogLine(f"{in_short(known)} {verb} gone; {option}: flk has kept lines of the ranks only", note=True)
    elif last and known:
        verb, whose = ("is", "its") if len(known) == 1 else ("are", "their")
        when = last.as_of(client.now())
        yield LogLine(f"{in_short(known)} {verb} gone; these are {whose} last lines, {when}", note=True)
        for pod in known:
            yield from kept_lines(client, last, chosen, pod)
    elif gone and not pods:
        yield LogLine(f"there is no pod with a log: job {name} is {state.headline}", note=True)


def choose_kept(client: JobClient, last: Answer, options: LogOptions) -> tuple[LineFilter, list[str]]:
    """Return the filter for the lines that are kept of a job that is gone, and the pods that it chooses, in order.

    Raises UsageError for an option that these lines do not answer.
    """
    target = next((target for target in TARGETS.values() if target.kind == last.state.kind), DEFAULT)
    name = last.state.name
    chosen = LineFilter(options, name, last.pods, target, 0)
    if option := _unanswered(chosen):
        problem = f"{option}: job {name} is gone, and flk has kept lines of its ranks only"
        raise UsageError(problem, hint=f"{client.commands.flk('logs', name)} shows them")
    return chosen, sorted(filter(lambda pod: chosen.wants_index(chosen.index_of(pod)), last.lines), key=chosen.index_of)


def _unanswered(chosen: LineFilter) -> str:
    """Return the option that kept lines do not answer; empty if there is none."""
    if chosen.options.previous:
        return "--previous"
    return "--container" if chosen.options.container not in ("", chosen.container) else ""


def kept_lines(client: JobClient, last: Answer, chosen: LineFilter, pod: str) -> Iterator[LogLine]:
    """Yield the chosen ones among the lines that are kept of a pod."""
    options = chosen.options
    lines = [(time, text) for time, text in last.lines[pod]]
    if options.since is not None:
        begin = client.now() - options.since
        lines = [(time, text) for time, text in lines if timestamp(time) >= begin]
    yield from chosen.lines(pod).chosen(options.last(lines))


def _read(client: JobClient, pods: list[Object], chosen: LineFilter, read: dict[str, Lines]) -> Iterator[LogLine]:
    """Yield the chosen lines of existing pods, in this order, then a note for each reason why logs cannot be read.

    ``read`` gets the lines of whole logs.
    """
    options = chosen.options
    failure, readable = None, False
    unread: dict[str, list[str]] = {}  # by reason: names of pods
    for name, lines in _logs(client, pods, options):
        if isinstance(lines, ApiError) and lines.status != 400:
            failure = lines
            unread.setdefault(f"a log that cannot be read: {str(lines).replace(name, 'POD')}", []).append(name)
            continue
        readable = True
        if isinstance(lines, ApiError):  # its container has not started, or was never restarted
            unread.setdefault("no log of an earlier container" if options.previous else "no log", []).append(name)
            continue
        if options.of_ranks and not options.cuts:
            read[name] = lines
        yield from chosen.lines(name).chosen(lines)
    for reason, names in unread.items():
        verb = "has" if len(names) == 1 else "have"
        yield LogLine(f"{in_short(names)} {verb} {reason}", note=True)
    if failure is not None and not readable:
        raise failure


def _logs(
    client: JobClient, pods: Sequence[Object], options: LogOptions
) -> Iterator[tuple[str, list[tuple[str, str]] | ApiError]]:
    """Yield the name of each pod with the lines of its log, or why it cannot be read; only some are held at once.

    Raises ForbiddenError, which holds for all pods.
    """

    def read(pod: Object) -> tuple[str, list[tuple[str, str]] | ApiError]:
        name = pod["metadata"]["name"]
        try:
            return name, read_log(client, pod, options)
        except ForbiddenError:
            raise
        except ApiError as error:
            return name, error

    with ReadPool(DUMPED) as pool:
        for begin in range(0, len(pods), DUMPED):
            yield from pool.map(read, pods[begin : begin + DUMPED])


def read_log(client: JobClient, pod: Object, options: LogOptions) -> list[tuple[str, str]]:
    """Return time and text of the lines that a pod's log has now. Raises ApiError."""
    with client.stream_log(pod, IDLE, container=options.container, timestamps=True, **options.query()) as lines:
        return options.last([split_stamp(line) for line in lines])


LINES: Final = 2000  # last lines of each pod that are searched
PODS: Final = 256  # pods whose logs are searched, those that failed first
BEFORE, AFTER = 20, 100  # lines that are shown before the error, and from its beginning
WITHOUT_ERROR: Final = 40  # last lines of a rank that ended without an error message


@dataclass(frozen=True)
class _Output:
    """The lines of one rank or launcher in one attempt, and the first error in them."""

    lines: list[LogLine]
    error: LoggedError | None

    @property
    def name(self) -> str:
        """The rank, or the pod of lines without a rank."""
        return self.lines[0].tag.strip("[] ")

    @property
    def time(self) -> tuple[str, float]:
        """When the error was printed; sorts as time does."""
        stamp = self.lines[self.error.begin].time if self.error else ""
        return stamp[:19], float("0" + stamp[19:].rstrip("Z").partition("+")[0] if stamp[19:20] == "." else "0")


def first_error(client: JobClient, name: str, options: LogOptions) -> Generator[LogLine, None, None]:
    """Yield the lines of the rank that failed first, around its error, then notes about the errors of other ranks.

    The launchers' record says which rank it was. Without a record it is the rank with the first error in the logs that
    is not a consequence of a peer's end. For pods that are gone, flk searches the lines that it has kept. Raises
    JobNotFoundError if there is no such job and nothing is kept of one.
    """
    outputs, failure = _read_outputs(client, name, options)
    first = _of_failure(outputs, failure) or min(
        (output for output in outputs if output.error),
        key=lambda output: (output.error is not None and output.error.secondary, output.time),
        default=None,
    )
    if first is None:
        details = failure.details.splitlines() if failure else []
        yield from (LogLine(line, tag=f"[rank {failure.rank}] ", rank=failure.rank) for line in details if failure)
        what = f"the launchers' record: {failure.summary}" if failure else f"no rank of job {name} has printed an error"
        yield LogLine(what, note=True)
        return
    error = first.error
    begin = max(0, error.begin - BEFORE) if error else max(0, len(first.lines) - WITHOUT_ERROR)
    yield from first.lines[begin : error.begin + AFTER if error else None]
    if failure is not None:
        yield LogLine(failure.summary, note=True)
    yield from _others(outputs, first)


def _others(outputs: list[_Output], first: _Output) -> Iterator[LogLine]:
    """Yield a note for the errors that are consequences, and one for each other kind of error."""
    consequences = [output for output in outputs if output is not first and output.error and output.error.secondary]
    if consequences:
        errors = [output.error.summary for output in consequences if output.error]
        example = max(errors, key=errors.count)
        yield LogLine(
            f"{plural(len(consequences), 'other rank')} failed as a consequence ({_names(consequences)}), most with: "
            f"{example}",
            note=True,
        )
    kinds: dict[str, list[_Output]] = defaultdict(list)
    for output in outputs:
        if output is not first and output.error and not output.error.secondary:
            kinds[output.error.summary].append(output)
    for summary, same in list(kinds.items())[:5]:
        yield LogLine(f"{_names(same)} printed an error later: {summary}", note=True)


def _names(outputs: list[_Output]) -> str:
    """Return ranks and pods in short: ``ranks 0-2``."""
    kinds: dict[str, list[int]] = defaultdict(list)
    for output in outputs:
        kind, number = output.name.split(" ")
        kinds[kind].append(int(number))
    return ", ".join(numbered(kind, of) for kind, of in sorted(kinds.items(), reverse=True))


def _of_failure(outputs: list[_Output], failure: Failure | None) -> _Output | None:
    """Return the output of the rank that a failure names, None if there is none."""
    if failure is None or failure.rank is None:
        return None
    of_rank = [output for output in outputs if output.lines[0].rank == failure.rank]
    return max(of_rank, key=lambda output: output.lines[0].attempt, default=None)


def _read_outputs(client: JobClient, name: str, options: LogOptions) -> tuple[list[_Output], Failure | None]:
    """Return the output of each rank in its last attempt, and the failure that the job's state names."""
    lines: dict[str, list[LogLine]] = defaultdict(list)
    plain = replace(options, ranks=frozenset(), grep=None, tail=LINES, previous=False)
    job = _job_or_answer(client, name)
    if isinstance(job, Answer):
        chosen, wanted = choose_kept(client, job, plain)
        for pod in wanted:
            for line in kept_lines(client, job, chosen, pod):
                lines[line.tag].append(line)
        return _outputs(lines), job.state.failure
    chosen = LineFilter.of(JobView(Observation(job)), plain)
    pods = [pod for pod in client.pods_of(job) if chosen.wants(pod)]
    pods.sort(key=lambda pod: (phase_of(pod) != "Failed", chosen.index(pod)))
    for pod_name, read in _logs(client, pods[:PODS], plain):
        if isinstance(read, ApiError):
            continue  # its container has not started, or its node does not answer
        for line in chosen.lines(pod_name).chosen(read):
            lines[line.tag].append(line)
    return _outputs(lines), get_state(client, name).failure


def _outputs(lines: dict[str, list[LogLine]]) -> list[_Output]:
    """Return the output of each rank and launcher in the last attempt that it has lines of."""
    outputs = []
    for found in lines.values():
        last = [line for line in found if line.attempt == found[-1].attempt]
        errors = find_errors([line.message for line in last])
        primary = next((error for error in errors if not error.secondary), errors[0] if errors else None)
        outputs.append(_Output(last, primary))
    return outputs
