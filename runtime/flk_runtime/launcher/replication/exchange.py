"""Exchange of parts with the launchers of other pods: copies that come in, and parts that are needed to restore."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any, Final

from flk_runtime.launcher.replication.connection import DataConnection, RefusedError
from flk_runtime.launcher.replication.plan import CheckpointId, Part
from flk_runtime.launcher.replication.store import AttemptEndedError, NoRoomError, PartStore, check_part
from flk_runtime.launcher.settings import Settings
from flk_runtime.shared.shard_file import PartError, read_header, read_prelude, verify

_STRANGERS: Final = 64  # connections that may wait for their authentication at once; others are closed
_SLOT_TIMEOUT: Final = 5.0  # seconds until a file is free that another thread still uses


class Exchange:
    """Accepts connections of other launchers of the job, in a thread for each."""

    def __init__(self, settings: Settings, store: PartStore, listener: socket.socket) -> None:
        self._settings, self._store, self._listener = settings, store, listener
        self._strangers = threading.BoundedSemaphore(_STRANGERS)
        self.ranks: set[int] = set()
        """Ranks of other pods whose copies are held here in this attempt."""

    def run(self) -> None:
        """Accept connections, until the listener is closed."""
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                continue
            if not self._strangers.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock,), name="memory-peer", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        connection = None
        known = False
        try:
            connection = DataConnection.accept(sock, self._settings)
            while True:
                message = connection.receive()  # the first one proves that the other side knows the secret
                if not known:
                    known = True
                    self._strangers.release()
                connection.set_timeout(self._settings.lease)
                self._answer(connection, message)
                connection.set_timeout(None)
        except (OSError, KeyError, TypeError, ValueError):
            pass  # the other side ended, or is no launcher of this job; it says so if it is one
        finally:
            if not known:
                self._strangers.release()
            if connection:
                connection.close()

    def _answer(self, connection: DataConnection, message: dict[str, Any]) -> None:
        match message["do"]:
            case "reserve":
                self._reserve(connection, int(message["rank"]), int(message["size"]))
            case "put":
                keep = CheckpointId.from_json(message["keep"]) if message["keep"] else None
                self._take(connection, Part.from_json(message["part"]), int(message["length"]), keep)
            case "header":
                self._give_header(connection, Part.from_json(message["part"]))
            case "get":
                self._give(connection, Part.from_json(message["part"]))
            case other:
                raise RefusedError(f"asked for {other!r}")

    def _reserve(self, connection: DataConnection, rank: int, size: int) -> None:
        self.ranks.add(rank)
        try:
            self._store.reserve(rank, size, _SLOT_TIMEOUT)
        except (NoRoomError, TimeoutError) as error:
            connection.send({"error": f"no room: {error}"})
        else:
            connection.send({})

    def _take(self, connection: DataConnection, part: Part, length: int, keep: CheckpointId | None) -> None:
        """Receive a copy of a part. A part that is cut off or damaged on its way is not kept."""
        answer: dict[str, Any] = {}
        slot = None
        try:
            if not self._store.path(part):
                slot = self._store.begin(part, length, _SLOT_TIMEOUT, keep=keep)
        except (NoRoomError, TimeoutError) as error:
            answer = {"error": f"no room: {error}"}
        except AttemptEndedError:
            pass  # the sender will hear of it
        if slot is None:
            connection.skip_part(length)
            connection.send(answer)
            return
        try:
            prelude = connection.receive_part(slot.memory, length)
            check_part(prelude, part)
        except PartError as error:
            self._store.cancel(slot)
            connection.send({"error": f"the part arrived damaged: {error}"})
        except BaseException:
            self._store.cancel(slot)
            raise
        else:
            with contextlib.suppress(AttemptEndedError):
                self._store.hold(slot, prelude)
            connection.send({})

    def _give_header(self, connection: DataConnection, part: Part) -> None:
        with self._store.reading(part) as memory:
            connection.send({"header": read_header(memory).to_json().decode()} if memory else {"error": "not held"})

    def _give(self, connection: DataConnection, part: Part) -> None:
        with self._store.reading(part) as memory:
            if memory is None:
                connection.send({"error": "not held"})
                return
            length = read_prelude(memory).end
            connection.send_part(memory, length, {"length": length})


class Fetcher:
    """Gets parts of the checkpoint to restore from other pods, each once however many ranks ask for it."""

    def __init__(
        self, settings: Settings, store: PartStore, addresses: Callable[[int], tuple[str, int]], own_ranks: range
    ) -> None:
        """``addresses`` gives the address of a pod's launcher."""
        self._settings, self._store, self._addresses, self._own_ranks = settings, store, addresses, own_ranks
        self._lock = threading.Lock()  # one part after the other
        self._checked: set[Part] = set()

    def fetch(self, part: Part, holders: list[int]) -> None:
        """Have the store hold an undamaged part. Raises OSError or NoRoomError, of the last holder that was asked."""
        with self._lock:
            if not self._holds(part):
                others = [pod for pod in holders if pod != self._settings.pod]
                self._try_each(others, lambda connection: self._receive(connection, part))
            self._checked.add(part)

    def _holds(self, part: Part) -> bool:
        """Whether the store holds a part; it is undamaged."""
        with self._store.reading(part) as memory:
            if memory is None:
                return False
            try:
                if part not in self._checked:
                    verify(memory)
                return True
            except PartError:
                pass
        self._store.forget(part)
        return False

    def header(self, part: Part, holders: list[int]) -> str:
        """The header of a part as JSON, as one of its holders tells it. Raises OSError."""
        texts: list[str] = []

        def ask(connection: DataConnection) -> None:
            connection.send({"do": "header", "part": part})
            texts.append(str(_checked(connection.receive())["header"]))

        self._try_each(holders, ask)
        return texts[0]

    def _try_each(self, holders: list[int], action: Callable[[DataConnection], None]) -> None:
        last: Exception | None = None
        start = self._settings.pod % max(1, len(holders))  # so that not all pods ask the same one
        for pod in holders[start:] + holders[:start]:
            try:
                connection = DataConnection.connect(self._addresses(pod), self._settings)
                try:
                    action(connection)
                    return
                finally:
                    connection.close()
            except (OSError, NoRoomError, PartError) as error:
                last = error
        raise last or ConnectionError("no pod holds it")

    def _receive(self, connection: DataConnection, part: Part) -> None:
        connection.send({"do": "get", "part": part})
        length = int(_checked(connection.receive())["length"])
        slot = self._store.begin(part, length, _SLOT_TIMEOUT, fetched=part.rank not in self._own_ranks)
        try:
            prelude = connection.receive_part(slot.memory, length)
            check_part(prelude, part)
        except BaseException:
            self._store.cancel(slot)
            raise
        self._store.hold(slot, prelude)


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    if "error" in answer:
        raise RefusedError(str(answer["error"]))
    return answer
