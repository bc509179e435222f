"""Shard files: what is written is read back, and a file that is not whole is refused."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from flk_runtime.checkpoint.gather import PodReader
from flk_runtime.checkpoint.load import SavedCheckpoint
from flk_runtime.checkpoint.state import chunks_of
from flk_runtime.errors import MismatchError
from flk_runtime.shared import shard_file
from flk_runtime.shared.shard_file import (
    DATA_BEGIN,
    Entry,
    ShardError,
    ShardFile,
    ShardHeader,
    read_header,
    verify,
)

VALUES = bytes(range(100)) * 3


def finish(path: Path, rows: torch.Tensor, first: int, rank: int, step: int = 7, world_size: int = 2) -> ShardHeader:
    """Write a shard that holds some rows of a (5, 3) tensor named x, as a rank does."""
    raw = rows.contiguous().view(torch.uint8).numpy().tobytes()
    entry = Entry("x", ("x",), DATA_BEGIN, len(raw), "float32", (5, 3), (first, 0), (len(rows), 3))
    file = ShardFile(path, [entry], {"job": "some"})
    file.begin()
    file.memory[DATA_BEGIN : DATA_BEGIN + len(raw)] = raw
    header = file.finish(step=step, number=1, world_size=world_size, rank=rank, values=VALUES)
    file.close()
    return header


def seal(path: Path) -> None:
    """Seal a shard, as a launcher does."""
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        preamble = shard_file.sealed_preamble(memory, "attempt")
        memory[:DATA_BEGIN] = preamble.to_bytes()


def write(path: Path, rows: torch.Tensor, first: int, rank: int, step: int = 7, world_size: int = 2) -> ShardHeader:
    header = finish(path, rows, first, rank, step, world_size)
    seal(path)
    return header


def test_a_shard_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    written = write(path, torch.ones(2, 3), 0, rank=1)
    assert read_header(path.read_bytes()) == written
    preamble = verify(path.read_bytes())
    assert (preamble.step, preamble.world_size, preamble.rank, preamble.attempt) == (7, 2, 1, b"attempt")
    assert written.metadata == {"job": "some"}
    value = written.entries[-1]
    assert (value.name, value.dtype) == ("flk.1", None)
    assert path.read_bytes()[value.begin : value.begin + value.length] == VALUES
    write(path, torch.zeros(1, 3), 0, rank=0, step=8)  # the file is used again
    preamble = verify(path.read_bytes())
    assert (preamble.step, preamble.rank) == (8, 0)


def test_the_size_of_a_shard_is_known_before_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    written = write(path, torch.ones(2, 3), 0, rank=1)
    assert verify(path.read_bytes()).end == shard_file.shard_size(written.entries[:-1], written.metadata) + len(VALUES)


def damage(kind: str, content: bytes) -> bytes:
    half = len(content) // 2
    header = verify(content).header_begin + 5
    return {
        "empty": b"",
        "short": content[:10],
        "cut": content[:half],
        "beginning": content[:20] + b"?" + content[21:],
        "header": content[:header] + b"?" + content[header + 1 :],
        "data": content[:DATA_BEGIN] + bytes([content[DATA_BEGIN] ^ 1]) + content[DATA_BEGIN + 1 :],
        "value": content.replace(bytes(range(50)), bytes(50)),
        "unfinished": bytes(DATA_BEGIN) + content[DATA_BEGIN:],
        "foreign": b"PK\3\4" + content,
    }[kind]


@pytest.mark.promise("Checkpoints: A damaged checkpoint is reported, and the one before it is used")
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("empty", "it has 0 bytes"),
        ("short", "it has 10 bytes"),
        ("cut", "it has .* of its .* bytes"),
        ("beginning", "its beginning is damaged"),
        ("header", "its data has another checksum"),
        ("data", "its data has another checksum"),
        ("value", "its data has another checksum"),
        ("unfinished", "it was not finished"),
        ("foreign", "it is not a shard of a checkpoint of flk"),
    ],
)
def test_a_damaged_shard_is_refused(tmp_path: Path, kind: str, reason: str) -> None:
    path = tmp_path / "shard"
    write(path, torch.ones(2, 3), 0, rank=0)
    with pytest.raises(ShardError, match=reason):
        verify(damage(kind, path.read_bytes()))


def test_a_damaged_header_is_refused_where_the_data_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    write(path, torch.ones(2, 3), 0, rank=0)
    with pytest.raises(ShardError, match="its header is damaged"):
        read_header(damage("header", path.read_bytes()))


def test_a_shard_is_not_whole_until_it_is_sealed(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    write(path, torch.ones(2, 3), 0, rank=0)
    finish(path, torch.ones(2, 3), 0, rank=0)
    for check in (read_header, verify):
        with pytest.raises(ShardError, match="not finished"):
            check(path.read_bytes())
    file = ShardFile(path, [], {})
    file.begin()
    with pytest.raises(ShardError, match="not finished"):
        seal(path)
    file.close()


def test_a_shard_that_does_not_fit_into_its_file_is_not_sealed(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    finish(path, torch.ones(2, 3), 0, rank=0)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ShardError, match="contradicts its size"):
        seal(path)


def test_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "shard"
    with monkeypatch.context() as newer:
        newer.setattr(shard_file, "FORMAT", 9)
        write(path, torch.ones(2, 3), 0, rank=0)
    with pytest.raises(ShardError, match="a newer flk wrote it in format 9"):
        verify(path.read_bytes())


@pytest.mark.parametrize(
    ("written", "changed", "reason"),
    [
        (b'"metadata"', b'"metadatum"', "its header cannot be read: 'metadata'"),
        (b'"length":24', b'"length":999', "its header contradicts the size of the data"),
    ],
)
def test_a_header_that_contradicts_the_shard_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: bytes, changed: bytes, reason: str
) -> None:
    """The checksum of the header is right: it was written so."""
    make = shard_file._header
    monkeypatch.setattr(shard_file, "_header", lambda *arguments: make(*arguments).replace(written, changed))
    write(tmp_path / "shard", torch.ones(2, 3), 0, rank=0)
    content = (tmp_path / "shard").read_bytes()
    assert changed in content
    assert verify(content)
    with pytest.raises(ShardError, match=reason):
        read_header(content)


@pytest.mark.parametrize("name", ["x", "x.y"])
def test_a_checkpoint_is_read_from_its_shards(tmp_path: Path, name: str) -> None:
    full = torch.arange(15.0).view(5, 3)
    write(tmp_path / "0", full[:3], 0, rank=0)
    write(tmp_path / "1", full[3:], 3, rank=1)
    found = torch.zeros(5, 3)
    checkpoint = SavedCheckpoint("memory", PodReader([0, 0], lambda rank: tmp_path / str(rank)))
    if name == "x":
        checkpoint.read(chunks_of((name,), found))
        assert torch.equal(found, full)
    else:
        with pytest.raises(MismatchError, match="holds no tensor"):
            checkpoint.read(chunks_of((name,), found))
