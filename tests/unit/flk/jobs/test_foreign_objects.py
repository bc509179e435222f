"""What others may write into a cluster breaks no command: not of those who read it, and not for other jobs.

Whoever may create jobs or pods, or writes a log, a record or a file, may write anything there.
"""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from flk import __main__ as program
from flk_runtime.contract.record import ArchivedRecord, Attempt, Goodput, JobRecord
from tests.support.api_server import MAPS, FakeApiServer
from tests.support.jobs import MADE, NOW, JobBuilder

pytestmark = pytest.mark.usefixtures("kubeconfig")
Command = Callable[..., tuple[int, str, str]]
MEMORY, SECONDS = 8 << 30, 60  # of addresses, of which each thread takes many

DIGITS = "9" * 5000
NESTED = "[" * 100_000
NUMBERS = [-1, 0, 10**6, 2**31, 2**62, 2**64, 10**30]
FLOATS = [float("nan"), float("inf"), 1e300, -1.0, 253402300800.0]
TEXTS = [
    "",
    "x",
    "\ud800",
    "\x1b[2J",
    "\u2028",
    "0-999999999",
    "5-1",
    "-1",
    DIGITS,
    NESTED,
    '{"a":' * 2000,
    "<b>",
    "\u00b2",
]
VALUES: list[Any] = [None, True, [], {}, [[]], [5], {"env": [5]}, *NUMBERS, *FLOATS, *TEXTS]


@pytest.fixture(autouse=True)
def limits() -> Iterator[None]:
    """A command that takes too much time or memory ends with an error."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("a command goes on for ever"))
    yield
    signal.alarm(0)
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        signal.alarm(SECONDS)
        code = program.main(list(words)) or 0
        signal.alarm(0)
        printed = capsys.readouterr()
        assert not any((ord(each) < 32 and each not in "\n\t") or 127 <= ord(each) < 160 for each in printed.err)
        return code, printed.out, printed.err

    return run


def record() -> dict[str, Any]:
    attempt = Attempt(0, NOW - 50, step=5, pods="0-1", restored=3)
    goodput = Goodput(NOW, {"computing": 10.0}, 1, 50)
    return asdict(JobRecord("running", 0, attempts=[attempt], started=NOW - 60, goodput=goodput, saved=4))


def of_job(field: str) -> Callable[[JobBuilder, Any], None]:
    """A place in the job's object."""

    def put(builder: JobBuilder, value: Any) -> None:
        worker = builder.job["spec"]["pytorchReplicaSpecs"]["Worker"]
        meta, text = builder.job["metadata"], value if isinstance(value, str) else json.dumps(value)
        if field == "replicas":
            worker["replicas"] = value
            builder.job["spec"]["runPolicy"]["suspend"] = True
        elif field == "nprocPerNode":
            builder.job["spec"]["nprocPerNode"] = text
        elif field.startswith("FLK_"):
            builder.container.setdefault("env", []).append({"name": field, "value": text})
        elif field.startswith("label "):
            meta["labels"][field.partition(" ")[2]] = text[:63]
        else:
            meta.setdefault("annotations", {})[field] = text

    return put


def of_record(where: str, path: tuple[Any, ...]) -> Callable[[JobBuilder, Any], None]:
    """A place in the record that a pod's message, its log, or the ConfigMap of records has."""

    def put(builder: JobBuilder, value: Any) -> None:
        whole: Any = record()
        if where == "entry":
            kept = ArchivedRecord("gone", "uid-gone", 2, 1, NOW - 60, NOW, JobRecord("running", 0), 5, 0.1)
            whole = {**asdict(kept), "record": whole}
        node = whole
        for key in path[:-1]:
            node = node[key]
        if path:
            node[path[-1]] = value
        text = json.dumps(whole) if path else value if isinstance(value, str) else json.dumps(value)
        if where == "message":
            builder.all("ended", 1, text)
        elif where == "log":
            builder.logs = f"[pod 0] flk-record {text}\n"  # type: ignore[attr-defined]
        else:
            builder.entry = text  # type: ignore[attr-defined]

    return put


PATHS: list[tuple[Any, ...]] = [
    *[(), ("attempts",), ("attempts", 0, "pods"), ("attempts", 0, "started"), ("attempts", 0, "number")],
    *[("started",), ("goodput", "until"), ("goodput", "seconds"), ("saved",), ("code",), ("outcome",), ("restarts",)],
]
PLACES = {
    **{field: of_job(field) for field in ("replicas", "nprocPerNode", "FLK_PODS", "FLK_MIN_PODS", "FLK_WORKERS")},
    **{field: of_job(field) for field in ("FLK_SPARES", "flk.dev/spec", "flk.dev/owner")},
    "stuck-after": of_job("label flk.dev/stuck-after"),
    **{f"{where} {path}": of_record(where, path) for where in ("message", "log") for path in PATHS},
    **{f"entry {path}": of_record("entry", path) for path in [(), ("pods",), ("processes",), ("updated",), ("lines",)]},
    "entry's step": of_record("entry", ("step_seconds",)),
    "entry's telemetry": of_record("entry", ("telemetry",)),
}
COMMANDS = [
    *(
        ["list", "-o", "wide"],
        ["list", "-o", "json"],
        ["status", "evil"],
        ["why", "evil"],
        ["delete", "evil", "--no-wait"],
    ),
    *(["report", "evil", "--force", "-o", "r.html"], ["report", "evil", "-o", "yaml"], ["status", "gone"]),
    *(
        ["logs", "evil", "--no-follow"],
        ["wait", "mine", "evil", "--timeout", "1s"],
        ["wait", "gone", "--timeout", "1s"],
    ),
]


def fill(fake: FakeApiServer, place: str, value: Any) -> None:
    """A cluster with two jobs of two pods, mine and evil; the second has a value in a place."""
    fake.delete_all()
    fake.written.clear()
    JobBuilder(2, name="mine").all("pod").add_to(fake)
    evil = JobBuilder(2, name="evil")
    PLACES[place](evil, value)
    if not evil.pods:
        evil.all("pod")
    evil.add_to(fake)
    if logs := getattr(evil, "logs", ""):
        fake.written["evil-worker-0"] = logs
    if entry := getattr(evil, "entry", ""):
        meta = {"name": "records", "labels": {"flk.dev/records": "true"}, "creationTimestamp": MADE}
        fake.objects[MAPS]["records"] = {"metadata": meta, "data": {"gone.uid-gone": entry}}


@given(place=st.sampled_from(sorted(PLACES)), value=st.sampled_from(VALUES), words=st.sampled_from(COMMANDS))
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_no_value_ends_a_command_but_in_one_line(
    fake: FakeApiServer, command: Command, place: str, value: Any, words: list[str]
) -> None:
    fill(fake, place, value)
    code, out, err = command(*words)
    assert code == 0 or sum(line.startswith("error:") for line in err.splitlines()) <= 2
    if words[0] == "list":
        assert code == 0
        assert "mine" in out
        assert "evil" in out


@pytest.mark.parametrize(
    ("place", "value"),
    [("replicas", 2 * 10**9), ("nprocPerNode", "1000000000"), ("nprocPerNode", "1" + "0" * 400), ("FLK_PODS", DIGITS)],
)
def test_a_job_that_cannot_be_read_is_a_row_of_its_own(
    fake: FakeApiServer, command: Command, place: str, value: Any
) -> None:
    fill(fake, place, value)
    code, out, err = command("list")
    assert (code, err) == (0, "")
    rows = {line.split()[0]: line.split() for line in out.splitlines()}
    assert rows["mine"][1] == "Running"
    assert rows["evil"][1] == "Unknown"
    for words in (["status", "evil"], ["wait", "evil", "--timeout", "1s"], ["why", "evil"]):
        code, _, err = command(*words)
        assert code == 1
        assert [line[:7] for line in err.splitlines()] == ["error: "]
        assert "cannot be used" in err
    assert command("delete", "evil", "--no-wait")[:2] == (0, "evil\n")


@pytest.mark.parametrize("place", ["replicas", "FLK_PODS"])
def test_a_job_that_cannot_be_read_ends_no_other_wait(fake: FakeApiServer, command: Command, place: str) -> None:
    fill(fake, place, 2 * 10**9)
    _, _, err = command("wait", "evil", "mine", "--timeout", "1s")
    unreadable, over = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "cannot be used" in unreadable
    assert "the wait ended after 1s: job mine" in over
