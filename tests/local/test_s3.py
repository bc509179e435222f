"""Checkpoints in S3, against a real server: resuming, and what happens when the server fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flk_runtime.checkpoint.storage.manifest import Manifest, pointer_text
from flk_runtime.checkpoint.storage.s3 import S3Destination
from flk_runtime.errors import MismatchError
from tests.local.test_checkpoint_kills import TRAIN as COUNT
from tests.support.collection import often
from tests.support.ports import held_ports
from tests.support.ranks import Ranks
from tests.support.s3 import KEY, SECRET, FaultyProxy, S3Server
from tests.support.small_model import SMALL_MODEL, told

PLACE = "s3://bucket/runs/one"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[S3Server]:
    with held_ports() as free_port:
        started = S3Server(tmp_path / "s3", free_port())
        yield started
        started.stop()


def stored(server: S3Server) -> Path:
    return server.folder / "runs" / "one"


SCRIPT = (
    SMALL_MODEL
    + """
with init(os.environ["STRATEGY"], checkpoint=os.environ["PLACE"], save_every=2) as run:
    model, optimizer = run.parallelize(*build())
    tell("losses", train(run, model, optimizer, steps=int(os.environ["STEPS"]), first=run.steps))
"""
)


def losses(ranks: Ranks, server: S3Server, place: str, steps: int, strategy: str, world_size: int) -> Any:
    variables = {**server.variables, "PLACE": place, "STEPS": str(steps), "STRATEGY": strategy}
    return told(ranks(SCRIPT, world_size, variables)[0])["losses"]


@pytest.mark.promise("Checkpoints: S3 keeps them as a folder does")
def test_a_run_resumes_from_s3_at_another_world_size_and_strategy(
    ranks: Ranks, tmp_path: Path, server: S3Server
) -> None:
    whole = losses(ranks, server, str(tmp_path / "folder"), 6, "full_shard", 2)
    begun = losses(ranks, server, PLACE, 3, "full_shard", 2)
    same = losses(ranks, server, PLACE, 4, "full_shard", 2)
    other = losses(ranks, server, PLACE, 6, "ddp", 1)
    assert begun + same == whole[:4]
    assert other == pytest.approx(whole[4:], abs=1e-6)
    assert sorted(path.name for path in stored(server).iterdir()) == [
        ".writer",
        "latest",
        "step-000000004",
        "step-000000006",
    ]


@pytest.mark.promise("Checkpoints: Storage that is full, slow or away stops no training and is named")
def test_training_goes_on_while_the_server_is_away(ranks: Ranks, server: S3Server) -> None:
    script = (
        SMALL_MODEL
        + """
import signal, subprocess
with init("ddp", checkpoint=os.environ["PLACE"], save_every=1) as run:
    model, optimizer = run.parallelize(*build())
    losses = train(run, model, optimizer, steps=2)
    run.save()  # waits for the one before it
    run._saves.manager.wait()
    os.kill(int(os.environ["SERVER"]), signal.SIGKILL)
    losses += train(run, model, optimizer, steps=5, first=2)
    server = subprocess.Popen(json.loads(os.environ["COMMAND"]), env={**os.environ, **json.loads(os.environ["KEYS"])})
    losses += train(run, model, optimizer, steps=6, first=5)
    print("done", run.steps)
server.kill()
"""
    )
    variables = {
        **server.variables,
        "PLACE": PLACE,
        "SERVER": str(server.process.pid),
        "COMMAND": json.dumps(server.command),
        "KEYS": json.dumps({"ROOT_ACCESS_KEY": KEY, "ROOT_SECRET_KEY": SECRET}),
    }
    (ended,) = ranks(script, 1, variables)
    assert "done 6" in ended.lines
    warnings = [line for line in ended.lines if "training goes on, and the next save tries again" in line]
    assert warnings
    assert warnings[0].startswith(f"flk: cannot write the checkpoint {PLACE}/step-000000003: ")
    assert (stored(server) / "latest").read_text().split()[0] == "step-000000006"


@pytest.mark.promise("Checkpoints: Storage that is full, slow or away stops no training and is named")
@pytest.mark.parametrize(
    ("mode", "words"),
    often(
        (0,),
        [
            ("unavailable", "SlowDown: Please reduce your request rate."),
            ("expired", "ExpiredToken: The provided token has expired."),
            ("slow", ""),
        ],
    ),
)
def test_training_goes_on_while_the_server_is_slow_or_refuses(
    ranks: Ranks, server: S3Server, tmp_path: Path, mode: str, words: str
) -> None:
    script = (
        SMALL_MODEL
        + """
mode = __import__("pathlib").Path(os.environ["MODE"])
with init("ddp", checkpoint=os.environ["PLACE"], save_every=1) as run:
    model, optimizer = run.parallelize(*build())
    losses = train(run, model, optimizer, steps=2)
    run.save(wait=True)
    mode.write_text(os.environ["WHAT"])
    losses += train(run, model, optimizer, steps=4, first=2)
    print("latest", open(os.environ["LATEST"]).read().split()[0])
    mode.write_text("")
    losses += train(run, model, optimizer, steps=6, first=4)
    tell("losses", losses)
"""
    )
    proxy = FaultyProxy(server, tmp_path / "mode")
    more = {"PLACE": PLACE, "MODE": str(proxy.mode), "WHAT": mode, "LATEST": str(stored(server) / "latest")}
    try:
        (ended,) = ranks(script, 1, {**proxy.variables, **more})
    finally:
        proxy.stop()
    warnings = [line for line in ended.lines if "training goes on, and the next save tries again" in line]
    if words:
        assert warnings[0].startswith(f"flk: cannot write the checkpoint {PLACE}/step-000000003: {words}"), ended.output
        assert "latest step-000000002" in ended.lines
    else:
        assert not warnings
    assert (stored(server) / "latest").read_text().split()[0] == "step-000000006"
    calm = losses(ranks, server, str(tmp_path / "calm"), 6, "ddp", 1)
    assert told(ended)["losses"] == calm


@pytest.mark.promise("Checkpoints: S3 keeps them as a folder does")
@pytest.mark.parametrize(
    ("change", "words"),
    often(
        (2,),
        [
            ({"AWS_SECRET_ACCESS_KEY": "expired"}, "SignatureDoesNotMatch: "),
            ({"AWS_ACCESS_KEY_ID": "nobody"}, "XAdminUserNotFound: "),
            ({"PLACE": "s3://missing/runs"}, "NoSuchBucket: "),
        ],
    ),
)
def test_storage_that_cannot_be_used_is_an_error_at_the_start(
    ranks: Ranks, server: S3Server, change: dict[str, str], words: str
) -> None:
    variables = {**server.variables, "PLACE": PLACE, "STEPS": "1", "STRATEGY": "ddp", **change}
    for rank in ranks(SCRIPT, 2, variables, failing=True):
        assert rank.code == 1
        assert f"cannot write checkpoints to {variables['PLACE']}: {words}" in rank.lines[-1]


def test_a_kill_during_an_upload_leaves_the_last_completed_checkpoint(ranks: Ranks, server: S3Server) -> None:
    known = 0
    for number in range(3):
        delay = str(0.3 * number / 3)
        variables = {**server.variables, "FLK_CHECKPOINT": PLACE, "STRATEGY": "full_shard", "DELAY": delay}
        ended = ranks(COUNT, 2, variables, failing=True)
        begun = [int(line.split()[1]) for rank in ended for line in rank.lines if line.startswith("begins")]
        assert begun == [known, known], [rank.output for rank in ended]
        latest = stored(server) / "latest"
        known = int(latest.read_text().split()[0].removeprefix("step-")) if latest.exists() else 0


@pytest.fixture
def writer(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], S3Destination]:
    """Makes a writer with a token, which has begun to save."""
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)

    def make(token: str) -> S3Destination:
        destination = S3Destination(PLACE)
        destination.token = token
        destination.prepare()
        destination.claim()
        return destination

    return make


def write(destination: S3Destination, step: int, number: int) -> bytes:
    """Upload the objects of a checkpoint, and return its manifest."""
    files = {}
    for file in ("__0_0.distcp", ".metadata"):
        name = destination.new_name(file, number)
        with destination.create(step, name) as stream:
            stream.write(f"{destination.token} {number}".encode())
        files[name] = destination.measure_new(step, name)
    return Manifest(step, 1, files).to_json()


def contents(destination: S3Destination, step: int) -> set[bytes]:
    """The contents of the files that the manifest lists, which have to be whole."""
    manifest = Manifest.from_json(destination.open(step, "manifest.json").read())
    assert all(destination.measure(step, file) == stored for file, stored in manifest.files.items())
    return {destination.open(step, file).read() for file in manifest.files}


def test_one_step_saved_twice_in_s3_is_one_checkpoint(writer: Callable[[str], S3Destination], server: S3Server) -> None:
    destination = writer("a")
    destination.commit(7, write(destination, 7, 1))
    destination.commit(7, write(destination, 7, 2))
    assert contents(destination, 7) == {b"a 2"}
    names = sorted(path.name for path in (stored(server) / "step-000000007").iterdir())
    assert names == [".metadata", ".metadata.a-2", "__0_0.a-2.distcp", "manifest.json"]


def test_a_writer_to_s3_that_was_paused_does_not_move_the_pointer_back(
    writer: Callable[[str], S3Destination], monkeypatch: pytest.MonkeyPatch
) -> None:
    paused = writer("a")
    paused.commit(7, write(paused, 7, 1))
    late = write(paused, 8, 2)

    def pause(method: Any) -> Any:
        def call(key: str, *arguments: Any) -> Any:
            if key.endswith(".writer") and not others:
                others.append(writer("b"))
                for step in (8, 12):
                    others[0].commit(step, write(others[0], step, step))
            return method(key, *arguments)

        return call

    others: list[S3Destination] = []
    monkeypatch.setattr(paused, "_get", pause(paused._get))
    with pytest.raises(MismatchError, match="another run saves in"):
        paused.commit(8, late)
    paused.discard(8)
    assert others[0].latest() == pointer_text(12).encode()
    assert contents(others[0], 8) == {b"b 8"}
