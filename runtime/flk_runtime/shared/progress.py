"""Progress page: a page of memory through which a rank and its launcher tell each other how far the rank has come.

The launcher makes a file for each rank and passes its path in FLK_PROGRESS; both map it into their memory. Each field
has one writer and takes 8 aligned bytes, so a reader sees either the old or the new value. Reading and writing need no
system call.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Generic, TypeVar

from flk_runtime.contract import pod_env
from flk_runtime.contract.record import SOURCES
from flk_runtime.contract.status import Phase as Phase

_Number = TypeVar("_Number", int, float)

_SIZE: Final = mmap.PAGESIZE
_POLL: Final = 0.002  # seconds between two looks of a rank that waits
_SECONDS: Final = 20  # index of the seconds that the rank has spent in the first phase; those in the others follow
# Indexes of fields.
_PHASE, _STEP, _STEP_TIME, _STEP_SECONDS, _BOUNDARY, _WAITING, _HOLD, _TARGET = 0, 1, 2, 3, 6, 7, 8, 9
_WEIGHT: Final = 0.1  # of the latest step in the mean step time


# The page has the place of the phase in this tuple.
_PHASES: Final = tuple(Phase)
_PLACES: Final = {phase: place for place, phase in enumerate(_PHASES)}
_LEFT_BY_A_STEP: Final = (_PLACES[Phase.FIRST_STEP], _PLACES[Phase.EVALUATING])


class _Field(Generic[_Number]):
    """A field of ProgressPage: a signed integer or a floating point number of 64 bits, in one of its two views."""

    def __init__(self, view: str, index: int) -> None:
        self._view, self._index = view, index

    def __get__(self, page: ProgressPage, owner: type) -> _Number:
        number: _Number = getattr(page, self._view)[self._index]
        return number

    def __set__(self, page: ProgressPage, value: _Number) -> None:
        getattr(page, self._view)[self._index] = value


_int: Final = functools.partial(_Field[int], "_ints")
_float: Final = functools.partial(_Field[float], "_floats")


class _PhaseField:
    """The field with the phase of the rank. Whoever sets it adds the time since the last change to the former phase."""

    def __get__(self, page: ProgressPage, owner: type) -> Phase:
        return _PHASES[page._ints[_PHASE]]

    def __set__(self, page: ProgressPage, phase: Phase) -> None:
        if phase in (Phase.FIRST_STEP, Phase.TRAINING):
            phase = Phase.TRAINING if page.step_time else Phase.FIRST_STEP
        now = time.monotonic()
        began, page.phase_time = page.phase_time, now
        page._floats[_SECONDS + page._ints[_PHASE]] += now - began
        page._ints[_PHASE] = _PLACES[phase]


class ProgressPage:
    """The page of one rank in one attempt. Times are in seconds, by time.monotonic, which all processes share."""

    # The rank writes these.
    phase = _PhaseField()
    phase_time = _float(18)  # when the rank came into its phase
    step = _int(_STEP)  # optimizer steps done, steps before a resume included; -1: no step in this attempt
    step_time = _float(_STEP_TIME)  # when the latest step was done; 0: no step in this attempt
    step_seconds = _float(_STEP_SECONDS)  # of a step, as an exponentially weighted mean; 0: fewer than two steps
    heartbeat_time = _float(4)  # of the latest call of `heartbeat`; 0: none
    saved = _int(5)  # step of the latest checkpoint that this rank took part in; -1: none
    stored = _int(19)  # step of the latest one of them in storage; -1: none
    boundary = _int(_BOUNDARY)  # the step after which the rank last looked at `hold`; -1: it cannot stop at a step
    waiting = _int(_WAITING)  # 1: the rank has found `hold` and waits at `boundary` until `target` is known
    restored = _int(14)  # the step after which this attempt's training began; -1: not known yet
    restored_from = _int(15)  # index in SOURCES
    first_step = _int(16)  # the first step done in this attempt; -1: none
    first_step_time = _float(17)  # when it was done
    data_wait = _float(30)  # share of the time between its latest lines of metrics that it waited for batches; -1: none
    grouped = _int(29)  # 1: it has opened a process group; -1: it has ended without one; 0: not known
    # The rank's observer writes these, a few times a second.
    samples = _int(10)  # how often it has looked whether a collective of this rank has not ended
    pending_samples = _int(11)  # how often one had not
    untold = _int(28)  # 1: it takes no samples, since torch does not tell which collectives have begun
    pending = _int(12)  # 1: one had not when it looked last
    collective_time = _float(13)  # when a collective was last seen to begin or end; 0: none yet
    # The launcher writes these.
    hold = _int(_HOLD)  # 1: wait at the next step boundary
    target = _int(_TARGET)  # the step after which all ranks save and end; -1: not known yet

    launched = True  # a launcher reads it, and an observer writes to it
    on_step: Callable[[], None] | None = None  # called after each step, in the thread that trains
    script_stops = False
    """Whether the script itself asks `flk.must_stop`, and saves."""
    counts_optimizers = False
    """Whether steps of optimizers count in a script with a run of flk too, because `flk.restore` restores its state."""

    def __init__(self, memory: mmap.mmap, *, is_new: bool) -> None:
        self._ints = memoryview(memory).cast("q")
        self._floats = memoryview(memory).cast("d")
        if is_new:
            self.step = self.saved = self.stored = self.boundary = self.target = self.restored = self.first_step = -1
            self.phase_time, self.data_wait = time.monotonic(), -1.0

    @classmethod
    def create(cls, path: Path) -> ProgressPage:
        """Make the file ``path`` and map it. Raises OSError, also if there is no room for it."""
        with open(path, "w+b") as file:
            file.write(bytes(_SIZE))  # not truncate: a write to a hole of a full file system would kill the rank
            file.flush()
            return cls(mmap.mmap(file.fileno(), _SIZE), is_new=True)

    @classmethod
    def open(cls, path: str) -> ProgressPage:
        """Map a file that `create` has made. Raises OSError if it does not exist, ValueError if it is too short."""
        with open(path, "r+b") as file:
            return cls(mmap.mmap(file.fileno(), _SIZE), is_new=False)

    @classmethod
    def private(cls) -> ProgressPage:
        """A page that no launcher reads."""
        page = cls(mmap.mmap(-1, _SIZE), is_new=True)
        page.launched = False
        return page

    def begin_at(self, step: int, source: str) -> None:
        """Tell the launcher after which step the training begins, until its first step; ``source``: as in SOURCES."""
        self.restored_from = SOURCES.index(source)
        self.restored = step

    def record_step(self, step: int) -> None:
        """Write that the rank has done ``step`` optimizer steps."""
        now, ints, floats = time.monotonic(), self._ints, self._floats  # each step takes the time of these lines
        before = floats[_STEP_TIME]
        if before:
            mean = floats[_STEP_SECONDS]
            floats[_STEP_SECONDS] = mean + _WEIGHT * (now - before - mean) if mean else now - before
        else:
            self.first_step, self.first_step_time = step, now
        ints[_STEP] = step
        floats[_STEP_TIME] = now
        if ints[_PHASE] in _LEFT_BY_A_STEP:  # the script may have left an evaluation without its end
            self.phase = Phase.TRAINING
        call = self.on_step  # another thread may take it away
        if call is not None:
            call()

    def seconds_in(self, phase: Phase, now: float) -> float:
        """The seconds that the rank has spent in ``phase`` until ``now``."""
        current = now - self.phase_time if self.phase == phase else 0.0
        return self._floats[_SECONDS + _PLACES[phase]] + max(0.0, current)

    @contextlib.contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Be in ``phase`` inside the block."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def reach_boundary(self, step: int) -> bool | None:
        """Whether this rank must save and end after ``step``; None: it must wait, and call this again.

        The rank writes `boundary` before it reads `hold`. So when the launcher has set `hold`, a rank that does not
        wait at `boundary` stops at the next one: no rank gets further than its launcher has read.
        """
        ints = self._ints
        ints[_BOUNDARY] = step
        if not ints[_HOLD]:
            ints[_WAITING] = 0
            return False
        target = self.target
        self.waiting = int(target < 0)
        return None if target < 0 else step >= target

    def must_stop(self, step: int) -> bool:
        """Whether this rank must save and end after ``step``. Waits while the launchers agree on the last step."""
        while (answer := self.reach_boundary(step)) is None:
            self.heartbeat_time = time.monotonic()
            time.sleep(_POLL)
        return answer

    def must_end_unsaved(self, step: int) -> bool:
        """Whether this rank, which can no longer save, must end after ``step``: the launchers agreed on it before.

        The rank takes `boundary` back, so that the launchers wait for no save.
        """
        ints = self._ints
        ints[_BOUNDARY] = -1
        return 0 <= ints[_TARGET] <= step


@functools.cache
def own_page() -> ProgressPage:
    """The page of this rank; a page that nobody reads if no launcher has made one."""
    path = os.environ.get(pod_env.PROGRESS)
    if path:
        try:
            return ProgressPage.open(path)
        except (OSError, ValueError):  # a process that outlived the launcher, whose folder is gone
            pass
    return ProgressPage.private()


def heartbeat() -> None:
    """Tell the launcher that this rank makes progress. Any script may call it, from any of a rank's processes."""
    own_page().heartbeat_time = time.monotonic()
