"""The launcher's part in checkpoints in memory, for one pod: it holds, copies, serves and fetches parts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

from flk_runtime.launcher.memory import room
from flk_runtime.launcher.memory.connection import listen, reason
from flk_runtime.launcher.memory.copies import Copies
from flk_runtime.launcher.memory.exchange import Exchange, Fetcher
from flk_runtime.launcher.memory.plan import CheckpointId, Inventory, MemoryPlan, Part, lonely_parts, ranks_text
from flk_runtime.launcher.memory.requests import Requests
from flk_runtime.launcher.memory.store import AttemptEndedError, NoRoomError, PartStore, mebibytes
from flk_runtime.launcher.settings import Settings
from flk_runtime.system import host
from flk_runtime.system.part import PartError, read_header

_SOCKET: Final = "socket"
_ENDED: Final = {"error": "the attempt is over"}  # the answer to a rank that was killed meanwhile
_BEGIN_TIMEOUT: Final = 300.0  # seconds that a rank waits for a free file: all pods hold the last checkpoint by then


class _Attempt:
    """What belongs to one attempt."""

    def __init__(self, number: int, plan: MemoryPlan, copies: Copies, fetcher: Fetcher, ranks: range) -> None:
        self.number, self.plan, self.copies, self.fetcher, self.ranks = number, plan, copies, fetcher, ranks
        self.copied: dict[CheckpointId, set[int]] = {}  # ranks of this pod whose part of a checkpoint is done
        self.restoring = set(ranks)
        self.reserved: dict[int, int] = {}  # bytes of a part, by rank
        self.said = ""  # how much memory its checkpoints take, as the log says


class Report(Protocol):
    """Tells the leader whether this pod holds the parts of its ranks."""

    def __call__(self, attempt: int, step: int, *, held: bool) -> None: ...


class MemoryService:
    """Checkpoints in the memory of this pod. Every method but `open` and `close` returns at once."""

    def __init__(
        self,
        settings: Settings,
        store: PartStore,
        *,
        report: Report,
        wake: Callable[[], None],
        failed: Callable[[BaseException], None],
        log: Callable[[str], None],
    ) -> None:
        """``report`` tells the leader, and ``wake`` is called when `busy` may have become false or a rank has restored.

        ``failed`` receives the exception with which a thread ended, which is a bug in flk. All are called in other
        threads. Raises OSError.
        """
        self._settings, self._store = settings, store
        self._report, self._wake, self._failed, self._log = report, wake, failed, log
        self._lock = threading.Lock()
        self._attempt: _Attempt | None = None
        self._listener = listen(settings)
        self._requests = Requests(store.folder / _SOCKET, self._answer)
        self._exchange = Exchange(settings, store, self._listener)
        self._start_thread("memory-requests", self._requests.run)
        self._start_thread("memory-exchange", self._exchange.run)

    @classmethod
    def open(
        cls,
        settings: Settings,
        *,
        report: Report,
        wake: Callable[[], None],
        failed: Callable[[BaseException], None],
        log: Callable[[str], None],
    ) -> MemoryService | None:
        """The service, with the parts that an earlier launcher of this pod has left. None if there is to be none."""
        root = settings.memory_root
        if not root or settings.memory_limit == 0:
            return None
        try:
            Path(root).mkdir(mode=0o700, parents=True, exist_ok=True)
            if not room.is_in_memory(root):
                log(f"keeps no checkpoints in memory: {root} is not a file system in memory (tmpfs)")
                return None
            folder = room.own_folder(root, settings.job, settings.job_uid, settings.pod_in_job)
            store = PartStore(folder, room.limit(root, settings.memory_limit))
            store.load(log)
            return cls(settings, store, report=report, wake=wake, failed=failed, log=log)
        except OSError as error:
            log(f"keeps no checkpoints in memory: {root}: {reason(error)}")
            return None

    @property
    def socket(self) -> str:
        """Path of the socket for the ranks, in FLK_MEMORY."""
        return str(self._requests.path)

    def inventory(self) -> Inventory:
        """What this launcher holds, for the leader."""
        settings = self._settings
        address = settings.pod_ip or host.source_address(settings.rendezvous_host)
        return Inventory(address, int(self._listener.getsockname()[1]), self._store.parts())

    def start(self, number: int, plan: MemoryPlan | None, ranks: range) -> None:
        """Begin an attempt with these ranks in this pod. Call it before they start. None: nothing is kept."""
        self.stop()
        restore = plan.restore if plan else None
        self._store.keep_only(restore.checkpoint if restore else None, attempt=plan.attempt_id if plan else "")
        self._exchange.ranks = set()
        if plan is None:
            return
        pod = self._settings.pod
        partner = plan.partners.get(pod)
        target = None if partner is None else (partner, plan.addresses[partner])
        copies = Copies(self._settings, self._store, target, self._copied, self._log)
        fetcher = Fetcher(self._settings, self._store, plan.addresses.__getitem__, ranks)
        with self._lock:
            self._attempt = _Attempt(number, plan, copies, fetcher, ranks)
        self._start_thread("memory-copies", copies.run)
        for part in lonely_parts(restore, pod) if restore else ():
            copies.add(part)

    def stop(self) -> None:
        """End the attempt. The parts stay."""
        with self._lock:
            attempt, self._attempt = self._attempt, None
        if attempt:
            attempt.copies.stop()

    def complete(self, number: int, step: int, *, whole: bool) -> None:
        """Handle what the leader says of a checkpoint: all pods hold their parts, or never will."""
        attempt = self._attempt
        if attempt is None or attempt.number != number:
            return
        for checkpoint in {part.checkpoint for part in self._store.parts()}:
            if (checkpoint.written_in, checkpoint.step) != (attempt.plan.attempt_id, step):
                continue
            if whole:
                self._store.drop_older(checkpoint, {*attempt.ranks, *self._exchange.ranks})
            else:
                self._store.drop(checkpoint)

    @property
    def busy(self) -> bool:
        """Whether the partner may still get copies of parts of this pod."""
        attempt = self._attempt
        return attempt is not None and attempt.copies.busy

    def close(self, *, remove: bool) -> None:
        """End the service. ``remove``: the parts are not needed any more."""
        self.stop()
        self._listener.close()
        if remove:
            self._store.remove()

    def _start_thread(self, name: str, function: Callable[[], None]) -> None:
        def run() -> None:
            try:
                function()
            except BaseException as error:
                self._failed(error)

        threading.Thread(target=run, name=name, daemon=True).start()

    def hand_over(
        self, pod: int, address: tuple[str, int], parts: list[Part], done: Callable[[int, list[Part]], None]
    ) -> None:
        """Send parts to the launcher of a pod that stays, because this one ends.

        ``done`` is called in another thread with the pod and the parts that it holds now.
        """
        results: dict[Part, bool] = {}

        def sent(part: Part, held: bool) -> None:
            results[part] = held
            if len(results) == len(parts):
                given = [part for part in parts if results[part]]
                if given:
                    ranks = ranks_text([part.rank for part in given])
                    self._log(f"this pod ends; pod {pod} holds the parts of {ranks} of the checkpoint in memory now")
                done(pod, given)
                copies.stop()

        copies = Copies(self._settings, self._store, (pod, address), sent, self._log)
        for part in parts:
            copies.add(part)
        self._start_thread("memory-hand-over", copies.run)

    # Copies ------------------------------------------------------------------------------------------------------

    def _copied(self, part: Part, held: bool) -> None:
        """The partner has a copy of a part, or cannot have one."""
        attempt = self._attempt
        if attempt and part.checkpoint.written_in == attempt.plan.attempt_id:
            ranks = attempt.copied.setdefault(part.checkpoint, set())
            ranks.add(part.rank)
            if ranks == set(attempt.ranks):
                del attempt.copied[part.checkpoint]
                self._report(attempt.number, part.checkpoint.step, held=True)
        self._wake()

    # Requests of ranks -------------------------------------------------------------------------------------------

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        attempt = self._attempt
        if attempt is None or int(request["attempt"]) != attempt.number:
            return _ENDED
        action = getattr(self, f"_do_{request['do']}", None)
        if action is None:
            return {"error": f"unknown request {request['do']!r}"}
        answer: dict[str, Any] = action(attempt, request)
        return answer

    def _do_restore(self, attempt: _Attempt, request: dict[str, Any]) -> dict[str, Any]:
        """What is restored."""
        restore = attempt.plan.restore
        if restore is None:
            return {}
        return {"step": restore.checkpoint.step, "world_size": restore.checkpoint.world_size}

    def _do_header(self, attempt: _Attempt, request: dict[str, Any]) -> dict[str, Any]:
        """The header of one part of the checkpoint that is restored."""
        return self._with_part(attempt, request, self._header_of)

    def _header_of(self, attempt: _Attempt, part: Part, holders: list[int]) -> dict[str, Any]:
        path = self._store.path(part)
        text = read_header(path).to_json().decode() if path else attempt.fetcher.header(part, holders)
        return {"header": text}

    def _do_part(self, attempt: _Attempt, request: dict[str, Any]) -> dict[str, Any]:
        """The file of one part of the checkpoint that is restored. It is fetched if another pod holds it."""
        return self._with_part(attempt, request, self._path_of)

    def _path_of(self, attempt: _Attempt, part: Part, holders: list[int]) -> dict[str, Any]:
        attempt.fetcher.fetch(part, holders)
        return {"path": str(self._store.path(part))}

    def _with_part(
        self,
        attempt: _Attempt,
        request: dict[str, Any],
        action: Callable[[_Attempt, Part, list[int]], dict[str, Any]],
    ) -> dict[str, Any]:
        restore = attempt.plan.restore
        if restore is None:
            return {"error": "nothing is restored"}
        rank = int(request["part"])
        part, holders = Part(restore.checkpoint, rank), restore.holders[rank]
        try:
            return action(attempt, part, holders)
        except (OSError, NoRoomError, PartError, TimeoutError) as error:
            why = reason(error) if isinstance(error, OSError) else str(error)
            return {"error": f"cannot get the part of rank {rank} from {_pods(holders)}: {why}"}

    def _do_restored(self, attempt: _Attempt, request: dict[str, Any]) -> dict[str, Any]:
        """The rank has restored what it needs."""
        attempt.restoring.discard(int(request["rank"]))
        if not attempt.restoring:
            self._store.drop_fetched()
        self._wake()
        return {}

    def _do_reserve(self, attempt: _Attempt, request: dict[str, Any]) -> dict[str, Any]:
        """Make room for the parts of a rank, here and at the partner."""
        rank, size = int(request["rank"]), int(request["size"])
        try:
            self._store.reserve(rank, size)
        except NoRoomError as error:
            return {"error": f"no room for checkpoints in the memory of pod {self._settings.pod}: {error}"}
        attempt.copies.reserve(rank, size)
        with self._lock:
            attempt.reserved[rank] = size
            if set(attempt.reserved) == set(attempt.ranks) and self._settings.pod == 0 and attempt.number == 0:
                self._say_size(attempt)
        return {}

    def _say_size(self, attempt: _Attempt) -> None:
        copies = 2 if attempt.plan.partners else 1
        needed = mebibytes(2 * copies * sum(attempt.reserved.values()))
        if needed == attempt.said:  # the ranks have made another plan of the same size
            return
        attempt.said = needed
        place = room.mount_point(str(self._store.folder))
        where = f"of this pod and of pod {attempt.plan.partners[0]}" if attempt.plan.partners else "of this pod"
        self._log(
            f"keeps checkpoints in the memory {where}: each pod uses up to {needed} of {place} "
            f"for them (limit {mebibytes(self._store.limit)})"
        )

    def _do_begin(self, attempt: _Attempt, request: dict[str, Any]) -> dict[str, Any]:
        """A file for the next part of a rank."""
        rank = int(request["rank"])
        try:
            path = self._store.begin(rank, int(request["size"]), _BEGIN_TIMEOUT, attempt=attempt.plan.attempt_id)
            return {"path": str(path)}
        except AttemptEndedError:
            return _ENDED
        except (NoRoomError, TimeoutError) as error:
            self._give_up(attempt, int(request["step"]))
            return {"error": str(error)}

    def _do_finish(self, attempt: _Attempt, request: dict[str, Any]) -> dict[str, Any]:
        """The part that a rank has written is whole."""
        checkpoint = CheckpointId(attempt.plan.attempt_id, int(request["step"]), int(request["world_size"]))
        part = Part(checkpoint, int(request["rank"]))
        self._store.hold(Path(str(request["path"])), part, attempt=attempt.plan.attempt_id)
        attempt.copies.add(part)
        return {}

    def _do_cancel(self, attempt: _Attempt, request: dict[str, Any]) -> dict[str, Any]:
        """A rank could not write its part."""
        with contextlib.suppress(ValueError):
            self._store.cancel(Path(str(request["path"])), attempt=attempt.plan.attempt_id)
        self._give_up(attempt, int(request["step"]))
        return {}

    def _give_up(self, attempt: _Attempt, step: int) -> None:
        self._report(attempt.number, step, held=False)


def _pods(holders: list[int]) -> str:
    return "pod " + " or ".join(map(str, holders))
