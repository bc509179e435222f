"""A member of the rendezvous: a launcher's connection to the leader, which it makes again when it breaks."""

from __future__ import annotations

import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from flk_runtime.contract import ExitCode
from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.contract.record import Attempt, JobRecord
from flk_runtime.contract.telemetry import PodStatus
from flk_runtime.launcher.control import start_thread
from flk_runtime.launcher.records.history import job_record, new_record
from flk_runtime.launcher.replication import Inventory, MemoryPlan
from flk_runtime.launcher.settings import Settings
from flk_runtime.launcher.transport import messages
from flk_runtime.launcher.transport.messages import MESSAGES, Event, FromMember, Message
from flk_runtime.launcher.transport.peers import Peer, PeerLoop
from flk_runtime.wire import BEATS, Backoff, Connection, Refused, Stream, VersionError, was_closed
from flk_runtime.wire.listener import LOOPBACK

_CONNECT_TIMEOUT = 3.0  # seconds to connect to one address of the leader, and for its answer
_POLL_MIN, _POLL_MAX = 0.05, 1.0  # seconds between two tries to connect
_PROGRESS_INTERVAL = 30.0  # seconds between two lines about a leader that does not answer


@dataclass(frozen=True)
class _Ready:
    """The agent's ranks have ended, with these failures, after this step."""

    failures: list[Failure]
    step: int | None


class _RefusedError(ConnectionError):
    """The leader knows this launcher and refuses it."""


class _NoLeaderError(ConnectionError):
    """The leader was not reached within the join timeout."""


@dataclass
class _Job:
    """What a launcher knows of the job."""

    history: list[Attempt]
    again: bool  # the job has had attempts before this launcher began
    told_by: str = ""  # the leader that sent the history
    plan: MemoryPlan | None = None  # of the attempt that starts next
    attempt: messages.AttemptStarted | None = None  # that runs


class Member:
    """A launcher as a member of the rendezvous. Every method returns at once; a thread does the rest and posts events.

    After each AttemptStarted exactly one event says that the attempt is over (AttemptEnded, LeaderLost or JobEnded).
    """

    def __init__(
        self,
        settings: Settings,
        port: int,
        post: Callable[[Event], None],
        log: Callable[[str], None],
        inventory: Callable[[], Inventory | None],
        prepare: Callable[[], tuple[list[Attempt], bool, list[Failure]]],
    ) -> None:
        """``port`` is the leader's port. ``post`` receives the events; ``log`` writes a line to the pod's log.

        ``inventory`` says which checkpoints in memory this pod holds. ``prepare`` reads attempts that no launcher may
        know any more, and whether there have been any, and finds faults of this pod. The thread calls it before it
        connects, since it may take seconds.
        """
        self._settings = settings
        self._port = port
        self._post = post
        self._log = log
        self._inventory = inventory
        self._prepare = prepare
        self._incarnation, self._began = uuid.uuid4().hex, time.monotonic()
        self._leader = messages.Welcome("")  # of the leader to which it was connected last
        self._job = _Job([], False)
        self._ready: _Ready | None = None  # for the next attempt; None: ranks run
        self._over = False
        self._status: PodStatus | None = None
        self._loop: PeerLoop[Peer, FromMember | _Ready | threading.Event] = PeerLoop()

    def start(self) -> None:
        """Start the thread, which connects to the leader and joins the first attempt."""
        start_thread("rendezvous-member", self._run, self._post)

    def send(self, message: FromMember) -> None:
        """Send the leader a message, or its successor. Any thread may call this."""
        self._loop.put(message)

    def send_last(self, message: FromMember, seconds: float) -> None:
        """Send a message, and wait at most ``seconds`` until it and all before it have been sent."""
        sent = threading.Event()
        self._loop.put(message)
        self._loop.put(sent)
        sent.wait(seconds)

    def join_next_round(self, failures: list[Failure], step: int | None) -> None:
        """Join the next attempt. Call when the ranks of the last attempt have ended, with the failures among them.

        ``step`` is the number of steps that they had done.
        """
        self._loop.put(_Ready(failures, step))

    def post_status(self, status: PodStatus) -> None:
        """Replace the status of this pod's ranks, which the next heartbeats carry to the leader."""
        self._status = status

    # The thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        history, again, faults = self._prepare()
        self._job, self._ready = _Job(history, again), _Ready(faults, None)
        while not self._over:
            try:
                self._serve(Peer(self._connect()))
            except _RefusedError as error:
                self._log(f"leaving the job: {error}")
                history, limits = self._job.history, self._settings.limits
                self._end(new_record("preempted", int(ExitCode.PREEMPTED), None, history, limits))
            except _NoLeaderError as error:
                self._log(f"leaving the job: pod 0 {error}")
                self._end_with(replace(self._lost(0, str(error)), kind=Kind.ABSENT))
            except VersionError as error:
                self._log(f"leaving the job: {error}")
                self._end_with(replace(self._lost(self._settings.pod, str(error)), kind=Kind.USAGE))
            except OSError as error:
                self._handle_loss(error)

    def _serve(self, peer: Peer) -> None:
        """Exchange messages with the leader until the job ends. Raises OSError if the connection breaks."""
        connection, heartbeat_at = peer.connection, 0.0
        self._loop.add(peer)
        try:
            if self._ready:
                self._join(peer, self._ready)
            while not self._over:
                now = time.monotonic()
                if now >= heartbeat_at:
                    self._loop.send([peer], messages.Heartbeat(self._status))
                    heartbeat_at = now + connection.lease / BEATS
                timeout = max(0.0, min(heartbeat_at, connection.heard + connection.lease) - now)
                for _, message in self._loop.messages(timeout):
                    self._handle(message, peer)
                for item in self._loop.items():
                    self._take(item, peer)
                if silence := connection.silence(time.monotonic()):
                    raise ConnectionError(silence)
                if peer.error and not self._over:
                    raise peer.error
        finally:
            self._loop.give_up(peer, ConnectionError("it is not used any more"))
            for _ in self._loop.take_broken():
                pass

    def _take(self, item: FromMember | _Ready | threading.Event, peer: Peer) -> None:
        """Do what another thread of this process wants."""
        if isinstance(item, _Ready):
            self._ready = item
            self._join(peer, item)
        elif isinstance(item, threading.Event):
            item.set()
        else:
            attempt = self._job.attempt
            if isinstance(item, messages.Restored) and attempt and attempt.number == item.attempt:
                self._note_last(restored=item.step, restored_from=item.source)  # for another leader
            self._loop.send([peer], item)

    def _join(self, peer: Peer, ready: _Ready) -> None:
        history, failures = self._job.history, ready.failures
        if self._job.told_by == self._leader.leader:
            # Pod 0 was there all the time, so if this pod lost the connection, it is the one that was lost.
            history, failures = [], [self._blame_self(failure) for failure in failures]
        own, memory = (self._settings.pod_name, self._settings.node), self._inventory()
        self._loop.send([peer], messages.Join(*own, history, failures, memory, ready.step, self._job.again))

    def _handle(self, message: Message, peer: Peer) -> None:
        match message:
            case MemoryPlan():
                self._job.plan = message
            case messages.AttemptStarted():
                message = replace(message, memory=self._job.plan)
                self._job = _Job(message.history, self._job.again, self._leader.leader, None, message)
                self._ready = None
                self._post(message)
            case messages.PreemptionStarted() | messages.SaveAt() if self._job.attempt:
                self._post(message)
            case messages.AttemptEnded() if self._job.attempt:
                self._end_attempt(message.failure)
                self._post(message)
            case messages.StacksRequested() | messages.Reply() | messages.WaitsChanged():
                self._post(message)
            case messages.JobEnded():
                self._loop.send([peer], messages.Leave())
                self._end(message.record)
            case Refused():
                raise _RefusedError(message.reason)

    def _handle_loss(self, error: OSError) -> None:
        """End the attempt for this pod, since the connection broke and its ranks cannot be told anything."""
        reason = error.strerror or str(error)
        self._log(f"lost the connection to the launcher of pod 0 ({reason}); connecting again")
        if self._job.attempt:
            cause = self._lost(0, f"closed the connection to the rendezvous: {reason}")
            if was_closed(error):  # unless the same launcher answers again (see `_join`)
                cause = replace(cause, kind=Kind.CONTAINER_KILLED, message="")
            self._end_attempt(cause)
            self._post(messages.LeaderLost(cause))

    def _end_attempt(self, failure: Failure) -> None:
        self._job.attempt = None
        self._note_last(ended=time.time(), failure=failure)

    def _note_last(self, **facts: Any) -> None:
        """Add facts to the latest attempt of the history, which the agent holds too: so the list is a new one."""
        self._job.history = [*self._job.history[:-1], replace(self._job.history[-1], **facts)]

    def _end(self, record: JobRecord) -> None:
        self._over = True
        self._post(messages.JobEnded(record))

    def _end_with(self, failure: Failure) -> None:
        self._end(job_record(failure, self._job.history, self._settings.limits))

    def _lost(self, pod: int, message: str) -> Failure:
        name = self._settings.pod_name if pod == self._settings.pod else self._leader.pod_name
        attempt = self._job.history[-1].number if self._job.history else 0
        return Failure(Kind.LOST, pod, pod_name=name, attempt=attempt, time=time.time(), message=message)

    # Connecting --------------------------------------------------------------------------------------------------

    def _connect(self) -> Connection[Message]:
        """Connect to the leader, again and again. Raises _NoLeaderError, _RefusedError and VersionError."""
        settings = self._settings
        where = f"{settings.rendezvous_host}:{self._port}"
        began = logged = time.monotonic()
        backoff = Backoff(_POLL_MIN, _POLL_MAX)
        while True:
            try:
                return self._open()
            except (_RefusedError, VersionError):
                raise
            except OSError as error:
                now = time.monotonic()
                if now - began > settings.join_timeout:
                    raise _NoLeaderError(f"did not answer at {where} within {now - began:.0f} s: {error}") from error
                if now - logged > _PROGRESS_INTERVAL:
                    self._log(f"waiting for the launcher of pod 0 at {where} since {now - began:.0f} s: {error}")
                    logged = now
                time.sleep(backoff.next())

    def _open(self) -> Connection[Message]:
        """Connect once, and authenticate both ends. Raises OSError."""
        settings = self._settings
        host = LOOPBACK if settings.pod == 0 else settings.rendezvous_host  # a name is resolved anew
        sock = socket.create_connection((host, self._port), timeout=_CONNECT_TIMEOUT)
        session = settings.session(serves=False, other="the leader at this address")
        stream = Stream(sock, session, MESSAGES, _CONNECT_TIMEOUT)
        try:
            stream.send(messages.Hello(settings.pod, self._incarnation, time.monotonic() - self._began))
            answer, _ = stream.receive()
            if isinstance(answer, Refused):
                raise _RefusedError(answer.reason)
            if not isinstance(answer, messages.Welcome):
                raise ConnectionError("the answer is not from a leader")
        except BaseException:
            stream.close()
            raise
        session.other = "it"
        self._leader = answer
        return Connection(sock, session, MESSAGES, settings.lease, time.monotonic())

    def _blame_self(self, failure: Failure) -> Failure:
        lost_leader = failure.kind in (Kind.LOST, Kind.CONTAINER_KILLED) and failure.pod == 0
        return self._lost(self._settings.pod, messages.DISCONNECTED) if lost_leader else failure
