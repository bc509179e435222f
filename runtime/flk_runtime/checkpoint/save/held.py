"""HeldSaves: the saves that the memory of the pods keeps, and when each of them is complete there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flk_runtime.checkpoint.memory import PodMemory, SaveKey
from flk_runtime.distributed import process_group

_GROWTH = 1 << 16  # bytes that the plain values may grow by until more memory is reserved


class HeldSaves:
    """This rank's saves in the memory of its pod, one after another.

    ``on_held(step)`` is called when a checkpoint is complete, by `poll` or `loss`. ``warn`` is called with the reason
    where a save has to wait. ``third``: storage may read one file while two are needed, if there is room for it.
    """

    def __init__(
        self, memory: PodMemory, on_held: Callable[[int], None], warn: Callable[[str], None], *, third: bool
    ) -> None:
        self.memory = memory
        self._wants_third = third
        self.has_third = False
        """Whether there is room for the next save while storage reads another one; after `reserve`."""
        self._on_held, self._warn = on_held, warn
        self._step: int | None = None  # of the save that is not known to be complete
        self._said_waits = False  # that there is no room for a third file

    def poll(self) -> bool:
        """Call ``on_held`` if the latest save has become complete, and return at once.

        Returns whether a later call may do so.
        """
        if self._step is not None and self.memory.is_held(wait=False):
            self._held(self._step)
        return self._step is not None

    def loss(self) -> str:
        """Wait until this rank's shard of the latest save is held. Returns why it is not; empty: it is."""
        if self._step is None:
            return ""
        if self.memory.is_held(wait=True):
            self._held(self._step)
            return ""
        step, self._step = self._step, None
        return f"the checkpoint after step {step} is not in memory: {self.memory.refusal}"

    def finish(self, save: SaveKey, path: Path | None) -> None:
        """Have the launcher hold the shard in this file; None: there was no room, which `loss` says."""
        if path:
            self.memory.finish(save, path)
        self._step = save.step

    def reserve(self, size: int) -> str:
        """Make room for shards of so many bytes on all ranks, or on none. Returns why there is none. Collective."""
        sizes = dict(enumerate(process_group.all_gather(size + _GROWTH)))
        no_third = self._try_to_reserve(sizes, counts_third=True) if self._wants_third else ""
        self.has_third = self._wants_third and not no_third
        if self.has_third:
            return ""
        refusal = self._try_to_reserve(sizes)
        if no_third and not refusal and not self._said_waits and process_group.rank() == 0:
            self._said_waits = True
            self._warn(f"a save waits for storage while that still writes: {no_third}")
        return refusal

    def path(self, size: int, read: Path | None) -> Path | None:
        """The file for a shard of this size, and not ``read``, where that is possible; None: there is no room."""
        memory = self.memory
        if size > memory.size and (refusal := memory.reserve({process_group.rank(): size + _GROWTH})):
            memory.skip(refusal)
            return None
        path = memory.next_path(read)
        if path == read and self.has_third:
            memory.add_third()
            path = memory.next_path(read)
        return path

    def _try_to_reserve(self, sizes: dict[int, int], *, counts_third: bool = False) -> str:
        """Make room on all ranks or on none. Returns why there is none; empty: there is. Collective."""
        own = self.memory.reserve(sizes, counts_third=counts_third)
        refusal = next(filter(None, process_group.all_gather(own)), "")
        if refusal:
            self.memory.release()
            process_group.maximum(0)  # no rank gives up what another one has reserved since then
        return refusal

    def _held(self, step: int) -> None:
        self._step = None
        self._on_held(step)
