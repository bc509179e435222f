"""MemoryService: holds, replicates, serves and fetches the shards of checkpoints in memory for one pod."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from flk_runtime.contract.pod_layout import SHM
from flk_runtime.contract.quantities import size_text
from flk_runtime.errors import CheckpointError
from flk_runtime.launcher.control import ThreadFailed, posting, start_thread
from flk_runtime.launcher.replication.exchange import Exchange, Fetcher, Partner
from flk_runtime.launcher.replication.plan import CheckpointId, Inventory, MemoryPlan, ShardId
from flk_runtime.launcher.replication.store import AttemptEndedError, NoRoomError, ShardStore
from flk_runtime.launcher.settings import Settings
from flk_runtime.shared import memory_messages as messages
from flk_runtime.shared.memory_messages import Answer
from flk_runtime.shared.shard_file import ShardError
from flk_runtime.system import host
from flk_runtime.wire import Done, Failed, Stream, listen, reason, serve
from flk_runtime.wire.listener import LOOPBACK

PREFIX: Final = "flk-"  # of the folders of launchers
SHARE: Final = 0.5  # of the memory that could be used


def shards_limit(folder: str, wanted: int | None) -> int:
    """Bytes that the shards in ``folder`` may take: ``wanted`` if it is given, else half of the memory that there is.

    This memory is the size of the file system, or the memory limit of the container if it is lower: files in memory
    count as memory of the container, and a container that exceeds its limit is killed.
    """
    if wanted is not None:
        return wanted
    sizes = [host.memory_limit()]
    with contextlib.suppress(OSError):
        info = os.statvfs(folder)
        sizes.append(info.f_blocks * info.f_frsize)
    return int(min(sizes) * SHARE)


def own_folder(root: str, job: str, uid: str, pod: int) -> Path:
    """The folder of one pod's launcher. Its path is short, since a socket's path has at most 107 characters."""
    name = hashlib.sha256(f"{job} {uid}".encode()).hexdigest()[:12]
    return Path(root, f"{PREFIX}{name}-{pod}")


_SOCKET: Final = "socket"
_BACKLOG: Final = 256  # ranks that wait to be accepted
_ENDED: Final = Failed("the attempt is over")  # the answer to a rank that was killed meanwhile
_FREE_TIMEOUT: Final = 120.0  # seconds until copies have arrived that are still received into files


class _Attempt:
    """The state of the service in one attempt."""

    def __init__(
        self,
        number: int,
        plan: MemoryPlan,
        partner: Partner,
        fetcher: Fetcher,
        own: range,
        copied: Sequence[int],
        readers: list[int],
    ) -> None:
        """``own`` are the ranks of this pod, and ``copied`` the ranks of which it gets copies.

        ``readers``: the rank that reads each shard of the checkpoint that is restored; empty: the rank that wrote it.
        """
        self.number, self.plan, self.partner, self.fetcher, self.own = number, plan, partner, fetcher, own
        self.held = [*own, *copied]
        """The ranks whose shards this pod holds."""
        self.readers = readers or list(range(plan.restore.checkpoint.world_size if plan.restore else 0))
        self.restored_copied = threading.Event()  # the partner has its copies of the restored checkpoint
        self.sizes: dict[int, int] = {}  # bytes of a shard, by rank; files do not shrink
        self.counts_third = False  # whether each rank may need a third file, which storage reads

    def read_elsewhere(self, held: Iterable[ShardId]) -> set[ShardId]:
        """The shards among ``held``, which this pod holds, that ranks of other pods read and keep."""
        restore = self.plan.restore
        if restore is None:
            return set()
        return {each for each in held if each.checkpoint == restore.checkpoint and each.rank not in restore.holders}

    def need(self) -> int:
        """The worst-case bytes of this pod over all possible partners.

        Each rank whose shards it holds has two files, and its own ranks may have three. A later attempt may have other
        partners, and what is reserved now must be enough for it.
        """
        pods: dict[int, int] = {}
        for rank, size in self.sizes.items():
            pods[rank // len(self.own)] = pods.get(rank // len(self.own), 0) + size
        own = pods.pop(self.own[0] // len(self.own), 0)
        partner = max(pods.values(), default=0) if self.plan.partner is not None else 0
        return (2 + self.counts_third) * own + 2 * partner


class MemoryService:
    """Checkpoints in the memory of this pod. Every method but `open` and `close` returns at once."""

    def __init__(
        self,
        settings: Settings,
        store: ShardStore,
        *,
        wake: Callable[[], None],
        post: Callable[[ThreadFailed], None],
        unreadable: Callable[[int, CheckpointId], None],
        log: Callable[[str], None],
    ) -> None:
        """``wake`` is called when `busy` may have become false after it was true, or a rank has restored.

        ``unreadable`` receives the number of the attempt and the checkpoint if no pod could give a shard of it.
        ``post`` receives the exceptions of threads. All are called in other threads. Raises OSError.
        """
        self._settings, self._store = settings, store
        self._wake, self._post, self._unreadable, self._log = wake, post, unreadable, log
        self._lock = threading.Lock()
        self._attempt: _Attempt | None = None
        listener = listen(LOOPBACK if settings.local else "", 0)
        self._port = int(listener.getsockname()[1])
        self._exchange = Exchange(settings, store, listener, log)
        self.socket = str(store.folder / _SOCKET)
        """Path of the socket for the ranks, in FLK_MEMORY."""
        Path(self.socket).unlink(missing_ok=True)  # of a launcher that was killed
        self._ranks_listener = socket.socket(socket.AF_UNIX)
        self._ranks_listener.bind(self.socket)
        self._ranks_listener.listen(_BACKLOG)

    @classmethod
    def open(
        cls,
        settings: Settings,
        *,
        wake: Callable[[], None],
        post: Callable[[ThreadFailed], None],
        unreadable: Callable[[int, CheckpointId], None],
        log: Callable[[str], None],
    ) -> MemoryService | None:
        """The service, with the shards that an earlier launcher of this pod has left; None if it keeps none."""
        root = settings.memory_root
        if not root or settings.memory_limit == 0:
            return None
        try:
            Path(root).mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = own_folder(root, settings.job, settings.job_uid, settings.pod_in_job)
            store = ShardStore(folder, shards_limit(root, settings.memory_limit))
            store.load(log)
            service = cls(settings, store, wake=wake, post=post, unreadable=unreadable, log=log)
            start_thread(
                "memory-requests",
                lambda: serve(service._ranks_listener, posting(service._serve_rank, post), "memory-rank"),  # some wait
                post,
            )
            start_thread("memory-exchange", service._exchange.run, post)
            return service
        except OSError as error:
            log(f"keeps no checkpoints in memory: {root}: {reason(error)}")
            return None

    def inventory(self) -> Inventory:
        """The shards that this launcher holds, for the leader."""
        settings = self._settings
        address = settings.pod_ip or host.source_address(settings.rendezvous_host)
        return Inventory.of(address, self._port, self._store.shards())

    def start(self, number: int, plan: MemoryPlan | None, pods: Sequence[int], readers: list[int]) -> None:
        """Begin an attempt of ``pods``, in the order of their ranks. Call it before its ranks start.

        ``readers`` are the ranks that read each shard; empty: who wrote them. Without a ``plan`` nothing is kept.
        """
        restore = plan.restore if plan else None
        self._store.keep_only(
            restore.checkpoint if restore else None,
            attempt=plan.attempt_id if plan else "",
            others=plan.others if plan else [],
        )
        self.stop()  # threads that this wakes find that their attempt is over
        if plan is None:
            return
        target = None if plan.partner is None else (plan.partner, plan.addresses[plan.partner])
        partner = Partner(self._settings, self._store, target, self._log)
        fetcher = Fetcher(self._settings, self._store, plan.addresses.__getitem__)
        pod, processes = self._settings.pod, self._settings.processes
        ranks = {each: range(index * processes, (index + 1) * processes) for index, each in enumerate(pods)}
        others = () if plan.copied is None else ranks[plan.copied]
        attempt = _Attempt(number, plan, partner, fetcher, ranks[pod], others, readers)
        with self._lock:
            self._attempt = attempt
        copied = plan.copied_at_first(pod, len(pods) * processes)
        if restore is None or not copied:
            attempt.restored_copied.set()
            return

        def copy() -> None:
            for shard in copied:
                # The rank that reads the shard hears of an error.
                with contextlib.suppress(OSError, CheckpointError, AttemptEndedError):
                    fetcher.fetch(shard, restore.holders[shard.rank])
                    partner.send(shard)
            attempt.restored_copied.set()
            self._wake()

        start_thread("memory-copies", copy, self._post)

    def stop(self) -> None:
        """End the attempt. The shards stay."""
        with self._lock:
            attempt, self._attempt = self._attempt, None
        if attempt:
            attempt.partner.stop()
            attempt.fetcher.stop()

    @property
    def received_at(self) -> float:
        """When bytes of a shard that is restored arrived last, by time.monotonic; 0: never."""
        attempt = self._attempt
        return attempt.fetcher.received_at if attempt else 0.0

    @property
    def busy(self) -> bool:
        """Whether the partner still gets copies of the shards that this attempt began with.

        A rank that saves before it ends waits until the partner has its shard.
        """
        attempt = self._attempt
        return attempt is not None and not attempt.restored_copied.is_set()

    def close(self, *, remove: bool) -> None:
        """End the service. ``remove``: the shards are not needed any more."""
        self.stop()
        self._exchange.close()
        if remove:
            self._store.remove()

    # Requests of ranks -------------------------------------------------------------------------------------------

    def _serve_rank(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):  # the rank was killed, or is no rank of flk's
            stream = Stream(sock, messages.session(serves=True), messages.MESSAGES, timeout=None)
            rank, _ = stream.receive()
            while isinstance(rank, messages.Rank):
                request, _ = stream.receive()
                stream.send(self._answer(rank, request))

    def _answer(self, rank: messages.Rank, request: messages.Rank | messages.Request | Answer) -> Answer:
        attempt = self._attempt
        if attempt is None or rank.attempt != attempt.number:
            return _ENDED
        try:
            match request:
                case messages.Reserve():
                    return self._reserve(attempt, rank.rank, request)
                case messages.Release():
                    self._store.release()
                    return Done()
                case messages.Finish(path, whole):
                    return self._finish(attempt, Path(path), whole)
                case messages.GetRestorable():
                    return messages.ToRestore(self._restorable(attempt))
                case messages.GetFile(shard):
                    return self._get_file(attempt, shard)
                case messages.Restored():
                    self._wake()
                    return Done()
                case _:
                    return Failed(f"{type(request).__name__} is no request")
        except AttemptEndedError:
            return _ENDED

    def _restorable(self, attempt: _Attempt) -> messages.Restorable | None:
        restore = attempt.plan.restore
        if restore is None:
            return None
        copies = sorted(shard.rank for shard in attempt.read_elsewhere(self._store.shards()))
        return messages.Restorable(restore.checkpoint.step, attempt.readers, restore.doubtful, len(attempt.own), copies)

    def _get_file(self, attempt: _Attempt, rank: int) -> Answer:
        """The file of one shard of the checkpoint that is restored.

        It is fetched if another pod holds it, and a rank of this pod reads it.
        """
        restore = attempt.plan.restore
        if restore is None:
            return Failed("nothing is restored")
        shard = ShardId(restore.checkpoint, rank)
        if rank not in restore.holders and not self._store.path(shard):
            return Failed(f"the shard of rank {rank} is read in another pod")
        holders = restore.holders.get(rank, [self._settings.pod])
        try:
            attempt.fetcher.fetch(shard, holders)
            return messages.Files([str(self._store.path(shard))])
        except (OSError, CheckpointError) as error:
            if rank in restore.holders:  # else another pod holds it, too, and this one forgets its own
                self._unreadable(attempt.number, restore.checkpoint)
            return Failed(
                f"cannot get the shard of rank {rank} from pod {' or '.join(map(str, holders))}: {reason(error)}"
            )

    def _reserve(self, attempt: _Attempt, rank: int, wanted: messages.Reserve) -> Answer:
        """Make room for the shards that this pod holds. Its partner makes room when a rank there asks."""
        pod = self._settings.pod
        attempt.restored_copied.wait()  # so that another pod holds what is given up
        with self._lock:
            first = not attempt.sizes
            attempt.sizes |= {each: max(size, attempt.sizes.get(each, 0)) for each, size in wanted.sizes.items()}
            attempt.counts_third = wanted.counts_third
            held = {each: attempt.sizes[each] for each in attempt.held if each in attempt.sizes}
            need = attempt.need()
        try:
            self._store.reserve(
                attempt.plan.attempt_id,
                held,
                _FREE_TIMEOUT,
                least=need,
                copied=attempt.read_elsewhere(self._store.shards()),
                third=[rank] if wanted.third else (),
            )
        except (NoRoomError, TimeoutError) as error:
            return Failed(f"no room for checkpoints in the memory of pod {pod}: {error}")
        if first and pod == 0 and attempt.number == 0:
            self._log_size(attempt.plan.partner, need)
        return messages.Files(list(map(str, self._store.files_of(rank))))

    def _log_size(self, partner: int | None, needed: int) -> None:
        """Log how much memory the checkpoints take."""
        where = "of this pod" if partner is None else f"of this pod and of pod {partner}"
        folder = self._store.folder
        place = SHM if str(folder).startswith(f"{SHM}/") else folder.parent
        self._log(
            f"keeps checkpoints in the memory {where}: each pod uses up to {size_text(needed)} of {place} for them "
            f"(limit {size_text(self._store.limit)})"
        )

    def _finish(self, attempt: _Attempt, path: Path, whole: messages.SaveKey | None) -> Answer:
        """Hold the shard that a rank has finished, and answer when the partner has a copy, if it can."""
        try:
            shard = self._store.seal(path, attempt.plan.attempt_id)
        except (ShardError, ValueError) as error:
            return Failed(str(error))
        keep = None
        if whole is not None:
            keep = shard.checkpoint._replace(**whole._asdict())
            self._store.settle(keep, set(attempt.held))
        attempt.partner.send(shard, keep)
        # The rank may overwrite the shard of the restored checkpoint after this.
        attempt.restored_copied.wait()
        return Done()
