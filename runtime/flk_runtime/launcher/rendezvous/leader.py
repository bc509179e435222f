"""The leader of the rendezvous, in the launcher of pod 0: it serves the store, starts attempts and ends the job."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

from flk_runtime.contract import Attempt, Failure, JobRecord
from flk_runtime.launcher.failures import job_record, progress, root_cause, shorten
from flk_runtime.launcher.policy import decide
from flk_runtime.launcher.rendezvous import store
from flk_runtime.launcher.rendezvous.messages import (
    LEADER_KEY,
    LEFT_KEY,
    ROUND_KEY,
    AttemptStarted,
    Event,
    JobEnded,
    Join,
    decode_end,
    encode_start,
    end_key,
    join_key,
    start_key,
)
from flk_runtime.launcher.settings import Settings, SettingsError

_LAST_REPORTS_TIMEOUT = 5.0  # seconds to wait for the other pods' failures when no attempt follows
_LEAVE_TIMEOUT = 5.0  # seconds to serve the store until all members have read how the job ended
_LEAVE_POLL = 0.02  # seconds between two looks at their number
_PROGRESS_INTERVAL = 30.0  # seconds between two lines about pods that have not joined
_POLL_MIN = 0.05  # seconds that a wait for the members takes at least


class Leader:
    """The rendezvous store and a thread that decides, round by round, whether and how an attempt starts."""

    def __init__(self, settings: Settings, post: Callable[[Event], None], log: Callable[[str], None]) -> None:
        self._settings = settings
        self._post = post
        self._log = log
        try:
            self._store = store.serve(settings.store_port)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise SettingsError(f"cannot serve the rendezvous store on port {settings.store_port}: {reason}") from error
        self._store.set(LEADER_KEY, uuid.uuid4().hex)
        self.port = int(self._store.port)
        self._incarnations: dict[int, str] = {}  # by pod, in the last attempt

    def start(self) -> None:
        """Start the thread, which waits for the members to join."""
        store.start_thread("leader", self._run, self._post)

    def wait_for_members_to_leave(self) -> None:
        """Serve the store until all members know how the job ended, for at most 5 seconds."""
        deadline = time.monotonic() + _LEAVE_TIMEOUT
        with contextlib.suppress(RuntimeError):
            while self._store.add(LEFT_KEY, 0) < self._settings.pods and time.monotonic() < deadline:
                time.sleep(_LEAVE_POLL)

    def _run(self) -> None:
        settings = self._settings
        number = 0
        history: list[Attempt] = []
        while True:
            self._store.set(ROUND_KEY, str(number))
            restart = decide(history, settings.limits).restart
            joins = self._collect(number, settings.join_timeout if restart else _LAST_REPORTS_TIMEOUT)
            # A leader that was restarted has no history; members that were there before send theirs.
            history = max([history, *(join.history for join in joins.values())], key=progress)
            if history:
                history[-1] = self._with_root_cause(history[-1], joins)
            record = self._final_record(history, joins)
            if record:
                self._store.set(start_key(number), encode_start(JobEnded(record)))
                return
            failure = self._run_attempt(number, history, joins)
            if failure is None:
                return
            number += 1

    def _run_attempt(self, number: int, history: list[Attempt], joins: dict[int, Join]) -> Failure | None:
        """Start an attempt, add it to ``history``, and wait for its end. Returns its failure, or None for success."""
        settings = self._settings
        self._incarnations = {pod: join.incarnation for pod, join in joins.items()}
        attempt = history[-1].number + 1 if history else 0
        decision = decide(history, settings.limits)
        self._delay(history, decision.delay)
        started = Attempt(attempt, time.time(), restarts=decision.restarts, disruptions=decision.disruptions)
        history[:] = [*shorten(history), started]
        # The ranks' own store: new, on a port of its own, and closed with the attempt.
        ranks_store = store.serve(0)
        address = "127.0.0.1" if settings.pods == 1 else settings.pod_ip or settings.store_host
        start = AttemptStarted(number, attempt, address, int(ranks_store.port), history)
        self._store.set(start_key(number), encode_start(start))
        failure = decode_end(store.wait_for(self._store, end_key(number)))
        if failure:
            failure = replace(failure, attempt=attempt)  # a pod that was restarted does not know the number
            history[-1] = replace(history[-1], ended=time.time(), failure=failure)
        return failure

    def _delay(self, history: list[Attempt], seconds: float) -> None:
        """Wait until ``seconds`` after the end of the last attempt."""
        if seconds:
            self._log(f"waiting for {seconds:g} s, because attempts failed quickly in a row")
            ended = history[-1].ended or time.time()
            time.sleep(min(seconds, max(0.0, ended + seconds - time.time())))

    def _collect(self, number: int, timeout: float) -> dict[int, Join]:
        """The members that have joined this round, by pod: all of them, or those of the first ``timeout`` seconds."""
        began = time.monotonic()
        keys = {pod: join_key(number, pod) for pod in range(self._settings.pods)}
        while True:
            left = timeout - (time.monotonic() - began)
            try:
                self._store.wait(list(keys.values()), timedelta(seconds=max(_POLL_MIN, min(left, _PROGRESS_INTERVAL))))
                joined = list(keys)
            except RuntimeError:
                joined = [pod for pod, key in keys.items() if self._store.check([key])]
                if len(joined) < len(keys) and left > 0:
                    if left > _LAST_REPORTS_TIMEOUT:
                        missing = next(pod for pod in keys if pod not in joined)
                        self._log(f"{len(joined)} of {len(keys)} pods have joined; waiting for pod {missing}")
                    continue
            return {pod: Join.from_json(self._store.get(keys[pod])) for pod in joined}

    def _with_root_cause(self, attempt: Attempt, joins: dict[int, Join]) -> Attempt:
        """The attempt with its root cause among the failures that all pods saw."""
        seen = [failure for join in joins.values() for failure in join.failures if failure.attempt == attempt.number]
        if attempt.failure:
            seen.append(attempt.failure)
        for pod, join in joins.items():
            restarted = self._incarnations.get(pod, join.incarnation) != join.incarnation
            if restarted and not any(failure.pod == pod for failure in seen):
                # No launcher reported why, so the pod was killed. Time 0 puts this before its consequences elsewhere.
                lost = Failure("lost", pod, None, join.pod_name, join.node, attempt.number, message="was restarted")
                seen.append(lost)
        if not seen:
            return attempt
        steps = [failure.step for failure in seen if failure.step is not None]
        return replace(attempt, failure=root_cause(seen), step=max(steps, default=None))

    def _final_record(self, history: list[Attempt], joins: dict[int, Join]) -> JobRecord | None:
        """The record of the job if no further attempt follows."""
        settings = self._settings
        decision = decide(history, settings.limits)
        if not decision.restart:
            return job_record(history[-1].failure, history, settings.limits, decision.verdict)
        missing = [pod for pod in range(settings.pods) if pod not in joins]
        if not missing:
            return None
        pods = ", ".join(str(pod) for pod in missing[:10]) + (", …" if len(missing) > 10 else "")
        message = f"never joined: waited {settings.join_timeout:.0f} s, missing of {settings.pods} pods: {pods}"
        attempt = history[-1].number if history else 0
        cause = Failure("lost", missing[0], attempt=attempt, time=time.time(), message=message)
        return job_record(cause, history, settings.limits)
