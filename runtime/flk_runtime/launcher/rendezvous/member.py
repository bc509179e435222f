"""One launcher's part in the rendezvous: it joins each round, and reports how its ranks ended."""

from __future__ import annotations

import contextlib
import queue
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from flk_runtime.contract import Attempt, Failure
from flk_runtime.launcher.failures import job_record
from flk_runtime.launcher.rendezvous import store
from flk_runtime.launcher.rendezvous.messages import (
    LEADER_KEY,
    LEFT_KEY,
    ROUND_KEY,
    AttemptEnded,
    AttemptStarted,
    Event,
    JobEnded,
    Join,
    LeaderLost,
    decode_end,
    decode_start,
    done_key,
    encode_end,
    end_key,
    join_key,
    pod_done_key,
    primary_key,
    start_key,
)
from flk_runtime.launcher.settings import Settings

_PROBE_TIMEOUT = 3.0  # seconds to connect to the leader's port
_POLL_MIN, _POLL_MAX = 0.05, 1.0  # seconds between two tries to connect
_PRIMARY_TIMEOUT = 0.5  # seconds to wait for a primary failure after an attempt has ended with a secondary one
_PROGRESS_INTERVAL = 30.0  # seconds between two lines about a leader that does not answer

_DISCONNECTED = "lost the connection to pod 0"


class Member:
    """A launcher's connection to the leader: a thread that follows the rounds and posts events."""

    def __init__(
        self, settings: Settings, port: int, post: Callable[[Event], None], log: Callable[[str], None]
    ) -> None:
        self._settings = settings
        self._port = port
        self._post = post
        self._log = log
        self._incarnation = uuid.uuid4().hex
        self._leader = b""  # identifies the process of the leader to which this member was connected last
        self._history: list[Attempt] = []
        self._failures: list[Failure] = []  # in the last attempt
        self._ended: queue.SimpleQueue[list[Failure]] = queue.SimpleQueue()
        self._writer: Any = None  # client for the agent's thread; that of the member's own thread waits for keys

    def start(self) -> None:
        """Start the thread, which connects to the leader."""
        store.start_thread("member", self._run, self._post)

    def report_failure(self, attempt: AttemptStarted, failure: Failure) -> None:
        """End the attempt in all pods, unless another failure has ended it already."""
        with contextlib.suppress(RuntimeError):  # the connection broke, which the thread notices too
            self._writer.compare_set(end_key(attempt.round), "", encode_end(failure))
            if not failure.secondary:
                self._writer.set(primary_key(attempt.round), "")

    def report_success(self, attempt: AttemptStarted) -> None:
        """Count this pod as done: all its ranks succeeded. The last pod ends the attempt as a success."""
        with contextlib.suppress(RuntimeError):
            if self._writer.add(pod_done_key(attempt.round, self._settings.pod), 1) > 1:
                return
            if self._writer.add(done_key(attempt.round), 1) == self._settings.pods:
                self._writer.compare_set(end_key(attempt.round), "", encode_end(None))

    def join_next_round(self, failures: list[Failure]) -> None:
        """Join the next round. Call when the ranks of the last attempt have ended, with the failures among them."""
        self._ended.put(failures)

    def _run(self) -> None:
        while True:
            try:
                client = self._connect()
            except TimeoutError as error:
                cause = self._lost(0, str(error))
                self._post(JobEnded(job_record(cause, self._history, self._settings.limits)))
                return
            try:
                self._follow_rounds(client)
                return
            except RuntimeError as error:  # the store's exceptions, also DistNetworkError and DistStoreError
                cause = self._lost(0, "closed the connection to the rendezvous store")
                if self._history and self._history[-1].ended is None:
                    self._end_attempt(cause)
                reason = str(error).splitlines()[0][:200]
                self._log(f"lost the connection to the launcher of pod 0 ({reason}); connecting again")
                self._post(LeaderLost(cause))
                self._failures = self._ended.get()

    def _follow_rounds(self, client: Any) -> None:
        """Take part in one round after the other, until the job ends. Raises RuntimeError if the connection breaks."""
        pod = self._settings.pod
        leader = store.wait_for(client, LEADER_KEY)
        if leader == self._leader:  # pod 0 was there all the time, so this pod is the one that was lost
            self._failures = [
                self._lost(pod, _DISCONNECTED) if (failure.kind, failure.pod) == ("lost", 0) else failure
                for failure in self._failures
            ]
        self._leader = leader
        number = int(store.wait_for(client, ROUND_KEY))
        if client.check([join_key(number, pod)]) and client.check([start_key(number)]):
            decision = decode_start(client.get(start_key(number)))
            if isinstance(decision, JobEnded):
                self._leave(client, decision)
                return
            # The attempt runs without this pod: its ranks ended with the former launcher, or with the connection.
            same = Join.from_json(client.get(join_key(number, pod))).incarnation == self._incarnation
            lost = self._lost(pod, _DISCONNECTED if same else "was restarted")
            client.compare_set(end_key(number), "", encode_end(lost))
            client.set(primary_key(number), "")
            number += 1
        while True:
            join = Join(self._incarnation, self._settings.pod_name, self._settings.node, self._history, self._failures)
            client.set(join_key(number, pod), join.to_json())
            start = decode_start(store.wait_for(client, start_key(number)))
            if isinstance(start, JobEnded):
                self._leave(client, start)
                return
            self._history = start.history
            self._post(start)
            failure = decode_end(store.wait_for(client, end_key(number)))
            if failure and failure.secondary:
                # The rank that failed first may still be ending. Its launcher must not end it before that is known.
                store.wait_at_most(client, primary_key(number), _PRIMARY_TIMEOUT)
            self._end_attempt(failure)
            if failure is None:
                self._leave(client, JobEnded(job_record(None, self._history, self._settings.limits)))
                return
            self._post(AttemptEnded(number, failure))
            self._failures = self._ended.get()
            number += 1

    def _end_attempt(self, failure: Failure | None) -> None:
        self._history[-1] = replace(self._history[-1], ended=time.time(), failure=failure)

    def _leave(self, client: Any, event: JobEnded) -> None:
        with contextlib.suppress(RuntimeError):
            client.add(LEFT_KEY, 1)
        self._post(event)

    def _lost(self, pod: int, message: str) -> Failure:
        name = self._settings.pod_name if pod == self._settings.pod else self._settings.store_host
        attempt = self._history[-1].number if self._history else 0
        return Failure("lost", pod, pod_name=name, attempt=attempt, time=time.time(), message=message)

    def _connect(self) -> Any:
        """Connect to the leader's store, again and again. Raises TimeoutError after the join timeout.

        A plain socket tries name and port first, because torch prints a C++ stack trace for each failed try.
        """
        host, port, timeout = self._settings.store_host, self._port, self._settings.join_timeout
        began = logged = time.monotonic()
        interval = _POLL_MIN
        while True:
            try:
                socket.create_connection((host, port), timeout=_PROBE_TIMEOUT).close()
                client, self._writer = store.connect(host, port), store.connect(host, port)
                return client
            except (OSError, RuntimeError) as error:
                now = time.monotonic()
                if now - began > timeout:
                    message = f"did not answer at {host}:{port} within {now - began:.0f} s: {error}"
                    raise TimeoutError(message) from None
                if now - logged > _PROGRESS_INTERVAL:
                    self._log(f"waiting for the launcher of pod 0 at {host}:{port} since {now - began:.0f} s: {error}")
                    logged = now
                time.sleep(interval)
                interval = min(_POLL_MAX, interval * 1.5)
