"""A launcher's own side of hangs and slow ranks: it tells the leader how its ranks progress, and takes snapshots."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from flk_runtime.contract import pod_env, user_env
from flk_runtime.contract.status import NEVER, Phase, RankStatus
from flk_runtime.contract.telemetry import PodStatus, PodUsage
from flk_runtime.launcher.hangs import snapshot
from flk_runtime.launcher.hangs.detector import interval
from flk_runtime.launcher.hangs.snapshot import Snapshot
from flk_runtime.launcher.settings import Settings
from flk_runtime.shared.progress import ProgressPage
from flk_runtime.system import host

if TYPE_CHECKING:
    from flk_runtime.launcher.telemetry.usage import Meter

_BUSY: Final = 0.05  # share of one CPU that a rank and its processes must use to count as busy


class Process(Protocol):
    """A running rank, as a launcher knows it."""

    rank: int
    pid: int
    progress: ProgressPage
    environment: Mapping[str, str]  # the variables that the launcher has set for it
    output_time: float  # when it last wrote a line, by time.monotonic; 0: never


@dataclass
class Watched:
    """A rank, and when it was last seen to use CPU time."""

    process: Process
    started: float
    busy_time: float
    meter: tuple[float, float]  # time of the latest reading, and the CPU time then, both in seconds
    touched: tuple[float, float] = (0.0, 0.0)  # when the file of heartbeats was changed, and when that was seen

    def update(self, now: float, seconds: float) -> None:
        """``seconds`` is the CPU time so far of the process and of the processes that it started."""
        before, used = self.meter
        if seconds - used >= _BUSY * (now - before) > 0:
            self.busy_time = now
        self.meter = now, seconds

    def since_touched(self, path: str, now: float) -> float:
        """Seconds since a change of the file of heartbeats was seen; NEVER if it does not exist.

        Its own time is by a clock that somebody may set, or that goes on while the machine sleeps.
        """
        changed = 0.0
        with contextlib.suppress(OSError):
            changed = os.stat(path).st_mtime
        if changed != self.touched[0]:
            self.touched = changed, now
        return age(self.touched[1] if changed else 0.0, now)


class Watch:
    """Watches the ranks of this pod. The launcher's loop calls `update` when it is due."""

    def __init__(
        self,
        settings: Settings,
        post_status: Callable[[PodStatus], None],
        report_stacks: Callable[[int, list[Snapshot]], None],
        received_at: Callable[[], float],
        meter: Meter | None = None,
    ) -> None:
        """``post_status`` and ``report_stacks`` send to the leader; both return at once and work from any thread.

        ``received_at`` is when bytes of a checkpoint that is restored arrived last, by time.monotonic; 0: never.
        ``meter`` reads what the pod uses; None: nobody asks.
        """
        self._settings = settings
        self._meter = meter
        self._post_status = post_status
        self._report_stacks = report_stacks
        self._received_at = received_at
        self._interval = interval(settings.hang_timeout)  # seconds between two statuses
        self._watched: dict[int, Watched] = {}  # by process id
        self.due = time.monotonic()  # time of the next `update`
        self.ranks: list[RankStatus] = []
        """The latest status of each rank of this pod."""

    def update(self, attempt: int, ranks: Iterable[Process]) -> None:
        """Tell the leader how the ranks that run progress."""
        now = time.monotonic()
        self.due = now + self._interval
        watched = {}
        for rank in ranks:
            each = self._watched.get(rank.pid) or Watched(rank, now, now, (now, 0.0))
            each.update(now, snapshot.cpu_seconds(rank.pid))
            watched[rank.pid] = each
        self._watched = watched
        self.ranks = [self._status(each, now) for each in watched.values()]
        self._post_status(PodStatus(attempt, self.ranks, self.usage))

    @property
    def usage(self) -> PodUsage | None:
        """The usage of the pod at the latest reading; None: nobody reads it, or nothing was read yet."""
        return self._meter.latest if self._meter else None

    def take_stacks(self, number: int) -> None:
        """Take snapshots of the ranks in a thread, which then sends them as the answer to request ``number``."""
        processes = [each.process for each in self._watched.values()]
        paths = {each.rank: (each.pid, each.environment[pod_env.OBSERVER]) for each in processes}

        def run() -> None:
            self._report_stacks(number, snapshot.take(paths, self._settings))

        threading.Thread(target=run, name="stacks", daemon=True).start()

    def _status(self, watched: Watched, now: float) -> RankStatus:
        process, page = watched.process, watched.process.progress
        touched = watched.since_touched(process.environment[user_env.HEARTBEAT], now)
        beats = [age(page.step_time, now), age(page.heartbeat_time, now), touched]
        if page.phase in (Phase.RESTORING, Phase.SAVING):  # it may wait for a checkpoint that its launcher receives
            beats.append(age(self._received_at(), now))
        since_output, since_collective = age(process.output_time, now), age(page.collective_time, now)
        idle = min(*beats, since_output, since_collective, now - watched.started)
        waits = since_collective if page.pending else 0.0
        # A script without flk's library trains when it uses collectives.
        trains = page.phase is Phase.STARTING and page.collective_time
        return RankStatus(
            process.rank,
            self._settings.pod,
            page.step,
            Phase.TRAINING if trains else page.phase,
            step_seconds=round(page.step_seconds, 6) or None,
            memory=(host.resident_bytes(process.pid) or None) if self._meter else None,
            data_wait=None if page.data_wait < 0 else page.data_wait,
            saved=page.saved,
            stored=page.stored,
            restored=page.restored,
            idle=round(idle, 2),
            beat=round(min(beats), 2),
            cpu_idle=round(now - watched.busy_time, 2),
            waits=round(waits, 2),
            samples=page.samples,
            pending=page.pending_samples,
        )


def age(moment: float, now: float | None = None) -> float:
    """Seconds since ``moment``, by time.monotonic; NEVER if it is 0."""
    return NEVER if not moment else max(0.0, (time.monotonic() if now is None else now) - moment)
