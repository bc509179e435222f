"""How the launchers of a job agree: who is there, which attempt begins, why it ended, and whether another one follows.

The launcher of pod 0 leads: it holds the control store (torch's TCPStore). A round is one attempt to run all ranks:

    <round>/join/<pod>   each launcher: I am here, and this is what I saw of the last attempt
    <round>/go           the leader, once all have joined: number of the attempt and the address of the ranks' own
                         store, new and empty for each attempt; or the record, when no further attempt follows
    <round>/done         counter: pods whose ranks have all ended well
    <round>/end          whoever is first: a failure (compare-and-set), or success when every pod is done
    round                number of the current round, for a launcher that comes late

Everybody waits for `<round>/end`, so one failure ends the attempt everywhere at once. A launcher that comes up and
finds its place in the current round taken is a pod that was started anew: it ends that attempt. When pod 0 itself is
started anew its store is empty; the other launchers bring the history of attempts along, so numbers and restarts go on.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any

from flk_runtime.contract import Attempt, ExitCode, Failure, JobRecord
from flk_runtime.launcher.settings import Settings, SettingsError

_FOR_EVER = timedelta(days=7)
_PROBE_TIMEOUT = 3.0  # seconds for one look at the leader's port
_LAST_FAILURES_TIMEOUT = 5.0  # seconds to wait for the other pods' reports when no attempt follows anyway
_GOODBYE = 5.0  # seconds that the leader keeps the store open for the others to read the end
_HISTORY = 20  # attempts that are kept
_REMIND = 30.0  # seconds between two lines that say who is missing


@dataclass(frozen=True)
class AttemptStarted:
    """An attempt begins: start the ranks."""

    round: int
    number: int
    address: str  # MASTER_ADDR
    port: int  # MASTER_PORT
    history: list[Attempt]


@dataclass(frozen=True)
class AttemptEnded:
    """The attempt is over; a failure, or None for success on every pod."""

    round: int
    failure: Failure | None


@dataclass(frozen=True)
class JobEnded:
    """No further attempt follows."""

    record: JobRecord


@dataclass(frozen=True)
class LeaderLost:
    """The leader went away: end the ranks, look for it again."""

    failure: Failure


@dataclass(frozen=True)
class ThreadFailed:
    """A thread of the rendezvous ended with an exception: a bug of flk."""

    error: BaseException


Event = AttemptStarted | AttemptEnded | JobEnded | LeaderLost | ThreadFailed


@dataclass
class _Join:
    incarnation: str  # of the launcher: another one for the same pod means that the pod was restarted
    pod_name: str
    node: str
    history: list[Attempt] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: bytes) -> _Join:
        data = json.loads(text)
        return cls(
            data["incarnation"],
            data["pod_name"],
            data["node"],
            _attempts(data["history"]),
            [Failure(**f) for f in data["failures"]],
        )


def root_cause(failures: Sequence[Failure]) -> Failure:
    """The failure that led to the others: the earliest that is not just a peer's broken connection."""
    return min(failures, key=lambda failure: (failure.secondary, failure.time))


class Member:
    """One launcher's part in the rendezvous: a thread that follows the rounds and posts what happens as events."""

    def __init__(
        self, settings: Settings, port: int, post: Callable[[Event], None], say: Callable[[str], None]
    ) -> None:
        self._settings = settings
        self._port = port
        self._post = post
        self._say = say
        self._incarnation = uuid.uuid4().hex
        self._next: queue.SimpleQueue[list[Failure]] = queue.SimpleQueue()
        self._writer: Any = None

    def start(self) -> None:
        """Begin to look for the leader."""
        _in_thread("rendezvous", self._follow, self._post)

    def failed(self, go: AttemptStarted, failure: Failure) -> None:
        """End the attempt for everybody, unless somebody else has ended it already."""
        with contextlib.suppress(RuntimeError):  # the leader went away: the thread sees that too
            self._writer.compare_set(f"{go.round}/end", "", json.dumps({"failure": asdict(failure)}))

    def done(self, go: AttemptStarted) -> None:
        """All ranks of this pod have ended well; the last pod to say so ends the attempt as a success."""
        with contextlib.suppress(RuntimeError):
            if self._writer.add(f"{go.round}/done", 1) == self._settings.pods:
                self._writer.compare_set(f"{go.round}/end", "", json.dumps({"failure": None}))

    def ready(self, failures: list[Failure]) -> None:
        """The ranks of the ended attempt are gone; ``failures`` is what failed here before they were told to end."""
        self._next.put(failures)

    def _follow(self) -> None:
        history: list[Attempt] = []
        failures: list[Failure] = []
        while True:
            try:
                store = self._connect()
            except TimeoutError as error:
                cause = self._lost(str(error), history)
                self._post(JobEnded(_record(cause, history, self._settings.restarts)))
                return
            try:
                number = int(_wait(store, "round"))
                if store.check([f"{number}/join/{self._settings.pod}"]) and self._is_new(store, number):
                    lost = self._lost("was restarted", history, pod=self._settings.pod)
                    store.compare_set(f"{number}/end", "", json.dumps({"failure": asdict(lost)}))
                    number += 1
                while True:
                    join = _Join(self._incarnation, self._settings.pod_name, self._settings.node, history, failures)
                    store.set(f"{number}/join/{self._settings.pod}", join.dump())
                    go = json.loads(_wait(store, f"{number}/go"))
                    if "record" in go:
                        self._say_goodbye(store)
                        self._post(JobEnded(_load_record(go["record"])))
                        return
                    history = _attempts(go["history"])
                    self._post(AttemptStarted(number, go["number"], go["address"], go["port"], history))
                    end = json.loads(_wait(store, f"{number}/end"))
                    failure = Failure(**end["failure"]) if end["failure"] else None
                    history[-1] = replace(history[-1], ended=time.time(), failure=failure)
                    if failure is None:
                        self._say_goodbye(store)
                        self._post(JobEnded(_record(None, history, self._settings.restarts)))
                        return
                    self._post(AttemptEnded(number, failure))
                    failures = self._next.get()
                    number += 1
            except RuntimeError as error:  # the store's exceptions; DistNetworkError and DistStoreError are among them
                cause = self._lost("closed the connection to the rendezvous store", history)
                if history and history[-1].ended is None:
                    history[-1] = replace(history[-1], ended=time.time(), failure=cause)
                self._say(f"lost the launcher of pod 0 ({str(error).splitlines()[0][:200]}); looking for it again")
                self._post(LeaderLost(cause))
                failures = self._next.get()

    def _is_new(self, store: Any, number: int) -> bool:
        return _Join.load(store.get(f"{number}/join/{self._settings.pod}")).incarnation != self._incarnation

    def _lost(self, message: str, history: list[Attempt], pod: int = 0) -> Failure:
        name = self._settings.pod_name if pod == self._settings.pod else self._settings.host
        attempt = history[-1].number if history else 0
        return Failure("lost", pod, pod_name=name, attempt=attempt, time=time.time(), message=message)

    def _say_goodbye(self, store: Any) -> None:
        with contextlib.suppress(RuntimeError):
            store.add("goodbye", 1)

    def _connect(self) -> Any:
        """A client of the control store. Name and port are tried with a plain socket first: torch prints stack traces
        of C++ for every name that does not resolve yet."""
        host, began, reminded = self._settings.host, time.monotonic(), time.monotonic()
        pause = 0.05
        while True:
            try:
                socket.create_connection((host, self._port), timeout=_PROBE_TIMEOUT).close()
                store, self._writer = _store(host, self._port), _store(host, self._port)
                return store
            except (OSError, RuntimeError) as error:
                waited = time.monotonic() - began
                if waited > self._settings.join_timeout:
                    raise TimeoutError(
                        f"was not reached at {host}:{self._port} within {waited:.0f} s: {error}"
                    ) from None
                if time.monotonic() - reminded > _REMIND:
                    self._say(
                        f"waiting for the launcher of pod 0 at {host}:{self._port}, {waited:.0f} s so far: {error}"
                    )
                    reminded = time.monotonic()
                time.sleep(pause)
                pause = min(1.0, pause * 1.5)


class Leader:
    """Pod 0's further part: holds the control store and decides, in a thread."""

    def __init__(self, settings: Settings, post: Callable[[Event], None], say: Callable[[str], None]) -> None:
        self._settings = settings
        self._post = post
        self._say = say
        # Any address of this pod; the port is the one in the manifest, which the pod's service names.
        try:
            self._server = _store("0.0.0.0", settings.port, serve=True)  # noqa: S104
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise SettingsError(f"cannot hold the job's store on port {settings.port}: {reason}") from error
        self.port = int(self._server.port)
        self._incarnations: dict[int, str] = {}

    def start(self) -> None:
        """Begin to collect the other launchers."""
        _in_thread("leader", self._lead, self._post)

    def linger(self) -> None:
        """Keep the store open until everybody has read how the job ended, for a few seconds at most."""
        deadline = time.monotonic() + _GOODBYE
        with contextlib.suppress(RuntimeError):
            while self._server.add("goodbye", 0) < self._settings.pods and time.monotonic() < deadline:
                time.sleep(0.02)

    def _lead(self) -> None:
        settings, store = self._settings, self._server
        number = 0
        history: list[Attempt] = []
        while True:
            store.set("round", str(number))
            used_up = _restarts_used(history) > settings.restarts or (bool(history) and _is_final(history[-1].failure))
            joins = self._collect(number, _LAST_FAILURES_TIMEOUT if used_up else settings.join_timeout)
            # A leader that was started anew knows nothing; those who were there before bring the history.
            history = max([history, *(join.history for join in joins.values())], key=_age)
            if history:
                history[-1] = self._with_cause(history[-1], joins)
            missing = [pod for pod in range(settings.pods) if pod not in joins]
            if _restarts_used(history) > settings.restarts or (history and _is_final(history[-1].failure)):
                record = _record(history[-1].failure, history, settings.restarts)
                store.set(f"{number}/go", json.dumps({"record": asdict(record)}))
                return
            if missing:
                names = ", ".join(str(pod) for pod in missing[:10]) + (", …" if len(missing) > 10 else "")
                waited = f"waited {settings.join_timeout:.0f} s"
                cause = Failure(
                    "lost", missing[0], attempt=history[-1].number if history else 0, time=time.time(),
                    message=f"never joined: {waited}, missing of {settings.pods} pods: {names}",
                )  # fmt: skip
                store.set(f"{number}/go", json.dumps({"record": asdict(_record(cause, history, settings.restarts))}))
                return
            self._incarnations = {pod: join.incarnation for pod, join in joins.items()}
            # The ranks' own store: empty, on a port of its own, gone with the attempt.
            ranks = _store("0.0.0.0", 0, serve=True)  # noqa: S104
            attempt = history[-1].number + 1 if history else 0
            history = [*_brief(history), Attempt(attempt, time.time())]
            address = "127.0.0.1" if settings.pods == 1 else settings.pod_ip or settings.host
            go = {"number": attempt, "address": address, "port": ranks.port, "history": [asdict(a) for a in history]}
            store.set(f"{number}/go", json.dumps(go))
            end = json.loads(_wait(store, f"{number}/end"))
            if end["failure"] is None:
                return
            failure = replace(Failure(**end["failure"]), attempt=attempt)  # a pod that is new does not know the number
            history[-1] = replace(history[-1], ended=time.time(), failure=failure)
            del ranks
            number += 1

    def _collect(self, number: int, patience: float) -> dict[int, _Join]:
        """Those who have joined this round, all of them or as many as came in ``patience`` seconds."""
        began = time.monotonic()
        keys = {pod: f"{number}/join/{pod}" for pod in range(self._settings.pods)}
        while True:
            left = patience - (time.monotonic() - began)
            try:
                self._server.wait(list(keys.values()), timedelta(seconds=max(0.05, min(left, _REMIND))))
                present = list(keys)
            except RuntimeError:
                present = [pod for pod, key in keys.items() if self._server.check([key])]
                if len(present) < len(keys) and left > 0:
                    missing = [pod for pod in keys if pod not in present]
                    if left > _LAST_FAILURES_TIMEOUT:
                        self._say(f"{len(present)} of {len(keys)} pods are here; waiting for pod {missing[0]}")
                    continue
            return {pod: _Join.load(self._server.get(keys[pod])) for pod in present}

    def _with_cause(self, attempt: Attempt, joins: dict[int, _Join]) -> Attempt:
        """The attempt with its root cause, out of what every pod saw of it."""
        failures = [
            failure for join in joins.values() for failure in join.failures if failure.attempt == attempt.number
        ]
        if attempt.failure:
            failures.append(attempt.failure)
        for pod, join in joins.items():
            if self._incarnations.get(pod, join.incarnation) != join.incarnation and not any(
                f.pod == pod for f in failures
            ):
                # It came back as another launcher and nobody said why: it was killed. Nothing can have come before.
                failures.append(
                    Failure("lost", pod, None, join.pod_name, join.node, attempt.number, message="was restarted")
                )
        return replace(attempt, failure=root_cause(failures)) if failures else attempt


def _in_thread(name: str, function: Callable[[], None], post: Callable[[Event], None]) -> None:
    """Run ``function`` beside the launcher's loop; an exception of it is posted."""

    def guarded() -> None:
        try:
            function()
        except BaseException as error:
            post(ThreadFailed(error))

    threading.Thread(target=guarded, name=name, daemon=True).start()


def _restarts_used(history: Sequence[Attempt]) -> int:
    """Attempts that have ended badly. The history may have been cut, so the numbers count and not its length."""
    return history[-1].number + (history[-1].failure is not None) if history else 0


def _brief(history: Sequence[Attempt]) -> list[Attempt]:
    """The last attempts, without what only their own reports need, so that the history stays small for ever."""
    return [
        replace(a, failure=replace(a.failure, traceback="", message=a.failure.message[:300]) if a.failure else None)
        for a in history[-_HISTORY:]
    ]


def _is_final(failure: Failure | None) -> bool:
    """Whether another attempt would be of no use."""
    return failure is not None and failure.kind in ("deadline", "usage")


def _age(history: Sequence[Attempt]) -> tuple[int, bool]:
    return (history[-1].number, history[-1].ended is not None) if history else (-1, False)


def _record(failure: Failure | None, history: Sequence[Attempt], restarts: int) -> JobRecord:
    outcome, code = ("failed", failure.code) if failure else ("succeeded", ExitCode.DONE)
    return JobRecord(outcome, int(code), restarts, failure, _brief(history))


def _load_record(data: dict[str, Any]) -> JobRecord:
    failure = Failure(**data["failure"]) if data["failure"] else None
    return JobRecord(data["outcome"], data["code"], data["restarts"], failure, _attempts(data["attempts"]))


def _attempts(data: Sequence[dict[str, Any]]) -> list[Attempt]:
    return [
        Attempt(a["number"], a["started"], a["ended"], Failure(**a["failure"]) if a["failure"] else None) for a in data
    ]


def _store(host: str, port: int, *, serve: bool = False) -> Any:
    """A client of torch's store at this address, or the store itself, on any free port where the port is 0."""
    import torch.distributed as dist

    timeout = timedelta(seconds=30)
    return dist.TCPStore(host, port, is_master=serve, timeout=timeout, wait_for_workers=False)  # type: ignore[attr-defined]


def _wait(store: Any, key: str) -> bytes:
    store.wait([key], _FOR_EVER)
    value: bytes = store.get(key)
    return value
