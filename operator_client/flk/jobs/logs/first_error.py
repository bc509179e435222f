"""Show the lines of the rank that failed first, and count the ranks whose errors are consequences of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import Final

from flk.errors import ApiError, ForbiddenError, JobNotFoundError
from flk.health.exceptions import LoggedError, find_errors
from flk.jobs.answer import get_state, last_answer
from flk.jobs.logs.dump import DUMPED, choose_kept, kept_lines, read_log
from flk.jobs.logs.lines import LineFilter, LogLine, LogOptions
from flk.kube import Object
from flk.observe.client import JobClient
from flk.observe.observation import Observation
from flk.observe.pods import phase_of
from flk.observe.pool import ReadPool
from flk.observe.view import JobView
from flk_runtime.contract.failure import Failure
from flk_runtime.contract.ranges import numbered, plural

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
    outputs, failure = _read(client, name, options)
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


def _read(client: JobClient, name: str, options: LogOptions) -> tuple[list[_Output], Failure | None]:
    """Return the output of each rank in its last attempt, and the failure that the job's state names."""
    lines: dict[str, list[LogLine]] = defaultdict(list)
    plain = replace(options, ranks=frozenset(), grep=None, tail=LINES, previous=False)
    try:
        job = client.get_job(name)
    except JobNotFoundError:
        last = last_answer(client, name)
        if last is None:
            raise
        chosen, wanted = choose_kept(client, last, plain)
        for pod in wanted:
            for line in kept_lines(client, last, chosen, pod):
                lines[line.tag].append(line)
        return _outputs(lines), last.state.failure
    chosen = LineFilter.of(JobView(Observation(job)), plain)
    pods = [pod for pod in client.pods_of(job) if chosen.wants(pod)]
    pods.sort(key=lambda pod: (phase_of(pod) != "Failed", chosen.index(pod)))
    with ReadPool(DUMPED) as pool:
        for found in pool.map(lambda pod: _read_pod(client, pod, chosen), pods[:PODS]):
            for line in found:
                lines[line.tag].append(line)
    return _outputs(lines), get_state(client, name).failure


def _read_pod(client: JobClient, pod: Object, chosen: LineFilter) -> list[LogLine]:
    try:
        return list(chosen.lines(pod["metadata"]["name"]).chosen(read_log(client, pod, chosen.options)))
    except ForbiddenError:
        raise
    except ApiError:
        return []  # its container has not started, or its node does not answer


def _outputs(lines: dict[str, list[LogLine]]) -> list[_Output]:
    """Return the output of each rank and launcher in the last attempt that it has lines of."""
    outputs = []
    for found in lines.values():
        last = [line for line in found if line.attempt == found[-1].attempt]
        errors = find_errors([line.message for line in last])
        primary = next((error for error in errors if not error.secondary), errors[0] if errors else None)
        outputs.append(_Output(last, primary))
    return outputs
