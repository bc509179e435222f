"""Show the logs that are there now, pod by pod, and the kept lines of pods that are gone."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from typing import Final

from flk.errors import ApiError, ForbiddenError, JobDeletedError, JobNotFoundError, UsageError
from flk.jobs.answer import Answer, Lines, answered, last_answer
from flk.jobs.logs.folding import Folder
from flk.jobs.logs.lines import LineFilter, LogLine, LogOptions, in_short
from flk.jobs.logs.reader import IDLE
from flk.jobs.wait import raise_for_state
from flk.kube import Object
from flk.observe.client import JobClient
from flk.observe.observation import Observation
from flk.observe.pods import phase_of
from flk.observe.pool import ReadPool
from flk.observe.reader import Reader, view_of
from flk.observe.stamps import split_stamp
from flk.observe.view import JobView
from flk.targets import DEFAULT, TARGETS
from flk.units import timestamp

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


def _dumped(client: JobClient, name: str, options: LogOptions) -> Iterator[LogLine]:
    try:
        job = client.get_job(name)
    except JobNotFoundError:
        last = last_answer(client, name)
        if last is None:
            raise
        when = last.as_of(client.now())
        if last.lines:
            chosen, wanted = choose_kept(client, last, options)
            yield LogLine(f"job {name} is gone; these are its last lines, {when}", note=True)
            for pod in wanted:
                yield from kept_lines(client, last, chosen, pod)
        else:
            yield LogLine(f"job {name} is gone, and flk has kept no lines of it; it was seen last {when}", note=True)
        if last.state.was_deleted:  # before it had ended
            raise_for_state(last.state, client)
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
    if gone:
        known = [pod for pod in last.lines if chosen.base_name(pod) in gone] if last is not None else []
        verb, whose = ("is", "its") if len(known) == 1 else ("are", "their")
        if last is not None and known and (refusal := _unanswered(chosen)):
            yield LogLine(f"{in_short(known)} {verb} gone; {refusal}", note=True)
        elif last is not None and known:
            when = last.as_of(client.now())
            yield LogLine(f"{in_short(known)} {verb} gone; these are {whose} last lines, {when}", note=True)
            for pod in known:
                yield from kept_lines(client, last, chosen, pod)
        elif not pods:
            yield LogLine(f"there is no pod with a log: job {name} is {state.headline}", note=True)


def choose_kept(client: JobClient, last: Answer, options: LogOptions) -> tuple[LineFilter, list[str]]:
    """Return the filter for the lines that are kept of a job that is gone, and the pods that it chooses, in order.

    Raises UsageError for an option that these lines do not answer.
    """
    target = next((target for target in TARGETS.values() if target.kind == last.state.kind), DEFAULT)
    name = last.state.name
    chosen = LineFilter(options, name, last.pods, target, 0)
    if refusal := _unanswered(chosen):
        option, _, why = refusal.partition(": ")
        raise UsageError(f"{option}: job {name} is gone; {why}", hint=f"{client.commands.flk('logs', name)} shows them")
    return chosen, sorted(filter(lambda pod: chosen.wants_index(chosen.index_of(pod)), last.lines), key=chosen.index_of)


def _unanswered(chosen: LineFilter) -> str:
    """Return the option that kept lines do not answer, and why; empty if there is none."""
    options = chosen.options
    if options.container not in ("", chosen.container):
        return f"--container: flk has kept lines of the container {chosen.container} only"
    if options.previous:
        return "--previous: flk has kept the last lines of the pods, not those of earlier containers"
    return ""


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
    options, remaining = chosen.options, iter(pods)
    failure, readable = None, False
    unread: dict[str, list[str]] = {}  # by reason: names of pods
    with ReadPool(DUMPED) as pool:
        reading: deque[tuple[str, Future[list[tuple[str, str]]]]] = deque()
        for pod in itertools.islice(remaining, DUMPED):
            reading.append((pod["metadata"]["name"], pool.submit(read_log, client, pod, options)))
        while reading:
            name, future = reading.popleft()
            for following in itertools.islice(remaining, 1):
                reading.append((following["metadata"]["name"], pool.submit(read_log, client, following, options)))
            try:
                lines = future.result()
            except ForbiddenError:
                raise
            except ApiError as error:
                if error.status == 400:  # its container has not started, or was never restarted
                    readable = True
                    unread.setdefault("no log of an earlier container" if options.previous else "no log", []).append(
                        name
                    )
                else:
                    failure = error
                    unread.setdefault(f"a log that cannot be read: {str(error).replace(name, 'POD')}", []).append(name)
                continue
            readable = True
            if options.of_ranks and options.tail is None and options.since is None:
                read[name] = lines
            yield from chosen.lines(name).chosen(lines)
    for reason, names in unread.items():
        verb = "has" if len(names) == 1 else "have"
        yield LogLine(f"{in_short(names)} {verb} {reason}", note=True)
    if failure is not None and not readable:
        raise failure


def read_log(client: JobClient, pod: Object, options: LogOptions) -> list[tuple[str, str]]:
    """Return time and text of the lines that a pod's log has now. Raises ApiError."""
    with client.stream_log(pod, IDLE, container=options.container, timestamps=True, **options.query()) as lines:
        return options.last([split_stamp(line) for line in lines])
