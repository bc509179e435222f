"""Show the logs that are there now, pod by pod, and the kept lines of pods that are gone."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Final

from flk.errors import ApiError, ForbiddenError, JobDeletedError, JobNotFoundError, UsageError
from flk.jobs.answer import Answer, Lines, answered, last_answer
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
from flk.spec.units import timestamp
from flk.targets import DEFAULT, TARGETS

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
        yield LogLine(f"there is no line yet: job {state.sentence}", note=True)
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
        yield LogLine(f"there is no pod with a log: job {state.sentence}", note=True)


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
        if isinstance(lines, ApiError):  # its container has not started
            unread.setdefault("no log", []).append(name)
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
