"""Choose the pods and the lines of a job's output, and make lines fit to print."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from flk.diagnose import Picture
from flk.errors import UsageError
from flk.jobs.state import derive
from flk.kube import Object
from flk.terminal import printable
from flk_runtime import contract

_RANK: Final = re.compile(r"\[rank (\d+)\] ")
_TAGGED: Final = re.compile(r"\[(?:rank|pod) \d+\] ")


@dataclass(frozen=True)
class LogOptions:
    """Which lines to show, and how."""

    ranks: frozenset[int] = frozenset()  # empty: all ranks, and the lines of the launchers
    tail: int | None = None  # number of lines of each pod to begin with
    since: int | None = None  # only lines of the last so many seconds
    previous: bool = False  # of the container before the last restart
    raw: bool = False  # keep control characters and flk's records
    colour: bool = False  # keep ANSI colours

    def query(self) -> dict[str, Any]:
        """Return the API's options for the first request of a log."""
        return {"tailLines": self.tail, "sinceSeconds": self.since, "previous": self.previous}


@dataclass(frozen=True)
class LogLine:
    """A line of output, or (``note``) something that flk says about it."""

    text: str
    note: bool = False


class LineFilter:
    """The pods and lines of one job that options choose. Raises UsageError for a rank that the job does not have."""

    def __init__(self, job: Object, options: LogOptions) -> None:
        self.options = options
        state = derive(Picture(job, [], now=0))
        self._processes = state.processes
        self._indexes = {pod.name: pod.index for pod in state.pods}
        absent = [rank for rank in sorted(options.ranks) if rank >= state.world_size]
        if absent:
            last = state.world_size - 1
            raise UsageError(f"--rank: job {state.name} has ranks 0 to {last}, no rank {absent[0]}")

    def index(self, pod: Object) -> int:
        """Return the position of a pod in its job."""
        return self._indexes.get(pod["metadata"]["name"], len(self._indexes))

    def wants(self, pod: Object) -> bool:
        """Return whether a pod has one of the ranks."""
        index = self.index(pod)
        return not self.options.ranks or any(rank // self._processes == index for rank in self.options.ranks)

    def shown(self, pod: Object, lines: Iterable[bytes]) -> Iterator[LogLine]:
        """Yield the chosen lines of a pod: each with a tag, without records and without control characters."""
        tag = contract.LAUNCHER_PREFIX.format(index=self.index(pod))
        ranks = self.options.ranks
        for raw in lines:
            text = raw.decode(errors="replace")
            if contract.is_record(text) and not self.options.raw:
                continue
            tagged = _TAGGED.match(text)
            if ranks and tagged:
                match = _RANK.match(text)
                if match is None or int(match[1]) not in ranks:
                    continue
            if not self.options.raw:
                text = printable(text, colour=self.options.colour)
            yield LogLine(text if tagged else tag + text)
