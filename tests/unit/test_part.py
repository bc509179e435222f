"""Part files: what is written is read back, and a file that is not whole is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from flk_runtime.checkpoint.part import PartsReader
from flk_runtime.system.part import ALIGNMENT, Entry, PartError, PartFile, PartHeader, align, read_header, verify

# The dcp functions warn that they run in one process, which is meant here.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed is disabled.*")


def write(path: Path, rows: torch.Tensor, first: int, rank: int, step: int = 7, world_size: int = 2) -> PartHeader:
    """Write a part that holds some rows of a (5, 3) tensor named x."""
    raw = rows.contiguous().view(torch.uint8).numpy().tobytes()
    file = PartFile(path, ALIGNMENT + len(raw))
    file.begin()
    file.memory[ALIGNMENT : ALIGNMENT + len(raw)] = raw
    shape = (len(rows), 3)
    entries = [Entry("x", ("x",), ALIGNMENT, len(raw), "float32", (5, 3), (first, 0), shape)]
    blob = bytes(range(100)) * 3
    begin = align(ALIGNMENT + len(raw))
    file.append(begin, blob)
    entries.append(Entry(f"value.{rank}", ("value", str(rank)), begin, len(blob)))
    header = file.finish(step=step, world_size=world_size, rank=rank, entries=entries, metadata={"job": "some"})
    file.close()
    return header


def test_a_part_is_read_back(tmp_path: Path) -> None:
    written = write(tmp_path / "part", torch.ones(2, 3), 0, rank=0)
    assert read_header(tmp_path / "part") == written
    assert verify(tmp_path / "part") == (7, 2, 0)
    assert written.metadata == {"job": "some"}
    write(tmp_path / "part", torch.zeros(1, 3), 0, rank=0, step=8)  # the file is used again
    assert verify(tmp_path / "part").step == 8


def damage(kind: str, content: bytes) -> bytes:
    half = len(content) // 2
    return {
        "empty": b"",
        "short": content[:10],
        "cut": content[:half],
        "header": content[:-1] + b"?",
        "data": content[:ALIGNMENT] + bytes([content[ALIGNMENT] ^ 1]) + content[ALIGNMENT + 1 :],
        "value": content.replace(bytes(range(50)), bytes(50)),
        "unfinished": bytes(ALIGNMENT) + content[ALIGNMENT:],
        "foreign": b"PK\3\4" + content,
    }[kind]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("empty", "it has 0 bytes"),
        ("short", "it has 10 bytes"),
        ("cut", "its header is cut off or damaged"),
        ("header", "its header is cut off or damaged"),
        ("data", "its data has another checksum"),
        ("value", "its data has another checksum"),
        ("unfinished", "it was not finished"),
        ("foreign", "it is not a part of a checkpoint of flk"),
    ],
)
def test_a_damaged_part_is_refused(tmp_path: Path, kind: str, reason: str) -> None:
    path = tmp_path / "part"
    write(path, torch.ones(2, 3), 0, rank=0)
    path.write_bytes(damage(kind, path.read_bytes()))
    with pytest.raises(PartError, match=reason):
        verify(path)


def test_a_part_that_is_begun_is_not_whole_until_it_is_finished(tmp_path: Path) -> None:
    write(tmp_path / "part", torch.ones(2, 3), 0, rank=0)
    file = PartFile(tmp_path / "part", 100)
    file.begin()
    with pytest.raises(PartError, match="not finished"):
        read_header(tmp_path / "part")
    file.close()


def test_a_newer_format_is_refused() -> None:
    with pytest.raises(PartError, match="a newer flk wrote it in format 9"):
        PartHeader.from_json(b'{"format": 9}')


@pytest.mark.parametrize(
    ("written", "changed", "reason"),
    [
        (b'"format":1', b'"format":9', "a newer flk wrote it in format 9"),
        (b'"world_size":2', b'"world_zise":2', "its header cannot be read: 'world_size'"),
        (b'"length":300', b'"length":999', "its header contradicts the size of the data"),
    ],
)
def test_a_header_that_contradicts_the_part_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: bytes, changed: bytes, reason: str
) -> None:
    """The checksum of the header is right: it was written so."""
    to_json = PartHeader.to_json
    monkeypatch.setattr(PartHeader, "to_json", lambda header: to_json(header).replace(written, changed))
    header = write(tmp_path / "part", torch.ones(2, 3), 0, rank=0)
    assert changed in header.to_json()
    with pytest.raises(PartError, match=reason):
        verify(tmp_path / "part")


def test_torch_loads_a_checkpoint_from_its_parts(tmp_path: Path) -> None:
    full = torch.arange(15.0).view(5, 3)
    headers = [write(tmp_path / "0", full[:3], 0, rank=0), write(tmp_path / "1", full[3:], 3, rank=1)]
    opened: list[int] = []

    def open_part(rank: int) -> Path:
        opened.append(rank)
        return tmp_path / str(rank)

    found: dict[str, Any] = {"x": torch.zeros(5, 3)}
    dcp.load(found, storage_reader=PartsReader(reversed(headers), open_part), no_dist=True)
    assert torch.equal(found["x"], full)
    assert opened == [0, 1]


@pytest.mark.parametrize("ranks", [[0], [0, 0], [1], []])
def test_parts_that_are_not_one_checkpoint_are_refused(tmp_path: Path, ranks: list[int]) -> None:
    headers = [write(tmp_path / "part", torch.ones(1, 3), 0, rank=rank) for rank in ranks]
    with pytest.raises(PartError, match="part"):
        PartsReader(headers, lambda rank: tmp_path)


def test_parts_of_different_steps_are_refused(tmp_path: Path) -> None:
    headers = [write(tmp_path / "part", torch.ones(1, 3), 0, rank=rank, step=rank) for rank in (0, 1)]
    with pytest.raises(PartError, match="different steps: 0, 1"):
        PartsReader(headers, lambda rank: tmp_path)
