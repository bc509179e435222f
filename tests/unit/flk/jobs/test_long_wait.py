"""`flk wait` for hours: tokens expire, watches end, the API server restarts, and the job succeeds at last."""

from __future__ import annotations

import functools
import json
import random
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from flk.__main__ import main
from flk.kube.client import ApiClient
from flk.kube.credentials import connect
from flk.kube.watch import Changed, Listed, list_and_watch
from flk.observe.client import JobClient
from flk.observe.follower import Follower
from flk_runtime.contract.record import Attempt, JobRecord
from tests.support.api_server import serve
from tests.support.jobs import NOW
from tests.support.virtual_time import VirtualClock
from tests.unit.flk.cli.outputs import jobs

TOKEN_LIFE = 1111.0  # seconds
DOWN_EVERY, DOWN_FOR = 1300.0, 45.0  # the server does not answer
LOOP_BEGIN, LOOP_END, LOOP_PERIOD = 0.3, 0.4, 40.0  # shares of the time in which a pod is lost again and again


class LongServer:
    """An API server whose objects, tokens, watches and outages follow a virtual clock."""

    def __init__(self, clock: VirtualClock, token_file: Path, hours: int) -> None:
        self.life = hours * 3600.0  # until the job succeeds
        self.clock, self.begin, self.token_file = clock, clock.time(), token_file
        self.requests: Counter[str] = Counter()
        self.refused = 0  # requests with an old token
        self.dropped = 0  # requests and watches during an outage
        self.random = random.Random(1)
        self.write_token()
        self.server = serve(self.answer)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    # What the cluster is at a time

    @property
    def age(self) -> float:
        return self.clock.time() - self.begin

    def token(self, ago: float = 0.0) -> str:
        return f"token-{int((self.age - ago) // TOKEN_LIFE)}"

    def write_token(self) -> None:
        self.token_file.write_text(self.token())

    def is_down(self) -> bool:
        return self.age % DOWN_EVERY > DOWN_EVERY - DOWN_FOR

    def step(self) -> int:
        """The number of changes of the objects so far."""
        begin, end = LOOP_BEGIN * self.life, LOOP_END * self.life
        loops = int((min(max(self.age, begin), end) - begin) // LOOP_PERIOD)
        return loops + (1 if self.age >= self.life else 0)

    def objects(self, kind: str) -> list[dict[str, Any]]:
        if self.age >= self.life:
            job = jobs.succeeded()
        elif self.step() % 2:
            job = jobs.restarting()
        else:
            job = jobs.running()
        items = [job.job] if kind == "pytorchjobs" else list(job.pods.values())
        for item in items:
            item["metadata"]["resourceVersion"] = str(1000 + self.step())
        return items

    # Requests

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(handler.path)
        query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        kind = parts.path.rpartition("/")[2]
        self.requests["watch" if "watch" in query else kind] += 1
        if self.is_down():
            self.dropped += 1
            handler.close_connection = True
            return  # the connection closes without an answer
        # The file has the new token a moment after the clock has moved.
        valid = {f"Bearer {self.token()}", f"Bearer {self.token(ago=15)}"}
        if handler.headers["Authorization"] not in valid:
            self.refused += 1
            self.reply(handler, 401, {"kind": "Status", "code": 401, "message": "Unauthorized"})
        elif kind == "log":
            record = JobRecord("running", 0, 3, None, [Attempt(0, NOW)])
            self.reply(handler, 200, jobs.log_of(0, record).encode())
        elif kind == "events":
            self.reply(handler, 200, {"items": [], "metadata": {}})
        elif "/nodes/" in parts.path:
            self.reply(handler, 404, {"kind": "Status", "code": 404, "reason": "NotFound", "message": "not found"})
        elif "watch" in query:
            self.watch(handler, kind, int(query["resourceVersion"]))
        else:
            version = str(1000 + self.step())
            self.reply(handler, 200, {"items": self.objects(kind), "metadata": {"resourceVersion": version}})

    def reply(self, handler: BaseHTTPRequestHandler, status: int, body: Any) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def watch(self, handler: BaseHTTPRequestHandler, kind: str, version: int) -> None:
        """Send changes and a bookmark a minute, until the watch expires or the server goes down."""
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        handler.close_connection = True
        if self.random.random() < 0.2:  # the version has been compacted
            self.send(handler, "ERROR", {"kind": "Status", "code": 410, "reason": "Expired"})
            return
        expires, bookmark = self.age + self.random.uniform(1800, 3600), self.age + 60
        while self.age < expires and not self.is_down():
            if version < 1000 + self.step():
                version = 1000 + self.step()
                for item in self.objects(kind):
                    self.clock.add_pending(1)
                    self.send(handler, "MODIFIED", item)
            elif self.age >= bookmark:
                bookmark = self.age + 60
                self.send(handler, "BOOKMARK", {"metadata": {"resourceVersion": str(version)}})
            self.clock.wait_until(self.clock.time() + 5)
        self.dropped += self.is_down()

    def send(self, handler: BaseHTTPRequestHandler, kind: str, item: dict[str, Any]) -> None:
        line = json.dumps({"type": kind, "object": item}).encode() + b"\n"
        handler.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
        handler.wfile.flush()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(NOW)


@pytest.fixture
def server(clock: VirtualClock, tmp_path: Path, hours: int) -> Iterator[LongServer]:
    server = LongServer(clock, tmp_path / "token", hours)
    yield server
    server.server.shutdown()
    server.server.server_close()


def watch_by_clock(clock: VirtualClock, *args: Any, **how: Any) -> Iterator[Listed | Changed]:
    for change in list_and_watch(*args, **how, sleep=clock.sleep, clock=clock.monotonic):
        yield change
        if isinstance(change, Changed):
            clock.add_pending(-1)


@pytest.fixture
def shifted(
    server: LongServer, clock: VirtualClock, secure: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything of flk that waits or looks at a clock takes the virtual one."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "long",
        "clusters": [{"name": "c", "cluster": {"server": server.url}}],
        "users": [{"name": "u", "user": {"tokenFile": str(server.token_file)}}],
        "contexts": [{"name": "long", "context": {"cluster": "c", "user": "u", "namespace": "team"}}],
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.delenv("http_proxy", raising=False)
    for module in (
        "flk.observe.follower",
        "flk.observe.follower",
        "flk.observe.reader",
        "flk.jobs.wait",
        "flk.kube.client",
        "flk.kube.credentials",
    ):
        monkeypatch.setattr(f"{module}.time", clock)
    updates = Follower.updates
    monkeypatch.setattr(Follower, "updates", lambda self, until: updates(self, until, 10.0))  # a tenth of the states
    monkeypatch.setattr("flk.observe.follower.queue", clock.queue())
    monkeypatch.setattr("flk.observe.follower.list_and_watch", functools.partial(watch_by_clock, clock))
    client = JobClient(ApiClient(connect(), sleep=clock.sleep))
    monkeypatch.setattr("flk.observe.client.JobClient.connect", lambda *_: client)


@pytest.mark.parametrize("hours", [1, pytest.param(12, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])
def test_hours_of_waiting(
    hours: int,
    server: LongServer,
    clock: VirtualClock,
    shifted: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    advance = clock.advance

    def advance_and_renew(seconds: float) -> None:
        clock.expected = 2  # the two watches of the follower
        advance(seconds)
        server.write_token()

    monkeypatch.setattr(clock, "advance", advance_and_renew)
    assert main(["wait", "gpt"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert server.life <= server.age < server.life + 300
    assert lines[-1].startswith("flk: job gpt succeeded")
    assert len(lines) < 30, lines
    # It went through what it was meant to go through.
    assert server.refused >= hours
    assert server.dropped >= 2 * hours
    # Two watches, each renewed some times an hour, their lists, and the launcher's record every ten seconds.
    assert server.requests["watch"] < 40 * hours + 20
    assert server.requests["pytorchjobs"] + server.requests["pods"] < 40 * hours + 20
    assert server.requests["log"] < server.life / 10 * 1.3
    assert server.requests["events"] < server.life / 20 * 1.3 + 100
