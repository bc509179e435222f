"""Saver: one save after another, each a short stop of the training for the copy and a write in the background."""

from __future__ import annotations

import io
import re
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from flk_runtime import contract
from flk_runtime.checkpoint.memory import PodMemory
from flk_runtime.checkpoint.save.plan import describe, make_plan
from flk_runtime.checkpoint.save.staging import StagedPart, Staging
from flk_runtime.checkpoint.save.writer import Retention, StorageWriter
from flk_runtime.checkpoint.state import Piece
from flk_runtime.checkpoint.storage import Destination
from flk_runtime.distributed import process_group
from flk_runtime.errors import CheckpointError

RANK_VALUE = "flk.{rank}"  # name of the plain values that a rank has written
_GLOBAL = re.compile(r"GLOBAL (\S+)")  # in torch's message: the class that weights_only=True refuses
_HEADER = 1 << 16  # bytes beside the state that a part file takes, about
_GOES_ON, _PLANS, _FAILED = range(3)  # what a rank says before a save; the largest counts


class Saver:
    """Saves what the ranks hold: `save` copies and returns, and a thread writes to storage.

    The copy is a part file in the memory of the pod where its launcher keeps checkpoints (``memory``), else memory of
    this process. Without a ``destination`` nothing is written to storage.
    ``metadata`` says what writes the checkpoints. ``timeout``: seconds that a rank waits in the background for another.
    ``on_saved(step)`` is called in the background when a checkpoint is complete on all ranks, and ``warn`` with the
    reason where one failed and training goes on.
    """

    def __init__(
        self,
        destination: Destination | None,
        memory: PodMemory | None,
        *,
        retention: Retention,
        metadata: Mapping[str, Any],
        timeout: float,
        on_saved: Callable[[int], None],
        warn: Callable[[str], None],
    ) -> None:
        """Collective."""
        self._destination, self._memory = destination, memory
        self._metadata, self._on_saved, self._warn = metadata, on_saved, warn
        self._rank, self._world_size = process_group.rank(), process_group.world_size()
        self._writer: StorageWriter | None = None
        if destination is not None:
            token = process_group.on_main(lambda: secrets.token_hex(4))
            store = process_group.store()
            self._writer = StorageWriter(destination, retention, store, token, self._rank, timeout)
        self._staging: Staging | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._checked = False  # whether plain values have been read back

    def save(self, step: int, pieces: Sequence[Piece], plain: Mapping[str, Any]) -> None:
        """Copy ``pieces`` and ``plain`` of this rank, and write them in the background. Collective.

        A write that is still going on is awaited first. Raises CheckpointError on all ranks if that one failed, if the
        pieces are not whole tensors, or if ``plain`` holds what cannot be read back.
        """
        self._join()
        error, self._error = self._error, None
        structure = describe(pieces)
        changed = self._staging is None or structure != self._staging.plan.structure
        failed = error is not None and not self._passes(error)
        state = process_group.maximum(_FAILED if failed else _PLANS if changed else _GOES_ON)
        if error is not None:
            if failed:
                raise error
            if self._rank == 0:
                self._warn(f"{error}; training goes on, and the next save tries again")
        part = self._stage(step, structure, pieces, plain, plans=state == _PLANS)
        self._thread = threading.Thread(target=self._finish, args=(part, step), name="flk-checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the latest save is complete. Raises CheckpointError, on all ranks alike, if it failed."""
        self._join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _passes(self, error: BaseException) -> bool:
        passing = self._destination is None or self._destination.passing_errors
        return passing and isinstance(error, CheckpointError)

    def _stage(
        self, step: int, structure: Any, pieces: Sequence[Piece], plain: Mapping[str, Any], *, plans: bool
    ) -> StagedPart:
        try:
            value = self._serialize(plain)
            problem = None
        except CheckpointError as error:
            problem = error
        if not self._checked:  # later states are of the same types
            _agree(problem)
            self._checked = True
        elif problem is not None:
            raise problem
        if plans:
            plan = make_plan(structure)
            if self._staging is not None:
                self._staging.close()
            self._staging = Staging(plan)
            self._reserve(plan.size + len(value))
        assert self._staging is not None  # noqa: S101
        size = self._staging.plan.size + len(value) + _HEADER
        path = self._memory.begin(step, size) if self._memory else None
        try:
            part = self._staging.part(path)
            part.copy(pieces, {RANK_VALUE.format(rank=self._rank): value})
        except OSError as error:
            if self._memory and path:
                self._memory.cancel(step, path)
            raise CheckpointError(f"there is no memory for a copy of this rank's state: {error}") from error
        return part

    def _reserve(self, size: int) -> None:
        """Make room for this rank's parts in the memory of the pods, or do without on all ranks. Collective."""
        if self._memory is None:
            return
        refusals = process_group.gather(self._memory.reserve(size + _HEADER))
        refusal = process_group.on_main(lambda: next((text for text in refusals or () if text), ""))
        if refusal:
            self._memory = None
            if self._rank == 0:
                self._warn(f"keeping no checkpoints in memory: {refusal}; {contract.MEMORY_LIMIT} sets the limit")

    def _serialize(self, plain: Mapping[str, Any]) -> bytes:
        buffer = io.BytesIO()
        try:
            torch.save(plain, buffer)
            if not self._checked:
                torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
        except Exception as error:
            name = _GLOBAL.search(str(error))
            reason = f"a registered object's state_dict() holds a {name[1]}" if name else str(error).splitlines()[0]
            raise CheckpointError(
                f"cannot save this state: {reason}; a state_dict may hold tensors, numbers, strings, lists, tuples and "
                "dictionaries"
            ) from error
        return buffer.getvalue()

    def _finish(self, part: StagedPart, step: int) -> None:
        """In the background: complete the part and write it to storage."""
        try:
            assert self._staging is not None  # noqa: S101
            header = part.finish(step, self._world_size, self._rank, self._metadata)
            if self._memory and part.path:
                self._memory.finish(step, self._world_size, part.path)
            if self._writer:
                self._writer.write(part, header)
            self._on_saved(step)
        except BaseException as error:
            self._error = error


def _agree(problem: CheckpointError | None) -> None:
    """Raise the first problem of any rank on all ranks. Collective."""
    problems = process_group.gather(problem)

    def choose() -> None:
        for each in problems or ():
            if each is not None:
                raise each

    process_group.on_main(choose)
